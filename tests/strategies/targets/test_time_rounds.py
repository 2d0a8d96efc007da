"""Survival in two rounds: the model of all records together, one budget over both, no cell shown."""

from __future__ import annotations

import json
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.client_app.governance.budget import Budget, Entry, Release, check_budget
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.common.errors import BudgetError, RunError
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, SUMS
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.protocol import site_variances
from fedsurrogate.common.secure_aggregation.rules import (
    local_epsilon,
    numbers_of,
    rules_of,
    shapes_of,
)
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.strategies.targets.residual_steps import SummedTargetRounds
from fedsurrogate.strategies.targets.time import risk_head
from tests.coded import coded
from tests.rounds_of_times import begun, done, hospitals, job_of, whole
from tests.strategies.base.test_courses_of_a_run import Kept

TIME: dict[str, Scalar] = {"task": "survival", "horizon": 3.0, "bins": 8, "time-head": "residuals"}
PRIVATE: dict[str, Scalar] = {"epsilon": 2.0, "delta": 1e-5}
SECURE: dict[str, Scalar] = {"secure-aggregation": True, "colluding": 0.0, "dropouts": 0.0}


@pytest.mark.parametrize("sizes", [(300,), (90, 60, 30, 100, 20), (6,) * 50])
def test_two_rounds_give_the_model_of_all_records(sizes: tuple[int, ...]) -> None:
    """Up to the rounding of 16 bits: the direction of the head from cells of one site."""
    run, sites = parse_run(TIME), hospitals(sizes)
    training = done(run, [sites, sites])
    x, y = whole(sites)
    assert run.target is not None
    one = risk_head(coded(run.target.code(y), x), calibrated=False)
    weight = training.memory["weight"].double()
    cosine = float(weight @ one.weight / weight.norm() / one.weight.norm())
    assert cosine > 0.9999
    assert float((training.memory["mean"] - x.mean(0)).abs().max()) < 0.005


def test_a_site_that_is_missing_in_the_second_round_takes_its_records_with_it() -> None:
    """The residuals still count it, which changes them by little."""
    run, sites = parse_run(TIME), hospitals((200, 150, 150))
    without = done(run, [sites, sites[1:]])
    never = done(run, [sites[1:], sites[1:]])
    one, other = (each.memory["weight"] for each in (without, never))
    assert float((one - other).norm() / other.norm()) < 0.05


@pytest.mark.parametrize("more", [{}, SECURE, PRIVATE, PRIVATE | SECURE])
def test_a_run_in_two_rounds_leaves_a_model_that_answers(
    more: dict[str, Scalar], tmp_path: Path
) -> None:
    flat = {key.replace("-", "_"): value for key, value in (TIME | more).items()}
    sites = hospitals((300, 200, 150))
    run = fs.simulate(sites, output_dir=tmp_path, **flat)
    assert isinstance(run.model, fs.Model)
    x, y = whole(sites)
    assert run.model.score(x, y) > 0.6
    answers = run.model.answers(x)
    curves = np.stack([answers[f"survival {(i + 1) * 3 / 8:g}"] for i in range(8)], 1)
    assert (np.diff(curves, axis=1) <= 1e-12).all()
    assert len(run.metrics["rounds"]) == 2
    assert "What the model answers" in run.report().read_text()


def test_times_need_no_settings_besides_the_horizon(tmp_path: Path) -> None:
    """A plain run refused every site with a cell of one record."""
    run = fs.simulate(hospitals((90, 60, 30)), task="survival", horizon=3.0, output_dir=tmp_path)
    assert run.metrics["sites"]["used"] == 3
    assert run.metric_values["risk"]["concordance"] > 0.6


def test_a_site_sends_times_at_once_where_messages_are_files() -> None:
    x, y = whole(hospitals((300,)))
    sent = fs.fit(x, y, site="north", task="survival", horizon=3.0, bins=1)
    assert fs.learn([sent]).score(x, y) > 0.6


# Privacy over both rounds.


@settings(max_examples=3, deadline=None)
@given(
    more=st.sampled_from([{}, SECURE]),
    epsilon=st.floats(0.1, 20),
    delta=st.sampled_from([1e-6, 1e-5, 1e-3]),
)
def test_both_rounds_together_are_within_the_budget_by_dp_accounting(
    more: dict[str, Scalar], epsilon: float, delta: float
) -> None:
    run = parse_run(TIME | more | {"epsilon": epsilon, "delta": delta})
    mechanism = run.mechanism
    assert mechanism is not None
    assert mechanism.name == (DISTRIBUTED_SUMS if more else SUMS)
    assert run.rounds == len(mechanism.events) == 2
    accountant = PLDAccountant()
    for event in mechanism.events:
        assert event.count == 1
        accountant.compose(dp_accounting.GaussianDpEvent(event.noise_multiplier))
    assert accountant.get_epsilon(delta) <= epsilon * 1.001
    assert accountant.get_epsilon(delta) >= epsilon * 0.98
    # Each round's statistics together are its event.
    first, second = mechanism.events
    for event, names in ((first, {"code"}), (second, {"totals", "sums", "squares"})):
        spent = sum((bound / sigma) ** 2 for sigma, bound in map(mechanism.noise.get, names))
        assert spent == pytest.approx(event.noise_multiplier**-2)
    assert mechanism.noise.keys() == {"code", "totals", "sums", "squares"}
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    assert first.noise_multiplier == pytest.approx(multiplier / 0.05**0.5)


def charged(run: Run, number: int) -> Release:
    return entry(run, "7", MethodOutput(b"", run.mechanism), number)


def as_entry(release: Release) -> Entry:
    return json.loads(json.dumps({"kind": "release", **vars(release)}, default=vars))


@pytest.mark.parametrize(
    ("course", "allowed"),
    [([1, 2], True), ([2], True), ([1, 1], False), ([1, 2, 2], False), ([2, 1], False)],
)
def test_the_ledger_lets_each_round_out_once(course: list[int], allowed: bool) -> None:
    """Two seconds, or a first after a second, are another plan than the settings'."""
    run = parse_run(TIME | PRIVATE)
    budget = Budget(2.0, 1e-5, 2.0)
    entries: list[Entry] = []
    *before, last = course
    for number in before:
        check_budget(entries, charged(run, number), budget)
        entries.append(as_entry(charged(run, number)))
    if allowed:
        assert check_budget(entries, charged(run, last), budget) <= 2.0 * (1 + 1e-9)
        return
    with pytest.raises(BudgetError, match=r"only once|releases of one kind"):
        check_budget(entries, charged(run, last), budget)


def test_distributed_noise_of_each_round_is_that_of_the_claim() -> None:
    run = parse_run(TIME | PRIVATE | SECURE | {"sites": 5})
    claim = run.mechanism
    assert claim is not None
    rules = rules_of(run.settings, 5)
    for number, names in ((1, {"code"}), (2, {"totals", "sums", "squares"})):
        numbers = numbers_of(run.plan, run.settings, 5, number)
        shapes = shapes_of(run.plan, 17, 4, number)
        found = site_variances(claim, numbers, shapes, rules)
        assert found.keys() == names
        for name in names:
            total = (5 * found[name]) ** 0.5 * numbers[name].step
            assert total >= claim.noise[name][0]
    # A site's own noise is as much of the whole as in one round of the same budget.
    once = parse_run(TIME | PRIVATE | SECURE | {"time-head": "cells"}).mechanism
    own = local_epsilon(2.0, claim, rules)
    assert own == pytest.approx(local_epsilon(2.0, once, rules), rel=1e-3)
    with pytest.raises(KeyError):
        site_variances(claim, numbers, {**shapes, "other": (1,)}, rules)


@pytest.mark.parametrize("ended", [0, 1])
def test_secure_aggregation_does_not_go_on_without_a_round_that_was_charged(
    ended: int, tmp_path: Path
) -> None:
    """The second of both learns; a run that left it out ended with weights of zero."""
    training = begun(parse_run(TIME | PRIVATE | SECURE), 4)
    training.memory = {"cells": torch.full((17,), 20.0), "cells-noise": torch.ones(1)}
    training.round, training.asked = ended, ended + 1
    (tmp_path / "checkpoint.safetensors").write_bytes(training.save())
    run = parse_run(TIME | PRIVATE | SECURE | {"resume": str(tmp_path)})
    strategy = SummedTargetRounds(run, Kept())
    with pytest.raises(RunError, match=f"round {ended + 1} of this run failed, but is charged"):
        strategy._resume()


# Calibration without sums by cell.


def test_a_second_round_without_values_is_refused() -> None:
    from fedsurrogate.common.errors import SurrogateError
    from tests.rounds_of_times import released

    run, (site,) = parse_run(TIME), hospitals((50,))
    with pytest.raises(SurrogateError, match="value of each cell"):
        released(job_of(run, site, {"values": torch.zeros(3)}, 2))
    with pytest.raises(SurrogateError, match="round 3 of a run of 2"):
        released(job_of(run, site, {"values": torch.zeros(17)}, 3))
