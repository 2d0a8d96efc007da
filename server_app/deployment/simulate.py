"""Run a whole federation on this machine: start Flower's simulation, watch it, read its true
status, stop it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import OWN_CLUSTER, UNIX, prepared_ray
from fedsurrogate.common.flower.interface import CONTROL_OPTION, RUNTIME_OPTION
from fedsurrogate.common.help import without_effect
from fedsurrogate.common.machine import (
    STATE,
    VARIABLE,
    ray_folder,
    usable_cores,
    user_folder,
    warnings_on,
)
from fedsurrogate.common.settings.base import Scalar

from ..control_api import event_now
from ..lifecycle.before_start import (
    DID_NOT_START,
    REMEDY,
    Interrupted,
    check_addresses,
    check_records,
    check_simulation,
    fitting_sites,
    site_folders,
)
from ..lifecycle.ends import complete_interrupted
from .addresses import connect
from .submit import (
    COORDINATOR,
    DONE,
    OnEvent,
    failure,
    flower_environment,
    plain,
    reason,
    stop_process,
    submit,
    to_the_end,
    warn,
)

START_SECONDS = 300.0
ATTEMPTS = 3
# Lines of Flower's log that only say that it ends, after the error that is the cause.
LAST_WORDS = ("RuntimeError: An error was encountered", "RuntimeError: Simulation Runtime crashed")
KILLED = "one of its processes has ended without a word: killed, most likely for lack of memory"


class NotStartedError(RunError):
    """Flower's simulation ended before any request to a site.

    Args:
        text: the message.
        folder: the run folder that says why, if there is one.

    Attributes:
        folder: the same.
    """

    def __init__(self, text: str, folder: Path | None = None) -> None:
        super().__init__(text)
        self.folder = folder


@dataclass(frozen=True)
class Machine:
    """What simulated sites get.

    Attributes:
        parallel: how many run at the same time, 0 for one a core.
        gpus: share of a GPU of each.

    Example:
        >>> Machine(parallel=2).at_once(sites=3), Machine(parallel=8).at_once(sites=3)
        (2, 3)
    """

    parallel: int = 0
    gpus: float = 0.0

    def resources(self, sites: int) -> dict[str, Scalar]:
        """By Flower's names, for this number of sites."""
        # Each site takes one of the cores that Ray believes to have. Flower starts a process a
        # core, and each loads all libraries; more of them than sites would wait for nothing.
        return {
            "num_supernodes": sites,
            "client_resources_num_cpus": 1,
            "client_resources_num_gpus": self.gpus,
            "init_args_num_cpus": self.at_once(sites),
        }

    def at_once(self, sites: int) -> int:
        """How many of these sites run at the same time."""
        return min(self.parallel or usable_cores(), sites)


def simulate(
    sites: int, overrides: Mapping[str, Scalar], machine: Machine, on_event: OnEvent
) -> Path:
    """Run simulated sites.

    The settings, the records and the memory are checked before a process starts. If Ray does not
    start, the simulation is tried again. This happens at times, for reasons unrelated to the run.

    Args:
        sites: their number.
        overrides: settings of the run, flat.
        machine: what the sites get.
        on_event: takes each event of the run.

    Returns:
        The run folder.

    Raises:
        RunError: the run did not finish.
        Interrupted: after the run folder records this.
    """
    config, settings = check_simulation(overrides)
    fit, few = fitting_sites(machine.at_once(sites))
    with site_folders() as warnings:
        warnings = [*warnings, *warnings_on(os.environ, ray_folder(os.environ))]
        unused = without_effect(config.method, config.settings.flat())
        warn(
            [*([few] if few else []), *unused, *warnings, *check_records(settings, sites)], on_event
        )
        check_addresses()
        machine = replace(machine, parallel=fit)
        for _ in range(ATTEMPTS - 1):
            try:
                return _simulate(sites, settings, machine, on_event)
            except NotStartedError as error:
                on_event(event_now("Ray did not start, trying again"))
                if error.folder is not None:
                    # It holds nothing but the reason; that of the last attempt stays.
                    shutil.rmtree(error.folder, ignore_errors=True)
        return _simulate(sites, settings, machine, on_event)


def _simulate(
    sites: int, settings: Mapping[str, Scalar], machine: Machine, on_event: OnEvent
) -> Path:
    """Make one attempt to run the simulation.

    Flower gets its own home folder and ports, so runs on one machine are separate. All processes
    started here are stopped.
    """
    short = ray_folder(os.environ)
    place = (os.environ | short).get(VARIABLE)
    with tempfile.TemporaryDirectory(prefix="fedsurrogate-", dir=place or None) as home:
        environment = (
            flower_environment(Path(home)) | short | prepared_ray(os.environ) | OWN_CLUSTER
        )
        output = Path(str(settings["output-dir"]))
        try:
            with superlink(Path(home), environment) as control:
                run_id = submit(control, None, settings, machine.resources(sites))
                folder, status, log = to_the_end(run_id, output, control, None, on_event)
        except Interrupted as stop:
            # All processes have ended, some perhaps before they could record it.
            if stop.folder is not None:
                complete_interrupted(stop.folder, f"interrupted by {stop}")
            raise
        if folder is None:
            raise NotStartedError(
                f"the simulation ended before it had a run folder: {cause(log)}; {REMEDY}"
            )
        if status == DONE:
            return folder
        (folder / "flower.log").write_text(log, encoding="utf-8")
        why = failure(folder)
        text = f"the run ended as {status}: {why}\nrun folder: {folder}{_site_log()}"
        raise NotStartedError(text, folder) if why.startswith(DID_NOT_START) else RunError(text)


def cause(log: str) -> str:
    """The error in Flower's log that ended a simulation, in one line.

    Args:
        log: The log without its colours.

    Returns:
        A process that the kernel has killed leaves no error; then this says so.

    Example:
        >>> cause("ValueError: no label\\nRuntimeError: Simulation Runtime crashed")
        'ValueError: no label'
    """
    lines = [line.strip() for line in log.splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b: ", line)]
    return next((line for line in errors if not line.startswith(LAST_WORDS)), KILLED).rstrip(".;")


def _site_log() -> str:
    """Where the log of the simulated sites is, as a further line; empty if there is none that
    stays.
    """
    log = user_folder(STATE) / "site.log"
    temporary = log.is_relative_to(tempfile.gettempdir())
    return f"\nlog of the simulated sites: {log}" if log.exists() and not temporary else ""


@contextmanager
def superlink(home: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """A SuperLink with simulation, on sockets of this account, while the block runs.

    Args:
        home: Flower's home folder, which gets its sockets and the log. This account
            alone may open it, and its path is short.
        environment: of the process.

    Yields:
        The address of its Control API.
    """
    control = f"{UNIX}{home / 'control:9093'}"
    addresses = [CONTROL_OPTION, control, RUNTIME_OPTION, f"{UNIX}{home / 'app:9091'}"]
    command = [*COORDINATOR, "superlink", *flower().simulation_flags(), *addresses]
    log = home / "superlink.log"
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _wait_for_api(process, control, log)
        yield control
    finally:
        stop_process(process.pid)


def _wait_for_api(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RunError(f"the SuperLink ended with code {process.returncode}:\n{_end(log)}")
        try:
            connect(address, seconds=1)
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise RunError(
        f"the SuperLink did not open its socket within {START_SECONDS:.0f} s:\n{_end(log)}"
    )


def _end(log: Path) -> str:
    return reason(plain(log.read_text(errors="replace")))
