"""What a run's settings decide of its secure aggregation: how many sites it needs, which every
site computes itself;
its fixed-point numbers modulo 2^32, shapes and dimensions; and what binds them.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError, PolicyError
from ..methods.method import BITS, Plan
from ..privacy.mechanism import DISTRIBUTED_SUMS, Mechanism
from ..run import Run
from ..settings import FeaturesSettings
from ..settings.heads import FEWEST_MAPPED
from ..settings.settings import SumSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from .secrets import Words

MOST_MEMBERS = 1000
# Beyond it, noise for lost sites is no part of its own: the proof for discrete noise counts at most
# 1000 parts.
MOST_SPARED = 500


@dataclass(frozen=True)
class SumRules:
    """Limits of one secure aggregation.

    Attributes:
        members: sites in the key list.
        colluding: how many of them may tell the coordinator their secrets.
        threshold: number of shares that recover a secret, and of signatures that fix the list of
            summed sites.
        least: fewest sites in the sum.

    Example:
        >>> rules = SumRules.of(10, colluding=0.2, dropouts=0.3)
        >>> rules
        SumRules(members=10, colluding=2, threshold=7, least=7)
        >>> rules.honest
        5
    """

    members: int
    colluding: int
    threshold: int
    least: int

    @classmethod
    def of(cls, members: int, colluding: float, dropouts: float) -> SumRules:
        """The rules for shares of colluding and lost sites.

        Args:
            members: sites in the key list.
            colluding: share of them that may tell the coordinator their secrets.
            dropouts: share of them that may be lost.
        """
        together = math.floor(colluding * members + 1e-9)
        # The smallest threshold that is safe.
        threshold = (members + together) // 2 + 1
        least = max(members - math.floor(dropouts * members + 1e-9), threshold)
        return cls(members, together, threshold, least)

    @property
    def honest(self) -> int:
        """Fewest sites in the sum that do not collude. Only their noise counts for privacy."""
        return self.least - self.colluding

    @property
    def lasting(self) -> SumRules:
        """The rules of the noise that stays when no site is lost: that for lost sites is then taken
        out of the sum.
        """
        return replace(self, least=self.members) if self.members <= MOST_SPARED else self

    def check(self, smallest_sum: int = 2) -> None:
        """Check that the coordinator can learn one sum only, and none of too few sites.

        With c colluding sites, 2 threshold > members + c: two groups of honest sites cannot both
        complete `threshold` shares or signatures. So all honest sites agree on one list of summed
        sites, and no site's two secrets are both recovered.

        Args:
            smallest_sum: fewest sites that a policy allows in a sum.

        Raises:
            PolicyError: for rules under which it could learn more.

        Source:
            Bonawitz et al. 2017, theorem 6.5.
        """
        if not 2 <= self.members <= MOST_MEMBERS:
            raise PolicyError(
                f"secure aggregation of {self.members} sites: needs 2 to {MOST_MEMBERS}"
            )
        if self.members < smallest_sum or self.least < smallest_sum:
            raise PolicyError(
                f"smallest-sum = {smallest_sum}: this secure aggregation has {self.members} sites, and may "
                f"be of only {self.least}"
            )
        if 2 * self.threshold <= self.members + self.colluding:
            raise PolicyError(
                f"a threshold of {self.threshold} shares: {self.colluding} of {self.members} sites may "
                f"collude, so it must be at least {(self.members + self.colluding) // 2 + 1}"
            )
        if self.threshold > self.members:
            raise PolicyError(
                f"a threshold of {self.threshold} shares: there are only {self.members} sites"
            )
        if self.honest < 1:
            raise PolicyError(
                f"colluding: {self.colluding} of {self.members} sites may collude, so none would "
                "be protected"
            )


HALF = 2 ** (BITS - 1)
# The part of the range for the sum itself; the rest is for noise.
FILLED = 0.9


@dataclass(frozen=True)
class FixedPoint:
    """Numbers as whole multiples of a step.

    Attributes:
        step: the distance of two numbers.
        largest: of the multiples that one site adds, in magnitude.

    Example:
        >>> import torch
        >>> from fedsurrogate.common.secure_aggregation.secrets import words
        >>> fixed = FixedPoint(step=0.5, largest=100)
        >>> fixed.encode(torch.tensor([1.5, -2.0, 1000.0])).tolist()
        [3, -4, 100]
        >>> one, other = (words(fixed.encode(torch.tensor([number]))) for number in (1.5, -2.0))
        >>> total = one + other
        >>> fixed.decode(total).tolist()
        [-0.5]
    """

    step: float
    largest: int

    @classmethod
    def of(cls, bound: float, records: int, sites: int, whole: bool = False) -> FixedPoint:
        """The finest numbers for which the sum of all sites cannot wrap around.

        Args:
            bound: largest magnitude that a record adds to an entry.
            records: most records of a site.
            sites: number of sites.
            whole: whether entries are whole numbers.

        Raises:
            ConfigError: if the modulus is too small.
        """
        largest = math.floor(FILLED * HALF / sites)
        if records > largest:
            raise ConfigError(
                f"secure-aggregation-records = {records}: counts of {sites} sites do not fit into {BITS} "
                f"bits; set at most {largest}"
            )
        return cls(1.0, largest) if whole else cls(bound * records / largest, largest)

    def encode(self, values: Tensor) -> NDArray[np.int64]:
        """Values as whole numbers. What is beyond the range becomes the end of the range.

        Cutting off at a fixed number brings no two vectors farther apart, so it needs no part of a
        sensitivity.

        Args:
            values: of any shape.

        Returns:
            Multiples of the step, flat, int64.
        """
        scaled = (values.double().cpu() / self.step).round().clamp(-self.largest, self.largest)
        multiples: NDArray[np.int64] = scaled.long().flatten().numpy()
        return multiples

    def decode(self, total: Words) -> Tensor:
        """A sum as real numbers.

        Args:
            total: the sum modulo 2^32, flat.

        Returns:
            The numbers, flat, float64.
        """
        import torch

        return torch.from_numpy(total.astype("int32").astype("float64")) * self.step


# Dimensions of a projection: this times the root of (records / noise on the second moment).
# Measured with 2,500 and 10,000 images of CIFAR-10 that are in no table, and 3,143 sketches of
# PACS; half or twice as many cost up to a point.
DIMENSIONS = 7.5
# Without distributed noise.
MOST_DIMENSIONS = 512


def rules_of(sums: SumSettings, members: int) -> SumRules:
    """The limits of a run's secure aggregation.

    Args:
        sums: settings of the sum.
        members: number of sites in the key list.
    """
    return SumRules.of(members, sums.colluding, sums.dropouts)


def numbers_of(plan: Plan, sums: SumSettings, sites: int, round: int = 1) -> dict[str, FixedPoint]:
    """The fixed-point numbers of each statistic of a round.

    Under distributed noise, features have norm at most one.

    Args:
        plan: of the run.
        sums: the largest feature and the most records of a site.
        sites: number of sites in the sum.
        round: counted from one.

    Raises:
        ConfigError: if the modulus is too small.
    """
    distributed = plan.mechanism_name == DISTRIBUTED_SUMS
    numbers = {}
    for each in plan.combination.sums_in(round):
        largest = min(float(sums.secure_aggregation_range), each.largest)
        bound = each.bound if distributed else largest**each.degree * math.sqrt(max(1, each.degree))
        whole = each.whole and not each.degree and not distributed
        numbers[each.name] = FixedPoint.of(bound, sums.secure_aggregation_records, sites, whole)
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
    if mechanism is None or mechanism.name != DISTRIBUTED_SUMS or "squares" not in mechanism.noise:
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
    if mechanism is None or mechanism.name != DISTRIBUTED_SUMS:
        return epsilon
    return mechanism.epsilon_of_part(rules.lasting.honest)
