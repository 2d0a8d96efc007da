"""Methods whose sites send sums over their records by class, from which the coordinator learns: one
plan for all.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedsurrogate.common.limits import LARGEST_COUNT
from fedsurrogate.common.methods.heads import HEAD
from fedsurrogate.common.methods.method import (
    MESSAGE,
    Combination,
    Defences,
    Field,
    Messages,
    Plan,
    Work,
    fields_of,
)
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS, SUMS, NoisySums
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.terms import Term

# What a secure sum adds up: class counts, class sums of features, and the second moment of all
# features, folded; with T = d (d + 1) / 2.
MOMENTS = (Term("counts", "C"), Term("sums", "C d", 1, count="counts"), Term("squares", "T", 2))


def class_sums_plan(
    settings: Settings,
    learn: str,
    shares: Mapping[str, float] | None = None,
) -> Plan:
    """The plan of a method whose sites send their class counts and sums of features once.

    The site's part, secure sums, the schema, planned bytes, relearning and the ledger follow from
    it.

    Args:
        settings: of the run.
        learn: "module:function" at the coordinator: from statistics of all records and a header for
            the model, to the model and facts about it; see `Learn` in
            `fedsurrogate.strategies.closed_form.strategy`.
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
        Field("counts", "C", -LARGEST_COUNT if private else 0, LARGEST_COUNT),
        *fields_of(MOMENTS[1:2]),
    )
    privacy = None
    if settings.epsilon and shares is not None:
        if set(shares) != (names := {field.name for field in sends}):
            raise ValueError(f"shares = {dict(shares)}: must be of {', '.join(sorted(names))}")
        name = JOINT_SUMS if settings.secure_sum else SUMS
        privacy = NoisySums(name, settings.epsilon, settings.delta, shares)

    def work(classes: int, dimension: int) -> Work:
        return Work(passes=1, numbers=dimension * (1 + classes))

    return Plan(
        kind="one-shot",
        messages=Messages(
            sends,
            (),
            HEAD,
            introduces=False,
            all_classes=private and not settings.secure_sum,
        ),
        combination=Combination(
            site=MESSAGE,
            strategy="fedsurrogate.strategies.closed_form.strategy:FromStatistics",
            learn=learn,
            stored=True,
            sums=MOMENTS[:2],
            site_sums="fedsurrogate.client_app.methods.sums:class_moments",
            from_sums="fedsurrogate.strategies.closed_form.strategy:learn_from_sum",
        ),
        work=work,
        privacy=privacy,
        defences=Defences(reason=", whose class sums show no harm; max-share limits a site"),
        ranges=True,
    )
