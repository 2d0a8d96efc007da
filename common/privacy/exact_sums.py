"""Exact sums in floating point: contributions lie on a grid, no addition rounds, and the order has
no effect.

The sensitivity of a floating-point sum differs from that of the exact sum. Each addition rounds,
and the rounding depends on all earlier records. With n contributions of norm at most c, the
computed sum may be off by n^2 2^-53 c in double precision (1e-4 c at a million records), and by far
more in single. So adding or removing a record could change the result by more than c. Here
contributions are first rounded toward zero to multiples of a power of two. Then all partial sums
are representable and the result is exact. A record changes it only by its own rounded contribution,
whose entries are no larger than those of the contribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# Grid steps relative to the bound of a contribution: COARSE for the carried part, FINE for the
# rest. A double has 53 bits. Coarse parts are multiples of 2^-22, so 2^30 contributions add up
# exactly. The part before a carry is a multiple of 2^-44, so the sum of ROOM = 2^9 contributions is
# exact; the remainder of a carry counts as one contribution.
COARSE, FINE, ROOM = 2.0**-22, 2.0**-44, 2**9
ROWS = ROOM - 1


def power_above(bound: float) -> float:
    """The smallest power of two that is at least `bound` > 0."""
    mantissa, exponent = math.frexp(bound)
    return math.ldexp(1.0, exponent - (mantissa == 0.5))


def toward_zero(values: Tensor, step: float) -> Tensor:
    """Round values toward zero.

    Args:
        values: of any shape, float64.
        step: a power of two.

    Returns:
        Multiples of `step`, in the same shape.
    """
    return (values * (1 / step)).trunc_().mul_(step)


class ExactSum:
    """An exact sum (float64) of up to 2^30 contributions.

    Args:
        shape: of the sum.
        bound: largest magnitude of an entry of a contribution.
        device: where the sum is kept.

    Example:
        >>> total = ExactSum((2,), bound=1.0)
        >>> total.add(torch.tensor([[0.5, 0.25], [0.5, -0.125]], dtype=torch.float64))
        >>> total.value.tolist()
        [1.0, 0.125]
    """

    def __init__(
        self, shape: Sequence[int], bound: float, device: torch.device | None = None
    ) -> None:
        self._high = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self._low = torch.zeros_like(self._high)
        self._unit, self._waiting = power_above(bound), 0

    def add(self, contributions: Tensor) -> None:
        """Add contributions (n, *shape), float64."""
        for some in torch.split(contributions, ROWS):
            self._make_room(len(some))
            self._low += toward_zero(some, self._unit * FINE).sum(0)

    def add_at(self, index: Tensor, contributions: Tensor) -> None:
        """Add contributions, each to one entry of the first axis.

        Args:
            index: of the entry of each contribution, (n,), int64.
            contributions: (n, *shape[1:]), float64.
        """
        # Coarse and fine parts are added separately, so no carry is needed: 2^30 of each add up
        # exactly.
        self._make_room(ROWS)
        fine = toward_zero(contributions, self._unit * FINE)
        high = toward_zero(fine, self._unit * COARSE)
        self._high.index_add_(0, index, high)
        self._low.index_add_(0, index, fine.sub_(high))

    def add_products(self, left: Tensor, right: Tensor) -> None:
        """Add left_i right_i^T of all rows i.

        Both are rounded toward zero before the multiplication, so that no product exceeds its
        bound.

        Args:
            left: (n, a), float64, entries at most `bound`.
            right: (n, b), float64, entries at most one.
        """
        for some, others in zip(torch.split(left, ROWS), torch.split(right, ROWS), strict=True):
            self._make_room(len(some))
            # Products of integers; the final multiplication by a power of two is exact.
            steps, more = (
                (some * (1 / (self._unit * COARSE))).trunc_(),
                (others * (1 / COARSE)).trunc_(),
            )
            self._low += (steps.T @ more).mul_(self._unit * FINE)

    @property
    def value(self) -> Tensor:
        """The sum. This last addition rounds by 2^-53 of the sum, 1e-8 of the bound at a hundred
        million records. The safety margin of `clip` covers this.
        """
        return self._high + self._low

    def _make_room(self, rows: int) -> None:
        """Carry the coarse part over if the rest has no room for `rows` more contributions."""
        if self._waiting + rows > ROOM:
            carried = toward_zero(self._low, self._unit * COARSE)
            self._high += carried
            self._low -= carried
            self._waiting = 1
        self._waiting += rows
