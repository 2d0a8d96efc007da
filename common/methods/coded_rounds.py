"""Methods that learn another target than classes from sums in several rounds: one plan for all."""

from __future__ import annotations

from functools import partial

from fedsurrogate.common.limits import LARGEST_COUNT
from fedsurrogate.common.methods.coded_sums import coded_sizes, in_ranges
from fedsurrogate.common.methods.method import (
    MESSAGE,
    Combination,
    Defences,
    Field,
    Messages,
    ModelTraining,
    Plan,
    Work,
    fields_of,
)
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.target import Course, Target
from fedsurrogate.common.terms import noise_in_rounds

GAP = (
    "sums over a code in rounds are limited in size, not compared between sites: one hostile site can "
    "spoil the model; use max-share, or sites that you trust"
)
WHOLE = "fedsurrogate.strategies.targets.in_rounds:"


def coded_rounds_plan(settings: Settings, target: Target, course: Course, clip: float) -> Plan:
    """The plan of a method whose sites send sums over the code of their records in rounds.

    Args:
        settings: of the run.
        target: of the run.
        course: what the target needs in each round.
        clip: of features under privacy.
    """
    ranged = bool(settings.features.ranges)
    each, first = (in_ranges(sums, ranged) for sums in (course.each, course.first or ()))
    return Plan(
        kind="rounds",
        messages=Messages(
            sends=fields_of(each, LARGEST_COUNT),
            receives=tuple(Field(name, shape) for name, shape in course.receives),
            result=(Field("weight", "o d"), Field("bias", "o")),
            first=fields_of(first, LARGEST_COUNT) or None,
            symbols=partial(coded_sizes, len(target.outputs), 0),
            all_classes=True,
        ),
        combination=Combination(
            site=MESSAGE,
            strategy=WHOLE + "TargetRounds",
            evaluate="fedsurrogate.client_app.methods.target_evaluation:received_model",
            learn=course.steps,
            sums=each,
            first_sums=first or None,
            site_sums=course.site_sums,
            from_sums=WHOLE + "absorb_total",
            sum_strategy=WHOLE + "SummedTargetRounds",
        ),
        work=lambda classes, dimension: Work(
            passes=1, rounds=course.rounds, numbers=dimension * (dimension + classes)
        ),
        privacy=noise_in_rounds(each, settings, clip, course.rounds, first, course.first_share)
        if settings.epsilon
        else None,
        defences=Defences(
            reason=", whose sums over a code are not compared; max-share limits a site",
            gap=GAP,
        ),
        training=ModelTraining(frames=False, rounds=course.rounds, start=course.steps),
        refusal=_refusal(settings.features.given_projection, settings.fedpft.public),
        head="from sums over the code of the target, in rounds",
        variant=target.name,
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
