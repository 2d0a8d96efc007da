"""Sums whose result does not depend on the order: every contribution lies on a grid, and no addition rounds.

The sensitivity of a sum that is computed in floating point is not that of the real sum. Each addition rounds, and how it
rounds depends on all records before it: with n contributions of norm at most c the computed sum may be off by n^2 2^-53 c
in double precision, 1e-4 c at a million records, and by far more in single. So a record that comes or goes could move the
result by more than c. Here contributions are rounded toward zero to multiples of a power of two before they are added.
Then all partial sums are representable, the result is exact, and a record moves it by its own rounded contribution and
nothing else, whose entries are no larger than those of the contribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Of the bound of a contribution: the step of the grid, and of the coarse part that is summed apart. A double has 53 bits.
# Coarse parts are multiples of 2^-22 up to 1, so 2^31 of them add up exactly; fine parts are below 2^-22 and multiples of
# 2^-44, so 2^31 of them do as well.
COARSE, FINE = 2.0**-22, 2.0**-44
# Rows of one product of matrices: entries are multiples of 2^-44 up to 1, so the sum of 2^9 of them is exact.
ROWS = 2**9


def power_above(bound: float) -> float:
    """The smallest power of two that is at least `bound`, which is positive."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def toward_zero(values: Tensor, step: float) -> Tensor:
    """Values (float64) rounded toward zero to multiples of `step`, a power of two; exact in every other respect."""
    return (values / step).trunc_().mul_(step)


class ExactSum:
    """A sum (float64) of contributions with entries of size at most `bound`; up to 2^31 of them."""

    def __init__(self, shape: Sequence[int], bound: float, device: torch.device | None = None) -> None:
        self._high = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self._low = torch.zeros_like(self._high)
        self._unit = power_above(bound)

    def add(self, contributions: Tensor) -> None:
        """Add contributions (n, *shape), float64."""
        fine = toward_zero(contributions, self._unit * FINE)
        high = toward_zero(fine, self._unit * COARSE)
        self._high += high.sum(0)
        self._low += fine.sub_(high).sum(0)

    def add_at(self, index: Tensor, contributions: Tensor) -> None:
        """Add contributions (n, *shape[1:]), float64, each to the entry of the first axis that `index` (n,) names."""
        fine = toward_zero(contributions, self._unit * FINE)
        high = toward_zero(fine, self._unit * COARSE)
        self._high.index_add_(0, index, high)
        self._low.index_add_(0, index, fine.sub_(high))

    def add_products(self, left: Tensor, right: Tensor) -> None:
        """Add left_i right_i^T of all rows of left (n, a), entries at most `bound`, and right (n, b), at most one.

        Both are rounded toward zero before they are multiplied, so that no product is larger than asked for.
        """
        for some, others in zip(torch.split(left, ROWS), torch.split(right, ROWS), strict=True):
            product = toward_zero(some, self._unit * COARSE).T @ toward_zero(others, COARSE)
            high = toward_zero(product, self._unit * COARSE)
            self._high += high
            self._low += product - high

    @property
    def value(self) -> Tensor:
        """The sum. This last addition rounds, by 2^-53 of the sum: 1e-8 of the bound at a hundred million records, which
        the margin of whoever clips has room for.
        """
        return self._high + self._low
