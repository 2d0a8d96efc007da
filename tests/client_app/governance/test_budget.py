"""Exactly the releases that the total still allows succeed, and a run must follow its first plan."""

from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.budget import (
    Budget,
    Release,
    check_budget,
    closed,
    runs_left,
    spent,
)
from fedsurrogate.common.errors import BudgetError, PolicyError
from fedsurrogate.common.privacy.accounting import (
    GaussianEvent,
    composed,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from tests.client_app.governance.ledger_processes import TOTAL, release

SAMPLED = (GaussianEvent(2.0, 0.05, 10),)
STEP: dict[str, Any] = {"method": "dpcvae", "mechanism": "dp-sgd", "sample_rate": 0.05}
# The first round of a generative run releases Gaussian sums; releases on samples come later.
FIRST_ROUND = replace(release(20.0, run="first"), **STEP)
HISTORIES: dict[str, list[Release]] = {
    "nothing": [],
    "Gaussian": [release(20.0, run="first")],
    "a Gaussian round of a sampled run": [FIRST_ROUND],
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


@settings(max_examples=40, deadline=None)
@given(
    exact=st.lists(st.booleans(), max_size=5),
    noise=st.sampled_from([2.0, 20.0, 200.0]),
    raised=st.sampled_from([1.0, 100.0]),
)
def test_a_ledger_that_reports_a_further_run_accepts_it_and_another_refuses_it(
    exact: list[bool], noise: float, raised: float
) -> None:
    """Releases with and without noise in any order; a larger total takes none of them back."""
    limits = replace(TOTAL, epsilon_total=raised * TOTAL.epsilon_total)
    past = [
        replace(release(run=f"run-{number}"), events=() if bare else (GaussianEvent(20.0),))
        for number, bare in enumerate(exact)
    ]
    ledger, events = entries(past), (GaussianEvent(noise),)
    asked = replace(release(run="next"), events=events)
    assert bool(closed(ledger, limits)) == any(exact)
    if runs_left(ledger, events, limits):
        assert check_budget(ledger, asked, limits) > 0
    else:
        with pytest.raises(BudgetError, match="without privacy" if any(exact) else "epsilon"):
            check_budget(ledger, asked, limits)


def test_the_first_run_of_all_may_spend_the_whole_total() -> None:
    least = gaussian_noise_multiplier(TOTAL.epsilon_total, TOTAL.delta)
    whole = (GaussianEvent(least),)
    assert runs_left([], whole, TOTAL) == 1
    assert runs_left([], (GaussianEvent(0.999 * least),), TOTAL) == 0
    assert check_budget([], replace(release(), events=whole), TOTAL) == pytest.approx(
        TOTAL.epsilon_total
    )


@settings(max_examples=30, deadline=None)
@given(
    noise=st.floats(0.5, 30.0),
    own=st.sampled_from([1e-12, 1e-9, 1e-6, 1e-5]),
    allowed=st.sampled_from([1e-5, 1e-3]),
    share=st.sampled_from([0.5, 0.9, 0.999, 1.001, 1.1, 2.0]),
)
def test_a_run_costs_what_it_costs_at_its_own_delta_whatever_delta_the_site_allows(
    noise: float, own: float, allowed: float, share: float
) -> None:
    limit = share * gaussian_epsilon(noise, own)
    budget = Budget(1e4, allowed, limit, delta_total=4 * allowed)
    asked = replace(release(), events=(GaussianEvent(noise),), delta=own)
    if share > 1:
        check_budget([], asked, budget)
        return
    with pytest.raises(BudgetError, match="epsilon-per-run"):
        check_budget([], asked, budget)


VALUES = st.sampled_from(["one", "other"])
# Of runs that train, of evaluations, and of surveys of earlier versions.
SELECTED = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("split (training)", "bag (training)", "bag (held-out)"), VALUES),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(SELECTED | st.none(), max_size=6))
@example([{"split (training)": "one"}, {"bag (held-out)": "one"}, {"split (training)": "other"}])
def test_of_each_setting_that_selects_records_the_first_value_holds_until_a_person_decides(
    course: list[dict[str, str] | None],
) -> None:
    ledger: list[dict[str, Any]] = []
    fixed: dict[str, str] = {}
    for selection in course:
        if selection is None:
            ledger, fixed = [*ledger, {"kind": "decision", "events": []}], {}
            continue
        asked = replace(release(0), selection=selection)
        if any(fixed.get(key, value) != value for key, value in selection.items()):
            with pytest.raises(PolicyError, match="exact-runs-may-differ"):
                check_budget(ledger, asked, TOTAL)
            check_budget(ledger, asked, replace(TOTAL, exact_may_differ=True))
        else:
            check_budget(ledger, asked, TOTAL)
            ledger += entries([asked])
            fixed = selection | fixed


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"run": "other"}, "began with the settings"),
        ({"round": 1, "events": FIRST_ROUND.events}, "first round can be released only once"),
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
    later = replace(FIRST_ROUND, round=2, events=SAMPLED)
    before = entries([FIRST_ROUND, later])
    check_budget(before, replace(later, round=3), TOTAL)
    departed = replace(later, **second)
    with pytest.raises(BudgetError, match=reason):
        check_budget(before, departed, TOTAL)
    check_budget(before, replace(departed, flower_run="second"), TOTAL)


SHORT, FULL = "0123456789abcdef", [f"0123456789abcdef{digit * 48}" for digit in "ab"]
# A release by name of its settings and by cost: those of one plan, and those of another.
NAMED = st.tuples(st.sampled_from([SHORT, *FULL]), st.sampled_from([1.0, 2.0]))


@given(st.lists(NAMED, min_size=1, max_size=4), st.booleans())
def test_only_a_plan_that_the_first_release_fixed_is_counted_as_one(
    releases: list[tuple[str, float]], opened: bool
) -> None:
    """Exact composition needs a sequence that no result can change: one full digest, or equal
    releases. A short name alone is not enough, because two settings may share it.
    """
    steps = [
        replace(release(run=str(number), number=number), run=name, sample_rate=0.05)
        for number, (name, _) in enumerate(releases, 2)
    ]
    history = [
        replace(each, **(STEP | {"events": (GaussianEvent(noise, 0.05),)}))
        for each, (_, noise) in zip(steps, releases, strict=True)
    ]
    if opened:
        history = [replace(FIRST_ROUND, run=releases[0][0]), *history]
    names, costs, first = (
        {each.run for each in history},
        {each.events for each in history},
        history[0],
    )
    alike = all(SHORT in (name, first.run) or name == first.run for name in names)
    fixed = names == {first.run} != {SHORT} or (alike and len(costs) == 1)
    with pytest.MonkeyPatch.context() as patch:
        # A number that no Renyi divergence gives.
        patch.setattr("fedsurrogate.common.privacy.accounting.composed", lambda events, delta: -1.0)
        assert (spent(entries(history), TOTAL) == -1.0) == fixed


@pytest.mark.parametrize(("before", "after"), [(SHORT, FULL[0]), (FULL[0], SHORT)])
def test_a_run_that_an_earlier_version_began_continues(before: str, after: str) -> None:
    ledger = entries([replace(FIRST_ROUND, run=before)])
    step = replace(FIRST_ROUND, run=after, round=2, events=SAMPLED)
    assert check_budget(ledger, step, TOTAL) > spent(ledger, TOTAL)
    with pytest.raises(BudgetError, match="began with the settings"):
        check_budget(ledger, replace(step, run=f"f{after[1:]}"), TOTAL)
    both = [*ledger, *entries([step])]
    with pytest.raises(BudgetError, match="began with the settings"):
        check_budget(both, replace(step, round=3, run=FULL[1]), TOTAL)


def test_a_run_whose_plan_is_in_doubt_gets_no_more_than_renyi_divergences_allow() -> None:
    """Its first round was Gaussian; a coordinator with two settings of one short name could choose
    the noise of the steps by its result.
    """
    step = replace(FIRST_ROUND, run=FULL[0], round=2, events=(GaussianEvent(1.0, 0.05, 100),))
    run = [*FIRST_ROUND.events, *step.events]
    least, budget = composed(tuple(run), 1e-5), replace(TOTAL, epsilon_total=100.0)
    tight = replace(budget, epsilon_per_run=least)
    assert check_budget(entries([replace(FIRST_ROUND, run=FULL[0])]), step, tight) > 0
    with pytest.raises(BudgetError, match="began in an earlier version"):
        check_budget(entries([replace(FIRST_ROUND, run=SHORT)]), step, tight)
