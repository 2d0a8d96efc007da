"""A site's reason is shown in a simulation, where nothing is secret; a site with its own data never
sends it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict
from PIL import Image

from fedsurrogate.common.errors import PUBLIC_SENTENCES, RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.deployment import local_engine
from fedsurrogate.server_app.serverapp import federate
from fedsurrogate.strategies.flower import worker_failure
from tests.grid import (
    FAST,
    SECRET,
    Fault,
    InProcessGrid,
    default_run_config,
    events_of,
    files_with,
    run_federation,
    run_folders,
    sites,
)


def broken_images(folder: Path) -> Path:
    for name in "ab":
        (folder / name).mkdir(parents=True)
        for i in range(10):
            (folder / name / f"{i}.png").write_bytes(f"no image {name}{i}".encode())
    return folder


def why_rejected(folder: Path) -> list[str]:
    return [event["reason"] for event in events_of(folder) if event["event"] == "rejected"]


def test_a_simulation_shows_the_reason_of_its_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    data = broken_images(tmp_path / "data")
    settings = {
        "data": "imagefolder",
        "data-dir": str(data),
        "output-dir": str(tmp_path / "runs"),
        "image-size": 8,
    }
    with pytest.raises(RunError, match="quorum missed"):
        local_engine.simulate_here(2, settings, lambda event: None)
    (folder,) = run_folders(tmp_path / "runs")
    reasons = why_rejected(folder)
    assert reasons
    assert all(reason.startswith(f"{PUBLIC_SENTENCES['data']}: none of the ") for reason in reasons)


def test_a_hospitals_reason_stays_there_also_in_a_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = broken_images(tmp_path / SECRET)
    nodes = [{"site": "north", "data": "imagefolder", "data-dir": str(data)}]
    grid = InProcessGrid(nodes)
    # The engine runs in this process, and the site has data of its own all the same.
    monkeypatch.setattr(local_engine, "_active", 1)
    with pytest.raises(RunError, match="quorum missed"):
        run_federation(tmp_path, grid, image_size=8, **FAST)
    (folder,) = run_folders(tmp_path / "runs")
    assert not files_with(SECRET, folder)
    assert all("reason" not in reply.content["info"] for reply in grid.received)


def test_a_site_cannot_write_a_reason_into_a_deployment(tmp_path: Path) -> None:
    def claim(record: RecordDict) -> None:
        del record["payload"]
        info = {"status": "data", "site": "0", "reason": "call this number: 555"}
        record["info"] = ConfigRecord(info)

    folder = run_federation(tmp_path, InProcessGrid(sites(3), {0: Fault(reply=claim)}), **FAST)
    assert why_rejected(folder) == [PUBLIC_SENTENCES["data"]]


KILLED = "<class 'ray.exceptions.{}'>:<'The actor died.{}'>"
# What Ray says, and what is shown of it.
FAILURES = [
    *((KILLED.format(each, "\n\tactor_id: 42"), "(?s).*lack of memory.*--parallel 1")
      for each in ("OutOfMemoryError", "ActorDiedError", "WorkerCrashedError")),
    (KILLED.format("ActorDiedError", " Worker exit detail: Owner's node has crashed."),
     "(?s)the server of Ray.*--engine local"),
    ("<class 'ClientAppException'>:<'\nTraceback\n  File\nValueError: no such thing'>",
     "the app failed: ValueError: no such thing'>$"),
    (None, "the app failed$"),
]  # fmt: skip


@pytest.mark.parametrize(("said", "shown"), FAILURES)
def test_a_failure_of_a_worker_is_shown_with_its_remedy_or_its_last_line(
    said: str | None, shown: str
) -> None:
    assert re.match(shown, worker_failure("the app failed", said))


class KilledWorkerError(Exception):
    """Stands for Ray's exception, whose name the message contains."""


@pytest.mark.parametrize(
    ("simulated", "words"),
    [(True, "lack of memory"), (False, "the site's app failed (Flower error code 2)")],
)
def test_a_killed_worker_is_explained_in_a_simulation_only(
    tmp_path: Path, simulated: bool, words: str
) -> None:
    KilledWorkerError.__qualname__ = "OutOfMemoryError"
    grid = InProcessGrid(
        sites(3, state_dir=str(tmp_path), cache_dir=str(tmp_path)),
        {0: Fault(crash=KilledWorkerError("ended"))},
    )
    grid.run_config = default_run_config() | FAST | {"output-dir": str(tmp_path / "runs")}
    federate(parse_run(grid.run_config), grid, grid.run.run_id, simulated=simulated)
    (folder,) = run_folders(tmp_path / "runs")
    (reason,) = why_rejected(folder)
    assert words in reason
    assert "ended" not in reason


def test_a_missed_quorum_names_the_reason_of_the_missing_site_and_not_of_those_that_are_there(
    tmp_path: Path,
) -> None:
    """At the identification in a run in rounds, no site has sent anything yet."""
    faults = {0: Fault(crash=RuntimeError("ended"))}
    with pytest.raises(
        RunError,
        match="3 of 4 sites can be used, quorum = 1 needs 4; 1 of them: the site's app failed",
    ):
        run_federation(
            tmp_path, InProcessGrid(sites(4), faults), **FAST | {"method": "fedlap", "quorum": 1.0}
        )


def test_images_that_break_are_named_at_the_site_and_never_in_a_run_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    random = np.random.default_rng(0)
    data = tmp_path / "data"
    for name in "ab":
        (data / name).mkdir(parents=True)
        for i in range(20):
            Image.fromarray(random.integers(0, 255, (8, 8), dtype=np.uint8)).save(
                data / name / f"{i}.png"
            )
    (data / "a" / f"{SECRET}.png").write_bytes(b"no image")
    nodes = [
        {"site": name, "data": "imagefolder", "data-dir": str(data)} for name in ("north", "south")
    ]
    folder = run_federation(tmp_path, nodes, image_size=8, **FAST)
    assert f"{SECRET}.png is broken and skipped" in caplog.text
    assert not files_with(SECRET, folder)
    assert json.loads((folder / "metrics.json").read_text())["status"] == "ok"
