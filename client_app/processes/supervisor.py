"""Supervisor of a site's processes: its SuperNode, which starts no code, and the app installed here,
where that is not in a container of its own.

Flower sends an app's code with every run, and a SuperNode without `--isolation process` starts it.
The supervisor always sets this flag; the user cannot omit it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fedsurrogate.common.command_line import handling
from fedsurrogate.common.errors import LOG, ConfigError, RunError
from fedsurrogate.common.escapes import for_terminal, human_seconds
from fedsurrogate.common.files import owner_only
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET, UNIX, without_proxy_here

from ..diagnostics.connection_checks import Finding
from .app_report import ask
from .node_process import look_at_link
from .own_account import SETTINGS, TASK_NAME, end_with_parent, own_socket, unseen

if TYPE_CHECKING:
    from ..node_config import NodeConfig


# Seconds between the end of a process and its next start; doubled each time it ends soon after its
# start.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
# Seconds of a pause that a person is told of.
SLEPT = 60.0
AWAKE_OR_NOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
# A process that ends within these seconds has ended soon after its start.
STEADY = 60.0
LONGEST_LINE, LAST_LINES = 2**16, 5
# Colours and the like, which Flower writes into its log.
_SEQUENCE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Child:
    """Runs a process again and again, with a growing pause between ends and starts.

    Not for use by several threads.

    Args:
        name: is printed before its lines.

    Attributes:
        last: the last few lines.
        soon_ended: number of the last processes in a row that ended within `STEADY` seconds.
    """

    def __init__(self, name: str) -> None:
        self.name, self.soon_ended = name, 0
        self.last: deque[str] = deque(maxlen=LAST_LINES)
        self._process: subprocess.Popen[bytes] | None = None
        self._orphans: list[psutil.Process] = []
        self._started = self._next_start = 0.0
        self._pause, self._unfinished = FIRST_PAUSE, b""
        # One pipe for all processes: an orphan may still write when the next process has started.
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        """File descriptor that becomes readable when the process has written something."""
        return self._read

    @property
    def running(self) -> bool:
        """Whether a process was started whose end has not been reported yet."""
        return self._process is not None

    @property
    def due(self) -> bool:
        """Whether it is time to start the next process."""
        return self._process is None and time.monotonic() >= self._next_start

    def start(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a process.

        Args:
            command: program and arguments.
            environment: its variables.

        Raises:
            OSError: if the program does not exist.
        """
        self._started = time.monotonic()
        self.last.clear()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._write,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal then reaches only this process, which ends the others in order.
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )

    def ended(self) -> int | None:
        """The exit code if the process has ended since the last call, otherwise None."""
        if self._process is None or (code := self._process.poll()) is None:
            return None
        self._orphans += _group(self._process.pid)
        self._process = None
        soon = time.monotonic() - self._started < STEADY
        self.soon_ended = self.soon_ended + 1 if soon else 0
        if not soon:
            self._pause = FIRST_PAUSE
        self.postpone()
        return code

    def postpone(self, seconds: float = 0.0) -> float:
        """Postpone the next start by so long, or longer each time; return the pause in seconds."""
        pause, self._pause = seconds or self._pause, min(2 * self._pause, LONGEST_PAUSE)
        self._next_start = time.monotonic() + pause
        return pause

    def lines(self) -> list[str]:
        """Complete lines written since the last call, safe to print, without empty ones."""
        text = self._unfinished
        with suppress(BlockingIOError):
            while len(text) < LONGEST_LINE and (piece := os.read(self._read, LONGEST_LINE)):
                text += piece
        *whole, self._unfinished = text.split(b"\n")
        if len(self._unfinished) >= LONGEST_LINE:
            whole, self._unfinished = [*whole, self._unfinished], b""
        # A line may quote text that arrived with a run.
        texts = (_SEQUENCE.sub("", line.decode(errors="replace")) for line in whole)
        printable = (for_terminal(text).rstrip() for text in texts)
        complete = [line for line in printable if line]
        self.last.extend(complete)
        return complete

    def family(self) -> list[psutil.Process]:
        """All processes that still run: this one, its children, and orphans of earlier ones."""
        self._orphans = [orphan for orphan in self._orphans if _alive(orphan)]
        return self._orphans + (_group(self._process.pid) if self._process is not None else [])

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the whole family, process by process."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _group(leader: int) -> list[psutil.Process]:
    """Running processes of the group whose leader is `leader`."""
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if os.getpgid(process.pid) == leader and _alive(process):
                processes.append(process)
    return processes


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


# Seconds from a reason not to join to the app's end, after which its container starts it again.
PAUSE = 30.0
DATA_SECONDS, SAY_SECONDS = 0.5, 600.0
WAITS = (
    "this site stays away: its app does not run yet, or has not found as many records as the policy's "
    "smallest-site asks for; the app's log names the reason"
)


def found_data(runtime: str, node: NodeConfig, pause: float = PAUSE) -> bool:
    """Whether the site's data are there, so that its SuperNode may join.

    A SuperNode that has joined is served in any case: without data by noise, as if the folder had
    become empty while the app ran.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings.
        pause: seconds before an error is raised.

    Returns:
        False for a site that has joined and lacks data now.

    Raises:
        RunError: the site lacks data, and has not joined.
    """
    try:
        looked_at(node)
    except Exception as error:
        if _listens(runtime):
            LOG.error("%s; this site has joined, and answers as one without records", error)
            return False
        print(f"this site does not join: {error}; next look in {pause:g} s", flush=True)
        time.sleep(pause)
        raise RunError(str(error)) from None
    return True


def looked_at(node: NodeConfig) -> list[str]:
    """Take a first look at a site's data, in a process of its own: the caller, which waits for tasks,
    does not load torch for it.

    Args:
        node: the site's settings.

    Returns:
        Warnings.

    Raises:
        DataError, PackageError: the data cannot be used, or are fewer than the policy asks for.
    """
    if node.data == "digits":
        return []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as process:
        return process.submit(_look, node).result()


def _look(node: NodeConfig) -> list[str]:
    from ..diagnostics.first_look import first_look
    from ..governance.policy import policy_of

    policy = policy_of(node)
    warnings = first_look(node, policy.smallest_site)
    return [*warnings, policy.irrevocable] if policy.irrevocable else warnings


def await_data(runtime: str) -> None:
    """Wait until the app of this site has found the site's data; print what is waited for."""
    next_line = time.monotonic()
    while check_data(runtime).state == "FAIL":
        if time.monotonic() >= next_line:
            print(WAITS, flush=True)
            next_line += SAY_SECONDS
        time.sleep(DATA_SECONDS)


def check_data(runtime: str) -> Finding:
    """Whether the app of this site runs and has found the site's data, as its SuperNode sees it."""
    report = ask(runtime)
    if report is not None and report.found_data:
        return Finding("data", "PASS", "the app runs, and found this site's data when it started")
    return Finding(
        "data", "FAIL", WAITS, "mount or fill the folder of data, or lower smallest-site"
    )


def _listens(runtime: str) -> bool:
    """Whether a SuperNode has this socket open; a killed one leaves the file."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.settimeout(5)
        probe.connect(runtime.removeprefix(UNIX))
        return True
    return False


NODE_MODULE = "fedsurrogate.client_app.processes.node_process"
LINK_OPTIONS = ("--superlink", "--root-certificates", "--auth-supernode-private-key")
TWIN = (
    "the coordinator knows this site's key, but a node with this key is connected already; stop the "
    "other one, or wait a minute if it has just ended; each machine needs a kit of its own"
)
# Number of early ends of a process after which a site that was never connected gives up.
ATTEMPTS = 3
# Number of refusals of key or certificate in a row after which a site that was never connected
# gives up.
REFUSALS = 2
# Waiting times at the end: for the app's reply, for the reply to be sent, for the SuperNode to end.
ANSWER_SECONDS, SEND_SECONDS, END_SECONDS = 60.0, 15.0, 15.0
# Name of the supervisor, before its lines.
OWN = "join"
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Commands:
    """Commands of a site's processes.

    Attributes:
        node: the SuperNode's, and variables of its environment.
        app: the app's, likewise; None: it runs in a container of its own.
        look: checks the connection.
    """

    node: tuple[Sequence[str], Mapping[str, str]]
    app: tuple[Sequence[str], Mapping[str, str]] | None
    look: Callable[[], Sequence[Finding]]


def site_commands(
    runtime: str, node_config: str, superlink: str, authority: Path | None, key: Path | None
) -> Commands:
    """The commands of a site, which every user of its machine may read, and their variables, which
    only this account may read.

    Args:
        runtime: unix:/path of the socket between SuperNode and app.
        node_config: the site's settings, as one text; for its app alone.
        superlink: host:port.
        authority: ca.crt; None without TLS.
        key: file of the site's private key; None without one.

    Raises:
        ConfigError: for a program that is not installed.
    """
    trust = [] if authority is None else ["--root-certificates", str(authority.expanduser())]
    if key is not None:
        trust += ["--auth-supernode-private-key", str(key.expanduser())]
    link = ["--superlink", superlink, *trust]
    of_node = _node([runtime, *link, *(["--insecure"] if authority is None else [])])
    of_app = unseen(["--runtime", runtime, "--joined"]) | {SETTINGS: node_config}
    return Commands(of_node, ([_installed("site"), "app"], of_app), lambda: look_at_link(link))


def _node(arguments: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
    # -P: files of the folder from which the site joins are no modules.
    command = [sys.executable, "-P", "-m", NODE_MODULE]
    return command, unseen(arguments) | {SETTINGS: ""}


# Its socket, too, is for this account alone.
@owner_only()
def serve_node(runtime: str, arguments: Sequence[str], retry: float = 0.0) -> None:
    """Run a SuperNode whose app is in a container of its own, once that has found the site's data,
    until a signal ends it.

    Args:
        runtime: Address of its Runtime API: unix:/path of a socket, which only this user may open.
        arguments: All others of `flower-supernode`.
        retry: Seconds after which a SuperNode that ended by an error is started again, as for a
            site whose key is not registered yet; 0: never.

    Raises:
        RunError: The SuperNode ended by an error and is not started again.
        ConfigError: `runtime` is a port, where Flower's API asks for no authentication, or a socket that
            others could replace.
    """
    runtime = own_socket(runtime)
    await_data(runtime)
    pairs = pairwise([*arguments, ""])
    link = [word for pair in pairs if pair[0] in LINK_OPTIONS for word in pair]
    commands = Commands(_node([runtime, *arguments]), None, lambda: look_at_link(link))

    def show(name: str, line: str) -> None:
        print(line, file=sys.stderr if name == OWN else sys.stdout, flush=True)

    Supervisor(commands, show, retry).run()


def _installed(name: str) -> str:
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        raise ConfigError(
            f"{program} does not exist; install fedsurrogate and its dependencies in this "
            "environment"
        )
    return str(program)


class Supervisor:
    """Starts the processes of a site, restarts them, and ends them in order.

    Args:
        commands: of the processes.
        show: prints a line of a named process.
        retry: without an app, seconds after which a SuperNode that has ended is started again; 0:
            never.
    """

    def __init__(
        self, commands: Commands, show: Callable[[str, str], None], retry: float = 0.0
    ) -> None:
        self._commands, self._show, self._retry = commands, show, retry
        self._environment = (
            os.environ
            | QUIET
            | without_proxy_here(os.environ)
            | {"FLWR_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}
        )
        self._node, self._app = Child("node"), Child("app")
        self._log = flower().supernode_log
        self._warnings: list[Finding] = []
        self._listens = self._was_connected = self._works = self._looks = self._barred = False
        # Another node with this site's key is connected.
        self._waits = False
        self._refusals = self._signals = 0

    def run(self) -> None:
        """Run until a signal ends the site. Raises RunError, which says what to do, if the site
        cannot join.
        """
        with handling(ENDS, self._end_requested):
            try:
                while not self._signals:
                    self._tend_node()
                    self._tend_app()
                    self._listen()
            except _EndRequestedError:
                pass
            finally:
                self._end()

    def _tend_node(self) -> None:
        if (code := self._node.ended()) is not None:
            self._listen()
            self._listens = self._works = False
            if self._commands.app is None:
                self._say_why()
            elif self._barred:
                self._waits = True
                self._say(f"{TWIN}; next attempt in {self._node.postpone():g} s")
            elif self._node.soon_ended >= ATTEMPTS and not self._was_connected:
                raise RunError(self._why_not())
            else:
                self._say(f"the SuperNode has ended with exit code {code}; it is started again")
        if self._node.due and (self._commands.app is None or self._reachable()):
            self._barred = False
            self._start(self._node, *self._commands.node)

    def _say_why(self) -> None:
        """Say why a SuperNode without an app has ended: what is wrong with its connection now, and what
        to do. Raises RunError if it is not started again.
        """
        findings = self._look()
        failed = next((each for each in findings if each.state == "FAIL"), None)
        if failed is not None:
            why = f"{failed.what}: {failed.found}; {failed.remedy}"
        elif self._barred:
            why = TWIN
        else:
            state = "is good" if findings else "could not be checked"
            why = f"its connection {state}; its log names the cause"
        if not self._retry:
            raise RunError(f"the SuperNode has ended: {why}")
        self._node.postpone(self._retry)
        self._say(f"the SuperNode has ended: {why}; it is started again in {self._retry:g} s")

    def _tend_app(self) -> None:
        if self._commands.app is None:
            return
        if (code := self._app.ended()) is not None:
            # Without a SuperNode the app ends too.
            given_up = self._app.soon_ended >= ATTEMPTS and not self._waits
            if given_up and not self._was_connected:
                raise RunError(f"`site app` does not start; it wrote:\n{_written(self._app)}")
            if not self._waits:
                self._say(f"the app has ended with exit code {code}; it is started again")
        if self._app.due and self._listens:
            self._start(self._app, *self._commands.app)

    def _start(self, child: Child, command: Sequence[str], variables: Mapping[str, str]) -> None:
        child.start(command, {**self._environment, **variables})

    def _reachable(self) -> bool:
        """Whether this site can reach the coordinator. Raises RunError for an error that only a
        person can correct.
        """
        findings = self._look()
        failed = next((each for each in findings if each.state == "FAIL"), None)
        warnings = [each for each in findings if each.state != "PASS"]
        for each in warnings:
            if each not in self._warnings:
                self._say(f"{each.state} {each.what}: {each.found}")
                self._say(f"     {each.remedy}")
        self._warnings = warnings
        if failed is None:
            self._refusals = 0
            return True
        if failed.what in ("TLS", "certificate", "key") and not self._was_connected:
            self._refusals += 1
            if self._refusals >= REFUSALS:
                raise RunError(
                    f"this site cannot join: {failed.what}: {failed.found}; {failed.remedy}"
                )
        self._say(f"waiting for the coordinator; next attempt in {self._node.postpone():g} s")
        return False

    def _look(self) -> list[Finding]:
        """What is found about the connection; nothing if it could not be checked."""
        self._looks = True
        try:
            return list(self._commands.look())
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            name = type(error).__name__
            self._say(f"the connection to the coordinator could not be checked ({name})")
            return []
        finally:
            self._looks = False

    def _listen(self, seconds: float = 0.3) -> None:
        """Show the output of the processes; wait for it at most this long."""
        began = time.clock_gettime(AWAKE_OR_NOT)
        select.select([self._node, self._app], [], [], seconds)
        if (paused := time.clock_gettime(AWAKE_OR_NOT) - began - seconds) > SLEPT:
            self._say(
                f"this machine was asleep, or this program was stopped, for {human_seconds(paused)}; runs "
                "went on without this site; keep it awake while it takes part"
            )
        for child in (self._node, self._app):
            for line in child.lines():
                self._show(child.name, line)
                if child is self._node:
                    self._note(line)

    def _note(self, line: str) -> None:
        if self._log.listens in line:
            self._listens = True
        elif self._log.connected in line:
            self._was_connected, self._waits = True, False
            self._say("connected; only the code installed here runs. Ctrl-C ends it")
        elif self._log.inactive in line:
            self._barred = True
        elif self._log.receives in line:
            self._works = True
        elif any(word in line for word in self._log.done):
            self._works = False

    def _end(self) -> None:
        """End the app first, which replies to its current task; then the SuperNode, once that reply
        is sent.
        """
        if self._node.running or self._app.family():
            self._say("ending" + "; a second Ctrl-C ends everything at once" * bool(self._signals))
        # A message that no task has begun would have no reply, and a run would wait for it.
        self._wait(
            lambda: not self._works or bool(self._tasks()) or not self._app.family(), SEND_SECONDS
        )
        # Before its parents: with them a task ends that has not read its message.
        for task in self._tasks():
            with suppress(psutil.NoSuchProcess):
                task.terminate()
        self._wait(lambda: not self._tasks(), ANSWER_SECONDS)
        self._app.signal_all(signal.SIGTERM)
        self._wait(lambda: not self._app.family(), ANSWER_SECONDS)
        self._app.signal_all(signal.SIGKILL)
        self._wait(lambda: not self._works or self._node.ended() is not None, SEND_SECONDS)
        self._node.signal_all(signal.SIGTERM)
        self._wait(lambda: not self._node.family(), END_SECONDS)
        self._node.signal_all(signal.SIGKILL)
        self._wait(lambda: not (self._node.family() or self._app.family()), END_SECONDS)
        self._listen(0.0)

    def _tasks(self) -> list[psutil.Process]:
        """Processes of the app's tasks."""
        found = []
        for each in self._app.family():
            with suppress(psutil.NoSuchProcess):
                if each.name() == TASK_NAME:
                    found.append(each)
        return found

    def _wait(self, holds: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not holds() and time.monotonic() < until and self._signals < 2:
            self._listen(0.1)

    def _end_requested(self, *_: object) -> None:
        self._signals += 1
        if self._looks:
            raise _EndRequestedError

    def _why_not(self) -> str:
        reasons = [f"{each.what}: {each.found}; {each.remedy}" for each in self._warnings]
        return "\n".join(
            ["the SuperNode does not start; it wrote:", _written(self._node), *reasons]
        )

    def _say(self, text: str) -> None:
        self._show(OWN, text)


class _EndRequestedError(Exception):
    """A signal arrived during the check of the connection to the coordinator."""


def _written(child: Child) -> str:
    return "\n".join(f"  {line}" for line in child.last) or "  nothing"
