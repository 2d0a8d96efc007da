"""Requests at a site: what its replies say, and its log."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.requests import WORK, answer
from fedsurrogate.common.errors import (
    DataError,
    DisputeError,
    StorageError,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.version import own_version
from fedsurrogate.common.wire.records import from_record, to_record
from tests.attacks.privacy.visits import close_logs

FLOWER, SITE, LARGEST = "77", "north", 1073741824
SUMMED = {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b,c"}


def request(
    folder: Path, run: Run, data: str = "", payload: bytes | None = None, **numbers: Any
) -> SiteRequest:
    node = NodeConfig(site=SITE, data=data, data_dir=data and str(folder), state_dir=str(folder))
    _, info = from_record(message(payload, **numbers), LARGEST)
    return SiteRequest(run, node, SITE, flower_run=FLOWER, payload=payload, info=info)


def message(payload: bytes | None, **numbers: Any) -> Any:
    size = {} if payload is None else {"bytes": len(payload)}
    named = {key.removesuffix("_"): value for key, value in numbers.items()}
    return to_record(payload, size | named)


def test_a_dispute_is_answered_by_its_places_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def disputes(asked: SiteRequest, _: Gate) -> Any:
        raise DisputeError("secret words", [2, 5])

    monkeypatch.setitem(WORK, "sum-open", disputes)
    node = NodeConfig(site=SITE, state_dir=str(tmp_path))
    try:
        # Twice: the second finds the folder of sums.
        for _ in range(2):
            reply = answer("sum-open", message(None), SUMMED, FLOWER, node, SITE)
            found = {"status": "seal", "disputed": [2, 5], "site": SITE}
            assert from_record(reply, 9) == (None, found)
    finally:
        close_logs()


def test_a_reply_without_payload_has_no_size(tmp_path: Path) -> None:
    node = NodeConfig(site=SITE, state_dir=str(tmp_path))
    try:
        reply = answer("name", to_record(None, {}), {}, FLOWER, node, SITE)
    finally:
        close_logs()
    payload, info = from_record(reply, 0)
    assert payload is None
    assert info == {"status": "ok", "site": SITE, "version": own_version()}


def test_a_comparison_at_a_hospital_is_refused_whatever_came_with_it(tmp_path: Path) -> None:
    asked = request(tmp_path, parse_run({}), "imagefolder", payload=b"model")
    with pytest.raises(DataError, match="needs the data of all sites"):
        WORK["comparison"](asked, Gate(Policy(), Ledger(tmp_path, "data")))


def test_the_log_is_opened_once_for_each_state_folder_and_says_when_and_how_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, nodes = (
        requests.log,
        [NodeConfig(state_dir=str(tmp_path / name / "state")) for name in ("a", "b")],
    )
    other, before = logging.FileHandler(tmp_path / "a" / "x", delay=True), list(log.handlers)
    other.baseFilename = str(tmp_path / "a" / "state" / "site.log")
    log.addHandler(other)
    try:
        for node in (*nodes, *nodes):
            requests._open_log(node)
        opened: Any = [each for each in log.handlers if each not in (*before, other)]
        assert [Path(each.baseFilename) for each in opened] == [
            node.state / "site.log" for node in nodes
        ]
        assert {(each.maxBytes, each.backupCount) for each in opened} == {(5_000_000, 5)}
        log.removeHandler(other)
        # pytest would send what it captures from one process to another, which takes whole characters.
        monkeypatch.setattr(log, "propagate", False)
        log.info("a file \udcff of records")
        for node in nodes:
            (line,) = (node.state / "site.log").read_text().splitlines()
            assert line.endswith(" INFO a file \ufffd of records")
            assert line[:4].isdigit()
    finally:
        log.removeHandler(other)
        close_logs()


def test_a_log_that_cannot_be_opened_names_the_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error, words in (
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (OSError("odd"), "OSError"),
    ):

        def fails(*_: Any, error: OSError = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(requests, "RotatingFileHandler", fails)
        with pytest.raises(StorageError, match=words):
            requests._open_log(NodeConfig(state_dir=str(tmp_path / words)))
    assert json.dumps(sorted(each.name for each in tmp_path.iterdir())) == (
        '["OSError", "Permission denied"]'
    )
