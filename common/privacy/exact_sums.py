"""Exact sums in floating point: contributions lie on a grid, no addition rounds, and the order has
no effect.

The sensitivity of a floating-point sum differs from that of the exact sum. Each addition rounds,
and the rounding depends on all earlier records. With n contributions of norm at most c, the
computed sum may be off by n^2 2^-53 c in double precision (1e-4 c at a million records), and by far
more in single. So adding or removing a record could change the result by more than c. Here
contributions are first rounded toward zero to multiples of a power of two. Then all partial sums
are representable and the result is exact. A record changes it only by its own rounded contribution,
whose entries are no larger than those of the contribution.

A contribution is shortened to its bound here, whatever computed it. So a bound that is charged holds
for any model, map or bins that a coordinator sends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# Grid steps relative to the bound of a contribution: COARSE for the carried part, FINE for the
# rest. A double has 53 bits. Coarse parts are multiples of 2^-22, so 2^30 contributions add up
# exactly. The part before a carry is a multiple of 2^-44, so the sum of ROOM = 2^9 contributions is
# exact; the remainder of a carry counts as one contribution.
COARSE, FINE, ROOM = 2.0**-22, 2.0**-44, 2**9
ROWS = ROOM - 1
# Rows of factors of a product that are converted at a time.
CACHED = 64
# A coarse step is 2^BITS fine ones.
BITS = 22
# A norm may be computed as so much longer than it is. Noise has more room than that (SLACK).
ROUNDED = 1 + 1e-10


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


def clip_factors(norms: Tensor, clip: float | Tensor) -> Tensor:
    """Factors that shorten contributions to a norm.

    Args:
        norms: of the contributions, (n,), float64.
        clip: largest norm, of all or of each, (n,).

    Returns:
        Factors (n,), float64; zero for norms not finite.

    Example:
        >>> norms = torch.tensor([0.5, 2.0, torch.inf], dtype=torch.float64)
        >>> clip_factors(norms, 1.0).round(decimals=3).tolist()
        [1.0, 0.5, 0.0]
    """
    # The bound must hold in exact arithmetic, and for the computed sum. Relative errors are at most
    # d 2^-53 in a norm over d entries (1e-8 for 1e8), 2^-53 in factor and product, and 1e-8 in the
    # sum of 1e8 records (ExactSum).
    shortest = torch.finfo(torch.float64).tiny
    return torch.where(
        norms.isfinite(), (clip * (1 - 1e-6) / norms.clamp_min(shortest)).clamp_max(1.0), 0.0
    )


@dataclass(frozen=True)
class IntegerSum:
    """A sum as integers: each entry is (coarse * 2^22 + fine) steps.

    Two integers, because 2^30 contributions of 2^44 steps each do not fit into one of 64 bits.

    Attributes:
        coarse: int64, of any shape.
        fine: int64, in the same shape.
        step: a power of two.
        bound: norm to which every contribution was shortened; 0 for a sum of none.

    Example:
        >>> total = IntegerSum.of(torch.tensor([0.5, -0.25]), bound=1.0)
        >>> total.plus(torch.tensor([1, 0])).value.tolist() == [0.5 + total.step, -0.25]
        True
    """

    coarse: Tensor
    fine: Tensor
    step: float
    bound: float = 0.0

    @classmethod
    def of(cls, values: Tensor, bound: float) -> IntegerSum:
        """The sum of one contribution, rounded toward zero.

        Args:
            values: of any shape.
            bound: decides the step, as in `ExactSum`.
        """
        unit, given = power_above(bound), values.double()
        coarse = toward_zero(given, unit * COARSE)
        return cls(
            _integers(coarse, unit * COARSE), _integers(given - coarse, unit * FINE), unit * FINE
        )

    @classmethod
    def joined(cls, sums: Sequence[IntegerSum]) -> IntegerSum:
        """The entries of sums of the same step as one vector, on the CPU."""
        coarse, fine = (
            torch.cat([getattr(each, part).flatten().cpu() for each in sums])
            for part in ("coarse", "fine")
        )
        (step,) = {each.step for each in sums}
        return cls(coarse, fine, step, max(each.bound for each in sums))

    @property
    def value(self) -> Tensor:
        """The sum, float64. It is rounded by 2^-53 of itself, 1e-8 of a contribution's bound at a
        hundred million records.
        """
        coarse: Tensor = self.coarse.double().mul_(self.step * 2.0**BITS)
        return coarse.add_(self.fine.double(), alpha=self.step)

    def map(self, change: Callable[[Tensor], Tensor]) -> IntegerSum:
        """The sum with its entries moved or left out; `change` computes with no entry."""
        return replace(self, coarse=change(self.coarse), fine=change(self.fine))

    def plus(self, steps: Tensor) -> IntegerSum:
        """The sum and integers (int64, at most 2^62). The result depends on their sum alone, also in
        how it is split into coarse and fine.
        """
        fine = self.fine.cpu() + steps
        coarse = (fine >> BITS).add_(self.coarse.cpu())
        return replace(self, coarse=coarse, fine=fine.bitwise_and_(2**BITS - 1))

    def coarsened(self) -> IntegerSum:
        """The sum rounded down to coarse steps. What a contribution changes may grow by one step in
        every entry.
        """
        whole = self.plus(torch.zeros_like(self.fine.cpu()))
        zeros, step = torch.zeros_like(whole.coarse), self.step * 2**BITS
        return replace(self, coarse=zeros, fine=whole.coarse, step=step)


class ExactSum:
    """An exact sum (float64) of up to 2^30 contributions, each no longer than a bound.

    A contribution has the weight of its record as a factor, and is shortened to the bound times that
    weight; what is not finite adds nothing. The weights of a unit's records sum to at most one
    (`unit_weights`), so one unit adds a vector of norm `bound` at most, whatever was computed.

    Args:
        shape: of the sum.
        bound: largest norm of a contribution of weight one.
        device: where the sum is kept.
        most: largest magnitude of an entry of a contribution, if it is less than the bound.

    Example:
        >>> total = ExactSum((2,), bound=1.0)
        >>> total.add(torch.tensor([[0.5, 0.25], [0.5, -0.125]], dtype=torch.float64))
        >>> total.value.tolist()
        [1.0, 0.125]
        >>> total.add(torch.tensor([[300.0, 400.0]], dtype=torch.float64))
        >>> [round(entry, 3) for entry in total.value.tolist()]
        [1.6, 0.925]
    """

    def __init__(
        self,
        shape: Sequence[int],
        bound: float,
        device: torch.device | None = None,
        most: float = math.inf,
    ) -> None:
        self._high = torch.zeros(tuple(shape), dtype=torch.float64, device=device)
        self._low = torch.zeros_like(self._high)
        self._bound, self._unit, self._waiting = bound, power_above(min(bound, most)), 0

    def add(
        self, contributions: Tensor, weights: Tensor | None = None, norms: Tensor | None = None
    ) -> None:
        """Add contributions.

        Args:
            contributions: (n, *shape), float64.
            weights: of their records, (n,), at most one; None for one.
            norms: (n,), of contributions to several sums, where the bound is for all together; None
                where this sum is the only one.
        """
        norms = _norms(contributions) if norms is None else norms
        contributions = _times(contributions, self._factors(norms, weights))
        for some in torch.split(contributions, ROWS):
            self._make_room(len(some))
            self._low += toward_zero(some, self._unit * FINE).sum(0)

    def add_at(self, index: Tensor, contributions: Tensor, weights: Tensor | None = None) -> None:
        """Add contributions, each to one entry of the first axis.

        Args:
            index: of the entry of each contribution, (n,), int64.
            contributions: (n, *shape[1:]), float64.
            weights: as for `add`.
        """
        factors = self._factors(_norms(contributions), weights)
        self._add_at(index, _times(contributions, factors))

    def add_cells(self, cells: Tensor, weights: Tensor) -> None:
        """Add the weight of each record to each of its cells.

        Args:
            cells: entries of the first axis, (n, k), int64. A record counts as often in a cell as it
                is named.
            weights: of the records, (n,), float64, at most one.
        """
        ordered = cells.sort(1).values
        new = torch.ones_like(ordered, dtype=torch.bool)
        new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        place = torch.arange(cells.shape[1]).expand_as(cells)
        again = place - torch.where(new, place, 0).cummax(1).values
        # The squares of numbers of times add up as odd numbers: m^2 = 1 + 3 + ... + (2 m - 1).
        norms = (2 * again + 1).sum(1).double().sqrt() * weights.abs()
        own = _times(weights, self._factors(norms, weights))
        self._add_at(cells.flatten(), own[:, None].expand_as(cells).flatten())

    def _add_at(self, index: Tensor, contributions: Tensor) -> None:
        # Coarse and fine parts are added separately, so no carry is needed: 2^30 of each add up
        # exactly.
        self._make_room(ROWS)
        fine = toward_zero(contributions, self._unit * FINE)
        high = toward_zero(fine, self._unit * COARSE)
        self._high.index_add_(0, index, high)
        self._low.index_add_(0, index, fine.sub_(high))

    def add_products(
        self,
        left: Tensor,
        right: Tensor,
        powers: Tensor | None = None,
        weights: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """Add left_i right_i^T of all rows i.

        Both are rounded toward zero before the multiplication, so that no product exceeds its
        bound.

        Args:
            left: (n, a), float64.
            right: (n, b), float64 or float32.
            powers: (n, 1), float64, powers of two that no entry of a row of `right` exceeds; None
                for one. They may move from one factor to the other without rounding.
            weights: as for `add`.
            norms: as for `add`.
        """
        if norms is None:
            # That of a product is that of its factors, which takes a small part of its time.
            norms = _norms(left).square() if right is left else _norms(left) * _norms(right)
        factors = self._factors(norms, weights)
        left, right = _times(left, factors), _times(right, None if factors is None else factors > 0)
        for start in range(0, len(left), ROWS):
            rows = slice(start, start + ROWS)
            self._make_room(len(left[rows]))
            over = None if powers is None else powers[rows]
            self._add_integers(left[rows], right[rows], over)

    def _add_integers(self, left: Tensor, right: Tensor, powers: Tensor | None) -> None:
        """Add products of integers; the final multiplication by a power of two is exact."""
        coarse = self._unit * COARSE
        if powers is None:
            steps, more = (left * (1 / coarse)).trunc_(), (right * (1 / COARSE)).trunc_()
            self._low += (steps.T @ more).mul_(self._unit * FINE)
            return
        steps, scales = (left * (powers / coarse)).trunc_(), (1 / (COARSE * powers)).to(right)
        whole = torch.zeros_like(self._low)
        # So few rows at a time that they stay in the processor's cache.
        size = max(CACHED, left.shape[1])
        for some, more, scale in zip(
            *(torch.split(part, size) for part in (steps, right, scales)), strict=True
        ):
            # To integers and back: several times as fast as trunc, and the same, as 22 bits fit.
            whole.addmm_(some.T, (more * scale).to(torch.int32).double())
        self._low += whole.mul_(self._unit * FINE)

    @property
    def total(self) -> IntegerSum:
        """The sum as integers."""
        return IntegerSum(
            _integers(self._high, self._unit * COARSE),
            _integers(self._low, self._unit * FINE),
            self._unit * FINE,
            self._bound,
        )

    @property
    def value(self) -> Tensor:
        """The sum in double precision, see `IntegerSum.value`."""
        return self._high + self._low

    def _factors(self, norms: Tensor, weights: Tensor | None) -> Tensor | None:
        """Factors (n,) that shorten contributions of these norms (n,) to the bound; None for none."""
        own = torch.ones_like(norms) if weights is None else weights.to(norms).clamp(0, 1)
        inside = norms <= self._bound * own * ROUNDED
        if bool(inside.all()):
            return None
        return torch.where(inside, 1.0, clip_factors(norms, self._bound * own))

    def _make_room(self, rows: int) -> None:
        """Carry the coarse part over if the rest has no room for `rows` more contributions."""
        if self._waiting + rows > ROOM:
            carried = toward_zero(self._low, self._unit * COARSE)
            self._high += carried
            self._low -= carried
            self._waiting = 1
        self._waiting += rows


def _integers(values: Tensor, step: float) -> Tensor:
    """Numbers of steps (int64), rounded toward zero."""
    return (values * (1 / step)).to(torch.int64)


def _norms(rows: Tensor) -> Tensor:
    """Norms (n,), float64, of rows (n, ...)."""
    flat = rows.reshape(len(rows), math.prod(rows.shape[1:]))
    norms: Tensor = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64)
    return norms


def _times(rows: Tensor, factors: Tensor | None) -> Tensor:
    """Rows (n, ...) times their factors (n,); zero where a factor is, whatever a row holds."""
    if factors is None:
        return rows
    each = factors.reshape(-1, *[1] * (rows.ndim - 1))
    return torch.where(each > 0, rows * each, 0.0)
