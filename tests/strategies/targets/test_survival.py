"""Survival curves and risks from cells, against lifelines, scikit-survival and statsmodels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks._pseudo_values import mean_time, pseudo_value_head
from benchmarks.targets_survival import coverage
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.targets.time import Time, widening_edges
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.time import (
    Cells,
    Curve,
    cells_of,
    kaplan_meier,
    log_rank,
    risk_head,
    risk_of_rounds,
    second_code,
)
from tests.coded import coded, noisy


@dataclass(frozen=True)
class Cohort:
    """Records with the last bin in which they are at risk, B for those that outlive the horizon."""

    features: Tensor
    bins: Tensor
    events: Tensor
    count: int

    @property
    def code(self) -> Tensor:
        seen = (self.bins + self.count + 1).clamp_max(2 * self.count)
        cell = torch.where(self.events, self.bins, seen)
        return torch.nn.functional.one_hot(cell, 2 * self.count + 1).double()

    @property
    def sums(self) -> CodedSums:
        return coded(self.code, self.features)

    def at(self, rows: Tensor) -> Cohort:
        return Cohort(self.features[rows], self.bins[rows], self.events[rows], self.count)

    @property
    def structured(self) -> Any:
        pairs = zip(self.events.tolist(), self.bins.tolist(), strict=True)
        return np.array(list(pairs), dtype=[("event", bool), ("time", float)])


BETA = torch.tensor([0.8, -0.5, 0.0], dtype=torch.float64)


def cohort(seed: int, n: int = 300, bins: int = 8, scale: float = 1.0) -> Cohort:
    draw = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, 3, generator=draw, dtype=torch.float64)
    uniform = torch.rand(2, n, generator=draw, dtype=torch.float64)
    times = -uniform[0].log() * (-(x / scale) @ BETA).exp() * 4
    ends = 10 * uniform[1]
    place = torch.minimum(times, ends).long().clamp_max(bins)
    return Cohort(x, place, (times <= ends) & (place < bins), bins)


cohorts = st.builds(
    cohort, st.integers(0, 500), st.integers(30, 200), st.integers(2, 20), st.just(1.0)
)


@settings(max_examples=20, deadline=None)
@given(of=cohorts)
def test_the_curve_and_its_interval_are_those_of_lifelines(of: Cohort) -> None:
    from lifelines import KaplanMeierFitter

    curve = kaplan_meier(cells_of(of.sums))
    fit = KaplanMeierFitter().fit(of.bins.numpy(), of.events.numpy())
    kept = len(curve.survival)
    theirs = fit.survival_function_at_times(range(kept)).to_numpy()
    assert np.abs(curve.survival.numpy() - theirs).max() < 1e-9
    limits = fit.confidence_interval_
    at = np.searchsorted(limits.index, range(kept), side="right") - 1
    inside = (curve.survival > 0).numpy() & (curve.survival < 1).numpy()
    for own, column in ((curve.low, 0), (curve.high, 1)):
        assert np.abs(own.numpy() - limits.to_numpy()[at, column])[inside].max(initial=0) < 1e-9


@settings(max_examples=20, deadline=None)
@given(of=cohorts, groups=st.integers(2, 4))
def test_the_log_rank_test_is_that_of_lifelines(of: Cohort, groups: int) -> None:
    from lifelines.statistics import multivariate_logrank_test

    group = torch.arange(len(of.bins)) % groups
    found = log_rank([Cells.of(of.at(group == g).code.sum(0)) for g in range(groups)])
    theirs = multivariate_logrank_test(of.bins.numpy(), group.numpy(), of.events.numpy())
    assert found["statistic"] == pytest.approx(theirs.test_statistic, abs=1e-9)
    assert found["chance"] == pytest.approx(theirs.p_value, abs=1e-9)
    assert found["freedom"] == groups - 1


@st.composite
def times_on_edges(draw: st.DrawFn) -> tuple[Time, Tensor]:
    """Times of which many are tied, on the edges of bins, at zero and at the horizon, or beyond."""
    horizon, part = draw(st.sampled_from([(10.0, 10), (6.0, 12), (3.0, 5), (0.7, 7)]))
    edges = widening_edges(horizon, part)
    on_edges = st.sampled_from([*edges[1:], horizon * 1.5])
    rows = draw(st.lists(st.tuples(on_edges, st.booleans()), min_size=1, max_size=60))
    # Events at zero belong to the first bin, in which records that are last seen at zero are not.
    rows += [(0.0, draw(st.booleans()))] * draw(st.integers(0, 5))
    dtype = draw(st.sampled_from([torch.float64, torch.float32]))
    return Time(("t", "e"), edges), torch.tensor(rows, dtype=dtype)


@given(times_on_edges())
@settings(max_examples=100, deadline=None)
def test_the_curve_of_tied_times_on_edges_is_that_of_lifelines(both: tuple[Time, Tensor]) -> None:
    """An event at an edge, or at the horizon, belongs before it; a record that is last seen there
    was at risk until then.
    """
    from lifelines import KaplanMeierFitter

    target, values = both
    cells = Cells.of(target.code(values).sum(0))
    time, event = values.double().T.numpy()
    late = time > target.edges[-1] * (1 + 1e-6)
    fit = KaplanMeierFitter().fit(time, (event == 1) & ~late)
    theirs = fit.survival_function_at_times(np.array(target.edges[1:]) * (1 + 1e-6)).to_numpy()
    curve = kaplan_meier(cells).survival.numpy()
    assert np.abs(curve - theirs[: len(curve)]).max(initial=0) < 1e-9
    # Where the curve ends nobody is at risk.
    assert (time[:, None] <= np.array(target.edges)[None, :-1] * (1 + 1e-6))[:, len(curve) :].all()
    assert float(cells.events.sum()) == ((event == 1) & ~late).sum()
    seen = (-cells.within_bins(cells.hazard).cumsum(0)).exp().numpy()[: len(curve)]
    assert np.abs(seen - curve)[curve > 0.05].max(initial=0) < 1e-9


def log_survival(counts: Tensor) -> Tensor:
    """As in the curve, without its limits."""
    bins = len(counts) // 2
    events, censored = counts[:bins], counts[bins:-1]
    at_risk = (events + censored).flip(0).cumsum(0).flip(0) + counts[-1] - censored
    return (1 - events / at_risk).log().cumsum(0)


def test_the_noise_adds_its_squared_gradient_to_the_variance() -> None:
    counts = cohort(0, 2000).sums.code
    sigma = 3.0
    gradient: Any = torch.autograd.functional.jacobian(log_survival, counts)  # type: ignore[no-untyped-call]
    cells = Cells.of(counts, sigma)
    low = kaplan_meier(cells).low
    risk = cells.at_risk
    greenwood = (cells.events / (risk * (risk - cells.events))).cumsum(0)
    variance = greenwood + sigma**2 * gradient.square().sum(1)
    logarithm = log_survival(counts)
    expected = (logarithm * (1.959963984540054 * variance.sqrt() / -logarithm).exp()).exp()
    assert torch.allclose(low, expected[: len(low)], atol=1e-9)


def test_a_noisy_curve_ends_where_noise_rules_and_never_leaves_its_range() -> None:
    draw = torch.Generator().manual_seed(0)
    for sigma in (1.0, 10.0, 100.0):
        counts = cohort(1, 400).sums.code
        counts = counts + sigma * torch.randn(17, generator=draw, dtype=torch.float64)
        curve = kaplan_meier(Cells.of(counts, sigma))
        assert bool(((curve.survival > 0) & (curve.survival <= 1)).all())
        assert bool((curve.at_risk >= 10).all())
    assert len(curve.survival) == 0
    whole = kaplan_meier(cells_of(cohort(1, 400).sums))
    assert len(whole.survival) == 8


@given(
    survival=st.lists(st.floats(0, 1), max_size=6).map(lambda steps: sorted(steps, reverse=True)),
    widths=st.lists(st.floats(0.1, 9), min_size=6, max_size=9),
)
def test_the_mean_time_of_a_curve_that_ends_early_is_the_area_up_to_its_end(
    survival: list[float], widths: list[float]
) -> None:
    edges = torch.tensor([0.0, *widths]).double().cumsum(0)
    values = torch.tensor(survival).double()
    curve = Curve(values, values, values, values)
    heights = [1.0, *survival]
    area = sum(
        width * (before + after) / 2
        for width, before, after in zip(widths, heights, heights[1:], strict=False)
    )
    assert mean_time(curve, edges) == pytest.approx(area)


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 8.0])
@pytest.mark.parametrize("records", [500, 10_000])
def test_intervals_hold_the_true_survival(records: int, epsilon: float) -> None:
    held, plain, _ = coverage(records, epsilon, 600)
    # Bins of a curve fall together, so 600 curves leave a deviation of half a percent.
    assert 0.93 < held < 0.97
    if records == 500 and epsilon == 1.0:
        assert plain < 0.9, "without the noise's part, intervals are too short"


@settings(max_examples=10, deadline=None)
@given(of=cohorts)
def test_residuals_sum_to_zero_and_give_the_score_of_a_cox_model(of: Cohort) -> None:
    cells, sums = cells_of(of.sums), of.sums
    assert float(cells.residuals @ cells.counts) == pytest.approx(0.0, abs=1e-9)
    beta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    risk = of.features @ beta
    likelihood = risk[of.events].sum()
    for bin_ in of.bins[of.events].tolist():
        likelihood = likelihood - risk[of.bins >= bin_].logsumexp(0)
    (score,) = torch.autograd.grad(likelihood, beta)
    assert torch.allclose(cells.residuals @ sums.sums, score, atol=1e-9)


def test_pseudo_values_are_those_of_leaving_out_each_record() -> None:
    from sklearn.linear_model import Ridge

    of, edges = cohort(6, 120, 5), torch.arange(6).double()

    def time(rows: Tensor) -> float:
        return mean_time(kaplan_meier(Cells.of(of.code[rows].sum(0))), edges)

    everyone = torch.arange(120)
    whole = time(everyone)
    values = torch.tensor([120 * whole - 119 * time(everyone[everyone != i]) for i in range(120)])
    fitted_ = pseudo_value_head(of.sums, edges)
    ridge = Ridge(alpha=120 * float(fitted_.strength[0]))
    theirs = ridge.fit(of.features.numpy(), values.numpy()).coef_
    # The reference rounds to single precision.
    assert np.abs(fitted_.weight[0].numpy() - theirs).max() < 1e-5


def test_calibrated_risks_have_the_slope_and_baseline_of_a_cox_model() -> None:
    from sksurv.linear_model import CoxPHSurvivalAnalysis

    of = cohort(4, 4000)
    head = risk_head(of.sums)
    scores = ((of.features - head.mean) @ head.weight)[:, None]
    model = CoxPHSurvivalAnalysis(ties="breslow").fit(scores.numpy(), of.structured)
    assert float(model.coef_[0]) == pytest.approx(1.0, abs=0.1)
    observed = kaplan_meier(cells_of(of.sums)).survival
    predicted = (-scores.exp() * head.hazard.cumsum(0)).exp().mean(0)
    assert float((observed - predicted).abs().max()) < 0.03


def test_two_rounds_without_noise_are_one() -> None:
    of = cohort(5, 400)
    cells = cells_of(of.sums)
    values, bound = second_code(cells)
    assert float(values.abs().max()) <= 1 + 1e-12
    assert bound >= 1
    code = torch.stack([torch.ones(400).double(), of.code @ values], 1)
    head = risk_of_rounds(cells, coded(code, of.features))
    assert torch.allclose(head.weight, risk_head(of.sums, calibrated=False).weight, atol=1e-9)


def test_what_cannot_be_learned_is_refused() -> None:
    of = cohort(11, 100)
    none = Cohort(of.features, of.bins, torch.zeros(100, dtype=torch.bool), of.count)
    for learn in (risk_head, lambda sums: pseudo_value_head(sums, torch.arange(9).double())):
        with pytest.raises(RunError, match="0 events before the horizon: nothing"):
            learn(none.sums)
    sd = torch.full((17,), 100.0, dtype=torch.float64)
    with pytest.raises(RunError, match="within the noise"):
        risk_head(noisy(of.sums, sd, sd, 1.0, 0, centre=True))
    with pytest.raises(ValueError, match="4 cells"):
        Cells.of(torch.zeros(4))
    one = cells_of(of.sums)
    with pytest.raises(ValueError, match="two groups or more"):
        log_rank([one])
    with pytest.raises(ValueError, match="needs exact cells"):
        log_rank([one, Cells.of(one.counts, 1.0)])
