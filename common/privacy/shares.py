"""What public settings alone decide of a private statistic: how its parts share the budget, and how
little it keeps of the mean over a feature's own columns, and of its length.
"""

from __future__ import annotations

from typing import NamedTuple


class OwnParts(NamedTuple):
    """What features keep before their clip.

    Attributes:
        mean: weight of the mean over a feature's own columns.
        length: weight of the length of what else it has; 0 leaves it to the clip.
        steady: whether a length near one changes the mean little.
    """

    mean: float
    length: float = 0.0
    steady: bool = False


# The weights, of few columns and of others, and the largest length of the mean as a share of that of the
# rest. Chosen on generated families of classes (`benchmarks/level_families.py`), where features of
# backbones lose nothing.
KEPT_OF_FEW, KEPT, MOST = OwnParts(0.1, 0.0, True), OwnParts(0.1, 0.2, True), 0.75
# All of it, as of features without this map; and what earlier versions kept: nothing, the mean, or both.
ALL, REMOVED, MEAN_ALONE, BOTH = OwnParts(1.0), OwnParts(0.0), OwnParts(0.1), OwnParts(0.1, 0.1)
# What claims state in place of a centre's digest.
STATED = {
    "own mean": REMOVED,
    "own mean, weight 0.1": MEAN_ALONE,
    "own mean and length, weight 0.1": BOTH,
    "steady own mean 0.1": KEPT_OF_FEW,
    "steady own mean 0.1, length 0.2": KEPT,
}


def stated(weight: OwnParts, centre: str = "") -> str:
    """What a claim states was subtracted from features before their clip.

    Args:
        weight: of the mean over columns and the length.
        centre: digest of the public mean, or empty, where all of the mean is kept.
    """
    return next((text for text, each in STATED.items() if each == weight), centre)


def weight_of(claim: str) -> OwnParts:
    """The weight of the mean over columns and the length by the statement of a claim.

    Args:
        claim: as `stated` gives it.
    """
    return STATED.get(claim, ALL)


def as_stored(claim: str | None, due: str) -> str:
    """What the claim of a stored run has to state.

    Args:
        claim: what it states, where an earlier version may have written it; else None.
        due: what a claim of this version states.
    """
    earlier = claim in STATED or claim == ""
    return claim if claim is not None and earlier and due in STATED else due


# Releases of DP-EM: one for the class means, then the steps of EM. More steps split the same budget
# into smaller parts.
EM_STEPS = 4
# Of counts, sums and second moment under one distributed noise, which is small enough for all three at
# any epsilon.
DISTRIBUTED = {"counts": 0.03, "sums": 0.55, "squares": 0.42}
# Of a training step under one distributed noise. The number of records is summed in every round, and
# averaged.
DISTRIBUTED_STEP = {"records": 0.03, "gradients": 0.97}


def budget_shares(family: str, noise_multiplier: float) -> dict[str, float]:
    """Shares of the budget 1 / noise_multiplier^2 by statistic. They depend only on public
    settings.

    Second moments are large tables. Below an epsilon of about 2, noise dominates them and they get
    little; from 4 on, half. Counts need little: they are only weights of the sums. Measured in
    benchmarks/private_surrogates.py.

    Args:
        family: of covariances; or "distributed" for secure aggregation, measured in
            benchmarks/secure_aggregation.py.
        noise_multiplier: of the whole release as one Gaussian mechanism.

    Returns:
        The shares, which sum to one. "spherical" covariances need no second moments.

    Example:
        >>> shares = budget_shares("full", noise_multiplier=1.0)
        >>> {name: round(share, 3) for name, share in shares.items()}
        {'counts': 0.039, 'sums': 0.521, 'squares': 0.44}
    """
    if family == "distributed":
        return DISTRIBUTED
    squares = 0.0 if family == "spherical" else 0.55 / (1 + (noise_multiplier / 2) ** 2)
    counts = 0.07 * (1 - squares)
    shares = {"counts": counts, "sums": 1 - squares - counts}
    return shares | ({"squares": squares} if squares else {})
