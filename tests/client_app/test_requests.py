"""Requests at a site, step by step: which checks come before which work, what is charged, and what
leaves; and its log. Steps of other modules are only noted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from filelock import FileLock, Timeout

from fedsurrogate.client_app import requests
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance import work_limits
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import Failure, entry
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job, MethodOutput, SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig, packages_of
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.client_app.requests import WORK, answer
from fedsurrogate.common.errors import (
    DataError,
    DisputeError,
    PolicyError,
    SurrogateError,
)
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.version import own_version
from fedsurrogate.common.wire.records import from_record, to_record
from tests.attacks.privacy.visits import close_logs

FLOWER, SITE, CACHE, KEPT = "77", "north", 12.5, 34.5
PRIVATE = {"epsilon": 5.0, "delta": 1e-5, "classes": "a,b,c"}
SUMMED = {"secure-aggregation": True, "fedpft.covariance": "gram", "classes": "a,b,c"}
SEALED = {"fedpft.seal": True, "fedpft.topology": "chain", "classes": "a,b,c"}
LARGEST = 1073741824
Note = tuple[Any, ...]


class Calls:
    """What was called, in order, and the functions that note it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[Note] = []
        self.patch = patch

    def noting(self, name: str, result: Any = None) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.made.append((name, *given, *named.values()))
            return result

        return call

    def instead(self, name: str, result: Any = None) -> None:
        """Note calls of a function, and make none."""
        self.patch.setattr(requests, name, self.noting(name, result))

    def names(self) -> list[str]:
        return [each[0] for each in self.made]

    def of(self, name: str) -> Note:
        (found,) = (each for each in self.made if each[0] == name)
        return found[1:]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(monkeypatch)
    close_logs()


def gate(
    calls: Calls,
    exact: bool = True,
    limits_attacks: bool = False,
    at_models: bool = True,
) -> Any:
    """A gate that only notes what it is asked, in the place of the site's own."""
    made = SimpleNamespace(
        policy=SimpleNamespace(
            cache_mib=CACHE,
            kept_mib=KEPT,
            limits_attacks=limits_attacks,
            exact_sums_at_models=at_models,
        ),
        check_request=calls.noting("check_request"),
        check_receipts=calls.noting("check_receipts", 41),
        new_receipt=calls.noting("new_receipt", {"receipt": "new"}),
        exact_numbers_may_leave=calls.noting("exact_numbers_may_leave", exact),
        smallest_class=calls.noting("smallest_class", 2),
        let_out=calls.noting("let_out"),
        ledger=SimpleNamespace(entries=lambda: [{}, {"flower_run": FLOWER}]),
    )
    made.has_charged = lambda run: any(e.get("flower_run") == run for e in made.ledger.entries())
    calls.instead("open_gate", made)
    calls.instead("check_size", None)
    return made


def features(simulated: bool) -> SiteFeatures:
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    # Columns in other units have a frame.
    x = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(5)
    part = LabelledFeatures(x, labels)
    return SiteFeatures(part, part, ("a", "b", "c"), "print", 0.25, simulated)


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
        ("check_sealed_request", None),
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
        ("check_sealed_request", own.policy, run.settings.fedpft.seal, node.peers, work),
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
    assert calls.made[:2] == [load, ("check_size", run.plan.work(named, 5), own.policy, 5, named)]
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
    for brief in ({"brief": True}, {"brief": False}, {}):
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
            ("compare", model, run, node, not brief.get("brief")),
        ]


def test_a_comparison_at_a_hospital_is_refused_whatever_came_with_it(tmp_path: Path) -> None:
    asked = request(tmp_path, parse_run({}), "imagefolder", payload=b"model")
    with pytest.raises(DataError, match="needs the data of all sites"):
        WORK["comparison"](asked, Gate(Policy(), Ledger(tmp_path, "data")))
