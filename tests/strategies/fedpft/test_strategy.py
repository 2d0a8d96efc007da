"""A fault of one site excludes that site and never ends the run; the run folder names the site and
the reason.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from flwr.app import Message
from safetensors.torch import load_file

from fedsurrogate.common.errors import RunError
from tests.grid import (
    FAST,
    SECRET,
    Fault,
    InProcessGrid,
    NodeConfig,
    events_of,
    files_with,
    metrics_of,
    outcome,
    run_federation,
    sites,
    surrogates_of,
)

SHORT = {"deadline": 0.15}


def test_a_reply_that_came_while_another_held_the_line_is_used(tmp_path: Path) -> None:
    class Stalling(InProcessGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            time.sleep(2 * SHORT["deadline"])
            return super().pull_messages(message_ids)

    folder = run_federation(tmp_path, Stalling(sites(2), {1: Fault(pulls=1)}), **FAST, **SHORT)
    assert metrics_of(folder)["sites"]["used"] == 2


def test_a_late_surrogate_is_kept_for_refit_and_named(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(3), {1: Fault(late="evaluate")})
    folder = run_federation(tmp_path, grid, **FAST, **SHORT)
    assert outcome(folder, "node 1002", "dropped") == "no reply before the deadline"
    (late,) = (event for event in events_of(folder) if event["event"] == "late")
    assert late["site"] == "1"
    replied = {event["site"] for event in events_of(folder) if event["event"] == "replied"}
    assert replied == {"0", "2"}
    assert metrics_of(folder)["sites"]["used"] == 2
    assert set(surrogates_of(folder)) == {"0.pb", "1.pb", "2.pb"}
    on_time = run_federation(
        tmp_path / "alone", InProcessGrid(sites(3), {1: Fault(offline=True)}), **FAST, **SHORT
    )
    ours, theirs = (load_file(path / "model.safetensors") for path in (folder, on_time))
    assert all(ours[name].equal(theirs[name]) for name in ours), "a late surrogate changed the head"


def test_nothing_of_an_exception_at_a_site_reaches_the_run_folder(tmp_path: Path) -> None:
    crash = RuntimeError(f"cannot open /mnt/{SECRET}/patient-17.dcm")
    folder = run_federation(tmp_path, InProcessGrid(sites(3), {1: Fault(crash=crash)}), **FAST)
    assert "Flower error code 2" in outcome(folder, "node 1002", "rejected")
    assert not files_with(SECRET, folder)


@pytest.mark.parametrize("kind", ["evaluate", "query.compare"])
@pytest.mark.parametrize("fault", ["crash", "offline"])
def test_a_failure_after_the_surrogate_costs_only_the_measurement(
    tmp_path: Path, kind: str, fault: str
) -> None:
    broken = {"kind": kind} | (
        {"offline": True} if fault == "offline" else {"crash": RuntimeError(SECRET)}
    )
    grid = InProcessGrid(
        sites(3), {node: Fault(**broken) for node in range(3 if kind != "evaluate" else 1)}
    )
    folder = run_federation(tmp_path, grid, **FAST, **SHORT)
    metrics = metrics_of(folder)
    assert (metrics["status"], metrics["sites"]["used"]) == ("ok", 3)
    assert ("model" in metrics["accuracy"]) == (kind == "evaluate")
    assert set(metrics["accuracy"]["per_site"]) == (
        {"1", "2"} if kind == "evaluate" else {"0", "1", "2"}
    )
    name = "evaluation-failed" if kind == "evaluate" else "comparison-failed"
    (failed,) = (event for event in events_of(folder) if event["event"] == name)
    assert failed.get("site", "0") == "0"
    assert not files_with(SECRET, folder)


def hidden(tmp_path: Path, name: str) -> tuple[NodeConfig, str]:
    """An invalid node-config, and the code that the coordinator receives."""
    empty = tmp_path / SECRET / "nothing"
    empty.mkdir(parents=True)
    (empty / f"{SECRET}.txt").write_text("no image")
    own: NodeConfig = {"site": "1", "data": "imagefolder"}
    match name:
        case "missing folder":
            return own | {"data-dir": str(tmp_path / SECRET / "missing")}, "no usable data"
        case "no images":
            return own | {"data-dir": str(empty)}, "no usable data"
        case "misspelt key":
            return own | {"data-dri": str(empty)}, "cannot work with these settings"
        case _:
            return own | {
                "partition-id": 7,
                "data-dir": str(empty),
            }, "cannot work with these settings"


@pytest.mark.parametrize(
    "name", ["missing folder", "no images", "misspelt key", "partition that is not there"]
)
def test_a_site_that_cannot_work_tells_a_code_and_no_path(tmp_path: Path, name: str) -> None:
    config, reported = hidden(tmp_path, name)
    nodes = sites(3)
    nodes[1] = config
    folder = run_federation(tmp_path, nodes, **FAST)
    unread = name in ("misspelt key", "partition that is not there")
    assert reported in outcome(folder, "node 1002" if unread else "1", "rejected")
    assert not files_with(SECRET, folder)
    assert unread or files_with(SECRET, tmp_path / "site-state"), (
        "the site's own log tells the detail"
    )


def test_where_too_few_sites_are_there_nobody_is_asked(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2))
    with pytest.raises(
        RunError, match=r"quorum missed: 2 of 3 sites are connected, quorum = 0.9 needs 3"
    ):
        run_federation(tmp_path, grid, **FAST | SHORT | {"sites": 3, "quorum": 0.9})
    assert not grid.sent
    (folder,) = (tmp_path / "runs").iterdir()
    (waited,) = (event for event in events_of(folder) if event["event"] == "waiting")
    assert waited["reason"] == "for 1 more of 3 sites to connect"
    assert not list((tmp_path / "site-state").rglob("*.jsonl")), "nothing is spent"


def test_a_missed_quorum_fails_the_run_but_not_its_folder(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"quorum missed: 2 of 3 sites can be used, quorum = 0.9 needs 3"
    ):
        run_federation(
            tmp_path,
            InProcessGrid(sites(3), {1: Fault(offline=True)}),
            report=True,
            quorum=0.9,
            **FAST,
            **SHORT,
        )
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = metrics_of(folder)
    assert metrics["status"] == "failed"
    assert "quorum missed" in metrics["failure"]
    assert metrics["sites"] == {"invited": 3, "used": 2, "rejected": 0, "dropped": 1}
    assert set(surrogates_of(folder)) == {"0.pb", "2.pb"}
    assert "quorum missed" in (folder / "report.html").read_text()
    assert not (folder / "model.safetensors").exists()
