"""The process of a site's SuperNode, below its supervisor, and the one that checks its connection."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import QUIET
from fedsurrogate.common.logs import configure_log

from ..diagnostics.connection_checks import Finding
from .own_account import end_after, take_arguments, unseen

LOOK_SECONDS = 120.0


def serve(arguments: Sequence[str]) -> None:
    """Run a SuperNode that starts no app. Does not return.

    Args:
        arguments: The address of its Runtime API, then all others of `flower-supernode`.
    """
    configure_log(os.environ)
    shorten_errors()
    try:
        flower().supernode(arguments[0], arguments[1:])
    except (ConfigError, ImportError):
        raise
    except Exception as error:
        # Flower's words after a refusal, of which its log has said the cause.
        refused = isinstance(error, RuntimeError) and str(error) == "generator didn't yield"
        sys.exit(1 if refused else f"{type(error).__name__}: {error}")


def look_at_link(link: Sequence[str]) -> list[Finding]:
    """What `site doctor --link-only` finds, in a process of its own: gRPC starts threads, and whoever
    asks forks others.

    Args:
        link: its options that name the coordinator, the certificate and the key.

    Raises:
        OSError, ValueError, TypeError, subprocess.TimeoutExpired: nothing could be found out.
    """
    site = str(Path(sys.executable).with_name("site"))
    done = subprocess.run(
        [site, "doctor"],
        env=os.environ | QUIET | unseen(["--link-only", "--json", *link]),
        capture_output=True,
        text=True,
        timeout=LOOK_SECONDS,
        check=False,
    )
    return [Finding(**row) for row in json.loads(done.stdout)]


def shorten_errors() -> None:
    """Let Flower's log, and threads that end, have one line of an error of a connection."""
    logging.getLogger("flwr").addFilter(_in_one_line)
    threading.excepthook = _of_a_thread


def _in_one_line(record: logging.LogRecord) -> bool:
    """Replace an error of a connection, which has many lines, by its code and its text."""
    raised = record.exc_info[1] if record.exc_info else None
    text = record.getMessage()
    if short := _short(raised or record.msg):
        record.msg, record.args = f"{text}: {short}" if raised else short, ()
        record.exc_info = None
    elif "of RPC that terminated with" in text:
        record.msg, record.args = " ".join(text.split()), ()
    return True


def _short(error: object) -> str:
    """Code and text of an error of a connection; empty for another."""
    if isinstance(error, Exception) and callable(code := getattr(error, "code", None)):
        return f"{getattr(code(), 'name', '')}: {error.details()}"  # type: ignore[attr-defined]
    return str(error) if isinstance(error, ValueError) and "closed channel" in str(error) else ""


def _of_a_thread(error: threading.ExceptHookArgs) -> None:
    """Print what ended a thread, but not that gRPC watched a channel that was closed: a race in
    gRPC, without effect.
    """
    if short := _short(error.exc_value):
        print(short, file=sys.stderr, flush=True)
    elif not (isinstance(error.exc_value, ValueError) and "Channel closed" in str(error.exc_value)):
        threading.__excepthook__(error)


if __name__ == "__main__":
    take_arguments(1)
    end_after(lambda: serve(sys.argv[1:]))
