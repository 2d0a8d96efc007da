"""Submit a run to a SuperLink; the app that it brings, and the ends of processes."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import files
from pathlib import Path
from typing import Any

import psutil

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET, quoted_python, without_proxy_here
from fedsurrogate.common.flower.interface import FINISHED
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.control_api.following import (
    Handle,
    event_now,
    find_folder,
    follow_run,
)
from fedsurrogate.server_app.control_api.runs import UNKNOWN, status_of
from fedsurrogate.server_app.lifecycle.ends import final_metrics
from fedsurrogate.server_app.lifecycle.resume import Interrupted

APP_FOLDER = Path(__file__).resolve().parents[2]
# The packages of the app next to `fedsurrogate`, as `fab-include` in pyproject.toml names them.
PACKED = ("common", "client_app", "server_app", "strategies")
# Flower's status of a successful run.
DONE = "finished:completed"
OnEvent = Callable[[dict[str, Any]], None]


def submit(
    address: str,
    authority: Path | None,
    settings: Mapping[str, Scalar],
    sites: Mapping[str, Scalar] | None = None,
) -> str:
    """Submit a run of this app to a SuperLink.

    Args:
        address: of the Control API, unix:/path or host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        settings: of the run, flat.
        sites: of a simulation, and what they get, by Flower's names.

    Returns:
        Flower's number of the run.

    Raises:
        RunError: the SuperLink does not answer, or refuses the run.
    """
    with folder_to_pack() as app, flower().control(address, authority) as control:
        return control.start(app, settings, sites or {})


def to_the_end(
    run_id: str, output: Path, address: str, authority: Path | None, on_event: OnEvent
) -> tuple[Path | None, str, str]:
    """Follow a run that was submitted until it, and the process of its app, have ended.

    Args:
        run_id: Flower's number.
        output: folder in which the coordinator's app makes the run folder.
        address: as for `submit`.
        authority: as for `submit`.
        on_event: takes each event of the run.

    Returns:
        The run folder, None if none appears in `output`; Flower's status, "unknown" where the
        SuperLink does not answer; and the end of what the app has written.
    """
    log = ""
    try:
        folder = follow_run(Handle(run_id, None), output, address, authority, on_event)
        while not (status := status_of(run_id, address, authority)).startswith((FINISHED, UNKNOWN)):
            time.sleep(0.2)
        with suppress(RunError), flower().control(address, authority) as control:
            log = plain(control.log(run_id))
    except Interrupted as stop:
        stop.folder = find_folder(output, run_id)
        raise
    return folder, status, log


def remark(remarks: Sequence[str], on_event: OnEvent) -> None:
    """Report remarks about a run that has not started, as events.

    Args:
        remarks: one sentence each.
        on_event: takes each event.
    """
    for each in remarks:
        on_event(event_now("remark", each))


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
    if all((APP_FOLDER / each).is_file() for each in ("pyproject.toml", "server_app/app.py")):
        yield APP_FOLDER
        return
    # `pip install --target` puts the data files into the folder of the packages, and records
    # another place for them.
    recorded = [
        Path(str(file.locate())).parent
        for file in files("fedsurrogate") or ()
        if "share/fedsurrogate/" in file.as_posix()
    ]
    folders = (*recorded, APP_FOLDER.parent / "share" / "fedsurrogate")
    data = next((each for each in folders if (each / "pyproject.toml").is_file()), None)
    if data is None:
        raise RunError(
            f"pyproject.toml of this app is neither in {APP_FOLDER} nor among the installed files; "
            "install the package again"
        )
    with _put_together(data, APP_FOLDER) as app:
        yield app


@contextmanager
def folder_to_pack() -> Iterator[Path]:
    """As `app_folder`, with nothing but what is packed: Flower looks at every file of a folder, and an
    environment in a checkout has a hundred thousand.
    """
    with app_folder() as app:
        if app != APP_FOLDER:
            yield app
            return
        with _put_together(app, app / "fedsurrogate") as copy:
            yield copy


@contextmanager
def _put_together(data: Path, own: Path) -> Iterator[Path]:
    """A temporary folder of the app. data: folder of its three other files; own: of `fedsurrogate`."""
    with tempfile.TemporaryDirectory() as folder:
        # Flower takes the folder's name as the app's name, where it allows no underscore; random
        # names may hold one.
        app, compiled = Path(folder) / "fedsurrogate", shutil.ignore_patterns("__pycache__")
        (app / "fedsurrogate").mkdir(parents=True)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(data / name, app)
        for package in PACKED:
            shutil.copytree(APP_FOLDER / package, app / package, ignore=compiled)
        for file in own.glob("*.py"):
            shutil.copy(file, app / "fedsurrogate")
        yield app


def flower_environment(home: Path) -> dict[str, str]:
    """Environment of Flower's commands: their own home folder, little output, and this Python's
    scripts first.
    """
    variables = os.environ | QUIET | without_proxy_here(os.environ)
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    quoted = quoted_python(sys.executable, os.environ)
    return variables | quoted | {"FLWR_HOME": str(home), "PATH": programs}


def failure(folder: Path) -> str:
    """The recorded reason why a run failed."""
    return str(
        final_metrics(folder).get("failure")
        or "its app has recorded no reason yet; see events.jsonl"
    )


def plain(log: str) -> str:
    """Flower's log without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", log)


def reason(log: str) -> str:
    """The last lines of a log without colours."""
    return "\n".join(log.splitlines()[-15:])


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
