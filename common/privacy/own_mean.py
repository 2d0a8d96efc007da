"""The mean over a feature's own columns, and its length, of which a private statistic keeps little.

Features that are never negative have most of their length in that mean, so after the clip little of
their norm would be left for the rest. But classes may differ in it alone, as a scan that is darker
differs from others. So it keeps a small weight, and never more than a share of the rest. The clip gives
all features one length, in which classes may differ, too. So the length takes the place of what a
feature has along one public direction.
"""

from __future__ import annotations

from typing import NamedTuple


class OwnParts(NamedTuple):
    """What features keep before their clip.

    Attributes:
        mean: weight of the mean over a feature's own columns.
        length: weight of the length of what else it has; 0 leaves it to the clip.
    """

    mean: float
    length: float = 0.0


# The weights, and the largest length of the mean as a share of that of the rest. Chosen on generated
# families of classes (`benchmarks/level_families.py`), where features of backbones lose nothing.
KEPT, MOST = OwnParts(0.1, 0.1), 0.75
# All of it, as of features without this map; and what earlier versions kept: nothing, or the mean.
ALL, REMOVED, MEAN_ALONE = OwnParts(1.0), OwnParts(0.0), OwnParts(0.1)
# What claims state in place of a centre's digest.
STATED = {
    "own mean": REMOVED,
    "own mean, weight 0.1": MEAN_ALONE,
    "own mean and length, weight 0.1": KEPT,
}


def stated(weight: OwnParts, centre: str = "") -> str:
    """What a claim states was subtracted from features before their clip.

    Args:
        weight: of the own mean and the length.
        centre: digest of the public centre, or empty, where all of the mean is kept.
    """
    return next((text for text, each in STATED.items() if each == weight), centre)


def weight_of(claim: str) -> OwnParts:
    """The weight of the own mean and the length by the statement of a claim.

    Args:
        claim: as `stated` gives it.
    """
    return STATED.get(claim, ALL)


def as_stored(claim: str, due: str) -> str:
    """What the claim of a stored run has to state.

    Args:
        claim: what it states, where an earlier version may have written it; else empty.
        due: what a claim of this version states.
    """
    return claim if claim in STATED and due == stated(KEPT) else due
