"""How the statistics of one release share its budget. Shares follow from public settings alone."""

from __future__ import annotations

# Releases of DP-EM: one for the class means, then the steps of EM. More steps split the same budget
# into smaller parts.
EM_STEPS = 4
# Of counts, sums and second moment under one joint noise, which is small enough for all three at
# any epsilon.
JOINT = {"counts": 0.03, "sums": 0.55, "squares": 0.42}
# Of a training step under one joint noise. The number of records is summed in every round, and
# averaged.
JOINT_STEP = {"records": 0.03, "gradients": 0.97}


def budget_shares(family: str, noise_multiplier: float) -> dict[str, float]:
    """Shares of the budget 1 / noise_multiplier^2 by statistic. They depend only on public
    settings.

    Second moments are large tables. Below an epsilon of about 2, noise dominates them and they get
    little; from 4 on, half. Counts need little: they are only weights of the sums. Measured in
    benchmarks/private_surrogates.py.

    Args:
        family: of covariances; or "joint" for secure sums, measured in benchmarks/secure_sums.py.
        noise_multiplier: of the whole release as one Gaussian mechanism.

    Returns:
        The shares, which sum to one. "spherical" covariances need no second moments.

    Example:
        >>> shares = budget_shares("full", noise_multiplier=1.0)
        >>> {name: round(share, 3) for name, share in shares.items()}
        {'counts': 0.039, 'sums': 0.521, 'squares': 0.44}
    """
    if family == "joint":
        return JOINT
    squares = 0.0 if family == "spherical" else 0.55 / (1 + (noise_multiplier / 2) ** 2)
    counts = 0.07 * (1 - squares)
    shares = {"counts": counts, "sums": 1 - squares - counts}
    return shares | ({"squares": squares} if squares else {})
