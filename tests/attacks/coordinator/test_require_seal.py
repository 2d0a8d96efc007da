"""Attacks by the coordinator on a site that requires sealing: for no request does the site reply
unencrypted.

The coordinator sends any messages, in any order and with any settings; the site is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.governance.budget import Release
from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.answers import release_to
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.methods import METHODS as ALL
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, open_sealed, public_key, seal
from fedsurrogate.common.surrogate_pb2 import Sealed
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import from_record, to_record
from tests.attacks.hospitals import CLASSES, Hospitals, open_hospitals
from tests.e2e.test_nothing_leaks import all_that_left
from tests.grid import (
    FAST,
    FIRST_NODE,
    InProcessGrid,
    NodeConfig,
    default_run_config,
    events_of,
    metrics_of,
    run_federation,
)

NAMES = ("north", "south", "west")
POLICY = (
    "require-seal = true\nwithout-dp = true\nsmallest-class = 1\n"
    "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
)
SEALED: dict[str, Any] = {
    "fedpft.topology": "chain",
    "fedpft.covariance": "spherical",
    "fedpft.seal": True,
    **FAST,
}
OPEN = SEALED | {"fedpft.seal": False}
LINEAGE = "0123456789abcdef"
CLEAR = {"status", "site", "version", "bytes"}
HELLO = {"status", "site", "version", "fingerprint", "dimension", "simulated", "key"}


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    """Three sites that require sealing and know each other's keys."""
    return open_hospitals(tmp_path, NAMES, POLICY)


def private(hospitals: Hospitals, name: str) -> bytes:
    return private_key(parse_node_config(hospitals.nodes[name]), name)


def keys(hospitals: Hospitals) -> dict[str, str]:
    return {name: public_key(private(hospitals, name)).hex() for name in NAMES}


def released(hospitals: Hospitals) -> bool:
    return any(map(hospitals.released, NAMES))


def untouched(hospitals: Hospitals) -> bool:
    """Whether no site has read its data or released anything."""
    seen = any(list(hospitals.folder.glob(pattern)) for pattern in ("*/cache", "*/state/runs"))
    return not (seen or released(hospitals))


def ask(
    node: NodeConfig,
    kind: str,
    settings: dict[str, Any],
    reported: dict[str, Any] | None = None,
    payload: bytes | None = None,
) -> tuple[bytes | None, dict[str, Any]]:
    """One site's reply to one message of a coordinator with these settings: payload and numbers,
    including the status.
    """
    grid = InProcessGrid([node])
    grid.run_config = default_run_config() | {"device": "cpu"} | settings
    record = {"run": parse_run(grid.run_config).digest, "lineage": LINEAGE} | (reported or {})
    record |= {} if payload is None else {"bytes": len(payload)}
    names = list(grid.push_messages([Message(to_record(payload, record), FIRST_NODE, kind)]))
    (reply,) = grid.pull_messages(names)
    assert reply.has_content()
    return from_record(reply.content, 2**30)


def relayed(
    hospitals: Hospitals, readers: tuple[str, ...], own: dict[str, str] | None = None, hop: int = 1
) -> dict[str, Any]:
    return {
        "keys": json.dumps(own or keys(hospitals)),
        "readers": ",".join(readers),
        "hop": hop,
        "classes": "[]",
    }


def a_head() -> bytes:
    header = Header(
        "fedpft", parse_run(SEALED).digest, "coordinator", "f" * 16, tuple(CLASSES.split(","))
    )
    return pack_classifier(Head(header, torch.randn(2, 6), torch.zeros(2)))


KINDS = ("train", "evaluate", "query.hello", "query.head", "query.compare")
METHODS: dict[str, dict[str, Any]] = {
    "star": {},
    "private": {"epsilon": 1.0, "delta": 1e-5, "classes": CLASSES},
}
METHODS |= {"chain": OPEN, "kd": {"method": "kd"}, "private chain": OPEN | METHODS["private"]}
METHODS |= {
    spec.name: (METHODS["private"] if spec.needs_budget else {}) | {"method": spec.name}
    for spec in ALL.values()
}


@pytest.mark.parametrize("method", METHODS)
def test_no_message_of_an_unsealed_run_is_answered_with_more_than_a_code(
    hospitals: Hospitals, method: str
) -> None:
    for kind in KINDS:
        payload, info = ask(hospitals.nodes["north"], kind, METHODS[method], {"round": 1}, a_head())
        assert (payload, info) == (None, {"status": "policy", "site": "north"}), kind
    assert untouched(hospitals)


@pytest.mark.parametrize("kind", ["evaluate", "query.head", "query.compare"])
def test_what_a_sealed_run_cannot_seal_is_refused_before_any_work(
    hospitals: Hospitals, kind: str
) -> None:
    for settings in (SEALED, SEALED | METHODS["private"]):
        payload, info = ask(hospitals.nodes["north"], kind, settings, payload=a_head())
        assert (payload, info) == (None, {"status": "policy", "site": "north"})
    assert untouched(hospitals)


def test_hello_in_a_sealed_run_holds_what_the_run_needs_and_no_classes(
    hospitals: Hospitals,
) -> None:
    _, info = ask(hospitals.nodes["north"], "query.hello", SEALED)
    assert info.keys() == HELLO
    assert info["key"] == keys(hospitals)["north"]
    assert not released(hospitals)


def test_settings_that_differ_between_two_messages_of_a_run_do_not_open_it(
    hospitals: Hospitals,
) -> None:
    """The same run is sealed in one message and open in another, or sealed first and open later."""
    north = hospitals.nodes["north"]
    assert ask(north, "query.hello", SEALED)[1]["status"] == "ok"
    first, info = ask(north, "train", SEALED, relayed(hospitals, ("south",)))
    assert info["status"] == "ok"
    for kind in KINDS:
        assert (
            ask(north, kind, OPEN, relayed(hospitals, ("south",)), first)[1]["status"] == "policy"
        )
    # The run's digest covers its settings, so an open run and a sealed run have different digests.
    digest = parse_run(OPEN).digest
    assert digest != parse_run(SEALED).digest
    assert (
        ask(north, "train", SEALED, relayed(hospitals, ("south",)) | {"run": digest})[1]["status"]
        == "surrogate"
    )


def test_all_that_leaves_in_a_sealed_run_is_sealed_for_peers(hospitals: Hospitals) -> None:
    grid = InProcessGrid(list(hospitals.nodes.values()))
    settings = SEALED | {"fedpft.order": ",".join(NAMES), "classes": CLASSES}
    folder = run_federation(hospitals.folder / "run", grid, **settings)
    assert metrics_of(folder)["sites"]["used"] == 3
    assert not (folder / "model.safetensors").exists()
    assert not [event for event in events_of(folder) if event["event"] == "evaluated"]
    for reply in grid.received:
        payload, info = from_record(reply.content, 2**30)
        if reply.metadata.message_type == "query.hello":
            assert (payload, info.keys()) == (None, HELLO)
            continue
        assert info.keys() - {"simulated"} == CLEAR | {"receipt"}
        sealed = Sealed()
        sealed.ParseFromString(payload or b"")
        later = NAMES[NAMES.index(str(info["site"])) + 1 :]
        assert [reader.name for reader in sealed.readers] == sorted(later)
    left = all_that_left(grid.received)
    assert not [
        where
        for where, content in left.items()
        for name in CLASSES.split(",")
        if name.encode() in content
    ]
    # Each site keeps its own head and does not send it.
    kept = list(hospitals.folder.glob("*/state/runs/*/*.pb"))
    assert [file.name for file in kept] == ["confidential-head.pb"] * 3


def test_a_private_sealed_run_works_under_the_default_policy_and_is_charged(
    hospitals: Hospitals,
) -> None:
    hospitals.policy("require-seal = true\n")
    settings = SEALED | METHODS["private"] | {"fedpft.order": ",".join(NAMES)}
    folder = run_federation(hospitals.folder / "run", list(hospitals.nodes.values()), **settings)
    assert metrics_of(folder)["sites"]["used"] == 3
    for name in NAMES:
        (entry,) = hospitals.entries(name)
        assert (entry["mechanism"], entry["sealed"]) == ("sums", True)


def test_a_site_without_peers_believes_no_coordinator_about_keys(hospitals: Hospitals) -> None:
    alone = {key: value for key, value in hospitals.nodes["north"].items() if key != "peers"}
    for kind in KINDS:
        assert ask(alone, kind, SEALED, relayed(hospitals, ("south",)))[1] == {
            "status": "policy",
            "site": "north",
        }
    assert untouched(hospitals)

    def found(node: NodeConfig) -> tuple[str, str]:
        checks = check_site(parse_run(SEALED), parse_node_config(node))
        (own,) = [each for each in checks if each.what == "peers"]
        return own.state, own.remedy

    state, remedy = found(alone)
    assert (state, "`site offline key`" in remedy) == ("FAIL", True)
    assert found(hospitals.nodes["north"])[0] == "PASS"
    (hospitals.folder / "north" / "peers.toml").write_text('south = "00"\n')
    assert found(hospitals.nodes["north"])[0] == "FAIL"


@pytest.mark.parametrize("name", ["south", "mallory"])
def test_a_key_of_the_coordinators_own_opens_nothing(hospitals: Hospitals, name: str) -> None:
    mallory = new_key()
    false = keys(hospitals) | {name: public_key(mallory).hex()}
    payload, info = ask(
        hospitals.nodes["north"], "train", SEALED, relayed(hospitals, (name, "west"), false)
    )
    assert info["status"] == "ok"
    assert payload is not None
    sealed = Sealed()
    sealed.ParseFromString(payload)
    assert [reader.name for reader in sealed.readers] == ["west"]
    context = "\0".join((parse_run(SEALED).digest, LINEAGE, "north", "1")).encode()
    assert open_sealed(
        payload,
        "west",
        private(hospitals, "west"),
        public_key(private(hospitals, "north")),
        context,
    )


def test_the_last_site_and_a_chain_of_one_pass_on_what_nobody_can_read(
    hospitals: Hospitals,
) -> None:
    payload, info = ask(hospitals.nodes["north"], "train", SEALED, relayed(hospitals, ()))
    assert info.keys() - {"simulated"} == CLEAR | {"receipt"}
    sealed = Sealed()
    sealed.ParseFromString(payload or b"")
    assert not sealed.readers
    alone = [hospitals.nodes["north"]]
    folder = run_federation(hospitals.folder / "run", alone, **SEALED, classes=CLASSES)
    assert not (folder / "model.safetensors").exists()
    assert not list((folder / "surrogates").iterdir())


def test_a_relay_from_a_key_that_is_not_pinned_is_not_opened(hospitals: Hospitals) -> None:
    """So the coordinator cannot send a site its own surrogate and observe the reply."""
    mallory = new_key()
    context = "\0".join((parse_run(SEALED).digest, LINEAGE, "north", "1")).encode()
    forged = seal(b"anything", mallory, {"south": bytes.fromhex(keys(hospitals)["south"])}, context)
    false = keys(hospitals) | {"north": public_key(mallory).hex()}
    reported = relayed(hospitals, ("west",), false, 2) | {"sender": "north", "sent-hop": 1}
    assert ask(hospitals.nodes["south"], "train", SEALED, reported, forged)[1] == {
        "status": "seal",
        "site": "south",
    }


def test_no_bundle_leaves_such_a_site(hospitals: Hospitals) -> None:
    key, file = new_key(), hospitals.folder / "request"
    file.write_bytes(Request.fresh({**FAST, "device": "cpu"}, None).signed(key))
    node = parse_node_config(hospitals.nodes["north"] | {"coordinator-key": public_key(key).hex()})
    with pytest.raises(PolicyError, match="require-seal"):
        release_to(hospitals.folder / "bundle", file, node)
    assert not (hospitals.folder / "bundle").exists()
    assert untouched(hospitals)


def test_the_gate_itself_lets_nothing_out_in_clear(tmp_path: Path) -> None:
    """The gate protects even if a later request handler lacks the check."""

    def release(sealed: bool) -> Release:
        return Release(
            "r", "1", "fedpft", 1, "none", (), "record", 0.0, 0.0, {}, {}, {}, 10, "0" * 64, sealed
        )

    gate = Gate(Policy(require_seal=True, without_dp=True), Ledger(tmp_path, "data"))
    with pytest.raises(PolicyError, match="the release is not sealed"):
        gate.let_out(release(sealed=False))
    assert not gate.ledger.entries()
    gate.let_out(release(sealed=True))


def test_a_simulated_site_that_demands_sealing_tells_no_accuracy_either(
    tmp_path: Path, hospitals: Hospitals
) -> None:
    node: NodeConfig = {"partition-id": 0, "num-partitions": 2}
    node |= {
        key: hospitals.nodes["north"][key] for key in ("policy", "peers", "state-dir", "cache-dir")
    }
    _, info = ask(node, "query.hello", SEALED)
    assert info.keys() == HELLO
    payload, info = ask(node, "train", SEALED, relayed(hospitals, ("south",)))
    assert payload is not None
    assert info.keys() - {"simulated"} == CLEAR
    for kind in ("evaluate", "query.head", "query.compare"):
        assert ask(node, kind, SEALED, payload=a_head())[1]["status"] == "policy"


@pytest.mark.parametrize(
    "change",
    [
        lambda record: record.config_records.clear(),
        lambda record: record.__setitem__("more", ConfigRecord({"seal": False})),
        lambda record: record.config_records["info"].update({"fedpft.seal": False, "seal": False}),
    ],
)
def test_nothing_in_a_message_overrides_the_settings_of_the_run(
    hospitals: Hospitals, change: Callable[[RecordDict], None]
) -> None:
    grid = InProcessGrid([hospitals.nodes["north"]])
    grid.run_config = default_run_config() | {"device": "cpu"} | SEALED
    reported = relayed(hospitals, ("south",)) | {
        "run": parse_run(grid.run_config).digest,
        "lineage": LINEAGE,
    }
    record = to_record(None, reported)
    change(record)
    (reply,) = grid.pull_messages(list(grid.push_messages([Message(record, FIRST_NODE, "train")])))
    content = b"".join(all_that_left([reply]).values())
    assert not any(name.encode() in content for name in CLASSES.split(","))
