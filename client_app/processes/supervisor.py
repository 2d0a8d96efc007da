"""Keep a site in a federation: its SuperNode, which starts no code, and the app that is installed here.

Flower sends an app's code with every run, and a SuperNode without `--isolation process` starts it. Here the flag is not
the user's to set, so that it cannot be left out.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from client_app.diagnostics.connection_checks import Finding
from client_app.processes.child_process import Child
from common.errors import ConfigError, RunError
from common.flower_environment import QUIET

ATTEMPTS = 3
"""So often a process may end before the site was ever connected."""
REFUSALS = 2
"""So often in a row the coordinator may refuse key or certificate before the site was ever connected."""
ANSWER_SECONDS, SEND_SECONDS, END_SECONDS = 60.0, 15.0, 15.0
"""How long the end waits: for the app to answer, for its answer to be sent, for the SuperNode to end."""
LOOK_SECONDS = 120.0
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# How Flower 1.34's SuperNode reports what it does; test_foreign_app.py notices when the words change.
LISTENS, CONNECTED, TAKEN = "Starting Runtime API", "SuperNode ID:", "is already in use"
RECEIVES, DONE = "Receiving:", ("Sent successfully", "Failed to send", "Failed to receive", "Ignoring")


@dataclass(frozen=True)
class Commands:
    """What a site consists of. node, app: the command for a port of the Runtime API. look: findings on the way there."""

    node: Callable[[int], Sequence[str]]
    app: Callable[[int], Sequence[str]]
    look: Callable[[], Sequence[Finding]]


def site_commands(superlink: str, node_config: str, authority: Path | None, key: Path | None) -> Commands:
    """The commands of a site. superlink: host:port. authority: ca.crt, None without TLS. Raises ConfigError."""
    trust = [] if authority is None else ["--root-certificates", str(authority.expanduser())]
    if key is not None:
        trust += ["--auth-supernode-private-key", str(key.expanduser())]
    node, site = (_installed(name) for name in ("flower-supernode", "site"))

    def start_node(port: int) -> list[str]:
        link = ["--superlink", superlink, *trust, *(["--insecure"] if authority is None else [])]
        runtime = ["--clientappio-api-address", f"127.0.0.1:{port}"]
        return [node, "--isolation", "process", *link, *runtime, "--node-config", node_config]

    def look() -> list[Finding]:
        # A process of its own: gRPC would start threads in this one, which starts others.
        command = [site, "doctor", "--link-only", "--json", "--superlink", superlink, *trust]
        done = subprocess.run(
            command, env=os.environ | QUIET, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False
        )
        return [Finding(**row) for row in json.loads(done.stdout)]

    return Commands(start_node, lambda port: [site, "app", "--runtime", f"127.0.0.1:{port}"], look)


def _installed(name: str) -> str:
    program = Path(sys.executable).with_name(name)
    if not program.exists():
        raise ConfigError(f"{program} is not there; install fedsurrogate and its dependencies in this environment")
    return str(program)


class Supervisor:
    """Starts what a site needs, keeps it alive, and ends it in order. show: takes a name and a line to print."""

    def __init__(self, commands: Commands, show: Callable[[str, str], None], port: int = 0) -> None:
        self._commands, self._show = commands, show
        self._chosen, self._port = port, port
        self._environment: Mapping[str, str] = os.environ | QUIET | {"FLWR_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}
        self._node, self._app = Child("node"), Child("app")
        self._warnings: list[Finding] = []
        self._listens = self._was_connected = self._works = self._port_taken = self._looks = False
        self._refusals = self._signals = 0

    def run(self) -> None:
        """Return when a signal has ended the site. Raises RunError when the site cannot join, and says what to do."""
        with _handled(self._end_requested):
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
            if self._port_taken and self._chosen and not self._was_connected:
                raise RunError(
                    f"port {self._chosen} is in use on this machine; leave --runtime-port out, and a free one is taken"
                )
            if self._node.soon_ended >= ATTEMPTS and not self._was_connected:
                raise RunError(self._why_not())
            self._say(f"the SuperNode has ended with exit code {code}; it is started again")
        if self._node.due and self._reachable():
            if not self._chosen and (self._port_taken or not self._port):
                # An app that runs already knows another port only.
                self._app.signal_all(signal.SIGTERM)
                self._port = _free_port()
            self._port_taken = False
            self._node.start(self._commands.node(self._port), self._environment)

    def _tend_app(self) -> None:
        if (code := self._app.ended()) is not None:
            if self._app.soon_ended >= ATTEMPTS and not self._was_connected:
                raise RunError(f"`site app` does not start; it wrote:\n{_written(self._app)}")
            self._say(f"the app has ended with exit code {code}; it is started again")
        if self._app.due and self._listens:
            self._app.start(self._commands.app(self._port), self._environment)

    def _reachable(self) -> bool:
        """Whether nothing stands between this site and the coordinator. Raises RunError where only a person can help."""
        self._looks = True
        try:
            findings = list(self._commands.look())
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            self._say(f"the way to the coordinator could not be examined ({type(error).__name__})")
            return True
        finally:
            self._looks = False
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
        if failed.what in ("TLS", "key") and not self._was_connected:
            self._refusals += 1
            if self._refusals >= REFUSALS:
                raise RunError(f"this site cannot join: {failed.what}: {failed.found}; {failed.remedy}")
        self._say(f"waiting for the coordinator; next attempt in {self._node.postpone():g} s")
        return False

    def _listen(self, seconds: float = 0.3) -> None:
        """Show what the processes write, and wait at most this long for it."""
        select.select([self._node, self._app], [], [], seconds)
        for child in (self._node, self._app):
            for line in child.lines():
                self._show(child.name, line)
                if child is self._node:
                    self._note(line)

    def _note(self, line: str) -> None:
        if LISTENS in line:
            self._listens = True
        elif CONNECTED in line:
            self._was_connected = True
            self._say("connected; only the code that is installed here answers. Ctrl-C ends it")
        elif TAKEN in line:
            self._port_taken = True
        elif RECEIVES in line:
            self._works = True
        elif any(word in line for word in DONE):
            self._works = False

    def _end(self) -> None:
        """The app first, which answers what it works on; then the SuperNode, when that answer is sent."""
        if self._node.running or self._app.family():
            self._say("ending; a second Ctrl-C ends everything at once")
        self._app.signal_all(signal.SIGTERM)
        self._wait(lambda: not self._app.family(), ANSWER_SECONDS)
        self._app.signal_all(signal.SIGKILL)
        self._wait(lambda: not self._works or self._node.ended() is not None, SEND_SECONDS)
        self._node.signal_all(signal.SIGTERM)
        self._wait(lambda: not self._node.family(), END_SECONDS)
        self._node.signal_all(signal.SIGKILL)
        self._wait(lambda: not (self._node.family() or self._app.family()), END_SECONDS)
        self._listen(0.0)

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
        return "\n".join(["the SuperNode does not start; it wrote:", _written(self._node), *reasons])

    def _say(self, text: str) -> None:
        self._show("join", text)


class _EndRequestedError(Exception):
    """A signal has come while the way to the coordinator was examined."""


@contextmanager
def _handled(handler: Callable[..., None]) -> Iterator[None]:
    """Signals that end the site call `handler`; those that were ignored, as below nohup, stay so."""
    before = {number: signal.getsignal(number) for number in ENDS}
    for number, old in before.items():
        if old is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            with suppress(TypeError):
                signal.signal(number, old)


def _written(child: Child) -> str:
    return "\n".join(f"  {line}" for line in child.last) or "  nothing"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
