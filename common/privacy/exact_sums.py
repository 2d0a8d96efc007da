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

# Of the bound of a contribution: the step of the grid, and that of the coarse part which is carried over. A double has 53
# bits. Coarse parts are multiples of 2^-22, so 2^30 contributions add up exactly. What is not carried over yet is a
# multiple of 2^-44, so the sum of 2^9 contributions is exact; what a carry leaves behind takes the room of one.
COARSE, FINE, ROOM = 2.0**-22, 2.0**-44, 2**9
ROWS = ROOM - 1


def power_above(bound: float) -> float:
    """The smallest power of two that is at least `bound`, which is positive."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def toward_zero(values: Tensor, step: float) -> Tensor:
    """Values (float64) rounded toward zero to multiples of `step`, a power of two."""
    return (values * (1 / step)).trunc_().mul_(step)


class ExactSum:
    """A sum (float64) of contributions with entries of size at most `bound`; up to 2^30 of them."""

    def __init__(self, shape: Sequence[int], bound: float, device: torch.device | None = None) -> None:
        self._high = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self._low = torch.zeros_like(self._high)
        self._unit, self._waiting = power_above(bound), 0

    def add(self, contributions: Tensor) -> None:
        """Add contributions (n, *shape), float64."""
        for some in torch.split(contributions, ROWS):
            self._make_room(len(some))
            self._low += toward_zero(some, self._unit * FINE).sum(0)

    def add_at(self, index: Tensor, contributions: Tensor) -> None:
        """Add contributions (n, *shape[1:]), float64, each to the entry of the first axis that `index` (n,) names."""
        # At once, for a table of many entries: coarse parts need no carrying, and of fine ones 2^30 add up exactly.
        self._make_room(ROWS)
        fine = toward_zero(contributions, self._unit * FINE)
        high = toward_zero(fine, self._unit * COARSE)
        self._high.index_add_(0, index, high)
        self._low.index_add_(0, index, fine.sub_(high))

    def add_products(self, left: Tensor, right: Tensor) -> None:
        """Add left_i right_i^T of all rows of left (n, a), entries at most `bound`, and right (n, b), at most one.

        Both are rounded toward zero before they are multiplied, so that no product is larger than asked for.
        """
        for some, others in zip(torch.split(left, ROWS), torch.split(right, ROWS), strict=True):
            self._make_room(len(some))
            # Products of whole numbers; multiplying by a power of two at the end changes no digit.
            steps, more = (some * (1 / (self._unit * COARSE))).trunc_(), (others * (1 / COARSE)).trunc_()
            self._low += (steps.T @ more).mul_(self._unit * FINE)

    @property
    def value(self) -> Tensor:
        """The sum. This last addition rounds, by 2^-53 of the sum: 1e-8 of the bound at a hundred million records, which
        the margin of whoever clips has room for.
        """
        return self._high + self._low

    def _make_room(self, rows: int) -> None:
        """Carry the coarse part over where the rest has no room for so many more contributions."""
        if self._waiting + rows > ROOM:
            carried = toward_zero(self._low, self._unit * COARSE)
            self._high += carried
            self._low -= carried
            self._waiting = 1
        self._waiting += rows
