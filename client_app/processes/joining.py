"""When a site in two containers joins: once its app has found the site's data.

The SuperNode's container has no data, and the app's no network. The app reports as soon as the folder
of data holds what the policy's `smallest-site` asks for, and only then the SuperNode starts. So a
folder that is empty, or not mounted, is found before the site joins, and no answer to a request depends
on it.
"""

from __future__ import annotations

import logging
import multiprocessing
import socket
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

from fedsurrogate.client_app.diagnostics.findings import Finding
from fedsurrogate.client_app.processes.app_report import ask
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import UNIX

if TYPE_CHECKING:
    from fedsurrogate.client_app.node_config import NodeConfig

PAUSE = 30.0
"""Seconds from a reason not to join to the app's end, after which its container starts it again."""
LOOK_SECONDS, SAY_SECONDS = 0.5, 600.0
WAITS = (
    "this site stays away: its app does not run yet, or has not found as many records as the policy's "
    "smallest-site asks for; the app's log names the reason"
)
log = logging.getLogger("fedsurrogate.site")


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
            log.error("%s; this site has joined, and answers as one without records", error)
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
    from fedsurrogate.client_app.diagnostics.first_look import check_enough, check_files
    from fedsurrogate.client_app.governance.policy import policy_of

    warnings = check_files(node)
    check_enough(node, policy_of(node).smallest_site)
    return warnings


def await_data(runtime: str) -> None:
    """Wait until the app of this site has found the site's data; print what is waited for."""
    next_line = time.monotonic()
    while check_data(runtime).state == "FAIL":
        if time.monotonic() >= next_line:
            print(WAITS, flush=True)
            next_line += SAY_SECONDS
        time.sleep(LOOK_SECONDS)


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
