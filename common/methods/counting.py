"""Runs that count records at the sites instead of learning: their plans, tables and sensitivities."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import LARGEST_COUNT, SurrogateError, norm_of_ones
from fedsurrogate.common.identity import distinct_names
from fedsurrogate.common.methods.method import (
    Combination,
    Defences,
    Field,
    Messages,
    Method,
    Plan,
    Sizes,
    Work,
    check_fields,
    fields_of,
)
from fedsurrogate.common.privacy.mechanism import (
    JOINT_SUMS,
    NOISY_COUNTS,
    Mechanism,
    NoisySums,
    check_stated,
)
from fedsurrogate.common.run import Run
from fedsurrogate.common.safe_parsing import canonical
from fedsurrogate.common.settings import CountingSettings, Settings
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.terms import Term
from fedsurrogate.common.wire.surrogate_proto import (
    pack_claim,
    pack_header,
    parse,
    unpack_claim,
    unpack_header,
)
from fedsurrogate.common.wire.tensors import Expectation, check_header

DIGITS = 32


@dataclass(frozen=True)
class Counted:
    """One table of counts.

    Attributes:
        name: of the table.
        shape: of the table.
        bound: Euclidean norm of what one record adds; the weights of a patient's records sum to
            one, so a patient adds no more.
        share: part of the privacy budget.
        most: largest magnitude of what a record adds to an entry; one where records are counted.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    share: float
    most: float = 1.0


def scored_classes(classes: int) -> int:
    """Number of classes with a histogram: of two classes only the last, whose probability gives the
    other's.
    """
    return 1 if classes == 2 else classes


def tables_of(own: CountingSettings, classes: int) -> tuple[Counted, ...]:
    """The tables of a run that counts records of this many classes.

    survey: records (C,). evaluation: decisions (C, C) by true and decided class, and for each scored
    class a histogram of its probability, for records of other classes and of this class: scores (S,
    2, B). A record is in one cell of the decisions and in S cells of the scores, so it adds vectors
    of norm 1 and sqrt(S). The shares minimise the sum of the two variances of the noise.
    """
    if own.kind == "survey":
        return (Counted("records", (classes,), 1.0, 1.0),)
    scored = scored_classes(classes)
    share = 1 / (1 + math.sqrt(scored))
    return (
        Counted("decisions", (classes, classes), 1.0, share),
        Counted("scores", (scored, 2, own.bins), norm_of_ones(scored), 1 - share),
    )


def target_tables(own: CountingSettings, target: Target) -> tuple[Counted, ...]:
    """The one table of a run that counts records with a target, with all of the budget.

    Args:
        own: settings, of a survey or an evaluation.
        target: of the run.

    Raises:
        ConfigError: for a target that is not counted.
    """
    # It needs torch, which checks before a run of classes do without.
    from fedsurrogate.common.targets.counted import counted

    how = counted(target, own)
    if own.kind == "survey":
        return (Counted("records", (len(how.rows),), how.bound, 1.0),)
    table = how.table
    return (Counted(table.name, table.shape, table.bound, 1.0, table.most),)


def tables_in(own: CountingSettings, classes: int, target: Target | None) -> tuple[Counted, ...]:
    """The tables of a run that counts: of this many classes, or of a target."""
    return tables_of(own, classes) if target is None else target_tables(own, target)


def _symbols(own: CountingSettings, classes: int, dimension: int, records: int) -> Sizes:
    """S: classes with a histogram; 2: of other classes, and of the class; B: bins."""
    return {"S": scored_classes(classes), "2": 2, "B": own.bins}


def _refusal(own: CountingSettings, classes: tuple[str, ...]) -> str:
    if not classes:
        return f"counting.kind = {own.kind!r} needs classes, so that all sites count the same ones"
    if own.kind == "evaluation" and not own.digest:
        return "counting.kind = 'evaluation' needs counting.digest; `coordinator evaluate` sets it"
    return ""


def _plan(
    tables: dict[str, str], work: Callable[[int, int], Work], judges: bool, settings: Settings
) -> Plan:
    """The plan of a run that counts.

    Args:
        tables: shape of each table.
        work: of a site.
        judges: whether a model comes with the request.
        settings: of the run.
    """
    own = settings.counting
    counted = tables_of(own, len(settings.classes)) if settings.epsilon else ()
    return _counting(
        settings,
        counted,
        tuple(Term(name, shape) for name, shape in tables.items()),
        Messages(
            sends=(),
            receives=(Field("weight", "C d"), Field("bias", "C")) if judges else (),
            symbols=partial(_symbols, own),
            introduces=False,
        ),
        work,
    )


def _coded_plan(
    work: Callable[[int, int], Work], judges: bool, settings: Settings, target: Target
) -> Plan:
    """As `_plan`, for another target than classes."""
    counted = target_tables(settings.counting, target)
    (table,) = counted
    sides = {str(side): side for side in table.shape}
    summed = Term(table.name, " ".join(map(str, table.shape)), bound=table.most)
    return _counting(
        settings,
        counted,
        (summed,),
        Messages(
            sends=(),
            receives=(Field("weight", "C d"), Field("bias", "C")) if judges else (),
            symbols=lambda classes, dimension, records: sides,
            introduces=False,
        ),
        work,
    )


def _counting(
    settings: Settings,
    counted: tuple[Counted, ...],
    sums: tuple[Term, ...],
    messages: Messages,
    work: Callable[[int, int], Work],
) -> Plan:
    """The plan of a run that counts.

    Args:
        settings: of the run.
        counted: the tables; read under privacy only.
        sums: the same, as they are added up.
        messages: without the tables.
        work: of a site.
    """
    privacy = None
    if settings.epsilon:
        privacy = NoisySums(
            JOINT_SUMS if settings.secure_sum else NOISY_COUNTS,
            settings.epsilon,
            settings.delta,
            {each.name: each.share for each in counted},
            bounds={each.name: each.bound for each in counted},
        )
    return Plan(
        kind="one-shot",
        messages=replace(
            messages,
            sends=fields_of(sums, LARGEST_COUNT, DIGITS),
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.counting:counts",
            strategy="fedsurrogate.strategies.counting.strategy:Counting",
            sums=sums,
            site_sums="fedsurrogate.client_app.methods.counting:summed_counts",
            from_sums="fedsurrogate.strategies.counting.results:summed_result",
            sum_strategy="fedsurrogate.strategies.counting.strategy:SecureCounting",
        ),
        work=work,
        privacy=privacy,
        defences=Defences(
            reason=": the counts of each site are only kept within what its records and the noise "
            "can give"
        ),
        refusal=_refusal(settings.counting, settings.classes),
        counts=True,
    )


def _judging(classes: int, dimension: int) -> Work:
    return Work(passes=1, numbers=classes * (classes + dimension))


def _surveying(classes: int, dimension: int) -> Work:
    return Work(numbers=classes)


def _kind(
    name: str,
    title: str,
    paper: str,
    plan: Callable[[Settings], Plan],
    coded: Callable[[Settings, Target], Plan] | None = None,
) -> Method:
    return Method(
        name,
        title,
        paper,
        plan,
        reads=("counting",),
        shown="counting",
        coded=coded,
    )


EVALUATION = _kind(
    "evaluation",
    "Evaluation",
    "counts of decisions and scores with Gaussian noise",
    partial(_plan, {"decisions": "C C", "scores": "S 2 B"}, _judging, True),
    partial(_coded_plan, _judging, True),
)
SURVEY = _kind(
    "survey",
    "Survey",
    "counts of records with Gaussian noise",
    partial(_plan, {"records": "C"}, _surveying, False),
    partial(_coded_plan, _surveying, False),
)
# By the value of counting.kind.
KINDS_OF_COUNTS = {method.name: method for method in (EVALUATION, SURVEY)}


@dataclass(frozen=True)
class Counts:
    """Tables of whole numbers. Noise is rounded to whole numbers.

    Attributes:
        header: origin.
        tables: int64, by name, see `fedsurrogate.common.methods.counting.tables_of`.
        claim: what the message states of its differential privacy; None for exact counts.
    """

    header: Header
    tables: Mapping[str, Tensor]
    claim: Mechanism | None = None

    def variance(self, name: str) -> float:
        """Variance of the noise in each cell of a table, rounding included; zero for exact counts."""
        return 0.0 if self.claim is None else self.claim.noise[name][0] ** 2 + 1 / 12


# An honest value differs from what it must be by more than this many standard deviations once in a
# hundred million.
DEVIATIONS = 6.0
# A site with a record has a hundred steps or more, and rounds to half a step.
ROUNDED = 0.005


def pack_counts(counts: Counts) -> bytes:
    """Canonical bytes: the same counts always give the same bytes."""
    message = pb.Counts(header=pack_header(counts.header), claim=pack_claim(counts.claim))
    for name, table in sorted(counts.tables.items()):
        message.tables.add(
            name=name, shape=list(table.shape), data=table.numpy().astype("<i4").tobytes()
        )
    return canonical(message)


def unpack_counts(payload: bytes) -> Counts:
    """Parse bytes of `pack_counts`. `check_counts` checks if they fit a run.

    Raises:
        SurrogateError: for bytes of no counts.
    """
    message = pb.Counts()
    parse(message, payload)
    tables: dict[str, Tensor] = {}
    names = distinct_names([table.name for table in message.tables], "table")
    for name, table in zip(names, message.tables, strict=True):
        shape = tuple(table.shape)
        if len(shape) > 3 or 4 * math.prod(shape) != len(table.data) or 0 in shape:
            raise SurrogateError(f"a table of shape {shape[:4]} with {len(table.data)} bytes")
        numbers = np.frombuffer(table.data, "<i4").astype(np.int64)
        tables[name] = torch.from_numpy(numbers).reshape(shape)
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    return Counts(unpack_header(message.header), tables, claim)


def check_counts(counts: Counts, config: Run, fingerprint: str) -> None:
    """Check that counts belong to this run, and are what some records and honest noise can give.

    Args:
        counts: of one site.
        config: of the run.
        fingerprint: of the backbone.

    Raises:
        SurrogateError: if they are not.
    """
    check_header(counts.header, Expectation.of(config, config.settings.classes, fingerprint))
    if counts.header.classes != config.settings.classes:
        raise SurrogateError("counts of other classes than the run's, or in another order")
    if counts.claim is not None or config.settings.epsilon:
        check_stated(counts.claim, config.mechanism)
    messages, classes = config.plan.messages, len(config.settings.classes)
    check_fields(messages.sends, counts.tables, messages.sizes(classes, 1, 1))
    expected = tables_in(config.settings.counting, classes, config.target)
    assert set(counts.tables) == {each.name for each in expected}
    check_tables(counts.tables, {name: counts.variance(name) for name in counts.tables})


def check_tables(tables: Mapping[str, Tensor], variances: Mapping[str, float]) -> None:
    """Check that some records and honest noise can give these tables.

    Args:
        tables: of counts, by name.
        variances: of the noise in a cell, by table.

    Raises:
        SurrogateError: if they cannot.
    """
    for name, table in tables.items():
        if float(table.min()) < -DEVIATIONS * variances[name] ** 0.5:
            raise SurrogateError(
                f"{name}: a count of {int(table.min())}; below zero by more than the noise can "
                "explain"
            )
    if "errors" in tables:
        records, others = tables["errors"][:, :1].double(), tables["errors"][:, 1:].double()
        # Exact sums are rounded to whole steps at each site.
        room = DEVIATIONS * (2 * variances["errors"]) ** 0.5 + ROUNDED * float(records.max())
        if float((others - records).max()) > room + 1:
            raise SurrogateError("errors: a sum beyond its number of records")
    if "scores" not in tables:
        return
    decisions, scores = tables["decisions"], tables["scores"]
    room = variances["decisions"] * decisions.numel() + variances["scores"] * scores[0].numel()
    apart = (scores.sum((1, 2)) - decisions.sum()).abs().max()
    if float(apart) > DEVIATIONS * room**0.5:
        raise SurrogateError(
            f"decisions and scores differ by {int(apart)} records; each record is in both"
        )
