"""Budgets of the Gaussian mechanism, and a private surrogate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedsurrogate._arrays import Array
from fedsurrogate._surrogate import Surrogate, fit
from fedsurrogate.common.privacy.accounting import GaussianEvent, calibrate, epsilon_spent


def epsilon(
    noise_multiplier: float, delta: float, *, sample_rate: float = 1.0, steps: int = 1
) -> float:
    """Epsilon at `delta` of Gaussian releases together, for adding or removing one record.

    Args:
        noise_multiplier: standard deviation of the noise over the L2 sensitivity.
        delta: in (0, 1).
        sample_rate: of Poisson samples; 1 for all records.
        steps: number of releases.

    Returns:
        Epsilon: exact for a sample rate of 1, else by dp-accounting's privacy loss distributions.

    Raises:
        ConfigError: for numbers out of their range.

    Source:
        Balle & Wang 2018.

    Example:
        >>> round(epsilon(noise_multiplier=4.0, delta=1e-5), 3)
        0.926
    """
    return epsilon_spent([GaussianEvent(noise_multiplier, sample_rate, steps)], delta)


def noise_multiplier(
    epsilon: float, delta: float, *, sample_rate: float = 1.0, steps: int = 1
) -> float:
    """The smallest noise multiplier with which releases stay within (epsilon, delta).

    The inverse of `epsilon`.

    Args:
        epsilon: of all releases together.
        delta: of all releases together.
        sample_rate: of Poisson samples; 1 for all records.
        steps: number of releases.

    Returns:
        Standard deviation of the noise over the L2 sensitivity.

    Raises:
        ConfigError: for numbers out of their range.

    Example:
        >>> round(noise_multiplier(epsilon=1.0, delta=1e-5), 3)
        3.731
    """
    return calibrate(epsilon, delta, sample_rate, steps)


def noisy(
    features: Array,
    labels: Array,
    *,
    classes: Sequence[object],
    epsilon: float,
    delta: float,
    **settings: Any,
) -> Surrogate:
    """Noisy class sums of a site's records: `fit` with a budget.

    Covered: one record more or less (one patient with `patients`), for this one release. Not
    covered: further releases of the same records, which compose, and the backbone's own training
    data.

    Args:
        features: (n, d).
        labels: (n,), class names or integers.
        classes: all classes of the run.
        epsilon: of this release.
        delta: of this release.
        settings: further arguments of `fit`.

    Returns:
        What the site would send.

    Raises:
        ConfigError: for settings that do not agree.
        DataError: for features or labels that cannot be used.

    Example:
        >>> x, y = [[0.1, 0.9], [0.3, 0.8], [0.9, 0.2]], [0, 0, 1]
        >>> noisy(x, y, classes=range(3), epsilon=1.0, delta=1e-5).classes
        ('0', '1', '2')
    """
    return fit(features, labels, classes=classes, epsilon=epsilon, delta=delta, **settings)
