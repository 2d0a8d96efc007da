"""Intervals of evaluations of targets hold what is true of all records as often as they say, with the
noise of any budget: simulated draws of hospitals' records and of the noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.targets.counted import (
    CountedLabels,
    CountedNumbers,
    CountedTarget,
    CountedTimes,
)
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.time import Time, widening_edges
from fedsurrogate.strategies.counting.results import evaluation_of_target

POOL, DRAWS = 30_000, 1_000
# That a curve reaches the horizon in spite of the noise says something of the draw.
DEFINED = 0.9
# Records, and epsilon.
WAYS = [(300, 0.0), (300, 2.0), (2000, 1.0), (2000, 8.0)]


@cache
def judged(kind: str) -> tuple[CountedTarget, Tensor, Mapping[str, float]]:
    """How a target is counted, what each of many records adds, and the survival of each third."""
    draw = torch.Generator().manual_seed(1)

    def normal(columns: int = 1) -> Tensor:
        return torch.randn(POOL, columns, generator=draw).double()

    if kind == "number":
        how: CountedTarget = CountedNumbers(Number(("v",), ((0.0, 100.0),)), 10, 1.0)
        true = (50 + 18 * normal()).clamp(0, 100)
        return how, how.judged({"deviation": [8.0]}, ("v",), true + 8 * normal(), true), {}
    if kind == "labels":
        how = CountedLabels(Labels(("a",)), 16)
        true = (torch.rand(POOL, 1, generator=draw) < 0.3).double()
        scores = 1.2 * (2 * true - 1) + 1.5 * normal() - 0.4
        return how, how.judged({}, ("a",), scores, true), {}
    how = CountedTimes(Time(("t", "e"), widening_edges(3.0, 10, 4.0)))
    risk, uniform = normal(), torch.rand(POOL, 2, generator=draw).double()
    time = -2 * uniform[:, 0].log() * (-0.7 * risk[:, 0]).exp()
    last = 6 * uniform[:, 1]
    values = torch.stack([torch.minimum(time, last), (time <= last).double()], 1)
    parts = how.judged({"spread": 1.0}, ("risk",), risk, values)
    third = parts.sum((1, 3)).argmax(1)
    alive = {
        name: float((time[third == at] > 3).double().mean())
        for at, name in enumerate(("low risk", "middle risk", "high risk"))
    }
    return how, parts, alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "records", "epsilon"),
    [
        *((kind, *way) for kind in ("number", "labels") for way in WAYS),
        # A curve takes longer than all other metrics.
        *(("time", *way) for way in WAYS[1:3]),
    ],
)
def test_intervals_hold_the_truth(kind: str, records: int, epsilon: float) -> None:
    how, parts, alive = judged(kind)
    parts = parts.reshape(POOL, -1)
    sigma = gaussian_noise_multiplier(epsilon, 1e-5) * how.table.bound if epsilon else 0.0
    draw = torch.Generator().manual_seed(records)
    whole = evaluation_of_target(how, parts.sum(0).reshape(how.table.shape), 0.0)["outputs"]
    held: dict[tuple[str, str], list[bool]] = {}
    for _ in range(DRAWS):
        rows = torch.randint(POOL, (records,), generator=draw)
        noise = sigma * torch.randn(parts.shape[1], generator=draw).double()
        table = (parts[rows].sum(0) + noise).reshape(how.table.shape)
        for output, metric_values in evaluation_of_target(how, table, sigma**2)["outputs"].items():
            for name, own in metric_values.items():
                true = alive.get(output, whole[output][name]["value"])
                if name in ("records", "present", "events") or own["low"] is None:
                    continue
                held.setdefault((output, name), []).append(own["low"] <= true <= own["high"])
    shares = {key: sum(own) / len(own) for key, own in held.items() if len(own) > DEFINED * DRAWS}
    assert len(shares) >= 2
    # A thousand draws leave a deviation of .007. Intervals of binned areas, and of errors' squares,
    # are longer than they must be.
    assert min(shares.values()) > 0.92, shares
