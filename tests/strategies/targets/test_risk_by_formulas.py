"""The slope and the baseline hazard of a risk, and the weights under noise, by their formulas in plain
loops over generated cohorts.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.strategies.targets.time import (
    Cells,
    RiskHead,
    _weights,
    calibrated_head,
    cells_of,
    marginal_head,
)
from tests.coded import noisy
from tests.strategies.targets.test_survival import Cohort, cohort

few = settings(max_examples=8, deadline=None)
COHORTS = st.builds(cohort, st.integers(0, 500), st.integers(60, 200), st.integers(2, 6))


def head_of(of: Cohort, seed: int, size: float) -> RiskHead:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(3, generator=generator, dtype=torch.float64)
    mean = of.features.mean(0) + 0.1 * torch.randn(3, generator=generator, dtype=torch.float64)
    return RiskHead(weight, mean, torch.zeros(of.count, dtype=torch.float64))


@few
@given(COHORTS, st.integers(0, 99), st.sampled_from([0.0, 0.5, 1.5]), st.booleans())
def test_the_slope_solves_the_score_equation_of_scores_that_are_normal_within_a_cell(
    of: Cohort, seed: int, size: float, private: bool
) -> None:
    head, sums = head_of(of, seed, size), of.sums
    if private:
        cells = 2 * of.count + 1
        sums = noisy(
            sums, 0.5 * torch.ones(cells).double(), 0.1 * torch.ones(cells).double(), 0.1, seed
        )
    found, cells = calibrated_head(head, sums), cells_of(sums)
    assert torch.equal(found.mean, head.mean)
    counts = [max(0.0, float(each)) for each in cells.counts]
    rows = (sums.sums @ head.weight).tolist()
    middle = float(head.mean @ head.weight)
    spread = float(head.weight @ sums.covariance @ head.weight)
    if spread <= 0:
        assert torch.allclose(found.hazard, cells.within_bins(cells.hazard))
        assert torch.equal(found.weight, head.weight)
        return
    scores = [row - float(n) * middle for row, n in zip(rows, cells.counts, strict=True)]
    least = max(1e-9, 2 * cells.noise)
    means = [s / n if n > least else 0.0 for s, n in zip(scores, counts, strict=True)]
    between = sum(m * m * n for m, n in zip(means, counts, strict=True)) / max(sum(counts), 1e-9)
    left = max(spread - between, 0.1 * spread)
    slope = float(found.weight @ head.weight / head.weight.square().sum())
    assert torch.allclose(found.weight, slope * head.weight)
    events, b = cells.possible_events.tolist(), of.count
    below, gradient = [], sum(scores[:b])
    for j in range(b):
        # A record of a later cell is at risk, censored or not.
        there = [*range(j, b), *range(b + j + 1, 2 * b), 2 * b]
        mass = {k: counts[k] * math.exp(slope * means[k] + slope**2 * left / 2) for k in there}
        first = sum(mass[k] * (means[k] + slope * left) for k in there)
        gradient -= events[j] * first / max(sum(mass.values()), 1e-300)
        below.append(sum(mass.values()))
    # A slope of the other sign is not taken: then it is next to none.
    near = 1e-5 * max(1.0, sum(events)) * spread**0.5
    assert abs(gradient) < near if slope > 1e-6 else gradient < near
    hazard = torch.tensor([e / max(each, 1e-300) for e, each in zip(events, below, strict=True)])
    assert torch.allclose(found.hazard, cells.within_bins(hazard.double()), rtol=1e-6)


@few
@given(COHORTS, st.integers(0, 99), st.sampled_from([0.0, 0.4, 1.0]), st.floats(-1, 3))
def test_the_baseline_gives_all_records_the_survival_that_was_seen_at_the_slope_of_the_excess(
    of: Cohort, seed: int, size: float, share: float
) -> None:
    cells, covariance = cells_of(of.sums), of.sums.covariance
    plain = head_of(of, seed, size)
    variance = float(plain.weight @ covariance @ plain.weight)
    head = replace(plain, excess=share * variance * float(cells.events.sum()))
    found = marginal_head(head, cells, covariance)
    # Scores are normal; their integrals are of Gauss and Hermite, on 40 nodes.
    nodes, masses = np.polynomial.hermite_e.hermegauss(40)
    masses = masses / masses.sum()
    slope = 1.0
    if variance > 0:
        slope = float(found.weight @ head.weight / head.weight.square().sum())
        assert 0.2 - 1e-9 <= slope <= 5 + 1e-9
    assert torch.allclose(found.weight, slope * head.weight)
    scores = nodes * variance**0.5
    steps = cells.within_bins(cells.hazard).cumsum(0)
    summed, left, excess = 0.0, masses, 0.0
    for j in range(of.count):
        summed += float(found.hazard[j])
        after = masses * np.exp(-summed * np.exp(slope * scores))
        assert float(after.sum()) == pytest.approx(math.exp(-float(steps[j])), abs=1e-6)
        seen = left - after
        if seen.sum() > 1e-12:
            apart = seen @ scores / seen.sum() - left @ scores / left.sum()
            excess += float(cells.events[j]) * apart
        left = after
    if 0.2 + 1e-6 < slope < 5 - 1e-6 and variance > 0:
        assert excess == pytest.approx(
            head.excess, abs=1e-3 * variance**0.5 * float(cells.events.sum())
        )
    elif variance > 0:
        assert (excess > head.excess) == (slope < 1), "an end of the range of slopes"


@few
@given(COHORTS, st.integers(0, 99), st.sampled_from([0.2, 2.0, 20.0]))
def test_weights_under_noise_are_those_expected_for_the_likeliest_spread(
    of: Cohort, seed: int, noise: float
) -> None:
    cells = 2 * of.count + 1
    sums = noisy(
        of.sums, 0.5 * torch.ones(cells).double(), noise * torch.ones(cells).double(), noise, seed
    )
    counted = cells_of(sums)
    score = torch.randn(3, generator=torch.Generator().manual_seed(seed)).double() * 20
    weight, excess = _weights(score, noise, counted, sums)
    from fedsurrogate.strategies.targets.number import Directions

    assert sums.noise is not None
    clean = Directions.of_noisy(sums.covariance, sums.noise.squares / max(sums.records, 1.0), 0.0)
    events = float(counted.possible_events.sum())
    values = [events * float(each) for each in clean.values]
    parts = (score @ clean.vectors).tolist()
    usable = [each > 1e-12 * max(values) for each in values]
    best, scale = math.inf, 0.0
    for power in range(241):
        each = math.exp(-14 + 20 * power / 240) / sum(float(value) for value in clean.values)
        loss = 0.0
        for value, part, use in zip(values, parts, usable, strict=True):
            whole = value + value**2 * each + noise**2
            loss += (math.log(whole) + part**2 / whole) if use else 0.0
        if loss < best - 1e-12:
            best, scale = loss, each
    kept = [
        scale * value / (value + scale * value**2 + noise**2) if use else 0.0
        for value, use in zip(values, usable, strict=True)
    ]
    wanted = clean.vectors @ torch.tensor(
        [keep * part for keep, part in zip(kept, parts, strict=True)], dtype=torch.float64
    )
    assert torch.allclose(weight, wanted, rtol=1e-6, atol=1e-12)
    assert excess == pytest.approx(
        sum(k * (p * p - v - noise**2) for k, p, v in zip(kept, parts, values, strict=True)),
        rel=1e-6,
    )


def test_cells_in_the_order_of_the_code_are_read_with_their_noise() -> None:
    of = cohort(3, 90, 3)
    assert torch.equal(cells_of(of.sums).counts, of.code.sum(0))
    assert cells_of(of.sums).noise == 0
    cells = torch.tensor([0.1, 0.2, 0.3, 0.7, 0.1, 0.1, 0.1]).double()
    found = cells_of(noisy(of.sums, cells, cells, 0.1, 0))
    assert found.noise == pytest.approx(0.7)
    assert isinstance(found, Cells)
