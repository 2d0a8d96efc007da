"""The SuperNode of a site whose app has no network: both talk through a Unix socket, a file in a
folder that they share.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Sequence

from fedsurrogate.client_app.processes.joining import await_data
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.logs.output import configure_log


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
        ConfigError: `runtime` is a port, where Flower's API asks for no authentication.
    """
    if not runtime.startswith(UNIX):
        raise ConfigError(
            f"--runtime {runtime!r}: must be {UNIX}/path; every user of this machine may open a "
            "port"
        )
    configure_log(os.environ)
    os.umask(0o077)  # Its socket, too: only this account may open it.
    again = [sys.executable, *sys.orig_argv[1:]]
    logging.getLogger("flwr").addFilter(_in_one_line)
    threading.excepthook = _of_a_thread
    await_data(runtime)
    try:
        flower().supernode(runtime, arguments)
    except (ConfigError, ImportError):
        raise
    except Exception as error:
        # Flower's own text is a trace that ends with "generator didn't yield".
        why = (
            f"the SuperNode has ended ({type(error).__name__}): the coordinator most likely "
            "refuses this site's key; `site doctor --link-only` with the same --superlink, "
            "--root-certificates and --auth-supernode-private-key names the cause"
        )
        if not retry:
            raise RunError(why) from None
        print(f"{why}; it is started again in {retry:g} s", file=sys.stderr, flush=True)
        time.sleep(retry)
        # A new process: Flower's servers and threads do not start twice in one.
        os.execv(sys.executable, again)


def _in_one_line(record: logging.LogRecord) -> bool:
    """Replace an error of a connection, which has many lines, by its code and its text."""
    error = record.msg
    if isinstance(error, Exception) and callable(code := getattr(error, "code", None)):
        record.msg, record.args = f"{getattr(code(), 'name', '')}: {error.details()}", ()  # type: ignore[attr-defined]
    return True


def _of_a_thread(error: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, but not that gRPC watched a channel that was closed: a race in
    gRPC, without effect.
    """
    if not (isinstance(error.exc_value, ValueError) and "Channel closed" in str(error.exc_value)):
        threading.__excepthook__(error)
