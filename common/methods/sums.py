"""Methods whose sites send sums over their records, from which the coordinator learns: by class, or over
the public code of another target than classes, once or in rounds. One plan for all of each kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from ..errors import LARGEST_COUNT
from ..privacy.mechanism import DISTRIBUTED_SUMS, SUMS, NoisySums
from ..settings import FeaturesSettings, Settings
from ..settings.heads import AUTO
from ..targets.target import Course, Target
from ..terms import Term, noise_in_rounds
from . import method
from .heads import HEAD

# What secure aggregation adds up: class counts, class sums of features, and the second moment of all
# features, folded; with T = d (d + 1) / 2.
MOMENTS = (Term("counts", "C"), Term("sums", "C d", 1, count="counts"), Term("squares", "T", 2))


def class_sums_plan(
    settings: Settings, learn: str, shares: Mapping[str, float] | None = None
) -> method.Plan:
    """The plan of a method whose sites send their class counts and sums of features once.

    The site's part, secure aggregation, the schema, planned bytes, refitting and the ledger follow from
    it.

    Args:
        settings: of the run.
        learn: "module:function" at the coordinator: from statistics of all records and a header for
            the model, to the model and facts about it; see `Learn` in
            `fedsurrogate.strategies.heads`.
        shares: part of the privacy budget of "counts" and "sums", which add up to one; None for a
            method without privacy.

    Returns:
        The plan. Private sites send the sums of features of norm at most one, with noise.

    Raises:
        ValueError: for shares of other statistics than those that are sent.

    Example:
        >>> plan = class_sums_plan(Settings(), "fedsurrogate.strategies.nearest_mean:learn")
        >>> [field.name for field in plan.messages.sends]
        ['counts', 'sums']
    """
    private = bool(settings.epsilon) and shares is not None
    sends = (
        method.Field("counts", "C", -LARGEST_COUNT if private else 0, LARGEST_COUNT),
        *method.fields_of(MOMENTS[1:2]),
    )
    privacy = None
    if settings.epsilon and shares is not None:
        if set(shares) != (names := {field.name for field in sends}):
            raise ValueError(f"shares = {dict(shares)}: must be of {', '.join(sorted(names))}")
        name = DISTRIBUTED_SUMS if settings.secure_aggregation else SUMS
        privacy = NoisySums(name, settings.epsilon, settings.delta, shares)

    def work(classes: int, dimension: int) -> method.Work:
        return method.Work(passes=1, numbers=dimension * (1 + classes))

    return method.Plan(
        kind="one-shot",
        messages=method.Messages(
            sends,
            (),
            HEAD,
            identifies=False,
            all_classes=private and not settings.secure_aggregation,
        ),
        combination=method.Combination(
            site=method.MESSAGE,
            strategy="fedsurrogate.strategies.heads:FromStatistics",
            learn=learn,
            stored=True,
            sums=MOMENTS[:2],
            site_sums="fedsurrogate.client_app.methods.sums:class_moments",
            from_sums="fedsurrogate.strategies.heads:learn_from_sum",
        ),
        work=work,
        privacy=privacy,
        defences=method.Defences(reason=", whose class sums show no harm; max-share limits a site"),
        ranges=True,
    )


# Largest feature in secure aggregation, in halves of its public range: a little beyond is no failure.
RANGED = 2.0


def coded_sums_plan(settings: Settings, target: Target, clip: float | None) -> method.Plan:
    """The plan of a method whose sites send sums over the code of their records once.

    Args:
        settings: of the run.
        target: of the run.
        clip: of features under privacy; None for a method without privacy.

    Returns:
        The plan. The site's part, secure aggregation, noise, planned bytes, refitting and the ledger
        follow from it.
    """
    private = bool(settings.epsilon) and clip is not None
    sums = target.statistics(private)
    privacy = NoisySums(
        DISTRIBUTED_SUMS if settings.secure_aggregation else SUMS,
        settings.epsilon,
        settings.delta,
        {each.name: each.share for each in sums},
        clip or 0.0,
        {each.name: each.bound for each in sums},
    )
    outputs = (method.Field("weight", "o d"), method.Field("bias", "o"))
    return method.Plan(
        kind="one-shot",
        messages=method.Messages(
            method.fields_of(sums, LARGEST_COUNT),
            (),
            outputs,
            symbols=partial(coded_sizes, len(target.outputs), target.blocks),
            identifies=False,
            all_classes=True,
        ),
        combination=method.Combination(
            site=method.MESSAGE,
            strategy="fedsurrogate.strategies.targets.strategy:FromCodedSums",
            evaluate="fedsurrogate.client_app.methods.evaluation:received_target_model",
            stored=True,
            sums=in_ranges(sums, bool(settings.features.ranges)),
            site_sums="fedsurrogate.client_app.methods.sums:coded_moments",
            from_sums="fedsurrogate.strategies.targets.strategy:learn_from_sum",
        ),
        work=lambda classes, dimension: method.Work(
            passes=1, numbers=dimension * (dimension + classes)
        ),
        privacy=privacy if private else None,
        defences=method.Defences(
            ("none", "harm") if target.compared else ("none",),
            reason=", whose sums over a code show only what a site costs the others",
            fewest=4,
            gap="" if private else target.gap,
        ),
        head="; ".join(
            [
                "ridge in closed form, from sums over the code of the target",
                *(f"{key} {what}" for key, what in target.choices.items()),
            ]
        ),
        variant=target.name,
        mean_over_columns=private and weighs_own_parts(settings.features, settings.fedpft.public),
        ranges=True,
    )


def weighs_own_parts(features: FeaturesSettings, public: str) -> bool:
    """Whether private features keep a small weight of the mean over their own columns and of their
    length: where no map of the settings says what they are before their clip.

    Args:
        features: of a private run.
        public: file of public features.
    """
    return features.projection == AUTO and not (public or features.ranges)


def coded_sizes(
    outputs: int, blocks: int, classes: int, dimension: int, records: int
) -> method.Sizes:
    """o outputs; B blocks of sites; T and P numbers of a symmetric matrix of features, and of the
    code.
    """
    folded = {"T": dimension * (dimension + 1) // 2, "P": classes * (classes + 1) // 2}
    return {"1": 1, "o": outputs, "B": blocks, **folded}


def in_ranges(sums: tuple[Term, ...], ranged: bool) -> tuple[Term, ...]:
    """The same sums of features that have public ranges, which become [-1, 1], if `ranged`."""
    return tuple(replace(each, largest=RANGED) for each in sums) if ranged else sums


def refused(plan: method.Plan, why: str) -> method.Plan:
    """The plan with a reason why it does not support the settings; empty leaves it as it is."""
    return replace(plan, refusal=plan.refusal or why)


GAP = (
    "sums over a code in rounds are limited in size, not compared between sites: one hostile site can "
    "spoil the model; use max-share, or sites that you trust"
)
IN_ROUNDS = "fedsurrogate.strategies.targets.residual_steps:"


def coded_rounds_plan(
    settings: Settings, target: Target, course: Course, clip: float
) -> method.Plan:
    """The plan of a method whose sites send sums over the code of their records in rounds.

    Args:
        settings: of the run.
        target: of the run.
        course: what the target needs in each round.
        clip: of features under privacy.
    """
    ranged = bool(settings.features.ranges)
    each, first = (in_ranges(sums, ranged) for sums in (course.each, course.first or ()))
    return method.Plan(
        kind="rounds",
        messages=method.Messages(
            sends=method.fields_of(each, LARGEST_COUNT),
            receives=tuple(method.Field(name, shape) for name, shape in course.receives),
            result=(method.Field("weight", "o d"), method.Field("bias", "o")),
            first=method.fields_of(first, LARGEST_COUNT) or None,
            symbols=partial(coded_sizes, len(target.outputs), 0),
            all_classes=True,
        ),
        combination=method.Combination(
            site=method.MESSAGE,
            strategy=IN_ROUNDS + "TargetRounds",
            evaluate="fedsurrogate.client_app.methods.evaluation:received_target_model",
            sums=each,
            first_sums=first or None,
            site_sums=course.site_sums,
            from_sums=IN_ROUNDS + "absorb_total",
            sum_strategy=IN_ROUNDS + "SummedTargetRounds",
        ),
        work=lambda classes, dimension: method.Work(
            passes=1, rounds=course.rounds, numbers=dimension * (dimension + classes)
        ),
        privacy=noise_in_rounds(each, settings, clip, course.rounds, first, course.first_share)
        if settings.epsilon
        else None,
        defences=method.Defences(
            reason=", whose sums over a code are not compared; max-share limits a site", gap=GAP
        ),
        training=method.ModelTraining(frames=False, rounds=course.rounds, start=course.steps),
        refusal=_refusal(settings.features.given_projection, settings.fedpft.public),
        head="from sums over the code of the target, in rounds",
        variant=target.name,
        mean_over_columns=bool(settings.epsilon)
        and weighs_own_parts(settings.features, settings.fedpft.public),
        ranges=True,
    )


def _refusal(projection: str, public: str) -> str:
    for key, given in (("features.projection", projection), ("fedpft.public", public)):
        if given:
            return (
                f"{key} = {given!r} works only where a target is learned in one round; set "
                "time-head = 'cells', or remove it"
            )
    return ""
