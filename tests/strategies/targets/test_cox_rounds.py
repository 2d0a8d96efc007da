"""A Cox model in rounds: that of scikit-survival, with the standard errors of statsmodels."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import fedsurrogate as fs
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.targets.time import Time
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.targets.in_rounds import steps_of
from tests.rounds_of_times import Site, begun, done, hospitals, released, task_of, whole

COX: dict[str, Scalar] = {
    "target": "time",
    "horizon": 3.0,
    "bins": 12,
    "time-head": "cox",
    "cox-rounds": 5,
}
Floats = NDArray[np.float64]


def oracle(run: Run, sites: Sequence[Site]) -> tuple[Floats, Floats]:
    """Log hazards and their standard errors, of all records with their last bin as the time."""
    from sksurv.linear_model import CoxPHSurvivalAnalysis
    from statsmodels.duration.hazard_regression import PHReg

    assert isinstance(run.target, Time)
    x, y = whole(sites)
    z = x.float().double().numpy()
    cells, bins = run.target.cells(y), run.target.bins
    event = (cells < bins).numpy()
    place = run.target.last_bins(cells).double().numpy() + 1
    pairs = np.array(list(zip(event, place, strict=True)), dtype=[("e", bool), ("t", float)])
    beta = CoxPHSurvivalAnalysis(ties="breslow", n_iter=100, tol=1e-12).fit(z, pairs).coef_
    errors = PHReg(place, z, status=event.astype(int), ties="breslow").fit(disp=False).bse
    return beta, errors


def ratios(training: Training) -> tuple[Floats, Floats, dict[str, Any]]:
    """Log hazards, standard errors, and all facts of the model."""
    facts = json.loads(steps_of(training.config).head(training).target)
    beta, errors = np.array(facts["log-hazards"]).T
    return beta, errors, facts


@pytest.mark.parametrize("sizes", [(400,), (120, 60, 90, 100, 30), (8,) * 50])
def test_hazard_ratios_are_those_of_all_records_together(sizes: tuple[int, ...]) -> None:
    run, sites = parse_run(COX), hospitals(sizes)
    beta, errors, facts = ratios(done(run, [sites] * 5))
    true, due = oracle(run, sites)
    assert np.abs(beta - true).max() < 1e-6
    assert np.abs(errors - due).max() < 1e-6
    assert facts["converged"]


def test_a_site_that_drops_out_or_comes_back_does_so_with_its_records() -> None:
    """Each round is about the records that are there, so the search goes on with those."""
    run, sites = parse_run(COX), hospitals((200, 150, 150))
    for first, gone in ((0, 1), (0, 2), (1, 1), (1, 2)):
        # Before and after a round, with the first site or without it.
        before, after = sites[first:], sites[1 - first :]
        rounds = [before if number < gone else after for number in range(5)]
        beta, errors, _ = ratios(done(run, rounds))
        true, due = oracle(run, after)
        assert np.abs(beta - true).max() < 1e-3
        assert np.abs(errors - due).max() < 1e-3


def test_three_rounds_are_within_a_tenth_of_a_standard_error() -> None:
    run, sites = parse_run(COX | {"cox-rounds": 0}), hospitals((300, 200))
    assert run.rounds == 3
    beta, errors, _ = ratios(done(run, [sites] * 3))
    true, _ = oracle(run, sites)
    assert (np.abs(beta - true) < 0.1 * errors).all()


@pytest.mark.parametrize(
    "sites", [2, pytest.param(5, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.slow)]
)
def test_a_whole_run_gives_the_hazard_ratios_of_all_records(sites: int, tmp_path: Path) -> None:
    """Requests, messages, checks, rounds and model file; no record is held out."""
    flat = {key.replace("-", "_"): value for key, value in COX.items()}
    data = hospitals((400 // sites,) * sites)
    run = fs.simulate(data, output_dir=tmp_path, test_fraction=1e-6, **flat)
    assert run.metrics["sites"]["used"] == sites
    true, due = oracle(parse_run(COX), data)
    beta, errors = np.array(json.loads(target_of_model(run.model.classifier))["log-hazards"]).T
    assert np.abs(beta - true).max() < 1e-6
    assert np.abs(errors - due).max() < 1e-6


def test_a_run_shows_hazard_ratios_by_name(tmp_path: Path) -> None:
    flat = {key.replace("-", "_"): value for key, value in COX.items()}
    names = "age,dose,grade,size"
    run = fs.simulate(hospitals((200, 150)), output_dir=tmp_path, feature_names=names, **flat)
    shown = run.metrics["hazard_ratios"]
    assert [row["name"] for row in shown] == names.split(",")
    for row in shown:
        assert row["low"] < row["ratio"] < row["high"]
        assert row["ratio"] == pytest.approx((row["low"] * row["high"]) ** 0.5)
    page = run.report().read_text()
    assert "Hazard ratios" in page
    assert "grade" in page


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), effect=st.floats(0.0, 3.0))
def test_the_accepted_likelihood_never_falls_and_the_model_is_finite(
    seed: int, effect: float
) -> None:
    run, sites = parse_run(COX), hospitals((40, 30), seed, effect)
    last = -np.inf
    for count in range(1, 6):
        training = done(run, [sites] * count)
        now = float(training.memory["search"][0])
        assert now >= last - 1e-9 * abs(last)
        last = now
        assert steps_of(run).head(training).weight.isfinite().all()


def test_names_of_other_features_are_refused() -> None:
    with pytest.raises(RunError, match="has 2 names; the sites have 4"):
        begun(parse_run(COX | {"feature-names": "age,dose"}), 4)


def test_sums_that_no_records_have_are_refused() -> None:
    run, (site,) = parse_run(COX), hospitals((80,))
    steps, training = steps_of(run), begun(run, 4)
    honest = released(task_of(run, site, training.model, 1))
    steps.check(honest)
    for name, factor in (("code", -1.0), ("weights", -1.0), ("second", -1.0), ("first", np.inf)):
        tensors = dict(honest.tensors)
        for part in (name, f"{name}+1", f"{name}+2"):
            tensors[part] = tensors[part] * factor
        with pytest.raises(SurrogateError):
            steps.check(Parameters(honest.header, 1, tensors, honest.records))
