"""The log of a long-running process on its output: without constant lines, and as JSON where
`FEDSURROGATE_LOG=json`. And what a person sees of long work.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

from .command_line import of_a_command, stderr_console
from .errors import LOG
from .escapes import for_terminal
from .flower import flower

EVERY_SECONDS = 10.0


@contextmanager
def counted(
    name: str, total: int, done: int = 0, what: str = "records"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts finished items.

    A terminal shows a bar with the items, their rate and the seconds left. Elsewhere a line every ten
    seconds has the same, in the log and, of a command, on stderr.

    Args:
        name: of the work.
        total: number of items.
        done: items that were finished before; they do not count for the rate.
        what: the items' name.

    Example:
        >>> with counted("drawing", 3, what="pictures") as advance:
        ...     advance(1)
    """
    start = reported = time.perf_counter()
    before = done
    if stderr_console().is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        of, rated = "{task.completed} of {task.total} ", "{task.fields[rate]:.0f} "
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{of}{what}, {rated}{what}/s,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        with Progress(*columns, console=stderr_console(), transient=True) as bar:
            task = bar.add_task(name, total=total, completed=done, rate=0.0)

            def draw(count: int) -> None:
                nonlocal done
                done += count
                rate = (done - before) / max(time.perf_counter() - start, 1e-9)
                bar.update(task, completed=done, rate=rate)

            yield draw
        return

    def log(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.perf_counter()
        if now - reported >= EVERY_SECONDS:
            reported = now
            rate = (done - before) / (now - start)
            left = (total - done) / max(rate, 1e-9)
            line = f"{name}: {done} of {total} {what}, {rate:.0f} {what}/s, {left:.0f} s left"
            LOG.info("%s", line)
            if of_a_command.is_set():
                stderr_console().print(line)

    yield log


VARIABLE = "FEDSURROGATE_LOG"
LOGGERS = ("flwr", "fedsurrogate")
# Every node asks for messages every few seconds.
CONSTANT = (
    "[Fleet.PullMessages]",
    "[Fleet.PushMessages] No replies",
    "ControlServicer.ListRuns",
    "ControlServicer.ListNodes",
)


class TextLines(logging.Formatter):
    """A log record as text: its message in one line, and the lines of a trace indented, so that no
    text in it looks like another record, or controls a terminal.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        """The first line."""
        return for_terminal(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        """The trace."""
        lines = super().formatException(ei).split("\n")
        return "\n".join(f"  {for_terminal(line)}" for line in lines)


class JsonLines(logging.Formatter):
    """A log record as one JSON object: time (UTC), level, logger, message, and the trace of an
    error.
    """

    def format(self, record: logging.LogRecord) -> str:
        """One line of JSON."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        facts = {
            "time": time,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            facts["trace"] = self.formatException(record.exc_info)
        return json.dumps(facts)


def configure_log(environment: Mapping[str, str], stream: TextIO | None = None) -> None:
    """Set up this process's log. stream: for JSON; stdout by default."""
    logging.getLogger("flwr").addFilter(is_news)
    if environment.get(VARIABLE) != "json":
        # After the loggers' own filters, which know the message without its values.
        for each in logging.getLogger("flwr").handlers:
            each.addFilter(in_one_line)
        LOG.addFilter(in_one_line)
        return
    flower().open_log()
    handler = logging.StreamHandler(stream or sys.stdout)
    handler.setFormatter(JsonLines())
    for name in LOGGERS:
        logger = logging.getLogger(name)
        # A site's own log is a file, and stays.
        for old in [each for each in logger.handlers if not isinstance(each, logging.FileHandler)]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.propagate = False


def in_one_line(record: logging.LogRecord) -> bool:
    """Keep a record, its message made safe for a terminal."""
    record.msg, record.args = for_terminal(record.getMessage()), ()
    return True


def is_news(record: logging.LogRecord) -> bool:
    """Whether a record is worth a line."""
    return record.levelno > logging.INFO or not record.getMessage().startswith(CONSTANT)
