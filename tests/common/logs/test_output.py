"""What a long-running process writes to its log: no constant lines, and JSON where that is set."""

import io
import json
import logging
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

from fedsurrogate.common.logs import LOGGERS, VARIABLE, configure_log, is_news


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [
        (each, [*each.handlers], [*each.filters], each.propagate, each.level) for each in loggers
    ]
    yield
    for logger, handlers, filters, propagate, level in before:
        logger.handlers, logger.filters, logger.propagate = handlers, filters, propagate
        logger.setLevel(level)


def record(message: str, level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord("flwr", level, "", 0, message, None, None)


def test_constant_lines_are_left_out_and_warnings_are_not() -> None:
    assert not is_news(record("[Fleet.PullMessages] node_id=7"))
    assert is_news(record("[Fleet.PullMessages] failed", logging.WARNING))
    assert is_news(record("[Fleet.ActivateNode] Activated node_id=7"))


def test_the_log_is_json_on_one_stream_and_a_sites_own_file_stays(tmp_path: Path) -> None:
    out = io.StringIO()
    own = RotatingFileHandler(tmp_path / "site.log")
    logging.getLogger("fedsurrogate").addHandler(own)
    configure_log({VARIABLE: "json"}, out)
    logging.getLogger("flwr").setLevel(logging.INFO)
    logging.getLogger("flwr").info("[Fleet.PullMessages] node_id=7")
    logging.getLogger("flwr").info('a "quoted"\nline')
    try:
        raise ValueError("broken")
    except ValueError:
        logging.getLogger("fedsurrogate.site").exception("unexpected")
    first, second = map(json.loads, out.getvalue().splitlines())
    assert (first["level"], first["message"]) == ("INFO", 'a "quoted"\nline')
    assert "ValueError: broken" in second["trace"]
    assert "unexpected" in (tmp_path / "site.log").read_text()


def test_without_the_variable_the_log_stays_text() -> None:
    handlers = [*logging.getLogger("flwr").handlers]
    configure_log({})
    assert logging.getLogger("flwr").handlers == handlers
