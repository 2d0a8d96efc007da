"""Runs that count records at the sites instead of learning: their descriptions, tables and sensitivities."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from common.limits import LARGEST_COUNT
from common.rules.spec import Field, MethodSpec, Sizes, Summed, Work

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

MECHANISM = "counts"
# In an entry of the ledger: exact counts, which the policy allows and which no guarantee covers.
EXACT = "exact-counts"
DIGITS = 32
# Kinds that judge models on held-out records.
JUDGING = ("evaluation", "values")


@dataclass(frozen=True)
class Counted:
    """One table of counts.

    bound: Euclidean norm of what one record adds; the weights of a patient's records sum to one, so a patient adds no more.
    share: part of the privacy budget.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    share: float


def scored_classes(classes: int) -> int:
    """Number of classes with a histogram: of two classes only the last, whose probability gives the other's."""
    return 1 if classes == 2 else classes


def tables_of(config: RunConfig, classes: int) -> tuple[Counted, ...]:
    """The tables of a run that counts records of this many classes.

    survey: records (C,). values: tested records, and right decisions of each of M models, right (1 + M,); a record is in
    up to 1 + M cells. evaluation: decisions (C, C) by true and decided class, and for each scored class a histogram of
    its probability, for records of other classes and of this class: scores (S, 2, B). A record is in one cell of the
    decisions and in S cells of the scores, so it adds vectors of norm 1 and sqrt(S). The shares minimise the sum of the two
    variances of the noise.
    """
    if config.counting.kind == "survey":
        return (Counted("records", (classes,), 1.0, 1.0),)
    if config.counting.kind == "values":
        cells = 1 + config.counting.models
        return (Counted("right", (cells,), math.sqrt(cells) * (1 + 1e-12), 1.0),)
    scored = scored_classes(classes)
    # A little above the root, so that its rounding does not make the bound too small.
    bound = 1.0 if scored == 1 else math.sqrt(scored) * (1 + 1e-12)
    share = 1 / (1 + math.sqrt(scored))
    return (
        Counted("decisions", (classes, classes), 1.0, share),
        Counted("scores", (scored, 2, config.counting.bins), bound, 1 - share),
    )


def symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """S: classes with a histogram; 2: of other classes, and of the class; B: bins; M: tested records, and each model."""
    return {"S": scored_classes(classes), "2": 2, "B": config.counting.bins, "M": 1 + config.counting.models}


def _refusal(config: RunConfig) -> str:
    kind = config.counting.kind
    if not config.classes:
        return f"counting.kind = {kind!r} needs classes, so that all sites count the same ones"
    if kind in JUDGING and not config.counting.digest:
        return f"counting.kind = {kind!r} needs counting.digest; `coordinator evaluate` and `coordinator value` set it"
    if kind == "values" and not config.counting.models:
        return "counting.kind = 'values' needs counting.models; `coordinator value` sets it"
    return ""


EVALUATION = MethodSpec(
    name="evaluation",
    title="Evaluation",
    paper="counts of decisions and scores with Gaussian noise",
    kind="one-shot",
    trained="fedavg",
    configured="counting",
    digest={"counting": ("kind", "digest", "models", "bins")},
    site="client_app.methods.counting:counts",
    strategy="strategies.counting.strategy:Counting",
    sends=lambda config: (
        Field("decisions", "C C", -LARGEST_COUNT, LARGEST_COUNT, DIGITS),
        Field("scores", "S 2 B", -LARGEST_COUNT, LARGEST_COUNT, DIGITS),
    ),
    receives=lambda config: (Field("weight", "C d"), Field("bias", "C")),
    result=lambda config: (),
    symbols=symbols,
    work=lambda config, classes, dimension: Work(passes=1, numbers=classes * (classes + dimension)),
    defences=lambda config: ("none",),
    undefended=": the counts of each site are only kept within what its records and the noise can give",
    mechanisms=(MECHANISM,),
    mechanism=lambda config: MECHANISM,
    refusal=_refusal,
    introduces=False,
    counts=True,
    summed=lambda config: (Summed("decisions", "C C", 0), Summed("scores", "S 2 B", 0)),
    site_sums="client_app.methods.counting:summed_counts",
    from_sums="strategies.counting.results:summed_result",
    sum_strategy="strategies.counting.summed:SecureCounting",
)
SURVEY = replace(
    EVALUATION,
    name="survey",
    title="Survey",
    paper="counts of records with Gaussian noise",
    sends=lambda config: (Field("records", "C", -LARGEST_COUNT, LARGEST_COUNT, DIGITS),),
    receives=lambda config: (),
    work=lambda config, classes, dimension: Work(numbers=classes),
    summed=lambda config: (Summed("records", "C", 0),),
)
VALUES = replace(
    EVALUATION,
    name="values",
    title="Values of sites",
    sends=lambda config: (Field("right", "M", -LARGEST_COUNT, LARGEST_COUNT, DIGITS),),
    summed=lambda config: (Summed("right", "M", 0),),
)
COUNTS = {spec.name: spec for spec in (EVALUATION, VALUES, SURVEY)}
