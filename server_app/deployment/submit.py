"""Submit a run to a SuperLink, watch it, and read its true status."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import files
from pathlib import Path
from typing import Any

import psutil

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import QUIET, quoted_python, without_proxy_here
from fedsurrogate.common.flower.interface import FINISHED
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.lifecycle.ends import final_metrics
from fedsurrogate.server_app.lifecycle.resume import Interrupted
from fedsurrogate.server_app.runs.json_files import PARTS, EventFile

APP_FOLDER = Path(__file__).resolve().parents[2]
# The packages of the app next to `fedsurrogate`, as `fab-include` in pyproject.toml names them.
PACKED = ("common", "client_app", "server_app", "strategies")
# Flower's command, in this interpreter, which looks for no module in the current folder.
FLWR = (
    sys.executable,
    "-P",
    "-c",
    "from fedsurrogate.common.flower import flower as f; f().commands()",
)
# Flower's status of a successful run.
DONE = "finished:completed"
LOOK_SECONDS = 60.0
# How long a run may take to get its final status after the end of its log.
STATUS_SECONDS = 20.0
NOT_STARTED = (
    "the SuperLink has not started the run; check that it starts apps itself, or that `coordinator app` runs, and "
    "that no other run is active"
)
OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Reached:
    """How Flower's commands reach a SuperLink.

    Attributes:
        name: Of the SuperLink in Flower's configuration.
        environment: Of Flower's commands.
        status: Flower's current status of the run of an id, "unknown" if there is none; None: Flower's
            own command is started for it.
    """

    name: str
    environment: Mapping[str, str]
    status: Callable[[str], str] | None = None

    def asked(self, run_id: str) -> str:
        """Flower's current status of a run."""
        if self.status is not None:
            return self.status(run_id)
        command = [*FLWR, "list", self.name, "--run-id", run_id, "--format", "json"]
        done = subprocess.run(
            command, capture_output=True, text=True, env=self.environment, check=False
        )
        match = re.search(r'"status":\s*"([a-z:]+)"', done.stdout)
        return match.group(1) if match else "unknown"


def submit(
    superlink: Reached,
    overrides: Mapping[str, Scalar],
    output: Path,
    log: Path,
    on_event: OnEvent,
    resources: str = "",
) -> tuple[Path | None, str]:
    """Run this app on a SuperLink.

    Args:
        superlink: on which it runs.
        overrides: settings of the run, flat.
        output: folder in which the coordinator's app makes the run folder.
        log: file for Flower's output.
        on_event: takes each event of the run.
        resources: of a simulation, as Flower's `--federation-config`.

    Returns:
        The run folder, None if none appears in `output`; and Flower's status.
    """
    options = ["--federation-config", resources] if resources else []
    # JSON writes strings, numbers and booleans as TOML does.
    options += [
        "--run-config",
        " ".join(
            f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in overrides.items()
        ),
    ]
    with app_folder() as app, log.open("w") as stream:
        command = [*FLWR, "run", str(app), superlink.name, "--stream", *options]
        # In its own session: Ctrl-C in a terminal then reaches only this process, which ends the
        # others in order.
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=superlink.environment,
            start_new_session=True,
        )
        try:
            folder = _follow(
                process,
                log,
                output,
                on_event,
                lambda: superlink.asked(run_id_in(log)) == "pending",
            )
        except Interrupted as stop:
            stop.folder = find_folder(output, run_id_in(log))
            raise
        finally:
            stop_process(process.pid)
    return folder, _status(run_id_in(log), superlink)


def remark(remarks: Sequence[str], on_event: OnEvent) -> None:
    """Report remarks about a run that has not started, as events.

    Args:
        remarks: one sentence each.
        on_event: takes each event.
    """
    for each in remarks:
        on_event(
            {"time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}", "event": "remark", "reason": each}
        )


@contextmanager
def app_folder() -> Iterator[Path]:
    """The folder that `flwr run` packs: the checkout, or a temporary one that is put together from
    the installed wheel.

    A wheel has the packages in the folder `fedsurrogate` of site-packages, and pyproject.toml, which
    names the app, among its data files.

    Yields:
        The folder.

    Raises:
        RunError: pyproject.toml is missing.
    """
    if (APP_FOLDER / "pyproject.toml").is_file() and (
        APP_FOLDER / "server_app" / "app.py"
    ).is_file():
        yield APP_FOLDER
        return
    # `pip install --target` puts the data files into the folder of the packages, and records
    # another place for them.
    installed = files("fedsurrogate") or ()
    recorded = [
        Path(str(file.locate())).parent
        for file in installed
        if "share/fedsurrogate/" in file.as_posix()
    ]
    folders = (
        each
        for each in (*recorded, APP_FOLDER.parent / "share" / "fedsurrogate")
        if (each / "pyproject.toml").is_file()
    )
    data = next(folders, None)
    if data is None:
        raise RunError(
            f"pyproject.toml of this app is neither in {APP_FOLDER} nor among the installed files; "
            "install the package again"
        )
    with tempfile.TemporaryDirectory() as folder:
        # Flower takes the folder's name as the app's name, where it allows no underscore; random
        # names may hold one.
        app = Path(folder) / "fedsurrogate"
        shutil.copytree(data, app)
        for package in PACKED:
            shutil.copytree(
                APP_FOLDER / package, app / package, ignore=shutil.ignore_patterns("__pycache__")
            )
        (app / "fedsurrogate").mkdir()
        for file in APP_FOLDER.glob("*.py"):
            shutil.copy(file, app / "fedsurrogate")
        yield app


def flower_environment(home: Path) -> dict[str, str]:
    """Environment of Flower's commands: their own home folder, little output, and this Python's
    scripts first.
    """
    variables = (
        os.environ
        | QUIET
        | without_proxy_here(os.environ)
        | quoted_python(sys.executable, os.environ)
    )
    return variables | {
        "FLWR_HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }


def _follow(
    process: subprocess.Popen[bytes],
    log: Path,
    output: Path,
    on_event: OnEvent,
    pending: Callable[[], bool],
) -> Path | None:
    """Pass the run's events to `on_event` until Flower's log stream ends. Return the run folder, or
    None.

    Flower may start a run late and prints nothing until then. So `pending` is called at intervals,
    to report the wait.
    """
    events: EventFile | None = None
    look = time.monotonic() + LOOK_SECONDS
    while True:
        ended = process.poll() is not None
        if events is None and (folder := find_folder(output, run_id_in(log))) is not None:
            events = EventFile(folder / PARTS[2])
        for event in events.read() if events is not None else ():
            on_event(event)
        if events is None and not ended and time.monotonic() > look:
            look = time.monotonic() + LOOK_SECONDS
            if pending():
                on_event(
                    {
                        "time": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S}",
                        "event": "waiting",
                        "reason": NOT_STARTED,
                    }
                )
        if ended:
            return events.path.parent if events is not None else None
        time.sleep(0.3)


def find_folder(output: Path, run_id: str) -> Path | None:
    """The run folder of Flower's run of this id.

    Args:
        output: folder of all runs.
        run_id: Flower's, as text; empty if it is not known yet.

    Returns:
        The folder; None if there is none yet.
    """
    for manifest in output.glob("*/manifest.json") if run_id else ():
        try:
            if json.loads(manifest.read_text()).get("flower_run_id") == run_id:
                return manifest.parent
        except (OSError, ValueError):
            continue
    return None


def run_id_in(log: Path) -> str:
    """Flower's id of the run that this log is of; empty if it has not started one."""
    match = re.search(r"Successfully started run (\d+)", log.read_text(errors="replace"))
    return match.group(1) if match else ""


def _status(run_id: str, superlink: Reached) -> str:
    """Flower's final status of the run; it is needed because `flwr run --stream` always exits with
    0.
    """
    if not run_id:
        return "not started"
    end = time.monotonic() + STATUS_SECONDS
    while not (status := superlink.asked(run_id)).startswith(FINISHED):
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    return status


def stop_run(log: Path, name: str, environment: Mapping[str, str]) -> None:
    """Stop the run of a log at its SuperLink; no effect if there is none, or it has ended.

    Args:
        log: Flower's output.
        name: of the SuperLink in Flower's configuration.
        environment: of Flower's commands.
    """
    if run_id := run_id_in(log):
        command = [*FLWR, "stop", run_id, name]
        subprocess.run(
            command, capture_output=True, env=environment, check=False, start_new_session=True
        )


def failure(folder: Path) -> str:
    """The recorded reason why a run failed."""
    return str(
        final_metrics(folder).get("failure")
        or "its app has recorded no reason yet; see events.jsonl"
    )


def plain(log: Path) -> str:
    """Flower's log without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))


def reason(log: Path) -> str:
    """The last lines of Flower's log."""
    return "\n".join(plain(log).splitlines()[-15:])


def stop_process(pid: int) -> None:
    """End a process and its children by id: with SIGTERM, then with SIGKILL."""
    try:
        parent = psutil.Process(pid)
        family = [*parent.children(recursive=True), parent]
    except psutil.NoSuchProcess:
        return
    for end in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            try:
                end(process)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=5)
