"""Supervisor of a site's two processes: its SuperNode, which starts no code, and the app installed
here.

Flower sends an app's code with every run, and a SuperNode without `--isolation process` starts it.
The supervisor always sets this flag; the user cannot omit it.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.processes.child_process import Child
from fedsurrogate.client_app.processes.link_look import look_at_link
from fedsurrogate.client_app.processes.node_process import TWIN
from fedsurrogate.client_app.processes.own_account import SETTINGS, unseen
from fedsurrogate.common.command_line import handling
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET, without_proxy_here

NODE_MODULE = "fedsurrogate.client_app.processes.node_process"
ATTEMPTS = 3
"""Number of early ends of a process after which a site that was never connected gives up."""
REFUSALS = 2
"""Number of refusals of key or certificate in a row after which a site that was never connected gives up."""
ANSWER_SECONDS, SEND_SECONDS, END_SECONDS = 60.0, 15.0, 15.0
"""Waiting times at the end: for the app's reply, for the reply to be sent, for the SuperNode to end."""
ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


@dataclass(frozen=True)
class Commands:
    """Commands of a site's processes.

    Attributes:
        node: the SuperNode's, and variables of its environment.
        app: the app's, likewise.
        look: checks the connection.
    """

    node: tuple[Sequence[str], Mapping[str, str]]
    app: tuple[Sequence[str], Mapping[str, str]]
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
    of_node = [runtime, *link, *(["--insecure"] if authority is None else [])]
    of_app = unseen(["--runtime", runtime, "--joined"]) | {SETTINGS: node_config}
    return Commands(
        # -P: files of the folder from which the site joins are no modules.
        ([sys.executable, "-P", "-m", NODE_MODULE], unseen(of_node) | {SETTINGS: ""}),
        ([_installed("site"), "app"], of_app),
        lambda: look_at_link(link),
    )


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
    """

    def __init__(self, commands: Commands, show: Callable[[str, str], None]) -> None:
        self._commands, self._show = commands, show
        self._environment = (
            os.environ
            | QUIET
            | without_proxy_here(os.environ)
            | {"FLWR_LOG_LEVEL": "INFO", "PYTHONUNBUFFERED": "1"}
        )
        self._node, self._app = Child("node"), Child("app")
        self._log = flower().supernode_log
        self._warnings: list[Finding] = []
        self._listens = self._was_connected = self._works = self._looks = False
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
            if self._node.soon_ended >= ATTEMPTS and not self._was_connected:
                raise RunError(self._why_not())
            self._say(f"the SuperNode has ended with exit code {code}; it is started again")
        if self._node.due and self._reachable():
            self._start(self._node, *self._commands.node)

    def _tend_app(self) -> None:
        if (code := self._app.ended()) is not None:
            if self._app.soon_ended >= ATTEMPTS and not self._was_connected:
                raise RunError(f"`site app` does not start; it wrote:\n{_written(self._app)}")
            self._say(f"the app has ended with exit code {code}; it is started again")
        if self._app.due and self._listens:
            self._start(self._app, *self._commands.app)

    def _start(self, child: Child, command: Sequence[str], variables: Mapping[str, str]) -> None:
        child.start(command, {**self._environment, **variables})

    def _reachable(self) -> bool:
        """Whether this site can reach the coordinator. Raises RunError for an error that only a
        person can correct.
        """
        self._looks = True
        try:
            findings = list(self._commands.look())
        except (OSError, ValueError, TypeError, subprocess.TimeoutExpired) as error:
            self._say(
                f"the connection to the coordinator could not be checked ({type(error).__name__})"
            )
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
                raise RunError(
                    f"this site cannot join: {failed.what}: {failed.found}; {failed.remedy}"
                )
        self._say(f"waiting for the coordinator; next attempt in {self._node.postpone():g} s")
        return False

    def _listen(self, seconds: float = 0.3) -> None:
        """Show the output of the processes; wait for it at most this long."""
        select.select([self._node, self._app], [], [], seconds)
        for child in (self._node, self._app):
            for line in child.lines():
                self._show(child.name, line)
                if child is self._node:
                    self._note(line)

    def _note(self, line: str) -> None:
        if self._log.listens in line:
            self._listens = True
        elif self._log.connected in line:
            self._was_connected = True
            self._say("connected; only the code installed here runs. Ctrl-C ends it")
        elif self._log.inactive in line:
            self._say(TWIN)
        elif self._log.receives in line:
            self._works = True
        elif any(word in line for word in self._log.done):
            self._works = False

    def _end(self) -> None:
        """End the app first, which replies to its current task; then the SuperNode, once that reply
        is sent.
        """
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
        return "\n".join(
            ["the SuperNode does not start; it wrote:", _written(self._node), *reasons]
        )

    def _say(self, text: str) -> None:
        self._show("join", text)


class _EndRequestedError(Exception):
    """A signal arrived during the check of the connection to the coordinator."""


def _written(child: Child) -> str:
    return "\n".join(f"  {line}" for line in child.last) or "  nothing"
