"""Wait for Ray to start under Flower's simulation, and say why if it does not.

Flower's simulation starts Ray in the main thread of the process in which the coordinator's app has
a thread of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import RAY_PATIENCE

DID_NOT_START = "Ray, which runs the simulated sites, did not start"
REMEDY = (
    "the machine may be busy or short of memory: try again later, with fewer sites at the same "
    "time (`coordinator simulate --parallel 1`), or without Ray (`coordinator simulate --engine "
    "local`)"
)
LONGEST_CAUSE = 300
# How long Flower's end of this process waits until the app has written why.
RECORD_SECONDS = 120.0


@contextmanager
def ray_start(seconds: float = 2 * RAY_PATIENCE) -> Iterator[str]:
    """Wait until Flower has started Ray. While the block runs, Flower does not end this process.

    Until then no run folder is needed, and no process forks while torch's libraries are loaded.

    Args:
        seconds: How long to wait. Ray's own waits are shorter, so that it names its reason.

    Yields:
        Why Ray did not start, and what to do; empty if it has started.
    """
    errors, ended, recorded = _Errors(), threading.Event(), threading.Event()

    def end() -> None:
        ended.set()
        recorded.wait(RECORD_SECONDS)

    # Flower calls this in the main thread when the simulation has failed, and then ends the
    # process.
    flower().at_exit(end)
    logging.getLogger("flwr").addFilter(errors)
    flower().prepare_ray(RAY_PATIENCE)
    try:
        started = _wait(ended, seconds)
        yield "" if started else _problem(errors.cause, seconds, over=ended.is_set())
    finally:
        recorded.set()
        logging.getLogger("flwr").removeFilter(errors)


def _wait(ended: threading.Event, seconds: float) -> bool:
    """Whether Ray starts before the process ends, and in this time."""
    end = time.monotonic() + seconds
    while not flower().ray_has_started():
        if ended.wait(0.05) or time.monotonic() > end:
            return False
    return True


def _problem(cause: str, seconds: float, over: bool) -> str:
    if not over:
        cause = f"it has not begun to work within {seconds:.0f} s"
    return f"{DID_NOT_START}: {cause or 'Flower has ended the simulation'}; {REMEDY}"


class _Errors(logging.Filter):
    """Keeps the first exception that Flower logs: the cause of those that follow. A filter of the
    logger sees a record before handlers make a text of it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cause = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep the exception among the arguments of an error; every record passes."""
        error = record.levelno >= logging.ERROR and isinstance(record.args, tuple)
        for each in record.args or () if error else ():
            if isinstance(each, BaseException) and not self.cause:
                text = " ".join(str(each).split())[:LONGEST_CAUSE].rstrip(".;")
                self.cause = f"{type(each).__name__}: {text}" if text else type(each).__name__
        return True
