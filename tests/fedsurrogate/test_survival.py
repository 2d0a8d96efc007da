"""A federation that learns times is an estimator: scikit-survival's conventions, scikit-learn's tools."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import target_of_model

sksurv = pytest.importorskip("sksurv")
from sksurv.linear_model import CoxPHSurvivalAnalysis  # noqa: E402
from sksurv.metrics import concordance_index_censored  # noqa: E402
from sksurv.util import Surv  # noqa: E402

HORIZON = 4.0
Survival = fs.FederatedSurvival


def drawn(count: int = 600, seed: int = 0) -> tuple[Any, Any]:
    """Records whose hazard is exponential in two of five features, and times of which a third is
    censored.
    """
    random = np.random.default_rng(seed)
    x = random.normal(size=(count, 5))
    until = random.exponential(np.exp(-x[:, 0] + 0.5 * x[:, 1]))
    seen = random.exponential(2.0, count)
    return x, Surv.from_arrays(until <= seen, np.minimum(until, seen))


X, Y = drawn()
SITES = np.array(["north", "south", "west"])[np.arange(len(X)) % 3]


def test_risks_and_curves_are_near_those_of_pooled_records() -> None:
    test = drawn(seed=1)
    model = Survival(horizon=HORIZON).fit(X, Y, sites=SITES)
    pooled = CoxPHSurvivalAnalysis().fit(X, Y)
    assert model.score(*test) > pooled.score(*test) - 0.02
    times = [0.25, 0.5, 1.0, 2.0]
    found = model.predict_survival_function(test[0], times)
    expected = pooled.predict_survival_function(test[0], return_array=False)
    apart = found - np.array([curve(times) for curve in expected])
    assert np.abs(apart).mean() < 0.05
    assert list(model.sites_) == ["north", "south", "west"]
    assert min(model.bytes_.values()) > 0


def test_the_score_is_that_of_scikit_survival() -> None:
    x, y = drawn(200, 5)
    model = Survival(horizon=HORIZON).fit(X, Y, sites=SITES)
    expected = concordance_index_censored(y["event"], y["time"], model.predict(x))[0]
    assert model.score(x, y) == pytest.approx(expected)


@settings(max_examples=20)
@given(st.lists(st.floats(0, HORIZON), min_size=1, max_size=6), st.integers(0, 2**16))
def test_curves_begin_at_one_never_rise_and_go_through_the_ends_of_the_bins(
    times: list[float], seed: int
) -> None:
    model = FITTED
    x = np.random.default_rng(seed).normal(size=(3, 5))
    ordered = np.sort(times)
    curve = model.predict_survival_function(x, ordered)
    assert curve.shape == (3, len(times))
    assert ((curve >= 0) & (curve <= 1)).all()
    assert (np.diff(curve, axis=1) <= 1e-12).all()
    assert np.allclose(model.predict_survival_function(x, 0.0), 1)
    whole = model.predict_survival_function(x)
    assert np.allclose(model.predict_survival_function(x, model.unique_times_), whole)
    # Between two of them the hazard is constant: the logarithm of the curve is straight.
    ends = np.append(0.0, model.unique_times_)
    at = np.clip(np.searchsorted(ends, ordered, "right"), 1, len(ends) - 1)
    before, after = (
        np.log(model.predict_survival_function(x, ends[place])) for place in (at - 1, at)
    )
    part = (ordered - ends[at - 1]) / (ends[at] - ends[at - 1])
    assert np.allclose(np.log(curve), before + part * (after - before))


FITTED = Survival(horizon=HORIZON).fit(X, Y, sites=SITES)


def test_tools_of_scikit_learn_take_it() -> None:
    model = clone(Survival("residuals", horizon=HORIZON, settings={"bins": 8}))
    assert model.get_params()["settings"] == {"bins": 8}
    scores = cross_val_score(model, X, Y, groups=SITES, cv=GroupKFold(3), params={"sites": SITES})
    assert scores.min() > 0.65
    search = GridSearchCV(Survival(horizon=HORIZON), {"settings": [{"bins": 4}, {"bins": 8}]}, cv=2)
    search.fit(X, Y, sites=SITES)
    assert search.best_score_ > 0.65
    line = make_pipeline(Normalizer(), Survival(horizon=HORIZON))
    line.fit(X, Y, federatedsurvival__sites=SITES)
    assert line.score(X, Y) > 0.65
    again = pickle.loads(pickle.dumps(FITTED))
    assert np.array_equal(again.predict(X), FITTED.predict(X))
    assert "FederatedSurvival" in FITTED._repr_html_()


def test_under_privacy_it_learns_and_names_what_must_be_public() -> None:
    x, y = drawn(3000)
    sites = np.arange(3000) % 3
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    model = Survival(epsilon=8.0, delta=1e-5, horizon=HORIZON).fit(x, y, sites=sites)
    assert model.score(x, y) > 0.6
    with pytest.raises(ConfigError, match="horizon = None with epsilon"):
        Survival(epsilon=8.0, delta=1e-5).fit(x, y, sites=sites)


@pytest.mark.parametrize(
    ("y", "error", "what"),
    [
        (Y["time"], DataError, "structured array of event and time"),
        (Y[:10], ValueError, "inconsistent numbers of samples"),
        (np.stack([-Y["time"], Y["event"]], 1), DataError, "negative"),
        (np.stack([Y["time"], Y["event"] + 1.0], 1), DataError, "event"),
        (np.array([("a", True)] * len(X), [("t", "U4"), ("e", bool)]), DataError, "numbers"),
    ],
)
def test_times_that_cannot_be_are_named(y: Any, error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        Survival(horizon=HORIZON).fit(X, y, sites=SITES)


def test_a_time_beyond_the_horizon_has_no_answer() -> None:
    with pytest.raises(DataError, match="its horizon, 4"):
        FITTED.predict_survival_function(X[:2], [1.0, 5.0])


@settings(max_examples=8, deadline=None)
@given(st.floats(1e-4, 1e8))
@example(8.5)
def test_survival_is_known_up_to_the_largest_time_in_any_unit(unit: float) -> None:
    y = Surv.from_arrays(Y["event"], Y["time"] * unit)
    model = Survival().fit(X, y, sites=SITES)
    last = model.predict_survival_function(X[:5], y["time"].max())
    assert model.unique_times_[-1] == y["time"].max()
    of_all = model.predict_survival_function(X[:5])[:, -1]
    assert np.allclose(last[:, 0], of_all, rtol=1e-12, atol=0)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -1.0])
def test_a_time_that_no_record_has_is_named_whatever_the_horizon(wrong: float) -> None:
    times = np.stack([np.append(np.arange(1.0, 10.0), wrong), np.ones(10)], 1)
    for horizon in (None, 5.0):
        with pytest.raises(DataError, match=r"1 of 10 records have .* such as row 10"):
            fs.FederatedSurvival(horizon=horizon).fit(np.ones((10, 2)), times)


def test_times_that_are_all_zero_ask_for_a_horizon() -> None:
    with pytest.raises(DataError, match="all times of y are 0; give horizon"):
        Survival().fit(X, Surv.from_arrays(Y["event"], 0 * Y["time"]))


@pytest.mark.parametrize("head", ["residuals", "cells"])
@pytest.mark.parametrize("horizon", [None, 10.0])
def test_survival_of_whole_years_is_that_of_lifelines(head: Any, horizon: float | None) -> None:
    """Events at the horizon are events, and S(t) holds those at t."""
    from lifelines import KaplanMeierFitter

    random = np.random.default_rng(0)
    x = random.normal(size=(2400, 3)).astype(np.float32)
    death = np.ceil(random.exponential(5 * np.exp(-0.5 * x[:, 0])))
    left = np.ceil(random.uniform(0, 14, 2400))
    event, time = (death <= left) & (death <= 10), np.minimum(np.minimum(death, left), 10)
    y = np.array(list(zip(event, time, strict=True)), dtype=[("e", bool), ("t", float)])
    model = fs.FederatedSurvival(head, horizon=horizon, settings={"bins": 10})
    model.fit(x, y, sites=["a", "b"] * 1200)
    years = np.arange(1.0, 11.0)
    assert model.unique_times_.tolist() == years.tolist()
    theirs = KaplanMeierFitter().fit(time, event).survival_function_at_times(years).to_numpy()
    facts = json.loads(target_of_model(model.model_.classifier))
    assert np.abs(np.array(facts["survival"][0]) - theirs).max() < 1e-4
    # The mean over the records, of a model whose hazards are proportional.
    assert np.abs(model.predict_survival_function(x).mean(0) - theirs).max() < 0.01
