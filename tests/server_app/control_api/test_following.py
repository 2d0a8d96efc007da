"""Runs are found by their names and followed to their end, and sites are listed by their keys, also while
their SuperLink does not answer.
"""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.interface import FlowerRun
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app import control_api
from fedsurrogate.server_app.control_api import Handle, find_handle, follow_run, overview
from fedsurrogate.server_app.deployment.submit import stop
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies.base.outcome import Outcome, Site
from tests.commands import coordinator

# Nothing listens there.
NOWHERE = "127.0.0.1:1"


def begun(output: Path, number: int) -> RunWriter:
    folder = RunWriter(parse_run({"output-dir": str(output), "sites": 1}), number)
    folder.event("configured", method="fedpft")
    folder.event("invited", sites=1, names="claimed")
    return folder


def ended(folder: RunWriter) -> None:
    folder.event("replied", site="north", bytes=10)
    folder.finish(Outcome({1: Site("north", "used", "", 10)}), "ok")


def test_a_run_is_found_by_its_number_its_folder_its_name_and_as_the_latest(tmp_path: Path) -> None:
    first = begun(tmp_path, 7)
    for name in ("7", str(first.path), first.path.name, "latest"):
        assert find_handle(name, tmp_path) == Handle("7", first.path)
    assert find_handle("8", tmp_path) == Handle("8", None)
    with pytest.raises(RunError, match="'nonsense' is no run: give a run folder"):
        find_handle("nonsense", tmp_path)
    with pytest.raises(RunError, match="there is no run in"):
        find_handle("latest", tmp_path / "empty")


def test_a_run_is_followed_to_its_end_without_its_superlink(tmp_path: Path) -> None:
    folder, seen = begun(tmp_path, 7), list[dict[str, Any]]()

    def note(event: dict[str, Any]) -> None:
        seen.append(event)
        if event["event"] == "warning":
            threading.Thread(target=ended, args=(folder,)).start()

    assert follow_run(Handle("7", folder.path), tmp_path, NOWHERE, None, note) == folder.path
    assert [event["event"] for event in seen] == ["configured", "invited", "warning", "replied"]
    assert NOWHERE in seen[2]["reason"]


def test_a_run_that_is_not_started_is_reported_until_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = iter(["pending", "pending", "finished:failed"])
    last = "finished:failed"
    monkeypatch.setattr(
        control_api,
        "list_runs",
        lambda *_: [FlowerRun("7", next(states, last), None, None)],
    )
    monkeypatch.setattr(control_api, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(control_api, "REMIND_SECONDS", 0.0)
    seen = list[dict[str, Any]]()
    assert follow_run(Handle("7", None), tmp_path, NOWHERE, None, seen.append) is None
    assert [event["event"] for event in seen] == ["waiting", "waiting"]
    assert all("coordinator app" in event["reason"] for event in seen)


def test_without_a_folder_and_without_a_superlink_nothing_is_followed(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=f"the SuperLink at {NOWHERE} has failed a request"):
        follow_run(Handle("7", None), tmp_path, NOWHERE, None, lambda _: None)


def test_runs_are_listed_from_their_folders_when_the_superlink_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended(begun(tmp_path, 7))
    active = begun(tmp_path, 8)
    rows, problem = overview(tmp_path, NOWHERE, None, 20)
    assert {row.id: (row.state, row.sites) for row in rows} == {
        "7": ("ok", "1 used"),
        "8": ("running", "1 waiting"),
    }
    assert NOWHERE in problem
    assert coordinator(monkeypatch, "runs", "--runs", tmp_path, "--control", NOWHERE, "--json") == 0
    shown = capsys.readouterr()
    assert {row["name"] for row in json.loads(shown.out)} == {
        folder.name for folder in tmp_path.iterdir()
    }
    assert "only run folders are listed" in shown.err
    active.finish(Outcome(), "failed", "x")


def test_a_run_that_has_ended_cannot_be_stopped(tmp_path: Path) -> None:
    ended(begun(tmp_path, 7))
    with pytest.raises(RunError, match=r"has ended as ok; .* there is nothing to stop"):
        stop("latest", tmp_path, NOWHERE, None)


def test_a_version_is_that_of_the_last_run_of_the_site_that_names_one() -> None:
    runs: Any = [{"a": SimpleNamespace(version=own)} for own in ("", "2", "1")]
    assert control_api._version([{}, *runs], "a") == "2"
