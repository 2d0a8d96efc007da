"""Ray under Flower's simulation, played: its start waits, and its failure has a reason."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.supercore.exit import exit_handler

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.run import parse_run
from fedsurrogate.server_app.lifecycle.before_start import DID_NOT_START, ray_start
from fedsurrogate.server_app.serverapp import fail_before_start
from tests.grid import events_of, metrics_of, run_folders

log = logging.getLogger("flwr")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Ray, which starts when `ready` is set; nothing of Ray is patched."""
    played = SimpleNamespace(ready=False)
    played.is_initialized = lambda: played.ready
    monkeypatch.setitem(sys.modules, "ray", played)
    monkeypatch.setattr(flower(), "prepare_ray", lambda seconds: None)
    monkeypatch.setattr(exit_handler, "registered_exit_handlers", [])
    return played


def test_the_app_goes_on_when_ray_has_started(ray: SimpleNamespace) -> None:
    threading.Timer(0.3, lambda: setattr(ray, "ready", True)).start()
    with ray_start(30.0) as problem:
        assert problem == ""
    filters = len(log.filters)
    exit_handler.trigger_exit_handlers()
    assert len(log.filters) == filters


@pytest.mark.usefixtures("ray")
def test_flower_does_not_end_the_process_before_the_reason_is_written() -> None:
    """As in Flower: the main thread logs what failed, then what follows from it, and calls the exit
    handlers.
    """
    order: list[str] = []
    filters = len(log.filters)

    def main_thread() -> None:
        # However long the other thread takes to begin to listen.
        while len(log.filters) == filters:
            time.sleep(0.01)
        log.error(
            "An exception occured!! %s", TimeoutError("Timed out waiting for file\n  /tmp/x.")
        )
        log.error("An exception occurred !! %s", RuntimeError("Simulation Runtime crashed."))
        exit_handler.trigger_exit_handlers()
        order.append("ended")

    thread = threading.Thread(target=main_thread)
    thread.start()
    with ray_start(30.0) as problem:
        time.sleep(0.5)
        order.append("written")
    thread.join()
    assert order == ["written", "ended"]
    assert problem.startswith(f"{DID_NOT_START}: TimeoutError: Timed out waiting for file /tmp/x; ")
    assert "--engine local" in problem


@pytest.mark.usefixtures("ray")
def test_a_ray_that_hangs_is_not_waited_for_without_end() -> None:
    with ray_start(0.2) as problem:
        assert "it has not begun to work within 0 s" in problem


def test_the_run_folder_has_the_status_failed_and_the_reason(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no luck"):
        fail_before_start(parse_run({"output-dir": str(tmp_path)}), 7, RunError("no luck"))
    (folder,) = run_folders(tmp_path)
    assert (metrics_of(folder)["status"], metrics_of(folder)["failure"]) == ("failed", "no luck")
    assert events_of(folder)[-1]["reason"] == "no luck"
    assert (folder / "report.html").is_file()
