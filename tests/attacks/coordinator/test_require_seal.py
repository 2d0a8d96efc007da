"""Attacks by the coordinator on a site that requires sealing: for no request does the site reply
unencrypted.

The coordinator sends any messages, in any order and with any settings; the site is the real one.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.torch import save_file

from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.governance.entries import Release
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
from tests.e2e.test_nothing_leaks import all_that_left
from tests.grid import (
    FAST,
    FIRST_NODE,
    InProcessGrid,
    NodeConfig,
    default_run_config,
    events_of,
    metrics_of,
    open_new,
    run_federation,
)

NAMES = ("north", "south", "west")
CLASSES = ("benign-class", "malign-class")
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


@dataclass(frozen=True)
class Hospitals:
    """Three sites that require sealing and know each other's keys."""

    folder: Path
    nodes: list[NodeConfig]

    def node(self, name: str) -> NodeConfig:
        return self.nodes[NAMES.index(name)]

    def private(self, name: str) -> bytes:
        return private_key(parse_node_config(self.node(name)), name)

    def keys(self) -> dict[str, str]:
        return {name: public_key(self.private(name)).hex() for name in NAMES}

    def untouched(self) -> bool:
        """Whether no site has read its data or released anything."""
        seen = any(list(self.folder.glob(pattern)) for pattern in ("*/cache", "*/state/runs"))
        return not (seen or self.released())

    def released(self) -> bool:
        """Whether a ledger has more lines than its first, which opened it."""
        return any(
            len(file.read_text().splitlines()) > 1
            for file in self.folder.glob("*/state/ledgers/*.jsonl")
        )


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    nodes: list[NodeConfig] = []
    for number, name in enumerate(NAMES):
        folder = tmp_path / name
        folder.mkdir()
        labels = torch.arange(60) % 2
        features = (
            torch.randn(60, 6, generator=torch.Generator().manual_seed(number))
            + 3 * torch.eye(2, 6)[labels]
        )
        for part in ("train", "test"):
            metadata = {"classes": ",".join(CLASSES), "fingerprint": "f" * 16}
            save_file({"x": features, "y": labels}, folder / f"f-{part}.safetensors", metadata)
        (folder / "policy.toml").write_text(
            "require-seal = true\nwithout-dp = true\nsmallest-class = 1\n"
            "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
        )
        own: NodeConfig = {
            "site": name,
            "data": "safetensors",
            "data-dir": str(folder),
            "dataset": "f",
        }
        own |= {
            "policy": str(folder / "policy.toml"),
            "state-dir": str(folder / "state"),
            "cache-dir": str(folder / "cache"),
        }
        open_new(own)
        nodes.append(own | {"peers": str(folder / "peers.toml")})
    made = Hospitals(tmp_path, nodes)
    lines = "".join(f'{name} = "{key}"\n' for name, key in made.keys().items())
    for name in NAMES:
        (tmp_path / name / "peers.toml").write_text(lines)
    return made


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
    hospitals: Hospitals, readers: tuple[str, ...], keys: dict[str, str] | None = None, hop: int = 1
) -> dict[str, Any]:
    return {
        "keys": json.dumps(keys or hospitals.keys()),
        "readers": ",".join(readers),
        "hop": hop,
        "classes": "[]",
    }


def a_head() -> bytes:
    header = Header("fedpft", parse_run(SEALED).digest, "coordinator", "f" * 16, CLASSES)
    return pack_classifier(Head(header, torch.randn(2, 6), torch.zeros(2)))


KINDS = ("train", "evaluate", "query.hello", "query.head", "query.compare")
METHODS: dict[str, dict[str, Any]] = {
    "star": {},
    "private": {"epsilon": 1.0, "delta": 1e-5, "classes": ",".join(CLASSES)},
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
        payload, info = ask(hospitals.node("north"), kind, METHODS[method], {"round": 1}, a_head())
        assert (payload, info) == (None, {"status": "policy", "site": "north"}), kind
    assert hospitals.untouched()


@pytest.mark.parametrize("kind", ["evaluate", "query.head", "query.compare"])
def test_what_a_sealed_run_cannot_seal_is_refused_before_any_work(
    hospitals: Hospitals, kind: str
) -> None:
    for settings in (SEALED, SEALED | METHODS["private"]):
        payload, info = ask(hospitals.node("north"), kind, settings, payload=a_head())
        assert (payload, info) == (None, {"status": "policy", "site": "north"})
    assert hospitals.untouched()


def test_hello_in_a_sealed_run_holds_what_the_run_needs_and_no_classes(
    hospitals: Hospitals,
) -> None:
    _, info = ask(hospitals.node("north"), "query.hello", SEALED)
    assert info.keys() == HELLO
    assert info["key"] == hospitals.keys()["north"]
    assert not hospitals.released()


def test_settings_that_differ_between_two_messages_of_a_run_do_not_open_it(
    hospitals: Hospitals,
) -> None:
    """The same run is sealed in one message and open in another, or sealed first and open later."""
    north = hospitals.node("north")
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
    grid = InProcessGrid(hospitals.nodes)
    settings = SEALED | {"fedpft.order": ",".join(NAMES), "classes": ",".join(CLASSES)}
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
        where for where, content in left.items() for name in CLASSES if name.encode() in content
    ]
    # Each site keeps its own head and does not send it.
    kept = list(hospitals.folder.glob("*/state/runs/*/*.pb"))
    assert [file.name for file in kept] == ["confidential-head.pb"] * 3


def test_a_private_sealed_run_works_under_the_default_policy_and_is_charged(
    hospitals: Hospitals,
) -> None:
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text("require-seal = true\n")
    settings = SEALED | METHODS["private"] | {"fedpft.order": ",".join(NAMES)}
    folder = run_federation(hospitals.folder / "run", hospitals.nodes, **settings)
    assert metrics_of(folder)["sites"]["used"] == 3
    for name in NAMES:
        (ledger,) = (hospitals.folder / name / "state" / "ledgers").glob("*.jsonl")
        (entry,) = [json.loads(line) for line in ledger.read_text().splitlines()][1:]
        assert (entry["mechanism"], entry["sealed"]) == ("sums", True)


def test_a_site_without_peers_believes_no_coordinator_about_keys(hospitals: Hospitals) -> None:
    alone = {key: value for key, value in hospitals.node("north").items() if key != "peers"}
    for kind in KINDS:
        assert ask(alone, kind, SEALED, relayed(hospitals, ("south",)))[1] == {
            "status": "policy",
            "site": "north",
        }
    assert hospitals.untouched()
    run = parse_run(SEALED)
    (found,) = [each for each in check_site(run, parse_node_config(alone)) if each.what == "peers"]
    assert (found.state, "`site offline key`" in found.remedy) == ("FAIL", True)
    (found,) = [
        each
        for each in check_site(run, parse_node_config(hospitals.node("north")))
        if each.what == "peers"
    ]
    assert found.state == "PASS"
    (hospitals.folder / "north" / "peers.toml").write_text('south = "00"\n')
    (found,) = [
        each
        for each in check_site(run, parse_node_config(hospitals.node("north")))
        if each.what == "peers"
    ]
    assert found.state == "FAIL"


@pytest.mark.parametrize("name", ["south", "mallory"])
def test_a_key_of_the_coordinators_own_opens_nothing(hospitals: Hospitals, name: str) -> None:
    mallory = new_key()
    keys = hospitals.keys() | {name: public_key(mallory).hex()}
    payload, info = ask(
        hospitals.node("north"), "train", SEALED, relayed(hospitals, (name, "west"), keys)
    )
    assert info["status"] == "ok"
    assert payload is not None
    sealed = Sealed()
    sealed.ParseFromString(payload)
    assert [reader.name for reader in sealed.readers] == ["west"]
    context = "\0".join((parse_run(SEALED).digest, LINEAGE, "north", "1")).encode()
    assert open_sealed(
        payload, "west", hospitals.private("west"), public_key(hospitals.private("north")), context
    )


def test_the_last_site_and_a_chain_of_one_pass_on_what_nobody_can_read(
    hospitals: Hospitals,
) -> None:
    payload, info = ask(hospitals.node("north"), "train", SEALED, relayed(hospitals, ()))
    assert info.keys() - {"simulated"} == CLEAR | {"receipt"}
    sealed = Sealed()
    sealed.ParseFromString(payload or b"")
    assert not sealed.readers
    folder = run_federation(
        hospitals.folder / "run", hospitals.nodes[:1], **SEALED, classes=",".join(CLASSES)
    )
    assert not (folder / "model.safetensors").exists()
    assert not list((folder / "surrogates").iterdir())


def test_a_relay_from_a_key_that_is_not_pinned_is_not_opened(hospitals: Hospitals) -> None:
    """So the coordinator cannot send a site its own surrogate and observe the reply."""
    mallory = new_key()
    context = "\0".join((parse_run(SEALED).digest, LINEAGE, "north", "1")).encode()
    forged = seal(
        b"anything", mallory, {"south": bytes.fromhex(hospitals.keys()["south"])}, context
    )
    keys = hospitals.keys() | {"north": public_key(mallory).hex()}
    reported = relayed(hospitals, ("west",), keys, 2) | {"sender": "north", "sent-hop": 1}
    assert ask(hospitals.node("south"), "train", SEALED, reported, forged)[1] == {
        "status": "seal",
        "site": "south",
    }


def test_no_bundle_leaves_such_a_site(hospitals: Hospitals) -> None:
    key, file = new_key(), hospitals.folder / "request"
    file.write_bytes(Request.fresh({**FAST, "device": "cpu"}, None).signed(key))
    node = parse_node_config(hospitals.node("north") | {"coordinator-key": public_key(key).hex()})
    with pytest.raises(PolicyError, match="require-seal"):
        release_to(hospitals.folder / "bundle", file, node)
    assert not (hospitals.folder / "bundle").exists()
    assert hospitals.untouched()


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
        key: hospitals.node("north")[key] for key in ("policy", "peers", "state-dir", "cache-dir")
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
    grid = InProcessGrid([hospitals.node("north")])
    grid.run_config = default_run_config() | {"device": "cpu"} | SEALED
    reported = relayed(hospitals, ("south",)) | {
        "run": parse_run(grid.run_config).digest,
        "lineage": LINEAGE,
    }
    record = to_record(None, reported)
    change(record)
    (reply,) = grid.pull_messages(list(grid.push_messages([Message(record, FIRST_NODE, "train")])))
    content = b"".join(all_that_left([reply]).values())
    assert not any(name.encode() in content for name in CLASSES)
