"""Runs that count records at the sites instead of learning: their plans, tables and sensitivities."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from ..errors import LARGEST_COUNT, norm_of_ones
from ..image_histograms import histograms_of, read_bins
from ..privacy.mechanism import DISTRIBUTED_SUMS, NOISY_COUNTS, NoisySums
from ..settings import CountingSettings, Settings
from ..targets.target import Target
from ..terms import Counted, Term
from .method import Combination, Defences, Field, Messages, Method, Plan, Sizes, Work, fields_of

DIGITS = 32


def scored_classes(classes: int) -> int:
    """Number of classes with a histogram: of two classes only the last, whose probability gives the
    other's.
    """
    return 1 if classes == 2 else classes


def tables_of(own: CountingSettings, classes: int) -> tuple[Counted, ...]:
    """The tables of a run that counts records of this many classes.

    survey: records (C,), and images (I,) of all cells of its histograms, of each of which a record is in
    one: it adds vectors of norm 1 and sqrt(Q). evaluation: decisions (C, C) by true and decided
        class, and for each scored
    class a histogram of its probability, for records of other classes and of this class: scores (S,
    2, B). A record is in one cell of the decisions and in S cells of the scores, so it adds vectors
    of norm 1 and sqrt(S). The shares minimise the sum of the two variances of the noise.
    """
    if own.kind == "survey":
        return _surveyed(own, classes, 1.0)
    scored = scored_classes(classes)
    share = 1 / (1 + math.sqrt(scored))
    return (
        Counted("decisions", (classes, classes), 1.0, share),
        Counted("scores", (scored, 2, own.bins), norm_of_ones(scored), 1 - share),
    )


def _surveyed(own: CountingSettings, rows: int, bound: float) -> tuple[Counted, ...]:
    """The tables of a survey.

    Args:
        own: settings.
        rows: of the table of records.
        bound: of what a record adds to that.
    """
    if not own.images:
        return (Counted("records", (rows,), bound),)
    more = norm_of_ones(len(own.images))
    share = bound / (bound + more)
    return (
        Counted("records", (rows,), bound, share),
        Counted("images", (image_cells(own),), more, 1 - share),
    )


def image_cells(own: CountingSettings) -> int:
    """The number of cells of all histograms of images."""
    return sum(len(each.cells) for each in histograms_of(own.images, own.image_bins).values())


def target_tables(own: CountingSettings, target: Target) -> tuple[Counted, ...]:
    """The tables of a run that counts records with a target.

    Args:
        own: settings, of a survey or an evaluation.
        target: of the run.

    Raises:
        ConfigError: for a target that is not counted.
    """
    # It needs torch, which checks before a run of classes do without.
    from ..targets.counted import counted

    how = counted(target, own)
    if own.kind == "survey":
        return _surveyed(own, len(how.rows), how.bound)
    return (how.table,)


def tables_in(own: CountingSettings, classes: int, target: Target | None) -> tuple[Counted, ...]:
    """The tables of a run that counts: of this many classes, or of a target."""
    return tables_of(own, classes) if target is None else target_tables(own, target)


def _symbols(own: CountingSettings, classes: int, dimension: int, records: int) -> Sizes:
    """S: classes with a histogram; 2: of other classes, and of the class; B: bins; I: cells of images."""
    return {"S": scored_classes(classes), "2": 2, "B": own.bins, "I": image_cells(own)}


def _refusal(settings: Settings) -> str:
    own, classes = settings.counting, settings.classes
    if not classes:
        return f"counting.kind = {own.kind!r} needs classes, so that all sites count the same ones"
    if own.kind == "evaluation" and not own.digest:
        return "counting.kind = 'evaluation' needs counting.digest; `coordinator evaluate` sets it"
    if own.images and (own.kind != "survey" or settings.secure_aggregation):
        return (
            "counting.images compares sites in a survey: it needs counting.kind = 'survey', and "
            "secure-aggregation = false"
        )
    if unused := [name for name in read_bins(own.image_bins) if name not in own.images]:
        return f"counting.image-bins has {unused[0]!r}, which is not in counting.images"
    return ""


def _plan(
    tables: dict[str, str],
    work: Callable[[int, int], Work],
    settings: Settings,
    target: Target | None = None,
) -> Plan:
    """The plan of a run that counts.

    Args:
        tables: shape of each table of classes.
        work: of a site.
        settings: of the run.
        target: what is counted where it is not classes.
    """
    own, privacy, counted = settings.counting, None, tuple[Counted, ...]()
    symbols: Callable[[int, int, int], Sizes] = partial(_symbols, own)
    if target is None:
        counted = tables_of(own, len(settings.classes)) if settings.epsilon else ()
        named = tables | ({"images": "I"} if own.images else {})
        sums = tuple(Term(name, shape) for name, shape in named.items())
    else:
        counted = target_tables(own, target)
        sides = {str(side): side for table in counted for side in table.shape}
        symbols = lambda *_: sides  # noqa: E731
        sums = tuple(
            Term(table.name, " ".join(map(str, table.shape)), bound=table.most) for table in counted
        )
    if settings.epsilon:
        privacy = NoisySums(
            DISTRIBUTED_SUMS if settings.secure_aggregation else NOISY_COUNTS,
            settings.epsilon,
            settings.delta,
            {each.name: each.share for each in counted},
            bounds={each.name: each.bound for each in counted},
        )
    return Plan(
        kind="one-shot",
        messages=Messages(
            sends=fields_of(sums, LARGEST_COUNT, DIGITS),
            # Who judges receives a model.
            receives=(Field("weight", "C d"), Field("bias", "C")) if "decisions" in tables else (),
            symbols=symbols,
            identifies=False,
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
        refusal=_refusal(settings),
        counts=True,
    )


def _judging(classes: int, dimension: int) -> Work:
    return Work(passes=1, numbers=classes * (classes + dimension))


def _surveying(classes: int, dimension: int) -> Work:
    return Work(numbers=classes)


def _kind(
    name: str, title: str, paper: str, tables: dict[str, str], work: Callable[[int, int], Work]
) -> Method:
    plan = partial(_plan, tables, work)
    return Method(name, title, paper, plan, reads=("counting",), shown="counting", coded=plan)


EVALUATION = _kind(
    "evaluation",
    "Evaluation",
    "counts of decisions and scores with Gaussian noise",
    {"decisions": "C C", "scores": "S 2 B"},
    _judging,
)
SURVEY = _kind(
    "survey",
    "Survey",
    "counts of records with Gaussian noise",
    {"records": "C"},
    _surveying,
)
# By the value of counting.kind.
KINDS_OF_COUNTS = {method.name: method for method in (EVALUATION, SURVEY)}
