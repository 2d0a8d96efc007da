"""Each kind of request at a site, step by step: which checks come before which work, what is charged,
and what leaves.
"""

from __future__ import annotations

import base64
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock, Timeout

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.governance import work_limits
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.release import Failure, entry
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job, MethodOutput, SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig, packages_of
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.client_app.requests import WORK, answer
from fedsurrogate.common.errors import (
    DisputeError,
    PolicyError,
    SurrogateError,
)
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.version import own_version
from fedsurrogate.common.wire.records import from_record, to_record
from tests.attacks.privacy.visits import close_logs
from tests.client_app.requested import (
    CACHE,
    FLOWER,
    KEPT,
    LARGEST,
    PRIVATE,
    SEALED,
    SITE,
    SUMMED,
    Calls,
    Note,
    calls,
    features,
    gate,
    message,
    request,
)

__all__ = ["calls"]


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("settings", [{}, SUMMED, PRIVATE])
def test_a_request_is_checked_before_it_is_read_counted_before_it_is_done_and_then_answered(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    work: str,
    settings: dict[str, Any],
) -> None:
    node, own = NodeConfig(site=SITE, state_dir=str(tmp_path / "new" / "state")), gate(calls)
    run, content = parse_run(settings), to_record(None, {"receipts": "some"})
    for name, result in (
        ("close_to_others", None),
        ("_open_log", None),
        ("kept_run", run),
        ("check_addressee", None),
        ("note_policy", None),
        ("check_work", None),
        ("check_counting", None),
        ("from_record", (None, {"receipts": "some"})),
        ("check_packages", None),
        ("in_clear", {"left": 1}),
    ):
        calls.instead(name, result)
    monkeypatch.setattr(work_limits, "check_work", calls.noting("work"))
    monkeypatch.setattr(work_limits, "admit", calls.noting("admit"))

    def done(asked: SiteRequest, _: Gate) -> tuple[bytes, dict[str, Any]]:
        calls.made.append(("done", asked))
        if run.settings.secure_aggregation:
            with pytest.raises(Timeout), FileLock(node.state / "sums" / f"{SITE}.lock", 0):
                pass
        return b"reply", {"found": 1}

    monkeypatch.setitem(WORK, work, done)
    reply = answer(work, content, settings, FLOWER, node, SITE)
    with_model = ("surrogate", "evaluation", "comparison", "sum-shares", "sum-list", "sum-open")
    planned = run.plan.work(3 if settings else 0, 0)
    packages = [("check_packages", packages_of(run, node))] if work != "name" else []
    # A surrogate's is checked where it is made, and a comparison is of a simulation.
    checked = [("check_request", run)] * (work not in ("name", "surrogate", "comparison"))
    assert calls.made == [
        ("close_to_others", node),
        ("_open_log", node),
        ("kept_run", settings),
        ("check_addressee", content, SITE),
        ("open_gate", node, run.settings.data, FLOWER),
        ("note_policy", node, own.policy),
        ("check_work", own.policy, run.settings.fedpft.seal, node.peers, work),
        ("check_counting", run.settings.counting, run.settings.secure_aggregation, work),
        ("from_record", content, LARGEST if work in with_model else 0),
        ("work", planned, own.policy, run.settings),
        ("admit", run.settings, node, own.policy, FLOWER),
        ("check_receipts", "some"),
        *packages,
        *checked,
        ("done", SiteRequest(run, node, SITE, flower_run=FLOWER, info={"receipts": "some"})),
        ("in_clear", own.policy, work, {"found": 1}),
        ("new_receipt", 41),
    ]
    assert (node.state / "sums").is_dir() == run.settings.secure_aggregation
    assert from_record(reply, LARGEST) == (
        b"reply",
        {
            "status": "ok",
            "left": 1,
            "receipt": "new",
            "site": SITE,
            "version": own_version(),
            "bytes": 5,
        },
    )


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


@pytest.mark.parametrize("settings", [{}, SUMMED, PRIVATE])
@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("explained", [False, True])
def test_a_release_is_attacked_and_held_before_it_is_charged(
    calls: Calls, tmp_path: Path, settings: dict[str, Any], simulated: bool, explained: bool
) -> None:
    run = parse_run(settings)
    own, found = gate(calls), features(simulated)
    made = MethodOutput(
        b"out", answer={"answer": 3}, keep={tmp_path / "kept": b"k"}, must_keep=True
    )
    prepared = SimpleNamespace(
        made=made, found=found, fit_seconds=1.5, failure=Failure("why", explained), release="entry"
    )
    for name, result in (
        ("prepare", prepared),
        ("check_attacks", None),
        ("hold", None),
        ("_staged", "staged"),
        ("charge_and_release", None),
        ("remove_oldest", None),
    ):
        calls.instead(name, result)
    asked = request(tmp_path, run, payload=b"question", run_=run.digest, round=2)
    payload, reported = WORK["surrogate"](asked, own)
    node = asked.node
    assert calls.made == [
        ("prepare", asked, own),
        ("check_attacks", run, node, own.policy),
        *([] if explained else [("hold", node, "why")]),
        ("_staged", made.keep, True),
        ("charge_and_release", own, "entry", "staged", nullcontext),
        ("remove_oldest", node, KEPT),
    ]
    # How long the work takes depends on the number of records.
    times = {"fit-seconds": 1.5, "extract-seconds": 0.25}
    hidden = bool(settings) and not simulated
    assert reported == {"simulated": simulated, "answer": 3} | ({} if hidden else times)
    assert payload == b"out"


def test_a_request_for_another_run_is_refused_before_the_ledger_is_opened(
    calls: Calls, tmp_path: Path
) -> None:
    own, run = gate(calls), parse_run({})
    for work, numbers in product(("surrogate", "identification"), ({"run_": "other"}, {})):
        with pytest.raises(SurrogateError, match=f"these settings are run '{run.digest}'"):
            WORK[work](request(tmp_path, run, **numbers), own)
    assert calls.made == []


@pytest.mark.parametrize("settings", [{}, {"classes": "a,c"}, PRIVATE, SUMMED, SEALED,
                                      {"method": "fedavg"}, {"method": "fedavg", "classes": "a,b"}])  # fmt: skip
def test_an_identification_is_checked_and_what_it_says_of_records_is_charged(
    calls: Calls, tmp_path: Path, settings: dict[str, Any]
) -> None:
    for simulated, exact in product([False, True], repeat=2):
        calls.made.clear()
        identify(calls, tmp_path, settings, simulated, exact)


def identify(
    calls: Calls, tmp_path: Path, settings: dict[str, Any], simulated: bool, exact: bool
) -> None:
    run, found, own = parse_run(settings), features(simulated), gate(calls, exact)
    for name, result in (
        ("load_site", found),
        ("without_records", found),
        ("sum_keys", "key of the sum"),
    ):
        calls.instead(name, result)
    asked = request(tmp_path, run, "" if simulated else "imagefolder", run_=run.digest, sum="x")
    payload, reported = WORK["identification"](asked, own)
    assert payload is None
    node = asked.node
    hidden = run.hides_sites and not simulated
    load: Note = ("without_records", run, node) if hidden else ("load_site", run, node, CACHE)
    named = len(run.settings.classes)
    assert calls.made[:2] == [load, ("check_size", run.plan.work, 5, named)]
    facts: dict[str, Any] = {}
    if simulated or exact:
        job = Job(run, node, SITE, found, SiteLimits(smallest_class=2))
        # One record of class c is too few to name it.
        facts = {} if named else {"classes": '["a", "b"]'}
        if settings.get("method") == "fedavg":
            frame = job.own_frame(run.settings.classes or ("a", "b"))
            assert frame
            facts["frame"] = base64.b64encode(frame).decode()
        assert calls.of("smallest_class") == (run.plan.mechanism_name,)
    left = [each for each in calls.made if each[0] == "let_out"]
    whole = MethodOutput("".join(facts.values()).encode())
    charged = [("let_out", entry(run, FLOWER, whole, 0))] if facts and not simulated else []
    assert left == charged
    key = {}
    if settings == SEALED:
        key = {"key": public_key(private_key(node, SITE)).hex()}
    if settings == SUMMED:
        key = {"key": "key of the sum"}
        assert calls.of("sum_keys") == (asked, own.policy)
    public = {"fingerprint": "print", "dimension": 5, "simulated": simulated}
    assert reported == public | facts | key


def test_a_site_without_a_frame_to_make_says_so_in_its_first_round(
    calls: Calls, tmp_path: Path
) -> None:
    run, found = parse_run({"method": "fedavg", "classes": "x,y"}), features(False)
    calls.instead("load_site", found)
    _, reported = WORK["identification"](request(tmp_path, run, run_=run.digest), gate(calls))
    assert set(reported) == {"fingerprint", "dimension", "simulated"}
    assert "let_out" not in calls.names()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        (PRIVATE, "private or sealed"),
        (SUMMED, "secure aggregation"),
        (SEALED, "sealed run"),
    ],
)
def test_a_head_of_own_records_is_charged_and_leaves_no_run_that_hides(
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    settings: dict[str, Any],
    words: str,
) -> None:
    run = parse_run(settings or {"fedpft.topology": "chain"})
    own = gate(calls)
    calls.instead("kept_head", "head")
    calls.instead("pack_classifier", b"packed")
    asked = request(tmp_path, run, lineage="abc")
    if words:
        with pytest.raises(PolicyError, match=words):
            WORK["head"](asked, own)
        assert calls.names() == []
        return
    made = MethodOutput(b"packed")
    assert WORK["head"](asked, own) == (b"packed", {})
    assert calls.made == [
        ("kept_head", asked.node.state / "runs" / f"abc-{SITE}"),
        ("pack_classifier", "head"),
        # A chain has one round of training; what it asks for afterwards has the next number.
        ("let_out", entry(run, FLOWER, made, requests.after(run.rounds))),
    ]
    with pytest.raises(PolicyError, match="cannot be attacked before it leaves"):
        WORK["head"](asked, gate(calls, limits_attacks=True))
    assert len(calls.made) == 3


@pytest.mark.parametrize("kind", ["sum-shares", "sum-list", "sum-open"])
def test_a_step_of_a_sum_gets_the_whole_request(calls: Calls, tmp_path: Path, kind: str) -> None:
    run = parse_run(SUMMED)
    calls.instead(kind.replace("-", "_"), (b"reply", {}))
    asked = request(tmp_path, run, payload=b"members", sum="name")
    own = gate(calls)
    assert WORK[kind](asked, own) == (b"reply", {})
    assert calls.made == [(kind.replace("-", "_"), asked, own.policy)]
