"""Methods that learn another target than classes, from sums over a public code of each record: one
plan for all.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedsurrogate.common.limits import LARGEST_COUNT
from fedsurrogate.common.methods.method import (
    MESSAGE,
    Combination,
    Defences,
    Field,
    Messages,
    Plan,
    Sizes,
    Work,
    fields_of,
)
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS, SUMS, NoisySums
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.terms import Term

# Largest feature in a secure sum, in halves of its public range: a little beyond is no failure.
RANGED = 2.0


def coded_sums_plan(settings: Settings, target: Target, clip: float | None) -> Plan:
    """The plan of a method whose sites send sums over the code of their records once.

    Args:
        settings: of the run.
        target: of the run.
        clip: of features under privacy; None for a method without privacy.

    Returns:
        The plan. The site's part, secure sums, noise, planned bytes, relearning and the ledger
        follow from it.
    """
    private = bool(settings.epsilon) and clip is not None
    sums = target.statistics(private)
    privacy = NoisySums(
        JOINT_SUMS if settings.secure_sum else SUMS,
        settings.epsilon,
        settings.delta,
        {each.name: each.share for each in sums},
        clip or 0.0,
        {each.name: each.bound for each in sums},
    )
    outputs = (Field("weight", "o d"), Field("bias", "o"))
    return Plan(
        kind="one-shot",
        messages=Messages(
            fields_of(sums, LARGEST_COUNT),
            (),
            outputs,
            symbols=partial(coded_sizes, len(target.outputs), target.blocks),
            introduces=False,
            all_classes=True,
        ),
        combination=Combination(
            site=MESSAGE,
            strategy="fedsurrogate.strategies.targets.strategy:FromCodedSums",
            evaluate="fedsurrogate.client_app.methods.target_evaluation:received_model",
            learn="fedsurrogate.strategies.targets.learning:learned",
            stored=True,
            sums=in_ranges(sums, bool(settings.features.ranges)),
            site_sums="fedsurrogate.client_app.methods.coded_sums:coded_moments",
            from_sums="fedsurrogate.strategies.targets.strategy:learn_from_sum",
        ),
        work=lambda classes, dimension: Work(passes=1, numbers=dimension * (dimension + classes)),
        privacy=privacy if private else None,
        defences=Defences(
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
        ranges=True,
    )


def coded_sizes(outputs: int, blocks: int, classes: int, dimension: int, records: int) -> Sizes:
    """o outputs; B blocks of sites; T and P numbers of a symmetric matrix of features, and of the
    code.
    """
    folded = {"T": dimension * (dimension + 1) // 2, "P": classes * (classes + 1) // 2}
    return {"1": 1, "o": outputs, "B": blocks, **folded}


def in_ranges(sums: tuple[Term, ...], ranged: bool) -> tuple[Term, ...]:
    """The same sums of features that have public ranges, which become [-1, 1], if `ranged`."""
    return tuple(replace(each, largest=RANGED) for each in sums) if ranged else sums


def refused(plan: Plan, why: str) -> Plan:
    """The plan with a reason why it does not support the settings; empty leaves it as it is."""
    return replace(plan, refusal=plan.refusal or why)
