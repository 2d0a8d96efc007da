"""A site that uses another site's name: the coordinator uses the name of its registered key, not
the claimed name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.methods import FEDPFT_CHAIN
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.metrics import missing_line
from fedsurrogate.server_app.runs.reader import read_run
from fedsurrogate.server_app.runs.state import event_line, state_of
from tests.grid import (
    FAST,
    FIRST_NODE,
    Fault,
    InProcessGrid,
    NodeConfig,
    events_of,
    metrics_of,
    run_federation,
    run_folders,
    sites,
)
from tests.registry import BY_STRATEGY, TINY, settings_of

quick = partial(run_federation, **FAST)
ROUNDS: dict[str, Any] = {"method": "fedavg", "fedavg.rounds": 3}
# One method for each strategy.
METHODS = {
    spec.name if spec is not FEDPFT_CHAIN else "chain": spec for spec in BY_STRATEGY.values()
}
NAMES = ("north", "south", "west")


def named(*names: str, **config: Any) -> list[NodeConfig]:
    """Node-configs of sites with these claimed names."""
    return [
        each | {"site": name} for each, name in zip(sites(len(names), **config), names, strict=True)
    ]


class Table:
    """The table of registered sites, at the path that the coordinator's app reads."""

    def __init__(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = file
        monkeypatch.setenv("FEDSURROGATE_REGISTERED", str(file))
        self.write({name: FIRST_NODE + index for index, name in enumerate(NAMES)})

    def write(self, nodes: Mapping[str, int]) -> None:
        content = {
            name: {"key": f"ecdsa-sha2-nistp384 {name}", "node": node}
            for name, node in nodes.items()
        }
        self.file.write_text(json.dumps({"sites": content}))


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Table:
    return Table(tmp_path / "registered.json", monkeypatch)


def reasons(folder: Path, kind: str) -> dict[str, str]:
    """The last reason by site in the events of a kind."""
    return {event["site"]: event["reason"] for event in events_of(folder) if event["event"] == kind}


@pytest.mark.parametrize("method", METHODS)
def test_a_site_that_answers_first_in_the_name_of_another_does_not_take_it(
    tmp_path: Path, table: Table, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    # A hostile site would not run this check.
    monkeypatch.setattr(
        "fedsurrogate.client_app.requests.check_addressee",
        lambda question, site: None,
        raising=False,
    )
    kinds = {kind: Fault(pulls=3, kind=kind) for kind in ("train", "query.hello", "evaluate")}
    spec = METHODS[method]
    kind = "query.hello" if parse_run(settings_of(spec, TINY)).plan.messages.identifies else "train"
    grid = InProcessGrid(named("south", "south", "west"), {1: kinds[kind]})
    folder = quick(tmp_path, grid, **settings_of(spec, TINY))
    card = metrics_of(folder)["card"]
    assert (card["used"], set(card["rejected"])) == (["south", "west"], {"north"})
    assert (
        "reports the name 'south', but its key is registered as 'north'"
        in card["rejected"]["north"]
    )
    assert reasons(folder, "rejected") == card["rejected"]
    assert not [event for event in events_of(folder) if "node " in str(event.get("site"))]


def test_a_site_of_another_name_refuses_before_it_is_charged(tmp_path: Path, table: Table) -> None:
    private = {"epsilon": 1.0, "delta": 1e-5, "classes": "0,1,2,3,4,5,6,7,8,9"}
    nodes = named("north", "norht", "west")
    for name, config in zip(NAMES, nodes, strict=True):
        config["state-dir"] = str(tmp_path / name)
    folder = quick(tmp_path, nodes, **private)
    assert "reports the name 'norht'" in metrics_of(folder)["card"]["rejected"]["south"]
    charged = {
        name
        for name in NAMES
        if any('"release"' in f.read_text() for f in (tmp_path / name).rglob("*.jsonl"))
    }
    assert charged == {"north", "west"}
    assert "this site is called 'norht'" in (tmp_path / "south" / "site.log").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_a_node_that_is_not_registered_is_asked_nothing(
    tmp_path: Path, table: Table, method: str
) -> None:
    table.write({"north": FIRST_NODE, "west": FIRST_NODE + 2})
    grid = InProcessGrid(named(*NAMES))
    folder = quick(tmp_path, grid, **settings_of(METHODS[method], TINY))
    assert FIRST_NODE + 1 not in {message.metadata.dst_node_id for message in grid.sent}
    assert metrics_of(folder)["card"]["used"] == ["north", "west"]
    refused = reasons(folder, "rejected")
    assert "table of registered sites" in refused[f"node {FIRST_NODE + 1}"]


def test_a_run_among_strangers_alone_fails_and_names_whom_it_waits_for(
    tmp_path: Path, table: Table
) -> None:
    table.write({"north": 1, "west": 2})
    grid = InProcessGrid(named("south"))
    with pytest.raises(RunError, match=r"no site is connected.*; not connected: north, west"):
        quick(tmp_path, grid, deadline=0.1)
    assert not grid.sent


@pytest.mark.parametrize("method", ["fedpft", "ensemble", "fedavg"])
def test_a_site_lost_before_it_answers_is_named_from_the_start(
    tmp_path: Path, table: Table, method: str
) -> None:
    kind = "query.hello" if METHODS[method].usual.messages.identifies else "train"
    grid = InProcessGrid(named(*NAMES), {1: Fault(offline=True, kind=kind)})
    folder = quick(tmp_path, grid, **settings_of(METHODS[method], TINY) | {"deadline": 0.5})
    events, metrics = events_of(folder), metrics_of(folder)
    assert set(metrics["card"]["dropped"]) == {"south"}
    # Also while it still works.
    begun = events[: 1 + max(i for i, event in enumerate(events) if event["event"] == "invited")]
    assert {name: site.fate for name, site in state_of(begun).sites.items()} == dict.fromkeys(
        NAMES, "waiting"
    )
    assert state_of(begun).fates["waiting"] == 3
    assert f"node {FIRST_NODE}" not in "".join(map(event_line, events))
    assert "south" in missing_line(metrics["card"])


def test_registered_sites_that_have_not_connected_are_named(tmp_path: Path, table: Table) -> None:
    table.write({name: FIRST_NODE + index for index, name in enumerate((*NAMES, "east"))})
    folder = quick(tmp_path, named(*NAMES), sites=4, deadline=0.5)
    (waiting,) = (event for event in events_of(folder) if event["event"] == "waiting")
    assert waiting["reason"] == "for 1 more of 4 sites to connect; not connected: east"
    card = metrics_of(folder)["card"]
    assert (card["absent"], card["never_came"], card["names"]) == (["east"], 1, "registered")
    assert missing_line(card).endswith("1 that never connected (not connected: east)")
    assert {site.name: site.status for site in read_run(folder).sites}["east"] == "absent"
    page = write_report(folder).read_text()
    assert "<strong>east</strong>: absent, registered, and not connected" in page
    assert "Every site has the name of its registered key" in page


def test_the_same_site_goes_on_with_a_new_key_in_the_middle_of_a_run(
    tmp_path: Path, table: Table
) -> None:
    grid = InProcessGrid(named(*NAMES))
    nodes, new = grid.get_node_ids, FIRST_NODE + 50

    def replaced() -> Any:
        done = [
            e for f in run_folders(tmp_path / "runs") for e in events_of(f) if e["event"] == "round"
        ]
        if len(done) == 1 and FIRST_NODE + 1 in grid.node_configs:
            grid.node_configs[new] = grid.node_configs.pop(FIRST_NODE + 1)
            grid._states[new] = grid._states[FIRST_NODE]
            table.write({"north": FIRST_NODE, "south": new, "west": FIRST_NODE + 2})
        return nodes()

    grid.get_node_ids = replaced  # type: ignore[method-assign]
    folder = quick(tmp_path, grid, **ROUNDS)
    assert metrics_of(folder)["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}
    assert [(e["site"], e["round"]) for e in events_of(folder) if e["event"] == "joined"] == [
        ("south", 2)
    ]
    asked = [
        m for m in grid.sent if (m.metadata.dst_node_id, m.metadata.message_type) == (new, "train")
    ]
    assert [m.content.config_records["info"]["confirmed"] for m in asked] == [1, 2]


def test_a_key_that_is_taken_back_in_the_middle_of_a_run_is_not_asked_again(
    tmp_path: Path, table: Table
) -> None:
    grid = InProcessGrid(named(*NAMES))
    push = grid.push_messages

    def revoked(messages: Any) -> Any:
        table.write({"north": FIRST_NODE, "west": FIRST_NODE + 2})
        return push(messages)

    grid.push_messages = revoked  # type: ignore[method-assign]
    folder = quick(tmp_path, grid, **ROUNDS)
    assert metrics_of(folder)["card"]["used"] == ["north", "west"]
    assert "table of registered sites" in metrics_of(folder)["card"]["rejected"]["south"]
    assert not grid.replies(1)


DAMAGED = (
    "",
    "[]",
    '{"sites": {"north": {"key": "k"}}}',
    '{"sites": {"../x": {"key": "k", "node": 1}}}',
    '{"sites": {"a": {"key": "k", "node": 1}, "b": {"key": "l", "node": 1}}}',
)


@pytest.mark.parametrize("content", [None, *DAMAGED])
def test_no_run_begins_without_the_table_it_should_have(
    tmp_path: Path, table: Table, content: str | None
) -> None:
    table.file.unlink() if content is None else table.file.write_text(content)
    grid = InProcessGrid(named(*NAMES))
    with pytest.raises(RunError, match="coordinator sites register"):
        quick(tmp_path, grid)
    assert not grid.sent


def test_a_run_without_a_table_says_that_names_are_only_claimed(tmp_path: Path) -> None:
    folder = quick(tmp_path, named(*NAMES, data="digits"))
    assert metrics_of(folder)["card"]["names"] == "claimed"
    (invited,) = (event for event in events_of(folder) if event["event"] == "invited")
    assert (invited["sites"], invited["names"]) == (3, "claimed")
    assert "The sites chose their names themselves" in write_report(folder).read_text()


def test_no_site_can_work_out_the_id_of_anothers_question(tmp_path: Path) -> None:
    """With this id and the node id, a site could reply for another site if the SuperLink does not
    check senders.
    """
    grid = InProcessGrid(sites(3))
    quick(tmp_path, grid, **ROUNDS)
    secrets = [m.metadata.group_id for m in grid.sent if m.metadata.message_type != "query.compare"]
    assert len(secrets) > 9
    assert len(set(secrets)) == len(secrets)
    assert all(len(bytes.fromhex(secret)) == 16 for secret in secrets)
