"""What a site does when a run is trained: evaluations, signed models, comparisons; and its log."""

from __future__ import annotations

import json
import logging
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import entry
from fedsurrogate.client_app.methods.job import MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.requests import WORK
from fedsurrogate.common.errors import (
    DataError,
    StorageError,
    SurrogateError,
)
from fedsurrogate.common.run import parse_run
from tests.attacks.privacy.visits import close_logs
from tests.client_app.requested import (
    CACHE,
    FLOWER,
    KEPT,
    PRIVATE,
    SUMMED,
    Calls,
    Note,
    calls,
    features,
    gate,
    request,
)

__all__ = ["calls"]


@pytest.mark.parametrize("settings", [{}, PRIVATE, SUMMED, {"method": "dpcvae"},
                                      {"method": "dpcvae"} | PRIVATE])  # fmt: skip
def test_an_evaluation_reads_records_only_where_its_result_may_leave(
    calls: Calls, tmp_path: Path, settings: dict[str, Any]
) -> None:
    # Whether exact numbers may leave, attacks are limited, and sums at models may leave.
    allowed = [(True, False, True), (False, False, True), (True, True, True), (True, False, False)]
    for data, rules, simulated in product(["", "digits", "imagefolder"], allowed, [False, True]):
        calls.made.clear()
        evaluate(calls, tmp_path, settings, data, *rules, simulated)


def evaluate(
    calls: Calls,
    tmp_path: Path,
    settings: dict[str, Any],
    data: str,
    exact: bool,
    limits: bool,
    at_models: bool,
    simulated: bool,
) -> None:
    run, found = parse_run(settings), features(simulated)
    own = gate(calls, exact, limits, at_models=at_models)
    calls.instead("_keep")
    calls.instead("load_site", found)
    calls.instead("without_records", found)
    calls.instead("load", calls.noting("evaluate", {"correct": 3, "tested": 4}))
    asked = request(tmp_path, run, data, payload=b"model")
    node, job = asked.node, asked.job(found)
    silent = bool(data) and (limits or not exact or not at_models)
    result = WORK["evaluation"](asked, own)
    loaded: Note = ("load_site", run, node, CACHE)
    wanted: list[Note] = [("_keep", asked, own)]
    evaluated: list[Note] = [("load", run.plan.combination.evaluate), ("evaluate", job, own)]
    if silent:
        generates = settings.get("method") == "dpcvae"
        private = "epsilon" in settings
        if private and data == "digits":
            wanted += [loaded, *evaluated]
        elif private or generates:
            wanted += [("without_records", run, node), *evaluated]
        assert result == (None, {})
    else:
        wanted += [loaded, *evaluated]
        if not simulated:
            made = MethodOutput(b'{"correct": 3, "tested": 4}')
            wanted.append(("let_out", entry(run, FLOWER, made, requests.after(run.rounds))))
        assert result == (None, {"correct": 3, "tested": 4, "simulated": simulated})
    assert [each for each in calls.made if each[0] != "exact_numbers_may_leave"] == wanted


def test_a_target_has_no_share_of_right_answers_to_log(
    calls: Calls, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, number = (
        gate(calls),
        {"task": "regression", "target-range": "0,1", "value-columns": "size"},
    )
    for settings, results in ((number, {"errors": 1.0}), ({}, {"correct": 3, "tested": 4})):
        calls.instead("load_site", features(False))
        calls.instead("load", calls.noting("evaluate", results))
        with caplog.at_level(logging.INFO, "fedsurrogate.site"):
            WORK["evaluation"](request(tmp_path, parse_run(settings)), own)
        found = [each.getMessage() for each in caplog.records]
        assert (found == []) == (settings == number)
    assert found == [
        f"the model of run {parse_run({}).digest} classifies 3 of 4 test records of this site "
        "correctly"
    ]


@pytest.mark.parametrize("data", ["", "digits"])
@pytest.mark.parametrize("known", [True, False])
def test_a_signed_model_is_kept_by_a_site_of_its_run(
    calls: Calls, tmp_path: Path, data: str, known: bool
) -> None:
    run = parse_run({})
    own = gate(calls)
    if not known:
        own.ledger.entries = lambda: [{}, {"flower_run": "78"}]
    asked = request(tmp_path, run, data, payload=b"model", manifest="m")
    for named in ((run.digest, FLOWER), (run.digest, "78"), ("other", FLOWER)):
        model = SimpleNamespace(manifest=SimpleNamespace(run=named[0], flower_run=named[1]))
        calls.instead("received_model", model)
        calls.instead("keep_received")
        calls.made.clear()
        if data and named != (run.digest, FLOWER):
            with pytest.raises(SurrogateError, match=f"in a request of '{run.digest}'"):
                requests._keep(asked, own)
            continue
        requests._keep(asked, own)
        received = ("received_model", b"model", {"manifest": "m", "bytes": 5})
        kept = ("keep_received", asked.node, model, known, KEPT)
        assert calls.made == ([received, kept] if data else [])
    calls.instead("received_model", None)
    requests._keep(asked, own)
    assert "keep_received" not in calls.names()


@pytest.mark.parametrize("method", ["fedpft", "local", "survey"])
def test_a_comparison_reads_nothing_of_a_site_with_data_of_its_own(
    calls: Calls, tmp_path: Path, method: str
) -> None:
    counting = {"counting.kind": "survey", "classes": "a,b", "sites": 9}
    run = parse_run(counting if method == "survey" else {"method": method})
    found, own = features(True), gate(calls)
    for name, result in (
        ("check_comparable", None),
        ("load_site", found),
        ("own_classifier", "own"),
        ("received_classifier", "received"),
        ("compare", {"accuracy": 1.0}),
    ):
        calls.instead(name, result)
    for brief in ({"brief": True}, {"brief": False}, {"brief": 1}, {}):
        calls.made.clear()
        asked = request(tmp_path, run, payload=b"model", **brief)
        node = asked.node
        assert WORK["comparison"](asked, own) == (None, {"accuracy": 1.0})
        personal = run.plan.combination.personal
        assert bool(personal) == (method == "local")
        models: list[Note] = [
            ("load_site", run, node, CACHE),
            ("own_classifier", asked.job(found)),
        ]
        if not personal:
            digest = "" if method == "survey" else run.digest
            models = [("received_classifier", b"model", digest)]
        model = "own" if personal else "received"
        assert calls.made == [
            ("check_comparable", node),
            *models,
            ("compare", model, run, node, brief.get("brief") is not True),
        ]


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
