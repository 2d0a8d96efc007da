"""Fixed-point numbers modulo 2^32: what a site adds to a secure sum, and the sum as real numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from fedsurrogate.common.secure_sum.words import Words

BITS = 32
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
        >>> from fedsurrogate.common.secure_sum.words import words
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
                f"secure-sum-records = {records}: counts of {sites} sites do not fit into {BITS} "
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
