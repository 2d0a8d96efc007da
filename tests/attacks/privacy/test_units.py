"""A ledger counts one unit: runs over images and runs over bags cost an image and a bag different
things, and the coordinator chooses which it asks for.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.governance.budget import Budget, check_budget, spent
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import BudgetError
from fedsurrogate.common.privacy.accounting import GaussianEvent, composed
from tests.attacks.privacy.asked import Site
from tests.client_app.governance.ledger_processes import release
from tests.grid import Scalar

POLICY, DELTA = "epsilon-per-run = 1.0\nepsilon-total = 4.0\ndelta = 1e-5\n", 1e-5
PRIVATE: dict[str, Scalar] = {"device": "cpu", "epsilon": 1.0, "delta": DELTA, "classes": "0,1"}
RUNS: dict[str, dict[str, Scalar]] = {
    "images": PRIVATE,
    "bags": PRIVATE | {"features.bag": "mean"},
    # A site that names no bags takes each image as one.
    "survey": PRIVATE | {"counting.kind": "survey"},
    "survey of bags": PRIVATE | {"counting.kind": "survey", "features.bag": "mean"},
}
# By what a site protects: how often what a run sends for one of its units may change by the bound.
COSTS = {
    "record": {"images": 1, "survey": 1, "bags": 2, "survey of bags": 2},
    "bag": {"images": 5, "survey": 5, "bags": 1, "survey of bags": 1},
    "patient": dict.fromkeys(RUNS, 1),
}


@settings(max_examples=9, deadline=None)
@given(
    st.sampled_from(sorted(COSTS)),
    st.lists(st.sampled_from(sorted(RUNS)), min_size=11, max_size=12),
)
def test_no_order_of_runs_over_images_and_bags_costs_a_unit_more_than_the_total(
    unit: str, order: list[str]
) -> None:
    """Eleven alternating ones were epsilon 7.65 for an image, under a total of 4."""
    with TemporaryDirectory() as home:
        patients: dict[str, Scalar] = {"patient-column": "who"} if unit == "patient" else {}
        site = Site(Path(home) / "site", POLICY, **{"bag-column": "bag", "unit": unit} | patients)
        answered = [name for name in order if site.ask(RUNS[name])[0] == "ok"]
        entries = site.entries()
    assert {entry["unit"] for entry in entries} <= {unit}
    cost = [
        GaussianEvent(event["noise_multiplier"] / COSTS[unit][name])
        for name, entry in zip(answered, entries, strict=True)
        for event in entry["events"]
    ]
    assert not cost or composed(tuple(cost), DELTA) <= 4.0 * (1 + 1e-6)
    fitting = [name for name in order if COSTS[unit][name] == 1]
    assert answered == fitting[:11]


def test_a_run_over_bags_without_a_bag_column_is_one_over_images(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", POLICY)
    assert [site.ask(run)[0] for run in (RUNS["images"], RUNS["bags"])] == ["ok", "ok"]


BUDGET = Budget(4.0, DELTA, 1.0)
UNITS = st.sampled_from(["record", "bag", "patient"])


@given(st.lists(UNITS, min_size=1, max_size=4), UNITS)
def test_a_ledger_lets_out_one_unit_only(before: list[str], unit: str) -> None:
    entries = [
        {"kind": "release", **asdict(replace(release(90.0, run=str(at)), unit=each))}
        for at, each in enumerate(before)
    ]
    sent = replace(release(90.0, run="new"), unit=unit)
    if set(before) == {unit}:
        check_budget(entries, sent, BUDGET)
        return
    with pytest.raises(BudgetError, match="a ledger counts one unit"):
        check_budget(entries, sent, BUDGET)


def test_entries_of_earlier_versions_count_as_images_of_bags_where_the_site_names_bags() -> None:
    """They say "record" of both."""
    new = {"kind": "release", **asdict(release(20.0))}
    old = {key: value for key, value in new.items() if key != "selection"}
    sure, unsure = BUDGET, replace(BUDGET, bags=True)
    assert spent([old], sure) == spent([new], sure) == spent([new], unsure)
    twice = {"kind": "release", **asdict(release(10.0))}
    assert spent([old], unsure) == pytest.approx(spent([twice], sure))
    assert spent([new, old], unsure) == pytest.approx(spent([new, twice], sure))
    patients = old | {"unit": "patient"}
    assert spent([patients], unsure) == spent([old], sure)


@pytest.mark.parametrize("unit", ["record", "bag", "patient"])
def test_what_a_site_protects_follows_from_its_settings(unit: str) -> None:
    node: dict[str, Scalar] = {"data": "imagefolder", "data-dir": ".", "unit": unit}
    with_patients = parse_node_config(node | {"patient-column": "who"})
    assert with_patients.protects == unit
    assert parse_node_config(node).protects == ("record" if unit == "patient" else unit)
