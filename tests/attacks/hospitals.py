"""Hospitals in secure aggregation, and a coordinator that sends them what a test wants it to."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from safetensors.torch import save_file

from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.secure_aggregation.protocol import check_revealed, unmask
from fedsurrogate.common.secure_aggregation.rules import context_of, rules_of
from fedsurrogate.common.secure_aggregation.secrets import Dealt, Member, Words, unpack_words
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.records import from_record, to_record
from fedsurrogate.strategies.base.training import Training
from tests.common.secure_aggregation.parties import Party
from tests.grid import (
    FIRST_NODE,
    InProcessGrid,
    Json,
    NodeConfig,
    confirm,
    default_run_config,
    open_new,
)

NAMES = ("north", "south", "west", "east", "centre")
CLASSES = "benign,malign"
PLAIN: dict[str, Any] = {
    "fedpft.covariance": "gram",
    "classes": CLASSES,
    "secure-aggregation": True,
    "colluding": 0.0,
    "dropouts": 0.2,
}
PRIVATE = PLAIN | {"epsilon": 1.0, "delta": 1e-5}
POLICY = (
    'without-dp = true\nsmallest-class = 1\nmechanisms = "secure-aggregation"\nrequire-secure-aggregation = true\n'
    "smallest-colluding = 0.0\nexact-sums-at-models = true\n"
    # The rule of secure aggregation holds by itself.
    "exact-runs-may-differ = true\n"
)


@dataclass
class Hospitals:
    """Sites with data of their own. `name` is that of the sum to which messages belong."""

    folder: Path
    nodes: dict[str, NodeConfig]
    settings: dict[str, Any] = field(default_factory=lambda: dict(PLAIN))
    name: str = ""
    flower_run: int = 77

    def ask(
        self, site: str, kind: str, payload: bytes | None = None, **reported: Any
    ) -> tuple[bytes | None, dict[str, Any]]:
        """One site's reply to one message."""
        grid = InProcessGrid([self.nodes[site]], run_id=self.flower_run)
        grid.run_config = default_run_config() | {"device": "cpu"} | self.settings
        numbers = {"run": parse_run(grid.run_config).digest, "sum": self.name} | reported
        numbers |= {} if payload is None else {"bytes": len(payload)}
        sent = Message(to_record(payload, numbers), FIRST_NODE, kind)
        (reply,) = grid.pull_messages(list(grid.push_messages([sent])))
        return from_record(reply.content, 2**30)

    def answer(self, site: str, kind: str, payload: bytes, **reported: Any) -> bytes:
        """The payload of a reply, which is no refusal."""
        found, _ = self.ask(site, kind, payload, **reported)
        assert found is not None, self.log(site)
        return found

    def status(self, site: str, kind: str, payload: bytes | None = None, **reported: Any) -> str:
        found, info = self.ask(site, kind, payload, **reported)
        assert found is None or info["status"] == "ok"
        return str(info["status"])

    def hello(self, site: str) -> str:
        """The status of the first step of a new sum."""
        self.name = secrets.token_hex(16)
        return self.status(site, "query.hello")

    def keys(self, sites: Iterable[str] = NAMES) -> dict[str, Member]:
        """Begin a new sum; the keys of each site."""
        self.name = secrets.token_hex(16)
        found = {}
        for site in sites:
            _, info = self.ask(site, "query.hello")
            assert info["status"] == "ok", self.log(site)
            found[site] = surrogate_proto.unpack_member(bytes.fromhex(info["key"]))
        return found

    def party(self, name: str) -> Party:
        """A site that the coordinator makes up for this sum."""
        return Party(name, context=context_of(parse_run(self.settings), self.name))

    def offer(self, site: str, members: Iterable[Member], public: bytes = b"") -> str:
        """The status of a site's shares for this key list, and this map or model."""
        return self.status(site, "query.sum_shares", key_list(members, public))

    def shares(
        self, members: Mapping[str, Member], sites: Iterable[str] = NAMES, public: bytes = b""
    ) -> dict[str, Dealt]:
        listed = key_list(members.values(), public)
        return {
            site: surrogate_proto.unpack_dealt(self.answer(site, "query.sum_shares", listed))
            for site in sites
        }

    def dealt(self, sites: Iterable[str] = NAMES, public: bytes = b"") -> dict[str, Dealt]:
        """Shares in a new sum of these sites."""
        return self.shares(self.keys(sites), sites, public)

    def deliver(
        self, site: str, dealt: Iterable[Dealt], public: bytes = b"", **reported: Any
    ) -> str:
        """The status of a site's release after these shares."""
        return self.status(
            site, "train", surrogate_proto.pack_delivery(dealt, site, public), **reported
        )

    def masked(self, dealt: Mapping[str, Dealt], sites: Iterable[str] = NAMES) -> dict[str, bytes]:
        found = {}
        for site in sites:
            delivery = surrogate_proto.pack_delivery(dealt.values(), site)
            found[site] = self.answer(site, "train", delivery)
        return found

    def sign(self, site: str, summed: Iterable[str]) -> str:
        """The status of a site's signature of this list."""
        return self.status(site, "query.sum_list", surrogate_proto.pack_list(summed))

    def signatures(self, summed: Iterable[str], sites: Iterable[str] = NAMES) -> dict[str, bytes]:
        listed = surrogate_proto.pack_list(summed)
        return {site: self.answer(site, "query.sum_list", listed) for site in sites}

    def open(self, site: str, summed: Iterable[str], signatures: Mapping[str, bytes]) -> str:
        """The status of what a site reveals after these signatures of a list."""
        return self.status(site, "query.sum_open", surrogate_proto.pack_list(summed, signatures))

    def up_to_masked(self) -> dict[str, Dealt]:
        dealt = self.dealt()
        self.masked(dealt)
        return dealt

    def model(self) -> bytes:
        """The first model of a run in rounds."""
        run = parse_run(self.settings)
        return Training.begin(run, tuple(CLASSES.split(",")), "f" * 16, 6).payload()

    def first_round(self, sites: Iterable[str] = NAMES, site: str = "north") -> str:
        """The status of one site's release in a new sum of updates; each of these sums is a round."""
        model = self.model()
        return self.deliver(site, self.dealt(sites, model).values(), model, round=1)

    def total(
        self,
        sites: Collection[str],
        lost: Collection[str] = (),
        signing: Iterable[str] | None = None,
        public: bytes = b"",
        **reported: Any,
    ) -> Words | None:
        """The sum over `sites` without those that are lost after their shares; None when it cannot be
        completed.

        signing: the sites that are asked to sign and to open the sum; all that are in it by default.
        """
        members = self.keys(sites)
        rules = rules_of(parse_run(self.settings).settings, len(members))
        dealt = self.shares(members, sites, public)
        vectors: dict[str, Words] = {}
        for site in sites:
            delivery = surrogate_proto.pack_delivery(dealt.values(), site, public)
            payload, _ = self.ask(site, "train", delivery, **reported)
            if payload is not None and site not in lost:
                vectors[site] = unpack_words(pb.MaskedSum.FromString(payload).numbers)
        summed, signatures, revealed = sorted(vectors), {}, {}
        for site in summed if signing is None else signing:
            payload, _ = self.ask(site, "query.sum_list", surrogate_proto.pack_list(summed))
            if payload is not None:
                signatures[site] = payload
        opened = surrogate_proto.pack_list(summed, signatures)
        for site in signatures:
            payload, _ = self.ask(site, "query.sum_open", opened)
            if payload is not None:
                revealed[site] = surrogate_proto.unpack_revealed(payload)
                check_revealed(site, revealed[site], dealt, summed)
        if len(revealed) < rules.threshold:
            return None
        return unmask(vectors, dealt, members, revealed, rules)

    def policy(self, text: str, *sites: str) -> None:
        """Another policy, confirmed, at these sites; at all by default."""
        for name in sites or self.nodes:
            (self.folder / name / "policy.toml").write_text(text)
            confirm(self.nodes[name])

    def log(self, site: str) -> str:
        return (self.folder / site / "state" / "site.log").read_text()

    def entries(self, site: str) -> list[Json]:
        """A site's ledger after its header."""
        (file,) = self.folder.glob(f"{site}/state/ledgers/*.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()[1:]]

    def released(self, site: str) -> int:
        return len(self.entries(site))


def key_list(members: Iterable[Member], public: bytes = b"") -> bytes:
    """A packed key list of sites that agree on a map or model."""
    return surrogate_proto.pack_members(members, surrogate_proto.map_digest(public))


def open_hospitals(home: Path, names: Iterable[str], policy: str = POLICY) -> Hospitals:
    """Hospitals that know each other's keys, each with data of its own."""
    nodes: dict[str, NodeConfig] = {}
    lines = ""
    for number, name in enumerate(names):
        folder = home / name
        folder.mkdir()
        labels = torch.arange(60 + 4 * number) % 2
        draw = torch.Generator().manual_seed(number)
        features = torch.randn(len(labels), 6, generator=draw) + 3 * torch.eye(2, 6)[labels]
        for part in ("train", "test"):
            facts = {"classes": CLASSES, "fingerprint": "f" * 16}
            save_file({"x": features, "y": labels}, folder / f"f-{part}.safetensors", facts)
        (folder / "policy.toml").write_text(policy)
        own: NodeConfig = {"site": name, "data": "safetensors", "dataset": "f"}
        own |= {"data-dir": str(folder), "policy": str(folder / "policy.toml")}
        own |= {"state-dir": str(folder / "state"), "cache-dir": str(folder / "cache")}
        open_new(own)
        nodes[name] = own | {"peers": str(folder / "peers.toml")}
        lines += f'{name} = "{public_key(private_key(parse_node_config(own), name)).hex()}"\n'
    for name in nodes:
        (home / name / "peers.toml").write_text(lines)
    return Hospitals(home, nodes)
