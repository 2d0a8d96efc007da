"""The SuperNode of a site whose app has no network: both talk through a Unix socket, a file in a
folder that they share.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from itertools import pairwise

from fedsurrogate.client_app.processes.joining import await_data
from fedsurrogate.client_app.processes.link_look import look_at_link
from fedsurrogate.client_app.processes.own_account import own_socket, take_arguments, unseen
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.logs.output import configure_log

ENDED = "FEDSURROGATE_NODE_ENDED"
"""Variable of the environment with the error by which the SuperNode before this one ended."""
LONGEST_ERROR = 2000
LINK_OPTIONS = ("--superlink", "--root-certificates", "--auth-supernode-private-key")
_logged: list[str] = []
"""The last error in Flower's log."""
TWIN = (
    "the coordinator knows this site's key, but a node with this key is connected already; stop the "
    "other one, or wait a minute if it has just ended; each machine needs a kit of its own"
)


def serve(runtime: str, arguments: Sequence[str], retry: float = 0.0) -> None:
    """Run a SuperNode that starts no app in this process, once the app has found the site's data.
    Does not return.

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
    configure_log(os.environ)
    os.umask(0o077)  # Its socket, too: only this account may open it.
    again, given = [sys.executable, *sys.orig_argv[1:]], unseen(sys.argv[2:])
    if error := os.environ.pop(ENDED, ""):
        why = why_ended(error, arguments)
        if not retry:
            raise RunError(why)
        print(f"{why}; it is started again in {retry:g} s", file=sys.stderr, flush=True)
        time.sleep(retry)
    logging.getLogger("flwr").addFilter(_in_one_line)
    threading.excepthook = _of_a_thread
    await_data(runtime)
    try:
        flower().supernode(runtime, arguments)
    except (ConfigError, ImportError):
        raise
    except Exception as error:
        # A new process finds out why: Flower's servers and threads do not start twice in one, and
        # Flower ends this one within seconds.
        os.environ[ENDED] = "; ".join((f"{type(error).__name__}: {error}", *_logged))[
            :LONGEST_ERROR
        ]
        os.execve(sys.executable, again, os.environ | given)


def serve_joined(arguments: Sequence[str]) -> None:
    """Run the SuperNode of `site join`, which restarts it. Does not return.

    Args:
        arguments: The address of its Runtime API, then all others of `flower-supernode`.
    """
    threading.excepthook = _of_a_thread
    try:
        flower().supernode(arguments[0], arguments[1:])
    except RunError as error:
        sys.exit(str(error))


def why_ended(error: str, arguments: Sequence[str]) -> str:
    """Why a SuperNode has ended: what is wrong with its connection now, and what to do.

    Args:
        error: by which it ended, as text.
        arguments: those of `flower-supernode`.

    Returns:
        One line.
    """
    link = [
        word
        for option, value in pairwise([*arguments, ""])
        if option in LINK_OPTIONS
        for word in (option, value)
    ]
    try:
        findings = look_at_link(link)
    except (OSError, ValueError, TypeError, subprocess.TimeoutExpired):
        findings = []
    for each in findings:
        if each.state == "FAIL":
            return f"the SuperNode has ended: {each.what}: {each.found}; {each.remedy}"
    if flower().supernode_log.inactive in error:
        return f"the SuperNode has ended: {TWIN}"
    state = "is good" if findings else "could not be checked"
    name = error.partition(":")[0]
    return f"the SuperNode has ended ({name}), and its connection {state}; its log names the cause"


def _in_one_line(record: logging.LogRecord) -> bool:
    """Replace an error of a connection, which has many lines, by its code and its text; remember the
    last error, because Flower ends a node with another one.
    """
    error = record.msg
    if isinstance(error, Exception) and callable(code := getattr(error, "code", None)):
        record.msg, record.args = f"{getattr(code(), 'name', '')}: {error.details()}", ()  # type: ignore[attr-defined]
    if record.levelno >= logging.ERROR:
        _logged[:] = [record.getMessage()]
    return True


def _of_a_thread(error: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, but not that gRPC watched a channel that was closed: a race in
    gRPC, without effect.
    """
    if not (isinstance(error.exc_value, ValueError) and "Channel closed" in str(error.exc_value)):
        threading.__excepthook__(error)


if __name__ == "__main__":
    take_arguments(1)
    serve_joined(sys.argv[1:])
