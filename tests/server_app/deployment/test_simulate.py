"""Attempts of a simulation by Flower's engine, played: what is tried again, and what is said at the
end.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.errors import RunError
from fedsurrogate.server_app.deployment import submit as simulate
from fedsurrogate.server_app.deployment.submit import DONE, KILLED, Machine, cause
from fedsurrogate.server_app.lifecycle.before_start import DID_NOT_START

TRACE = """
INFO :      Starting Flower Simulation
Traceback (most recent call last):
  File "vce_api.py", line 214, in run_api
TimeoutError: Timed out waiting for file /tmp/ray/port.

RuntimeError: Simulation Runtime crashed.
RuntimeError: An error was encountered. Ending simulation.
ERROR :     Exit Code: 700
"""


def test_the_first_error_of_the_log_is_the_cause() -> None:
    assert cause(TRACE) == "TimeoutError: Timed out waiting for file /tmp/ray/port"
    assert cause("ray.exceptions.RaySystemError: x") == "ray.exceptions.RaySystemError: x"


@pytest.mark.parametrize(
    "log", ["", "INFO :      Starting Flower Simulation\nSuccessfully installed"]
)
def test_a_log_without_an_error_is_of_a_killed_process(log: str) -> None:
    assert cause(log) == KILLED


class Attempts:
    """Stands for Flower's processes. failures: of the attempts, in order; None leaves no run
    folder, "" is a success.
    """

    def __init__(self, output: Path, *failures: str | None) -> None:
        self.output, self.failures, self.made = output, iter(failures), 0
        self.sites: object = None
        self.environment = dict[str, str]()

    def submit(self, address: str, authority: None, settings: object, sites: object) -> str:
        self.sites, self.made = sites, self.made + 1
        return str(self.made)

    def to_the_end(self, *_: object) -> tuple[Path | None, str, str]:
        if (failure := next(self.failures)) is None:
            return None, "finished:failed", TRACE
        folder = self.output / f"run-{self.made}"
        folder.mkdir(parents=True)
        (folder / "metrics.json").write_text(json.dumps({"status": "failed", "failure": failure}))
        return folder, "finished:failed" if failure else DONE, TRACE


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def play(*failures: str | None) -> Attempts:
        played = Attempts(tmp_path / "runs", *failures)

        @contextmanager
        def superlink(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
            played.environment = dict(environment)
            yield "unix:nowhere"

        monkeypatch.setattr(simulate, "superlink", superlink)
        monkeypatch.setattr(simulate, "submit", played.submit)
        monkeypatch.setattr(simulate, "to_the_end", played.to_the_end)
        return played

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(simulate, "check_records", lambda settings, sites: [])
    return play


def run(tmp_path: Path, said: list[Any], machine: Machine | None = None) -> Path:
    return simulate.simulate(
        2, {"output-dir": str(tmp_path / "runs")}, machine or Machine(), said.append
    )


@pytest.mark.parametrize("first", [None, f"{DID_NOT_START}: TimeoutError; try again"])
def test_a_ray_that_does_not_start_is_tried_again_and_leaves_no_folder(
    tmp_path: Path, attempts: Any, first: str | None
) -> None:
    attempts(first, "")
    said: list[Any] = []
    folder = run(tmp_path, said)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name] == ["run-2"]
    tried = [event["event"] for event in said if event["event"] != "warning"]
    assert tried == ["Ray did not start, trying again"]


def test_the_last_attempt_leaves_its_folder_and_a_reason_with_what_to_do(
    tmp_path: Path, attempts: Any
) -> None:
    why = f"{DID_NOT_START}: TimeoutError: Timed out; use --engine local"
    played = attempts(why, why, why)
    with pytest.raises(RunError) as error:
        run(tmp_path, [])
    assert played.made == 3
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["run-3"]
    assert (tmp_path / "runs/run-3/flower.log").is_file()
    assert why in str(error.value)


def test_without_a_run_folder_the_error_is_one_line_with_the_cause(
    tmp_path: Path, attempts: Any
) -> None:
    attempts(None, None, None)
    with pytest.raises(RunError) as error:
        run(tmp_path, [])
    (line,) = str(error.value).splitlines()
    assert "TimeoutError: Timed out waiting for file" in line
    assert "--engine local" in line


def test_a_run_that_fails_later_is_not_tried_again(tmp_path: Path, attempts: Any) -> None:
    played = attempts("quorum missed")
    with pytest.raises(RunError, match="quorum missed"):
        run(tmp_path, [])
    assert played.made == 1


def test_fewer_sites_run_at_the_same_time_where_memory_is_short(
    tmp_path: Path, attempts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulate, "fitting_sites", lambda wanted: (1, f"1 of {wanted} sites"))
    played = attempts("")
    said: list[Any] = []
    run(tmp_path, said, Machine(parallel=2))
    assert played.sites["init_args_num_cpus"] == 1
    assert [each["reason"] for each in said if "nothing tells" not in each["reason"]] == [
        "1 of 2 sites"
    ]
