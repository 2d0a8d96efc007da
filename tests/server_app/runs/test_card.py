"""The run card: sites that are missing from a result, and their share of the records."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.refit import refit
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.metrics import (
    missing_classes,
    missing_line,
    run_card,
)
from fedsurrogate.strategies.base.outcome import Site
from tests.grid import (
    FAST,
    Fault,
    InProcessGrid,
    events_of,
    metrics_of,
    run_federation,
    sites,
    surrogates_of,
)

SHORT = {"deadline": 0.15}


def used(name: str, records: int = 0) -> Site:
    return Site(name, "used", "", records=records)


def test_nobody_missing_is_green() -> None:
    card = run_card([used("a", 10), used("b", 1000)], 2)
    assert (card["state"], card["missing_share"], card["used"]) == ("green", 0, ["a", "b"])


@pytest.mark.parametrize(("records", "state"), [(100, "amber"), (200, "red")])
def test_a_missing_site_is_red_when_it_has_many_records(records: int, state: str) -> None:
    late = Site("late", "dropped", "too late", records=records, late=True)
    card = run_card([used("a", 500), used("b", 700), late], 0)
    assert card["state"] == state
    assert card["missing_share"] == pytest.approx(records / (1200 + records), abs=1e-4)
    assert (card["late"], card["dropped"]) == ({"late": "too late"}, {})


def test_who_does_not_tell_is_taken_for_as_large_as_the_largest() -> None:
    silent = run_card([used("a", 100), used("b", 300), Site("node 7")], 0)
    assert silent["missing_share"] == pytest.approx(300 / 700, abs=1e-4)
    absent = run_card([used("a", 100), used("b", 300)], 3)
    assert (absent["never_came"], absent["missing_share"]) == (1, silent["missing_share"])
    assert run_card([used("a"), used("b"), Site("c")], 0)["missing_share"] == pytest.approx(
        1 / 3, abs=1e-4
    )


def test_nobody_at_all_is_all_missing() -> None:
    assert run_card([], 2)["missing_share"] == 1
    assert run_card([], 0)["state"] == "green"


@pytest.mark.slow
def test_what_comes_in_the_time_of_grace_is_kept_and_named_late(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(3), {1: Fault(pulls=30)})
    folder = run_federation(tmp_path, grid, **FAST, **SHORT, grace=30.0)
    assert set(surrogates_of(folder)) == {"0.pb", "1.pb", "2.pb"}
    metrics = metrics_of(folder)
    assert metrics["sites"] == {"invited": 3, "used": 2, "rejected": 0, "dropped": 1}
    card = metrics["card"]
    assert (card["state"], card["used"], set(card["late"]), card["dropped"]) == (
        "red",
        ["0", "2"],
        {"1"},
        {},
    )
    assert set(card["records"]) == {"0", "1", "2"}
    page = write_report(folder).read_text()
    assert "2 used, 1 late" in page
    assert "of all records" in page
    assert "refit" in page
    assert "node 1002" not in page
    assert 'class="banner"' in page


@pytest.mark.slow
def test_without_grace_nobody_is_waited_for_after_the_deadline(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(3), {1: Fault(pulls=10**6)})
    folder = run_federation(tmp_path, grid, **FAST, **SHORT)
    assert set(surrogates_of(folder)) == {"0.pb", "2.pb"}
    assert metrics_of(folder)["card"]["dropped"].keys() == {"node 1002"}


def test_a_missed_quorum_still_waits_in_grace_and_a_head_can_be_learned_from_all(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(sites(3), {node: Fault(pulls=30) for node in (1, 2)})
    with pytest.raises(RunError, match="quorum missed: 1 of 3"):
        run_federation(tmp_path, grid, **FAST, **SHORT, grace=30.0, quorum=0.9)
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = metrics_of(folder)
    assert (metrics["status"], set(metrics["card"]["late"])) == ("failed", {"1", "2"})
    assert [event["event"] for event in events_of(folder)][-2:] == ["late", "late"]
    refitted, _ = refit(folder)
    assert (refitted / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["fedavg", "fedlap", "dpcvae", "average"])
def test_every_method_tells_how_many_records_stand_behind_it(tmp_path: Path, method: str) -> None:
    rounds = {f"{method}.rounds": 2} if method in ("fedavg", "fedlap", "dpcvae") else {}
    quick = {"fedlap.image-steps": 2, "fedlap.model": "linear"} if method == "fedlap" else {}
    folder = run_federation(tmp_path, sites(2), **(FAST | {"method": method} | rounds | quick))
    card = metrics_of(folder)["card"]
    assert set(card["records"]) == {"0", "1"}
    # 1797 digits; a fifth is held out.
    assert sum(card["records"].values()) == pytest.approx(1438, abs=10)


@given(
    st.lists(st.lists(st.integers(0, 500), min_size=4, max_size=4), min_size=1, max_size=5),
    st.none() | st.floats(0.1, 50.0),
)
@settings(max_examples=60, deadline=None)
def test_a_class_is_missing_if_all_sites_together_have_none_or_no_more_than_noise(
    table: list[list[int]], noise: float | None
) -> None:
    counts = [(dict(zip("abcd", map(float, row), strict=True)), noise) for row in table]
    found = missing_classes("abcd", counts, noise is not None)
    totals = dict(zip("abcd", np.sum(table, 0), strict=True))
    if not np.any(table) and noise is None:
        assert set(found[0]) == set("abcd")
    elif noise is None:
        assert found == (tuple(n for n in "abcd" if not totals[n]), "exact")
    else:
        # Three deviations of the sum above its mean.
        bound = 0.4 * noise * len(table) + 3 * noise * len(table) ** 0.5
        assert found[0] == tuple(n for n in "abcd" if totals[n] <= bound)


def test_without_counts_nothing_is_known_and_nothing_is_claimed() -> None:
    for private in (False, True):
        assert missing_classes("ab", [], private) == ((), "unknown")
        assert missing_classes("ab", [({}, None)], private)[1] == "unknown"
    # A noisy count of which the noise is not known shows nothing.
    assert missing_classes("ab", [({"a": 5.0}, None)], True)[1] == "unknown"
    card = run_card([used("a", 10)], 1)
    assert (card["state"], card["records_by_class"]) == ("green", "unknown")


def test_a_missing_class_is_not_green() -> None:
    card = run_card([used("a", 10)], 1, missing=(("rare",), "exact"))
    assert (card["state"], card["missing_share"]) == ("amber", 0)
    assert missing_line(card) == "no site has a record of rare"
