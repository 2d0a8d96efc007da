"""Results of surveys and evaluations of labels, numbers and times, from generated counts with and
without noise: values by plain loops, intervals by the derivatives of each measure in each noisy cell.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.targets.counted import CountedLabels, CountedNumbers, CountedTimes
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.time import Time
from fedsurrogate.strategies.counting.results import (
    auroc,
    evaluation_of_target,
    rate,
    survey_of_target,
)
from fedsurrogate.strategies.targets.time import Cells, kaplan_meier, log_rank

few = settings(max_examples=40, deadline=None)
Z = 1.959963984540054
RANGES = ((0.0, 100.0), (-5.0, 5.0))
VARIANCES = st.sampled_from([0.0, 0.5, 4.0])
NOTHING = {"value": None, "low": None, "high": None}


def interval(value: float, room: float, least: float = -math.inf) -> Any:
    ends = {"value": value, "low": value - room, "high": value + room}
    found = {name: max(least, each) for name, each in ends.items()}
    return pytest.approx(found, rel=1e-6, abs=1e-9)


def counted(cells: Any, variance: float) -> Any:
    values = np.asarray(cells, dtype=float)
    return interval(float(values.sum()), Z * math.sqrt(variance * values.size), 0.0)


def noisy(counts: np.ndarray, variance: float, seed: int) -> torch.Tensor:
    noise = np.random.default_rng(seed).normal(0, math.sqrt(variance), counts.shape)
    return torch.from_numpy(counts + noise.round())


SEEDS = st.integers(0, 9999)


@few
@given(SEEDS, st.integers(0, 40), st.sampled_from([2, 6]), VARIANCES)
def test_labels_are_judged_at_one_half(seed: int, most: int, bins: int, variance: float) -> None:
    how = CountedLabels(Labels(("a", "b")), bins)
    exact = np.random.default_rng(seed).integers(0, most + 1, (2, 2, bins)).astype(float)
    table = noisy(exact, variance, seed + 1)
    found = evaluation_of_target(how, table, variance)["outputs"]
    assert list(found) == ["a", "b"]
    for at, own in enumerate(found.values()):
        absent, present = table[at]
        wrong, right = present[: bins // 2], present[bins // 2 :]
        assert own["records"] == counted(table[at], variance)
        assert own["present"] == counted(present, variance)
        assert own["sensitivity"] == vars(rate(right, wrong, variance))
        specificity = rate(absent[: bins // 2], absent[bins // 2 :], variance)
        assert own["specificity"] == vars(specificity)
        assert own["auroc"] == vars(auroc(torch.stack([absent, present]), variance))


def deviation(
    of: Callable[[np.ndarray], float], at: np.ndarray, variance: float, sampling: float
) -> float:
    """Of a function of noisy sums, from its numerical derivatives; and of the sampled records."""
    steps = 1e-4 * np.maximum(1.0, np.abs(at)) * np.eye(len(at))
    slopes = [(of(at + step) - of(at - step)) / (2 * step.sum()) for step in steps]
    return math.sqrt(variance * sum(slope**2 for slope in slopes) + max(sampling, 0.0))


@few
@given(SEEDS, st.integers(0, 60), VARIANCES, st.sampled_from([0.2, 1.0]), st.booleans())
def test_numbers_have_the_measures_of_their_records_and_the_noise_of_their_sums(
    seed: int, count: int, variance: float, largest: float, constant: bool
) -> None:
    """Sums in a message are in hundredths, so noise of a sum is a hundredth of that of its cell."""
    how = CountedNumbers(Number(("x", "y"), RANGES), 4, largest)
    generator = np.random.default_rng(seed)
    errors = generator.uniform(-1, 1, (count, 2)) ** 3
    values = np.full((count, 2), 0.3) if constant else generator.uniform(0, 1, (count, 2))
    inside = generator.random((count, 2)) < 0.8
    parts = (
        np.ones_like(errors), np.abs(errors), errors**2, (errors + 1) / 2, values, (2 * values - 1) ** 2, inside,
    )  # fmt: skip
    exact = 100 * np.stack([part.sum(0) for part in parts], 1)
    cells = noisy(exact, 1e4 * variance, seed + 1)
    found = evaluation_of_target(how, cells, 1e4 * variance)["outputs"]
    assert list(found) == ["x", "y"]
    for at, own in enumerate(found.values()):
        sums = cells[at].numpy() / 100
        n = sums[0]
        assert own["records"] == counted(n, variance)
        if n < max(1.0, 3 * math.sqrt(variance)):
            assert all(own[name] == NOTHING for name in own if name != "records")
            continue
        unit = largest * (RANGES[at][1] - RANGES[at][0])
        size, square = (min(max(sums[k] / n, 0.0), 1.0) for k in (1, 2))
        apart = 2 * sums[3] / n - 1

        def mean(k: int) -> Callable[[np.ndarray], float]:
            return lambda s: s[k] / s[0]

        if 0 < sums[1] < n and 0 < sums[2] < n:
            room = Z * unit * deviation(mean(1), sums, variance, (square - size**2) / n)
            assert own["mae"] == interval(unit * size, room, 0.0)
            room = Z * deviation(mean(2), sums, variance, 2 * square**2 / n)
            ends = [
                unit * math.sqrt(max(0.0, each)) for each in (square, square - room, square + room)
            ]
            assert list(own["rmse"].values()) == pytest.approx(ends, rel=1e-6, abs=1e-9)
        else:
            assert own["mae"]["value"] == pytest.approx(unit * size)
            assert own["rmse"]["value"] == pytest.approx(unit * math.sqrt(square))
        room = 2 * Z * unit * deviation(mean(3), sums, variance, (square - apart**2) / 4 / n)
        assert own["bias"] == interval(unit * apart, room)
        within = torch.tensor([sums[6]])
        hidden = sums[6] <= 3 * math.sqrt(variance)
        covered = rate(within, n - within, variance)
        if hidden or not variance:
            assert own["coverage"] == (NOTHING if hidden else pytest.approx(vars(covered)))
        _explains(own["r2"], sums, variance, largest, (size, square))


def _explains(
    own: Any, sums: np.ndarray, variance: float, largest: float, means: tuple[float, float]
) -> None:
    """R^2 is one minus the squared error over the variance of the values."""
    n, square = sums[0], means[1]
    spread = sums[5] / n / 4 - (sums[4] / n - 0.5) ** 2

    def of_mean(share: float) -> float:
        return variance * (1 + share**2) / n**2

    noise = math.sqrt(
        of_mean(sums[5] / n) / 16 + (2 * (sums[4] / n - 0.5)) ** 2 * of_mean(sums[4] / n)
    )
    if spread <= max(3 * noise, 1e-12):
        assert own == NOTHING
        return
    ratio = largest**2 * square / spread
    of_square = largest**2 * math.sqrt(of_mean(square) + 2 * square**2 / n)
    room = Z * math.sqrt(
        (of_square / spread) ** 2 + (ratio * noise / spread) ** 2 + 2 * ratio**2 / n
    )
    found = {"value": 1 - ratio, "low": 1 - ratio - room, "high": min(1.0, 1 - ratio + room)}
    assert own == pytest.approx(found, rel=1e-6, abs=1e-9)


EDGES = (0.0, 1.0, 2.0, 4.0)


@few
@given(SEEDS, st.sampled_from([0, 3, 60]), VARIANCES, st.booleans())
def test_thirds_of_the_risk_have_their_curves_and_only_exact_ones_a_test(
    seed: int, most: int, variance: float, empty: bool
) -> None:
    how = CountedTimes(Time(("t", "e"), EDGES, "years"))
    exact = np.random.default_rng(seed).integers(0, most + 1, (1, 3, 7)).astype(float)
    if empty:
        exact[0, 1] = 0
    table = noisy(exact, variance, seed + 1)
    found = evaluation_of_target(how, table, variance)
    assert (found["edges"], found["unit"]) == (list(EDGES), "years")
    groups = [Cells.of(each, math.sqrt(variance)) for each in table[0]]
    assert (
        list(found["outputs"]) == list(found["curves"]) == ["low risk", "middle risk", "high risk"]
    )
    for cells, own, shown in zip(
        groups, found["outputs"].values(), found["curves"].values(), strict=True
    ):
        row = cells.counts
        assert own["records"] == counted(row, variance)
        assert own["events"] == counted(row[:3], variance)
        curve = kaplan_meier(cells)
        for name in ("survival", "low", "high", "at_risk"):
            column = getattr(curve, name).tolist()
            assert shown[name] == [None if math.isnan(each) else each for each in column]
        whole = len(curve.survival) == 3
        for key, name in (("value", "survival"), ("low", "low"), ("high", "high")):
            assert own["survival"][key] == (shown[name][-1] if whole else None)
    if variance or not all(each.counts.sum() >= 1 for each in groups):
        assert "log_rank" not in found
    elif math.isfinite((test := log_rank(groups))["chance"]):
        assert found["log_rank"] == test


def quantile(counts: list[float], share: float) -> float:
    """By linear interpolation within a bin, as a share of the range."""
    wanted, below = min(max(share, 0.0), 1.0) * sum(counts), 0.0
    for at, own in enumerate(counts):
        if wanted < below + own or at == len(counts) - 1:
            return (at + (wanted - below) / max(own, 1e-9)) / len(counts)
        below += own
    raise AssertionError


@few
@given(SEEDS, st.integers(0, 30), VARIANCES, st.sampled_from([1, 5]))
def test_a_survey_of_numbers_has_their_quartiles(
    seed: int, most: int, variance: float, bins: int
) -> None:
    how = CountedNumbers(Number(("x", "y"), RANGES), bins)
    generator = np.random.default_rng(seed)
    exact = generator.integers(0, most + 1, (2, bins)) * (generator.random((2, bins)) < 0.8)
    counts = noisy(exact.astype(float), variance, seed + 1)
    found = survey_of_target(how, counts.flatten(), variance)
    assert list(found["classes"]) == list(how.rows)
    cells = zip(found["classes"].values(), counts.flatten().tolist(), strict=True)
    assert all(row == counted(cell, variance) for row, cell in cells)
    for (low, high), row, own in zip(RANGES, counts, found["questions"].values(), strict=True):
        whole = float(row.sum())
        clean = row.clamp_min(0).tolist()
        for name, share in (("lower quartile", 0.25), ("median", 0.5), ("upper quartile", 0.75)):
            if whole < max(1.0, 3 * math.sqrt(variance * bins)):
                assert own[name] == NOTHING
                continue
            room = Z * math.sqrt(share * (1 - share) * whole + variance * bins) / whole
            places = {"value": share, "low": share - room, "high": share + room}
            wanted = {key: low + (high - low) * quantile(clean, at) for key, at in places.items()}
            assert own[name] == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@few
@given(SEEDS, st.sampled_from([0, 40]), VARIANCES, st.booleans())
def test_a_survey_counts_all_records_once_although_each_question_counts_them(
    seed: int, most: int, variance: float, left_out: bool
) -> None:
    """`left_out`: one question of which a site could not let exact counts leave."""
    generator = np.random.default_rng(seed)
    counts = noisy(generator.integers(0, most + 1, (2, 3)).astype(float), variance, seed + 1)
    if left_out:
        counts[1] = 0
    how = CountedLabels(Labels(("a", "b")), 4)
    found = survey_of_target(how, counts.flatten(), variance)
    there = [row for row in counts if bool(row.any())] or [counts[0]]
    value = float(sum(row.sum() for row in there)) / len(there)
    room = Z * math.sqrt(variance * 3 * len(there)) / len(there)
    assert found["records"] == interval(value, room, 0.0)
    for row, own in zip(counts, found["questions"].values(), strict=True):
        present, absent, _ = row
        assert own["annotated"] == counted(row[:2], variance)
        assert own["present"] == counted(present, variance)
        assert own["prevalence"] == vars(rate(present[None], absent[None], variance))


@few
@given(SEEDS, st.sampled_from([0, 2, 50]), VARIANCES)
def test_a_survey_of_times_has_events_and_survival(seed: int, most: int, variance: float) -> None:
    how = CountedTimes(Time(("t", "e"), EDGES))
    exact = np.random.default_rng(seed).integers(0, most + 1, 7).astype(float)
    counts = noisy(exact, variance, seed + 1)
    found = survey_of_target(how, counts, variance)
    assert found["records"] == counted(counts, variance)
    (own,) = found["questions"].values()
    assert own["events"] == counted(counts[:3], variance)
    assert own["last seen"] == counted(counts[3:6], variance)
    assert own["outlived"] == counted(counts[6], variance)
    curve = kaplan_meier(Cells.of(counts, math.sqrt(variance)))
    if len(curve.survival) < 3:
        assert own["survival"] == NOTHING
    else:
        ends = [float(each[-1]) for each in (curve.survival, curve.low, curve.high)]
        assert list(own["survival"].values()) == [
            None if math.isnan(each) else each for each in ends
        ]


@few
@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=50), SEEDS)
def test_the_survival_of_whole_years_is_that_of_lifelines(
    rows: list[tuple[int, bool]], seed: int
) -> None:
    """Counted without noise: at the horizon, of the records that have the event there or before."""
    from lifelines import KaplanMeierFitter

    how = CountedTimes(Time(("t", "e"), (0.0, 1.0, 2.0, 3.0, 4.0)))
    values = torch.tensor(rows, dtype=torch.float64)
    counts = torch.bincount(how.cells(values).flatten(), minlength=9).double()
    (own,) = survey_of_target(how, counts, 0.0)["questions"].values()
    time, event = values.T.numpy()
    assert own["events"]["value"] == ((event == 1) & (time <= 4)).sum()
    curve = KaplanMeierFitter().fit(time, (event == 1) & (time <= 4))
    if (time >= 4).any():
        assert own["survival"]["value"] == pytest.approx(float(curve.predict(4.0)))
