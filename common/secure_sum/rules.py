"""The numbers of sites that a secure sum needs. Every site computes them itself, from the settings
and the key list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fedsurrogate.common.errors import PolicyError

MOST_MEMBERS = 1000
# Beyond it, noise for lost sites is no part of its own: the proof for discrete noise counts at most
# 1000 parts.
MOST_SPARED = 500


@dataclass(frozen=True)
class SumRules:
    """Limits of one secure sum.

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
    def of(cls, members: int, colluding: float, dropouts: float, threshold: int = 0) -> SumRules:
        """The rules for shares of colluding and lost sites.

        Args:
            members: sites in the key list.
            colluding: share of them that may tell the coordinator their secrets.
            dropouts: share of them that may be lost.
            threshold: as in the attributes; 0 for the smallest that is safe.
        """
        together = math.floor(colluding * members + 1e-9)
        smallest = (members + together) // 2 + 1
        chosen = threshold or smallest
        return cls(
            members, together, chosen, max(members - math.floor(dropouts * members + 1e-9), chosen)
        )

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
            raise PolicyError(f"a secure sum of {self.members} sites: needs 2 to {MOST_MEMBERS}")
        if self.members < smallest_sum or self.least < smallest_sum:
            raise PolicyError(
                f"smallest-sum = {smallest_sum}: this secure sum has {self.members} sites, and may "
                f"be of only {self.least}"
            )
        if 2 * self.threshold <= self.members + self.colluding:
            raise PolicyError(
                f"secure-sum-threshold = {self.threshold}: {self.colluding} of {self.members} "
                "sites may collude, so it must be at least "
                f"{(self.members + self.colluding) // 2 + 1}"
            )
        if self.threshold > self.members:
            raise PolicyError(
                f"secure-sum-threshold = {self.threshold}: there are only {self.members} sites"
            )
        if self.honest < 1:
            raise PolicyError(
                f"colluding: {self.colluding} of {self.members} sites may collude, so none would "
                "be protected"
            )
