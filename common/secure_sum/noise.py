"""Noise of a secure sum: every site adds a part, so that the sum keeps the guarantee even without
the parts of some sites.

Source: Kairouz, Liu & Steinke 2021, "The Distributed Discrete Gaussian Mechanism for Federated
Learning with Secure Aggregation". Differs from it: a site's sum is rounded once, which the
sensitivity covers, and the cost is that of a continuous Gaussian mechanism
(common/privacy/discrete_gaussian.py has the proof), which is tighter than Renyi divergences.

Noise for sites that may be lost is a part of its own (`spare`), made from a seed. When none is
lost, which the signatures of the list of summed sites prove, sites reveal their seeds, and the
coordinator takes these parts out of the sum (as in Jiang, Wang & Chen 2024, "Dordis", in which each
lost site has a part). What stays is enough for that list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.discrete_gaussian import (
    CONTINUOUS,
    Integers,
    discrete_gaussian,
    seeded,
)
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.secure_sum.rules import FILLED, HALF, FixedPoint, SumRules

# Standard deviations of the noise that the modulus has room for. Beyond it the sum wraps around,
# which costs no privacy.
ROOM = 8
# Covers the rounding of exact sums to double precision before they are rounded to steps.
SLACK = 1e-3
Shapes = Mapping[str, tuple[int, ...]]


def site_variances(
    claim: Mechanism, numbers: Mapping[str, FixedPoint], shapes: Shapes, rules: SumRules
) -> dict[str, int]:
    """Variance of one site's noise in every entry of each statistic. Depends on public numbers
    only.

    A unit changes a statistic by a vector of norm at most 1 / step. Rounding moves an entry by less
    than one more, so all of them by less than the root of their number. The `honest` sites alone
    give the noise of the claim. Each adds CONTINUOUS once more, because what discrete noise costs
    beyond continuous noise grows with the number of sites.

    Args:
        claim: the mechanism, with the noise of the sum.
        numbers: fixed-point numbers of each statistic.
        shapes: of each statistic.
        rules: of the sum.

    Returns:
        Variances in squared steps, by statistic.

    Raises:
        ConfigError: if the modulus has no room for the noise.
        KeyError: for a statistic of which the claim says no noise.
    """
    variances = {}
    # Of a claim for several rounds, the statistics of this one.
    for name in shapes:
        (sigma, bound), fixed = claim.noise[name], numbers[name]
        sensitivity = bound / fixed.step + (1 + SLACK) * math.sqrt(math.prod(shapes[name]))
        shared = ((sigma / bound * sensitivity) ** 2 + CONTINUOUS) / rules.honest
        variances[name] = math.ceil(shared) + CONTINUOUS
        if ROOM * math.sqrt(rules.members * variances[name]) > (1 - FILLED) * HALF:
            raise ConfigError(
                f"secure-sum-records: the noise on {name} does not fit into the modulus; set more "
                "records of a site, or a larger epsilon"
            )
    return variances


def spare_variances(
    claim: Mechanism, numbers: Mapping[str, FixedPoint], shapes: Shapes, rules: SumRules
) -> dict[str, int]:
    """Variance of the part of one site's noise that is for lost sites.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.

    Returns:
        Variances in squared steps, by statistic; empty where no site may be lost.
    """
    if rules.lasting == rules:
        return {}
    whole, lasting = (
        site_variances(claim, numbers, shapes, each) for each in (rules, rules.lasting)
    )
    # Two parts cost discreteness twice.
    return {name: whole[name] + CONTINUOUS - lasting[name] for name in whole}


def noise_of_site(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    seed: bytes,
) -> dict[str, Integers]:
    """One site's noise for each statistic.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        seed: of the part for lost sites, 32 bytes.

    Returns:
        Noise by statistic, flat, in steps.
    """
    lasting, spare = (
        site_variances(claim, numbers, shapes, rules.lasting),
        spare_of(claim, numbers, shapes, rules, seed),
    )
    noise = {
        name: discrete_gaussian(variance, math.prod(shapes[name]))
        for name, variance in lasting.items()
    }
    return {name: drawn + spare[name] if name in spare else drawn for name, drawn in noise.items()}


def spare_of(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    seed: bytes,
) -> dict[str, Integers]:
    """The part of a site's noise that is for lost sites: the same at site and coordinator.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        seed: of this part, 32 bytes.

    Returns:
        Noise by statistic, flat, in steps; empty where no site may be lost.
    """
    source = seeded(seed)
    variances = sorted(spare_variances(claim, numbers, shapes, rules).items())
    return {
        name: discrete_gaussian(variance, math.prod(shapes[name]), source)
        for name, variance in variances
    }


def noise_of_sum(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    summed: int,
    removed: int = 0,
) -> dict[str, float]:
    """Standard deviation of the noise in a sum.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        summed: number of sites in the sum.
        removed: number of sites whose part for lost sites was taken out.

    Returns:
        Standard deviations by statistic, in the units of the statistics.
    """
    lasting = site_variances(claim, numbers, shapes, rules.lasting)
    spare = spare_variances(claim, numbers, shapes, rules)
    return {
        name: math.sqrt(summed * variance + (summed - removed) * spare.get(name, 0))
        * numbers[name].step
        for name, variance in lasting.items()
    }
