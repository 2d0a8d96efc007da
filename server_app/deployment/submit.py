"""Submit a run to a SuperLink, follow it, and end processes; run a whole federation in Flower's simulation on
this machine; the installed app that runs, whatever a run brings.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import files
from pathlib import Path
from typing import Any

import psutil

from fedsurrogate.common.errors import ConfigError, FedSurrogateError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import (
    OWN_CLUSTER,
    QUIET,
    UNIX,
    prepared_ray,
    quoted_python,
    without_proxy_here,
)
from fedsurrogate.common.flower.interface import CONTROL_OPTION, FINISHED, RUNTIME_OPTION
from fedsurrogate.common.help import without_effect
from fedsurrogate.common.logs import configure_log
from fedsurrogate.common.machine import (
    STATE,
    VARIABLE,
    ray_folder,
    usable_cores,
    user_folder,
    warnings_on,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import read_setting
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.version import own_version

from ..control_api import (
    END_SECONDS,
    UNKNOWN,
    Handle,
    event_now,
    find_folder,
    find_handle,
    follow_run,
    status_of,
)
from ..control_api import stop as stop_at_superlink
from ..lifecycle.before_start import (
    DID_NOT_START,
    REMEDY,
    Interrupted,
    can_continue,
    check_addresses,
    check_records,
    check_simulation,
    continuation,
    fitting_sites,
    site_folders,
)
from ..lifecycle.ends import await_end, complete_interrupted, final_metrics
from .addresses import connect, is_here
from .audit_log import note

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


def warn(warnings: Sequence[str], on_event: OnEvent) -> None:
    """Report warnings about a run that has not started, as events.

    Args:
        warnings: one sentence each.
        on_event: takes each event.
    """
    for each in warnings:
        on_event(event_now("warning", each))


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


STOPPED = "stopped with `coordinator stop`"


def check_connection(address: str, authority: Path | None) -> None:
    """Check an address and its certificate, without connecting.

    Args:
        address: of the Control API.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Raises:
        ConfigError: `address` is no address, or the file `authority` does not exist.
    """
    if not re.fullmatch(rf"({UNIX}/[^\s\"\\]+|[^/\s\"\\]+):\d+", address):
        raise ConfigError(f"--control {address!r}: must be {UNIX}/path:NUMBER, or HOST:PORT")
    if authority is not None and not authority.is_file():
        raise ConfigError(f"--root-certificates {str(authority)!r}: the file does not exist")


def _check_listening(address: str) -> None:
    """Raise RunError if an address of this machine has no listener. A proxy may lie before others."""
    try:
        if is_here(address):
            connect(address, seconds=5)
    except OSError as error:
        what = (
            f"--control {address!r}: no SuperLink listens there ({error.strerror or 'no answer'})"
        )
        raise RunError(f"{what}; start one with `coordinator superlink`, or name another") from None


def run(
    overrides: Mapping[str, Scalar],
    output: Path,
    address: str,
    authority: Path | None,
    on_event: OnEvent,
) -> Path | None:
    """Run a federation with the connected sites to its end.

    Args:
        overrides: settings of the run, flat.
        output: folder in which the coordinator's app makes the run folder.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the coordinator's app writes it on another machine.

    Raises:
        RunError: the run did not finish.
    """
    check_connection(address, authority)
    _check_listening(address)
    credentials = None if authority is None else authority.parent
    note(credentials, "start", facts_of_run(overrides))
    try:
        run_id = submit(address, authority, overrides)
    except RunError:
        note(credentials, "end", {"run": "", "status": "not started"})
        raise
    try:
        folder, status, log = to_the_end(run_id, output, address, authority, on_event)
    except Interrupted as stop:
        if stop.terminal_is_lost:
            # `coordinator watch` continues to watch it.
            raise
        # Otherwise the run would continue at the SuperLink without anyone who watches it.
        with suppress(RunError):
            stop_at_superlink(run_id, address, authority)
        if stop.folder is not None:
            complete_interrupted(stop.folder, f"interrupted by {stop}", END_SECONDS)
        note(credentials, "end", {"run": _name(stop.folder), "status": "interrupted"})
        raise
    if status == UNKNOWN and folder is not None and succeeded(folder):
        # The SuperLink has gone meanwhile.
        status = DONE
    note(credentials, "end", {"run": _name(folder), "status": status})
    if status != DONE:
        if folder is not None:
            (folder / "flower.log").write_text(log, encoding="utf-8")
            raise ended(folder, status, options_of(address, authority))
        raise RunError(f"the run ended as {status}: {reason(log)}")
    return folder


def facts_of_run(overrides: Mapping[str, Scalar]) -> dict[str, object]:
    """What the audit log says of a run: its settings, and its digest by which sites know it.

    Args:
        overrides: its settings, flat.
    """
    shown = {key: value for key, value in overrides.items() if key != "approval"}
    run = parse_run(overrides)
    proposal = run.settings.approval
    allowed = read_setting(proposal).proposal.id if proposal else ""
    return {"digest": run.full_digest, "proposal": allowed, "settings": shown}


def _name(folder: Path | None) -> str:
    return "" if folder is None else folder.name


def attach(
    run: str, output: Path, address: str, authority: Path | None, on_event: OnEvent
) -> Path | None:
    """Follow a run that was started before to its end.

    Args:
        run: as for `find_handle`.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the coordinator's app writes it on another machine.

    Raises:
        RunError: the run did not finish.
    """
    check_connection(address, authority)
    handle = find_handle(run, output)
    folder = follow_run(handle, output, address, authority, on_event)
    if folder is None and (status := status_of(handle.id, address, authority)) != DONE:
        raise RunError(
            f"run {handle.id} ended as {status}; its folder is on the machine of the coordinator's "
            "app"
        )
    if folder is not None and not succeeded(folder):
        raise ended(folder, "failed", options_of(address, authority))
    return folder


def options_of(address: str, authority: Path | None) -> list[str]:
    """The options of a command that name a SuperLink.

    Args:
        address: of the Control API.
        authority: as for `check_connection`.
    """
    trust = [] if authority is None else ["--root-certificates", str(authority.absolute())]
    return ["--control", address, *trust]


def registration(folder: Path, address: str, authority: Path | None) -> str:
    """The command that registers the keys of sites with a SuperLink, for a shell.

    Args:
        folder: of `coordinator sites certs`.
        address: of the Control API.
        authority: as for `check_connection`.
    """
    words = ["coordinator", "sites", "register", str(folder.absolute())]
    return shlex.join([*words, *options_of(address, authority)])


def stop(run: str, output: Path, address: str, authority: Path | None) -> Handle:
    """Stop a run at its SuperLink, and record it in its folder.

    Args:
        run: as for `find_handle`.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.

    Returns:
        The run.

    Raises:
        RunError: it has ended, or the SuperLink did not stop it.
    """
    check_connection(address, authority)
    handle = find_handle(run, output)
    if handle.folder is not None and (status := final_metrics(handle.folder).get("status")) not in (
        None,
        "running",
    ):
        raise RunError(
            f"{handle.folder} has ended as {status}; name a newer run that has no folder yet by "
            "its number in `coordinator runs`, else there is nothing to stop"
        )
    if not handle.id:
        raise RunError(
            f"{handle.folder} does not name Flower's number of the run; give it, `coordinator "
            "runs` lists it"
        )
    facts = {"run": _name(handle.folder), "flower_run": handle.id}
    note(None if authority is None else authority.parent, "stop", facts)
    if not stop_at_superlink(handle.id, address, authority):
        raise RunError(
            f"the SuperLink at {address} did not stop run {handle.id}; `coordinator runs` shows "
            "its state"
        )
    if handle.folder is not None:
        complete_interrupted(handle.folder, STOPPED, END_SECONDS)
    return handle


def succeeded(folder: Path) -> bool:
    """Whether a run that has ended was successful."""
    return final_metrics(folder).get("status") == "ok"


def ended(folder: Path, status: str, link: Sequence[str] = ()) -> RunError:
    """The error of a run without success: how it ended, why, and what to do.

    Args:
        folder: the run folder.
        status: Flower's.
        link: options that name the SuperLink, for the command that continues the run.

    Returns:
        The error, to be raised.
    """
    # Flower reports the end of an app that it has ended before that app records why.
    await_end(folder, END_SECONDS)
    own = final_metrics(folder).get("status")
    interrupted = own == "interrupted"
    # A SuperLink may list a run as running whose app has ended.
    known = status if status.startswith(FINISHED) else own or "unfinished"
    how = "was interrupted" if interrupted else f"ended as {known}"
    lines = [f"the run {how}: {failure(folder)}", f"run folder: {folder}"]
    if interrupted or can_continue(folder):
        lines.append(continuation(folder, link))
    return RunError("\n".join(filter(None, lines)))


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


# This interpreter, which looks for no module in the current folder.
PYTHON = (sys.executable, "-P", "-m")
TASK = (*PYTHON, __name__)
COORDINATOR = (*PYTHON, "fedsurrogate.server_app.cli.main")


def serve(runtime: str, parent: int | None = None) -> None:
    """Start the installed app for every run of a SuperLink. Does not return.

    Args:
        runtime: Address of the SuperLink's API for its apps: unix:/path.
        parent: Id of the process with which this one ends; None: it ends by itself.
    """
    os.environ.update(QUIET | dict(os.environ) | without_proxy_here(os.environ))
    configure_log(os.environ)
    flower().coordinator_apps(runtime, TASK, parent)


def admission(
    audited: bool, credentials: Path | None
) -> Callable[[str, Mapping[str, Scalar]], None]:
    """What a SuperLink asks before it stores a run.

    Args:
        audited: Whether the audit log gets a line.
        credentials: As for `audit_file`.

    Returns:
        A function of the SHA-256 of the run's bundle and of its settings. It raises RunError for
        another app than the installed one, or where the line cannot be written.
    """

    def admit(digest: str, settings: Mapping[str, Scalar]) -> None:
        with folder_to_pack() as folder:
            if digest != flower().packed_digest(folder):
                raise RunError(
                    "the run brings another app than the app that is installed with this SuperLink, "
                    f"version {own_version()}; submit it with `coordinator run` of that installation"
                )
        if audited:
            note(credentials, "submit", _facts(settings))

    return admit


def _facts(settings: Mapping[str, Scalar]) -> dict[str, object]:
    """As `facts_of_run`; a run whose settings cannot work fails later, with the reason in its folder."""
    try:
        return facts_of_run(settings)
    except FedSurrogateError:
        return {"digest": "", "proposal": "", "settings": dict(settings)}


if __name__ == "__main__":
    with app_folder() as installed:
        flower().coordinator_task(installed)
