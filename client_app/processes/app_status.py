"""What a running `site app` tells `site doctor` of itself: its version, and the policy that it reads.

The doctor runs in another process, in a container of its own: that it reads a policy does not mean
that the app does, because a file mounted into a running container stays what it was when an editor
replaces it. So the app answers on a socket next to that of the Runtime API, which only this account
may open.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.version import own_version

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from fedsurrogate.client_app.node_config import NodeConfig

STATUS = ".status"
"""Ending of the socket, after the Runtime API's name."""
SECONDS, LONGEST = 5.0, 4096
RESTART = "start the app again: docker compose up -d --force-recreate app"


@dataclass(frozen=True)
class AppStatus:
    """Of a running app.

    Attributes:
        version: of the software that it runs.
        policy: SHA-256 of the policy file as it reads it now; empty without one.
    """

    version: str
    policy: str


@contextmanager
def answering(runtime: str, node: NodeConfig) -> Iterator[None]:
    """Answer on the socket meanwhile.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings.
    """
    from fedsurrogate.client_app.governance.policy import digest_of_policy

    with replying(_socket(runtime), lambda: AppStatus(own_version(), digest_of_policy(node))):
        yield


@contextmanager
def replying(path: Path, reply: Callable[[], DataclassInstance]) -> Iterator[None]:
    """Reply to each connection to a Unix socket meanwhile, from a thread.

    Args:
        path: of the socket; what is left of an earlier one is replaced.
        reply: called for each connection; its fields are sent as JSON.
    """
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()
        threading.Thread(target=_answer, args=(bound, reply), daemon=True).start()
        yield


def _answer(bound: socket.socket, reply: Callable[[], DataclassInstance]) -> None:
    while True:
        try:
            asked, _ = bound.accept()
        except OSError:  # It was closed.
            return
        with asked, suppress(OSError):
            asked.settimeout(SECONDS)
            asked.sendall(json.dumps(asdict(reply())).encode())


def received(path: Path, longest: int) -> dict[str, object] | None:
    """What a socket of `replying` sends; None if none replies there."""
    with (
        suppress(OSError, ValueError, RecursionError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to,
    ):
        to.settimeout(SECONDS)
        to.connect(str(path))
        found = json.loads(to.makefile("rb").read(longest))
        return found if isinstance(found, dict) else None
    return None


def ask(runtime: str) -> AppStatus | None:
    """The status of the app at this Runtime API; None if none runs there."""
    if found := received(_socket(runtime), LONGEST):
        with suppress(TypeError):
            return AppStatus(**found)  # type: ignore[arg-type]
    return None


def check_app(runtime: str, node: NodeConfig) -> Finding:
    """Whether the running app has this version and this policy.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings, as this process has them.
    """
    from fedsurrogate.client_app.governance.policy import digest_of_policy

    status, here = ask(runtime), AppStatus(own_version(), digest_of_policy(node))
    if status is None:
        return Finding(
            "app",
            "WARN",
            "it does not run",
            "after its start this command also checks that it uses this policy",
        )
    if status.policy != here.policy:
        used = f"one with sha256 {status.policy[:16]}" if status.policy else "none that it can read"
        return Finding(
            "app",
            "FAIL",
            f"the running app uses another policy than {node.policy or 'the default'}: {used}",
            RESTART,
        )
    if status.version != here.version:
        facts = f"the running app has version {status.version}, this command {here.version}"
        return Finding("app", "WARN", facts, RESTART)
    policy = f"the policy with sha256 {here.policy[:16]}" if here.policy else "the default policy"
    return Finding("app", "PASS", f"it runs version {status.version} and uses {policy}")


def _socket(runtime: str) -> Path:
    return Path(runtime.removeprefix(UNIX) + STATUS)
