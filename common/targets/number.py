"""Numbers, such as an ejection fraction: u = (y - middle) / half of a public range, in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from common.targets.target import (
    CODE,
    PRODUCTS,
    RECORDS,
    SQUARES,
    SUMS,
    TOTALS,
    Target,
    TargetSum,
)

# Share of values beyond the range that a person should know of.
MOST_CLIPPED = 0.01
GROUPS = 5


@dataclass(frozen=True)
class Number(Target):
    """One or several numbers, each in a public range.

    Attributes:
        columns: of the r numbers.
        ranges: lowest and highest value of each.

    Example:
        >>> Number(("age",), ((0.0, 100.0),)).code(torch.tensor([[75.0], [120.0]])).tolist()
        [[0.5], [1.0]]
    """

    columns: tuple[str, ...]
    ranges: tuple[tuple[float, float], ...]
    name = "number"
    counts = False

    @property
    def rows(self) -> tuple[str, ...]:
        """One row a number."""
        return self.columns

    @property
    def outputs(self) -> tuple[str, ...]:
        """The numbers."""
        return self.columns

    @property
    def public(self) -> dict[str, object]:
        """Names and ranges."""
        return {"name": self.name, "columns": list(self.columns), "ranges": list(self.ranges)}

    def statistics(self, private: bool) -> tuple[TargetSum, ...]:
        """Sums of 1, z, u, u z', z z' and u u'. A record has |u| <= sqrt(r) and |u u'| <= r."""
        count = len(self.columns)
        return (
            TargetSum(RECORDS, "1", 0, 1.0, 0.03, whole=True),
            TargetSum(TOTALS, "d", 1, 1.0, 0.10),
            TargetSum(CODE, "C", 0, math.sqrt(count), 0.06),
            TargetSum(SUMS, "C d", 1, math.sqrt(count), 0.38),
            TargetSum(SQUARES, "T", 2, 1.0, 0.40),
            TargetSum(PRODUCTS, "P", 0, float(count), 0.03),
        )

    def code(self, values: Tensor) -> Tensor:
        """u, (n, r)."""
        middle, half = self._scale()
        return ((values.double() - middle) / half).clamp(-1, 1)

    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Infinite values."""
        return {"a number that is not finite": values.isinf().any(1)}

    def groups(self, values: Tensor) -> Tensor:
        """Fifths of the first number."""
        ranks = values[:, 0].argsort(stable=True).argsort(stable=True)
        return ranks * GROUPS // max(1, len(values))

    def remarks(self, values: Tensor) -> list[str]:
        """Numbers of which many lie beyond the range."""
        beyond = torch.stack(
            [
                (values[:, i] < low) | (values[:, i] > high)
                for i, (low, high) in enumerate(self.ranges)
            ]
        )
        shares = beyond.double().mean(1).tolist() if len(values) else []
        return [
            f"{share:.1%} of the values of {name!r} lie beyond target-range {low:g},{high:g} and "
            "count as its ends; is the unit right?"
            for name, (low, high), share in zip(self.columns, self.ranges, shares, strict=False)
            if share > MOST_CLIPPED
        ]

    def _scale(self) -> tuple[Tensor, Tensor]:
        """Middle and half of the width of each range, (r,)."""
        low, high = torch.tensor(self.ranges, dtype=torch.float64).T
        return (low + high) / 2, (high - low) / 2
