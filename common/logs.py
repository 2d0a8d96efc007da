"""The log of a long-running process on its output: without constant lines, and as JSON where
`FEDSURROGATE_LOG=json`.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from .escapes import for_terminal
from .flower import flower

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
        logging.getLogger("fedsurrogate.site").addFilter(in_one_line)
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
