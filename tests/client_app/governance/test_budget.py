"""Exactly the releases that the total still allows succeed, and a run must follow its first plan."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from client_app.governance.budget import check_budget, runs_left
from client_app.governance.entries import Release, events_of
from common.errors import BudgetError
from common.privacy.accounting import GaussianEvent, gaussian_noise_multiplier
from tests.client_app.governance.ledger_processes import TOTAL, release

SAMPLED = (GaussianEvent(2.0, 0.05, 10),)
STEP: dict[str, Any] = {"method": "dpcvae", "mechanism": "dp-sgd", "sample_rate": 0.05}
# The first round of a generative run releases Gaussian sums; releases on samples come later.
OPENING = replace(release(20.0, run="first"), **STEP)
HISTORIES: dict[str, list[Release]] = {
    "nothing": [],
    "Gaussian": [release(20.0, run="first")],
    "a Gaussian round of a sampled run": [OPENING],
}


def entries(releases: list[Release]) -> list[dict[str, Any]]:
    return [{"kind": "release", **asdict(each)} for each in releases]


@pytest.mark.parametrize("name", ["nothing", "Gaussian", "a Gaussian round of a sampled run"])
def test_exactly_the_reported_number_of_further_runs_passes(name: str) -> None:
    """After a first run, whose plan decides how releases are composed."""
    events = (GaussianEvent(8.0),)
    ledger = entries(HISTORIES[name] or [replace(release(run="first"), events=events)])
    left = runs_left(ledger, events, TOTAL)
    assert left > 0
    for number in range(left):
        one = replace(release(run=f"run-{number}"), events=events)
        assert check_budget(ledger, one, TOTAL) <= TOTAL.epsilon_total * (1 + 1e-9)
        ledger += entries([one])
    with pytest.raises(BudgetError, match="epsilon-total"):
        check_budget(ledger, replace(release(run="last"), events=events), TOTAL)
    assert runs_left(ledger, events, TOTAL) == 0
    assert runs_left(ledger, (), TOTAL) == 0


def test_the_first_run_of_all_may_spend_the_whole_total() -> None:
    least = gaussian_noise_multiplier(TOTAL.epsilon_total, TOTAL.delta)
    whole = (GaussianEvent(least),)
    assert runs_left([], whole, TOTAL) == 1
    assert runs_left([], (GaussianEvent(0.999 * least),), TOTAL) == 0
    assert check_budget([], replace(release(), events=whole), TOTAL) == pytest.approx(
        TOTAL.epsilon_total
    )


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"run": "other"}, "began with the settings"),
        ({"round": 1, "events": OPENING.events}, "first round can be released only once"),
        (
            {"round": 3, "events": (GaussianEvent(3.0, 0.05, 10),)},
            "other noise than the rounds before it",
        ),
        ({"round": 3, "events": (*SAMPLED, *SAMPLED)}, "other noise than the rounds before it"),
    ],
)
def test_a_run_that_leaves_its_plan_is_refused_and_another_run_is_not(
    second: dict[str, Any], reason: str
) -> None:
    later = replace(OPENING, round=2, events=SAMPLED)
    before = entries([OPENING, later])
    check_budget(before, replace(later, round=3), TOTAL)
    departed = replace(later, **second)
    with pytest.raises(BudgetError, match=reason):
        check_budget(before, departed, TOTAL)
    check_budget(before, replace(departed, flower_run="second"), TOTAL)


def test_events_are_those_of_one_run_or_of_all() -> None:
    ledger = entries([release(20.0, run="first"), release(30.0, run="second")])
    assert [event.noise_multiplier for event in events_of(ledger)] == [20.0, 30.0]
    assert [event.noise_multiplier for event in events_of(ledger, "second")] == [30.0]
