"""When a site in two containers joins: once its app has found the site's data.

The SuperNode's container has no data, and the app's no network. They share a folder with the socket
of the Runtime API. Next to it the app binds a second socket as soon as the folder of data holds what
the policy's `smallest-site` asks for, and keeps it for as long as it lives; nothing is sent on it.
The SuperNode starts when that socket is bound. So a folder that is empty, or not mounted, is found
before the site joins, and no answer to a request depends on it.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import UNIX

if TYPE_CHECKING:
    from fedsurrogate.client_app.node_config import NodeConfig

READY = ".ready"
"""Ending of the second socket, after the first one's name."""
PAUSE = 30.0
"""Seconds from a reason not to join to the app's end, after which its container starts it again."""
LOOK_SECONDS, SAY_SECONDS = 0.5, 600.0
WAITS = (
    "this site stays away: its app does not run yet, or has not found as many records as the policy's "
    "smallest-site asks for; the app's log names the reason"
)
log = logging.getLogger("fedsurrogate.site")


def found_data(
    runtime: str, node: NodeConfig, pause: float = PAUSE
) -> AbstractContextManager[object]:
    """Look at the site's data, and let its SuperNode join if they are there.

    A SuperNode that has joined is served in any case: without data by noise, as if the folder had
    become empty while the app ran.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings.
        pause: seconds before an error is raised.

    Returns:
        What the caller keeps open while it serves: the socket; nothing for a site that has joined and
        lacks data now.

    Raises:
        RunError: the site lacks data, and has not joined.
    """
    path = Path(runtime.removeprefix(UNIX))
    try:
        looked_at(node)
    except Exception as error:
        if _listens(path, socket.SOCK_STREAM):
            log.error("%s; this site has joined, and answers as one without records", error)
            return nullcontext()
        print(f"this site does not join: {error}; next look in {pause:g} s", flush=True)
        time.sleep(pause)
        raise RunError(str(error)) from None
    return ready(runtime)


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
    from fedsurrogate.client_app.diagnostics.first_look import check_enough, check_files
    from fedsurrogate.client_app.governance.policy import policy_of

    warnings = check_files(node)
    check_enough(node, policy_of(node).smallest_site)
    return warnings


def ready(runtime: str) -> socket.socket:
    """Bind the socket for which `await_data` waits. Raises OSError."""
    path = _second(runtime)
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bound.bind(str(path))
    return bound


def await_data(runtime: str) -> None:
    """Wait until the app of this site has found the site's data; print what is waited for."""
    next_line = time.monotonic()
    while not _listens(_second(runtime), socket.SOCK_DGRAM):
        if time.monotonic() >= next_line:
            print(WAITS, flush=True)
            next_line += SAY_SECONDS
        time.sleep(LOOK_SECONDS)


def check_data(runtime: str) -> Finding:
    """Whether the app of this site runs and has found the site's data, as its SuperNode sees it."""
    if _listens(_second(runtime), socket.SOCK_DGRAM):
        return Finding("data", "PASS", "the app runs, and found this site's data when it started")
    return Finding(
        "data", "FAIL", WAITS, "mount or fill the folder of data, or lower smallest-site"
    )


def _second(runtime: str) -> Path:
    return Path(runtime.removeprefix(UNIX) + READY)


def _listens(path: Path, kind: socket.SocketKind) -> bool:
    """Whether a process has this socket open; a killed one leaves the file."""
    with socket.socket(socket.AF_UNIX, kind) as probe, suppress(OSError):
        probe.settimeout(5)
        probe.connect(str(path))
        return True
    return False
