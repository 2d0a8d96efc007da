"""Metrics of numbers, labels and times against the libraries, and their intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn import metrics
from sksurv.util import Surv

from fedsurrogate.client_app.model_use.target_metrics import (
    agreement_of_raters,
    label_metrics,
    number_metrics,
    time_metrics,
)
from fedsurrogate.common.models.class_metrics import Metric, measured


def predictions(seed: int, n: int = 60) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    true = random.normal(50, 10, n)
    return true, true + random.normal(1, 5, n)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), n=st.integers(2, 60))
def test_measures_of_numbers_are_those_of_scikit_learn(seed: int, n: int) -> None:
    true, predicted = predictions(seed, n)
    limits = predicted - 10, predicted + 10
    made = number_metrics(true, predicted, limits, draws=5)
    found = {name: each.value for name, each in made.items()}
    apart = predicted - true
    width = 1.96 * apart.std(ddof=1)
    assert found.pop("icc") == agreement_of_raters(np.stack([true, predicted], 1))
    assert found == pytest.approx(
        {
            "mae": metrics.mean_absolute_error(true, predicted),
            "rmse": metrics.root_mean_squared_error(true, predicted),
            "r2": metrics.r2_score(true, predicted),
            "bias": apart.mean(),
            "agreement_low": apart.mean() - width,
            "agreement_high": apart.mean() + width,
            "coverage": (np.abs(apart) <= 10).mean(),
        }
    )


def test_agreement_of_raters_counts_a_shift_as_disagreement() -> None:
    true = np.random.default_rng(0).normal(size=200)
    same, shifted = (agreement_of_raters(np.stack([true, true + by], 1)) for by in (0.0, 2.0))
    assert same == pytest.approx(1.0)
    assert shifted is not None
    assert shifted < 0.5
    assert agreement_of_raters(np.ones((1, 2))) is None
    assert agreement_of_raters(np.ones((5, 2))) is None
    # Sums of these differ in their last digits.
    assert agreement_of_raters(np.full((7, 2), 0.1)) is None


def test_intervals_draw_whole_patients() -> None:
    """Ten copies of each record of a patient say no more than one."""
    true, predicted = (np.repeat(each, 10) for each in predictions(1))
    patients = [str(i // 10) for i in range(600)]
    apart, by_patient = (
        number_metrics(true, predicted, patients=owners, draws=300)["mae"]
        for owners in (None, patients)
    )

    def width(metric: Metric) -> float:
        assert metric.low is not None
        assert metric.high is not None
        return metric.high - metric.low

    assert width(by_patient) > 2.5 * width(apart)


def test_without_records_nothing_is_defined() -> None:
    nothing = np.zeros(0)
    assert {m.value for m in number_metrics(nothing, nothing).values()} == {None}
    one = number_metrics(np.ones(1), np.ones(1), draws=5)
    assert (one["r2"].value, one["icc"].value, one["agreement_low"].value) == (None, None, None)
    assert one["mae"] == Metric(0.0, None, None, 1)
    chance = {"edema": np.full(3, 0.5)}
    found = label_metrics(np.full((3, 1), np.nan), chance, chance, {})
    (averages,) = (name for name in found if name.startswith("all labels but edema, without a"))
    assert found[averages] == {}
    assert {m.value for m in found["edema"].values()} == {None}
    observed = Surv.from_arrays(np.zeros(3, dtype=bool), np.ones(3))
    assert {m.value for m in time_metrics(observed, np.arange(3.0), 2.0, draws=3).values()} == {
        None
    }
    assert measured(lambda rows: {"x": None}, 0)["x"].value is None


def labelled(seed: int, n: int = 300) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    odds = random.normal(size=(n, 2))
    truth = (random.random((n, 2)) < 1 / (1 + np.exp(-odds))).astype(float)
    truth[random.random((n, 2)) < 0.3] = np.nan
    return truth, 1 / (1 + np.exp(-2 * odds))


NAMES = ["edema", "fracture"]


def labels(truth: np.ndarray, chance: np.ndarray, draws: int) -> dict[str, dict[str, Metric]]:
    answers = dict(zip(NAMES, chance.T, strict=False))
    return label_metrics(truth, answers, answers, {}, draws=draws)


def test_measures_of_labels_are_those_of_the_libraries_on_annotated_records() -> None:
    import statsmodels.api as sm

    truth, chance = labelled(0)
    report = labels(truth, chance, 100)
    for index, name in enumerate(NAMES):
        metric_values = report[name]
        known = ~np.isnan(truth[:, index])
        own, of = truth[known, index], chance[known, index]
        found = {name: each.value for name, each in metric_values.items()}
        wanted = {
            "auroc": metrics.roc_auc_score(own, of),
            "average_precision": metrics.average_precision_score(own, of),
            "brier": metrics.brier_score_loss(own, of),
        }
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, rel=1e-13)
        fit = sm.Logit(own, sm.add_constant(np.log(of / (1 - of)))).fit(disp=0)
        assert found["calibration_intercept"] == pytest.approx(fit.params[0], abs=1e-6)
        assert found["calibration_slope"] == pytest.approx(fit.params[1], abs=1e-6)
        slope = metric_values["calibration_slope"]
        assert (slope.low, slope.high) == pytest.approx(tuple(fit.conf_int()[1]), abs=1e-6)
        threshold = np.quantile(of[own == 0], 0.9)
        assert found["sensitivity_at_specificity"] == pytest.approx(
            (of[own == 1] > threshold).mean(), abs=0.03
        )
        assert known.sum() == metric_values["auroc"].support
        assert own.sum() == metric_values["sensitivity_at_specificity"].support
        for key, each in metric_values.items():
            if key == "calibration_error":
                continue
            assert each.value is not None
            assert each.low is not None
            assert each.high is not None
            assert each.low <= each.value <= each.high
    values = [report[name]["auroc"].value for name in NAMES]
    assert report["all labels"]["macro_auroc"].value == pytest.approx(np.mean(values))  # type: ignore[arg-type]


def test_a_label_of_one_class_is_left_out_of_averages_and_named() -> None:
    truth, chance = labelled(1)
    truth[:, 1] = np.where(np.isnan(truth[:, 1]), np.nan, 0.0)
    report = labels(truth, chance, 20)
    assert report["fracture"]["auroc"].value is None
    less = "all labels but fracture, without a positive or without a negative record"
    assert report[less]["macro_auroc"].value == report["edema"]["auroc"].value


def test_a_label_that_is_told_apart_perfectly_has_no_slope() -> None:
    truth = np.repeat([[0.0], [1.0]], 20, 0)
    report = labels(truth, 0.1 + 0.8 * truth, 20)["edema"]
    assert report["calibration_slope"].value is None
    assert report["auroc"].value == 1.0


@pytest.mark.parametrize(("spread", "known"), [(0.001, False), (1.0, True)])
def test_a_slope_of_nearly_equal_probabilities_is_undefined(spread: float, known: bool) -> None:
    """Ranks are right, and a slope of hundreds would read as if probabilities were extreme."""
    draw = np.random.default_rng(0)
    score = draw.normal(size=500)
    truth = (score + draw.normal(size=500) > 0).astype(float)
    chance = 1 / (1 + np.exp(-spread * score))
    metric_values = labels(truth[:, None], chance[:, None], 20)["edema"]
    assert (metric_values["calibration_slope"].value is not None) == known
    assert metric_values["auroc"].value is not None


@given(st.integers(0, 10**6), st.integers(20, 200), st.sampled_from([4.0, 6.0]))
@settings(max_examples=20, deadline=None)
def test_events_at_the_horizon_of_whole_years_are_events(
    seed: int, count: int, horizon: float
) -> None:
    from sksurv.metrics import (
        concordance_index_censored,
        concordance_index_ipcw,
        integrated_brier_score,
    )

    random = np.random.default_rng(seed)
    risks = random.normal(size=count)
    times = np.ceil(random.exponential(4 * np.exp(-risks)) + 1e-9).clip(1, 9)
    events = random.random(count) < 0.7
    own = Surv.from_arrays(events, times)
    grid = np.arange(1.0, horizon)
    chances = np.exp(-np.outer(np.exp(risks), grid) / 4)
    found = time_metrics(own, risks, horizon, (grid, chances), draws=20)
    assert found["dynamic_auc"].support == count
    for metric in found.values():
        if metric.low is not None and metric.high is not None and metric.value is not None:
            assert 0 <= metric.low <= metric.value <= metric.high <= 1
    opposite = time_metrics(own, -risks, horizon, draws=2)["concordance"].value
    assert opposite == pytest.approx(1 - (found["concordance"].value or 0.0))
    within = events & (times <= horizon)
    cut = np.minimum(times, horizon)
    assert found["concordance"].support == within.sum()
    assert found["concordance"].value == pytest.approx(
        concordance_index_censored(within, cut, risks)[0]
    )
    if times.max() > horizon and not events[times == times.max()].all():
        assert found["concordance_ipcw"].value == pytest.approx(
            concordance_index_ipcw(own, own, risks, tau=horizon + 0.5)[0]
        )
    brier = found["integrated_brier"].value
    if brier is not None:
        first, last = np.quantile(times[within], [0.1, 0.9])
        inside = (grid >= first) & (grid <= last)
        assert brier == pytest.approx(
            integrated_brier_score(own, own, chances[:, inside], grid[inside])
        )


def area(observed: Any, risks: np.ndarray, at: float, free: Any) -> float:
    """The AUC of risks at a time, by its definition: of a record with its event by then, weighted by one
    over its probability of being followed so long, and a record that is without it then.
    """
    case = observed["event"] & (observed["time"] <= at)
    weights = np.array([1 / free(time) for time in observed["time"][case]])
    other = risks[observed["time"] > at]
    apart = risks[case][:, None] - other
    right = (apart > 0) + (apart == 0) / 2
    return float((weights @ right).sum() / (weights.sum() * len(other)))


@given(st.integers(0, 10**6), st.integers(12, 120), st.sampled_from([4.0, 6.0, 9.0]), st.booleans())
@settings(max_examples=30, deadline=None)
def test_the_dynamic_auc_is_its_mean_from_the_first_to_the_last_decile_of_the_events(
    seed: int, count: int, horizon: float, whole: bool
) -> None:
    """Lambert & Chevret 2016: the mean over ten times, each weighted by the drop of the survival before it."""
    from lifelines import KaplanMeierFitter

    random = np.random.default_rng(seed)
    risks = random.normal(size=count).round(1)
    times = random.exponential(4 * np.exp(-risks)) + 0.01
    times = np.ceil(times).clip(1, 9) if whole else times
    # Nobody is followed beyond the last events.
    events = (random.random(count) < 0.7) | (times == times.max())
    observed = Surv.from_arrays(events, times)
    found = time_metrics(observed, risks, horizon, draws=2)["dynamic_auc"].value
    within = events & (times <= horizon)
    assume(within.any())
    first, last = np.quantile(times[within], [0.1, 0.9])
    # At the very last time nobody is left to compare with.
    last = min(last, times.max() * (1 - 1e-9))
    grid = np.unique(np.linspace(min(first, last), last, 10))
    # At one time, censoring comes after the event, and both have happened then.
    lost = KaplanMeierFitter().fit(times + 1e-9 * ~events, ~events)
    alive = KaplanMeierFitter().fit(times, events)
    free = lambda time: float(lost.predict(time + 2e-9))  # noqa: E731
    areas = [area(observed, risks, at, free) for at in grid]
    survival = np.array([float(alive.predict(at)) for at in grid])
    drops = -np.diff(np.concatenate([[1.0], survival]))
    assert found == pytest.approx(drops @ areas / (1 - survival[-1]), rel=1e-6)
