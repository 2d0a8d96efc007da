"""State computed from the events of real runs, during the run and after its end."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.runs.state import RunState, event_line, state_of
from tests.grid import FAST, Fault, InProcessGrid, events_of, metrics_of, run_federation, sites

ROUNDS = {"method": "fedavg", "fedavg.rounds": 3, "fedavg.local-epochs": 1}


@pytest.fixture(scope="module")
def in_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_federation(tmp_path_factory.mktemp("rounds"), sites(3), **ROUNDS)


def while_it_goes(folder: Path) -> Iterator[tuple[dict[str, Any], RunState]]:
    state = RunState()
    for event in events_of(folder):
        state.take(event)
        yield event, state


def test_the_events_alone_tell_what_the_metrics_tell(in_rounds: Path) -> None:
    state, metrics = state_of(events_of(in_rounds)), metrics_of(in_rounds)
    assert not state.ended
    assert (state.method, state.step, state.done, state.planned) == ("fedavg", "round", 3, 3)
    assert state.accuracy == metrics["accuracy"]["model"]
    assert {site.name: site.accuracy for site in state.sites.values()} == metrics["accuracy"][
        "per_site"
    ]
    assert state.bytes_up == metrics["rounds"][-1]["bytes_up"], (
        "only what sites say of the last model comes after"
    )
    assert state.fates == {"waiting": 0, "used": 3, "rejected": 0, "dropped": 0}


def test_the_end_is_what_the_metrics_say(in_rounds: Path) -> None:
    state, metrics = state_of(events_of(in_rounds)), metrics_of(in_rounds)
    state.conclude(metrics)
    assert state.ended
    assert (state.status, state.seconds) == ("ok", metrics["seconds"]["total"])
    assert (state.bytes_up, state.bytes_down) == (metrics["bytes"]["up"], metrics["bytes"]["down"])
    assert {name: site.bytes for name, site in state.sites.items()} == metrics["bytes"][
        "up_per_site"
    ]


def test_rounds_sites_and_bytes_are_reported_as_they_come(in_rounds: Path) -> None:
    seen = [
        (e["event"], s.done, s.fates["waiting"], len(s.sites)) for e, s in while_it_goes(in_rounds)
    ]
    story = [("configured", 0, 0, 0), ("invited", 0, 3, 0), *[("note", 0, 3, 0)] * 2]
    story += [("identified", 0, 3, number) for number in (1, 2, 3)]
    for number in range(3):
        story += [("replied", number, left, 3) for left in ([2, 1, 0] if number == 0 else [0] * 3)]
        story += [("round", number + 1, 0, 3)]
    assert seen[: len(story)] == story
    sent = [state.bytes_up for _, state in while_it_goes(in_rounds)]
    assert sent == sorted(sent)


def test_one_shot_is_one_round(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **FAST)
    state, metrics = state_of(events_of(folder)), metrics_of(folder)
    assert (state.step, state.done, state.planned) == ("round", 1, 1)
    assert state.accuracy == metrics["accuracy"]["model"]
    assert all(site.counts and site.doing == "evaluated" for site in state.sites.values())
    state.conclude(metrics)
    assert state.bytes_up == metrics["bytes"]["up"]


def test_a_chain_goes_hop_by_hop(tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(2), **FAST, **{"fedpft.topology": "chain"})
    hops = [
        (s.done, s.planned, s.step) for e, s in while_it_goes(folder) if e["event"] == "replied"
    ]
    assert hops == [(1, 2, "chain step"), (2, 2, "chain step")]


def test_epsilon_grows_with_the_rounds_and_ends_at_the_promise(tmp_path: Path) -> None:
    private = {
        "method": "dp-fedavg",
        "epsilon": 1.0,
        "delta": 1e-5,
        "fedavg.rounds": 2,
        "fedavg.sample-rate": 0.2,
    }
    folder = run_federation(tmp_path, sites(2), classes=",".join(map(str, range(10))), **private)
    first, second = (s.epsilon for e, s in while_it_goes(folder) if e["event"] == "round")
    assert first is not None
    assert second is not None
    assert 0 < first < second <= 1.0
    state = state_of(events_of(folder))
    state.conclude(metrics_of(folder))
    assert [site.epsilon for site in state.sites.values()] == [1.0, 1.0]


def test_a_site_in_trouble_says_why(tmp_path: Path) -> None:
    grid = InProcessGrid(
        sites(3), {1: Fault(payload=lambda payload: payload[:-1]), 2: Fault(offline=True)}
    )
    folder = run_federation(tmp_path, grid, deadline=1.0, quorum=0.3, **ROUNDS)
    state = state_of(events_of(folder))
    assert state.fates == {"waiting": 0, "used": 1, "rejected": 1, "dropped": 1}
    refused, silent = state.sites["1"], state.sites["2"]
    assert (refused.doing, silent.doing) == ("rejected", "dropped")
    assert refused.reason
    assert silent.reason == "no reply before the deadline"
    assert [what for what, _ in refused.outcomes] == ["rejected"] * 3


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2), {0: Fault(offline=True), 1: Fault(offline=True)})
    with pytest.raises(RunError, match="quorum"):
        run_federation(tmp_path, grid, deadline=0.5, **ROUNDS)
    (folder,) = (tmp_path / "runs").iterdir()
    state = state_of(events_of(folder))
    assert "quorum missed" in state.failure
    state.conclude(metrics_of(folder))
    assert (state.status, state.done, state.planned) == ("failed", 0, 3)


def test_a_run_that_goes_on_from_another_counts_on(tmp_path: Path) -> None:
    half = run_federation(tmp_path, sites(2), **ROUNDS)
    again = run_federation(tmp_path, sites(2), **ROUNDS, resume=str(half))
    assert state_of(event for event in events_of(again) if event["event"] != "round").done == 3


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"event": None},
        {"event": "round", "round": "x"},
        {"event": "replied", "site": None, "bytes": []},
        {"time": 3},
    ],
)
def test_whatever_an_event_is_it_does_no_harm(event: dict[str, Any]) -> None:
    state = state_of([event])
    state.conclude({"status": "ok", "sites": 3, "bytes": [], "accuracy": None})
    assert event_line(event)
    assert state.status == "ok"
    assert set(state.fates.values()) <= {0, 1}
