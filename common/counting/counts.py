"""Tables of counts that a site releases in a run that counts, exact or with noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.surrogates import Header


@dataclass(frozen=True)
class Counts:
    """Tables of whole numbers. Noise is rounded to whole numbers.

    Attributes:
        header: origin.
        tables: int64, by name, see `fedsurrogate.common.methods.counting.tables_of`.
        claim: what the message states of its differential privacy; None for exact counts.
    """

    header: Header
    tables: Mapping[str, Tensor]
    claim: Mechanism | None = None

    def variance(self, name: str) -> float:
        """Variance of the noise in each cell of a table, rounding included; zero for exact counts."""
        return 0.0 if self.claim is None else self.claim.noise[name][0] ** 2 + 1 / 12
