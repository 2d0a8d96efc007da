"""A ridge of pseudo-values of the restricted mean survival time, from the cells of a time axis: what
heads for times are compared with.

Source: Andersen, Klein & Rosthøj 2003.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedsurrogate.strategies.targets.number import (
    Directions,
    Fitted,
    Outcomes,
    cross_validated,
    expected,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.time import (
    Cells,
    Curve,
    _check_events,
    _directions,
    cells_of,
    kaplan_meier,
)


def mean_time(curve: Curve, edges: Tensor) -> float:
    """Restricted mean survival time up to the curve's end, by trapezoids.

    Args:
        curve: at the ends of the bins.
        edges: of the bins, (B + 1,).
    """
    values = torch.cat([torch.ones(1, dtype=torch.float64), curve.survival])
    return float(torch.trapezoid(values, edges[: len(values)]))


def pseudo_value_head(sums: CodedSums, edges: Tensor) -> Fitted:
    """The ridge of pseudo-values: larger values, longer life.

    Args:
        sums: as for `risk_head`.
        edges: of the bins, (B + 1,).

    Returns:
        The ridge, with one row.

    Raises:
        RunError: as in `risk_head`.
    """
    cells = cells_of(sums)
    _check_events(cells)
    counts, records = cells.counts, float(cells.counts.sum())

    def time(of: Tensor) -> float:
        return mean_time(kaplan_meier(Cells.of(of)), edges)

    clean = counts.clamp_min(0) if cells.noise else counts
    whole, values = time(clean), torch.zeros_like(counts)
    for cell in (clean >= 1).nonzero().flatten().tolist():
        without = clean.clone()
        without[cell] -= 1
        values[cell] = records * whole - (records - 1) * time(without)
    mean = float(values @ clean) / records
    variance = float(values.square() @ clean) / records - mean**2
    apart = values - mean
    cross = apart @ sums.sums / sums.records - (apart @ sums.code / sums.records) * sums.mean
    noise = 0.0
    if sums.noise is not None:
        noise = float((apart * sums.noise.sums).norm()) / records
    each = torch.tensor([[variance], [records], [noise]], dtype=torch.float64)
    outcome = Outcomes(cross[None], each[0], each[1], each[2])
    fit: Callable[[Directions, Outcomes], Fitted] = cross_validated
    return (expected if sums.noise is not None else fit)(_directions(sums), outcome)
