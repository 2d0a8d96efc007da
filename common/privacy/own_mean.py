"""The mean over a feature's own columns, of which a private statistic keeps little.

Features that are never negative have most of their length in that mean, so after the clip little of
their norm would be left for the rest. But classes may differ in it alone, as a scan that is darker
differs from others. So it keeps a small weight, and never more than a share of the rest.
"""

from __future__ import annotations

# The weight of the mean, and its largest length as a share of that of the rest. Chosen on generated
# families of classes (`benchmarks/level_families.py`), where features of backbones lose nothing.
KEPT, MOST = 0.1, 0.75
# All of it, as of features without this map; and nothing, as in earlier versions.
ALL, REMOVED = 1.0, 0.0
# What claims state in place of a centre's digest. The first is of earlier versions.
STATED_REMOVED, STATED_KEPT = "own mean", "own mean, weight 0.1"
STATED = {STATED_REMOVED: REMOVED, STATED_KEPT: KEPT}


def stated(weight: float, centre: str = "") -> str:
    """What a claim states was subtracted from features before their clip.

    Args:
        weight: of the own mean.
        centre: digest of the public centre, or empty, where all of the mean is kept.
    """
    return next((text for text, each in STATED.items() if each == weight), centre)


def weight_of(claim: str) -> float:
    """The weight of the own mean by the statement of a claim.

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
    return claim if (claim, due) == (STATED_REMOVED, STATED_KEPT) else due
