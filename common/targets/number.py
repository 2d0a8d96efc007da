"""Numbers, such as an ejection fraction: u = (y - middle) / half of a public range, in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ..escapes import ranges
from ..settings import Settings
from ..terms import Term
from . import target

# Share of values beyond the range that a person should know of.
MOST_CLIPPED = 0.01
# 95 % of a normal distribution lie within so many deviations.
WITHIN = 1.959963984540054
GROUPS = 5
# Share of a sum of squares up to which its last digits may be wrong.
LOST = 1e-12
# The second derivative is one. With an offset steps at a site diverge from 1 on, and joint ones with
# momentum from 3.5 on.
RATES = target.LearningRates(1.0, 0.3, 3.0)


@dataclass(frozen=True)
class Number(target.Target):
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
    name = "regression"
    compared = "regression"
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

    def statistics(self, private: bool) -> tuple[Term, ...]:
        """Sums of 1, z, u, u z', z z' and u u'. A record has |u| <= sqrt(r) and |u u'| <= r."""
        count = len(self.columns)
        return (
            Term(target.RECORDS, "1", share=0.03),
            Term(target.TOTALS, "d", 1, False, share=0.10, count=target.RECORDS),
            Term(target.CODE, "C", 0, False, math.sqrt(count), share=0.06),
            Term(target.SUMS, "C d", 1, False, math.sqrt(count), share=0.38),
            Term(target.SQUARES, "T", 2, False, share=0.40),
            Term(target.PRODUCTS, "P", 0, False, float(count), share=0.03),
        )

    def code(self, values: Tensor) -> Tensor:
        """u, (n, r)."""
        middle, half = self._scale()
        return ((values.double() - middle) / half).clamp(-1, 1)

    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Infinite values."""
        return {"a number that is not finite": values.isinf().any(1)}

    def objective(self) -> target.Objective:
        """Half of the squared error of u."""
        return target.Objective(len(self.columns), _losses, RATES, self._answering)

    def _answering(self, model: Mapping[str, Tensor]) -> target.Answering:
        middle, half = self._scale()
        weight = half[:, None] * model["weight"].double()
        bias = half * model["bias"].double() + middle
        return target.Answering(self.columns, weight.float(), bias.float())

    def groups(self, values: Tensor) -> Tensor:
        """Fifths of the first number."""
        ranks = values[:, 0].argsort(stable=True).argsort(stable=True)
        return ranks * GROUPS // max(1, len(values))

    def warnings(self, values: Tensor) -> list[str]:
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


def _losses(outputs: Tensor, code: Tensor) -> Tensor:
    return (outputs - code.to(outputs)).square().sum(1) / 2


def _make(settings: Settings) -> target.Target:
    columns, given = settings.value_columns or ("value",), ranges(settings.target_range)
    if not given:
        raise ConfigError(
            "task = 'regression' needs target-range, the lowest and highest value that are known in "
            'public, such as target-range = "0,100"'
        )
    if len(given) not in (1, len(columns)):
        raise ConfigError(
            f"target-range = {settings.target_range!r} has {len(given)} ranges for {len(columns)} "
            "value-columns; give one for all, or one for each"
        )
    return Number(columns, given * len(columns) if len(given) == 1 else given)


def _answers(facts: target.Facts, outputs: tuple[str, ...], scores: Tensor) -> dict[str, Tensor]:
    """Each number, and the interval that holds 95 % of new records, where their error is known: a
    model that was trained in rounds does not know it.
    """
    found: dict[str, Tensor] = {}
    if "deviation" not in facts:
        return dict(zip(outputs, scores.unbind(1), strict=True))
    for at, name in enumerate(outputs):
        width = WITHIN * float(facts["deviation"][at])
        found |= {name: scores[:, at]}
        found |= {f"{name} low": scores[:, at] - width, f"{name} high": scores[:, at] + width}
    return found


def _measured(scores: Tensor, true: Tensor) -> dict[str, float]:
    error = scores - true
    return {
        "records": float(len(true)),
        "absolute": float(error.abs().sum()),
        "squared": float(error.square().sum()),
        "value": float(true.sum()),
        "energy": float(true.square().sum()),
    }


def _metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Mean absolute error, root mean squared error, and R^2 where the values differ by more than what
    their sums of squares lose.
    """
    records = sums["records"]
    found = {"mae": sums["absolute"] / records, "rmse": math.sqrt(sums["squared"] / records)}
    spread = sums["energy"] - sums["value"] ** 2 / records
    return found | ({"r2": 1 - sums["squared"] / spread} if spread > LOST * sums["energy"] else {})


def _chance(metrics: Mapping[str, float], z: float) -> float:
    """Of all answers with a correlation r, whatever their spread, R^2 is at most r^2, and r of n records is
    normal with variance 1 / n by chance.
    """
    return z**2 / metrics["records"]


NUMBER = target.Kind(
    "regression",
    ("target_range", "value_columns"),
    _make,
    _answers,
    _measured,
    _metrics,
    score="r2",
    chance=_chance,
    columns=("value_columns", "value"),
)
