"""What a run's settings decide of its secure sum: who takes part, numbers, shapes, dimensions, and
what binds them.
"""

from __future__ import annotations

import hashlib
import math

from fedsurrogate.common.methods.method import Plan
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS, Mechanism
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.fixed_point import FixedPoint
from fedsurrogate.common.secure_sum.rules import SumRules
from fedsurrogate.common.settings import FeaturesSettings, SumSettings
from fedsurrogate.common.settings.features import FEWEST_MAPPED

# Dimensions of a projection: this times the root of (records / noise on the second moment).
# Measured with 2,500 and 10,000 images of CIFAR-10 that are in no table, and 3,143 sketches of
# PACS; half or twice as many cost up to a point.
DIMENSIONS = 7.5
# Without joint noise.
MOST_DIMENSIONS = 512


def rules_of(sums: SumSettings, members: int) -> SumRules:
    """The limits of a run's secure sum.

    Args:
        sums: settings of the sum.
        members: number of sites in the key list.
    """
    return SumRules.of(members, sums.colluding, sums.dropouts, sums.secure_sum_threshold)


def numbers_of(plan: Plan, sums: SumSettings, sites: int, round: int = 1) -> dict[str, FixedPoint]:
    """The fixed-point numbers of each statistic of a round.

    Under joint noise, features have norm at most one.

    Args:
        plan: of the run.
        sums: the largest feature and the most records of a site.
        sites: number of sites in the sum.
        round: counted from one.

    Raises:
        ConfigError: if the modulus is too small.
    """
    joint = plan.mechanism_name == JOINT_SUMS
    numbers = {}
    for each in plan.combination.sums_in(round):
        largest = min(float(sums.secure_sum_range), each.largest)
        bound = each.bound if joint else largest**each.degree * math.sqrt(max(1, each.degree))
        whole = each.whole and not each.degree and not joint
        numbers[each.name] = FixedPoint.of(bound, sums.secure_sum_records, sites, whole)
    return numbers


def dimensions_of(features: FeaturesSettings, colluding: float, mechanism: Mechanism | None) -> int:
    """The number of dimensions after the public projection. It depends on settings alone, never on
    data.

    Args:
        features: the number, or records of all sites from which it follows.
        colluding: share of the sites whose noise may not count.
        mechanism: of the run; None without a budget.
    """
    if features.dimensions:
        return features.dimensions
    if mechanism is None or mechanism.name != JOINT_SUMS or "squares" not in mechanism.noise:
        return MOST_DIMENSIONS
    # Part of the noise that counts, if no site is lost.
    honest = max(1 - colluding, 0.1)
    sigma, _ = mechanism.noise["squares"]
    return max(1, round(DIMENSIONS * math.sqrt(features.records / (sigma / math.sqrt(honest)))))


def projected_dimensions(run: Run, dimension: int) -> int:
    """The number of dimensions after the public projection; 0 where nothing projects.

    Args:
        run: with the settings.
        dimension: of the sites' features.
    """
    own = run.settings
    if not run.projects or (not own.features.given_projection and dimension < FEWEST_MAPPED):
        return 0
    return min(dimension, dimensions_of(own.features, own.colluding, run.mechanism))


def shapes_of(
    plan: Plan, classes: int, dimension: int, round: int = 1
) -> dict[str, tuple[int, ...]]:
    """The shape of each statistic of a round.

    Args:
        plan: of the run.
        classes: number of classes.
        dimension: of the features.
        round: counted from one.
    """
    sizes = plan.messages.sizes(classes, dimension, 1)
    sums = plan.combination.sums_in(round)
    return {each.name: tuple(sizes[symbol] for symbol in each.shape.split()) for each in sums}


def context_of(run: Run, name: str) -> bytes:
    """Digest that binds keys, shares and signatures to the settings of a run and to one sum.

    Args:
        run: with the settings.
        name: of the sum.
    """
    return hashlib.sha256(f"{run.full_digest}\0{name}".encode()).digest()


def local_epsilon(epsilon: float, mechanism: Mechanism | None, rules: SumRules) -> float:
    """Epsilon of the part of this site's own noise that always stays: if all others tell theirs.

    Args:
        epsilon: of the run, which is the answer where the noise of a site is its own alone.
        mechanism: of the run; None without a budget.
        rules: of the sum.

    Returns:
        Epsilon at the mechanism's delta, of all rounds of the run together.
    """
    if mechanism is None or mechanism.name != JOINT_SUMS:
        return epsilon
    return mechanism.epsilon_of_part(rules.lasting.honest)
