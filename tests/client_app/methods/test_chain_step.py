"""A step of any chain: what the step gets, who can read what it passes on, and which head is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.evaluation import kept_head, pass_on
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.offline.keys import private_key
from fedsurrogate.common.errors import DataError, SealError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier

CHAIN: dict[str, Any] = {"fedpft.topology": "chain"}
KINDS: dict[str, dict[str, Any]] = {
    "open": CHAIN,
    "private": CHAIN | {"epsilon": 1.0, "delta": 1e-5, "fedpft.covariance": "spherical"},
    "sealed": CHAIN | {"fedpft.seal": True},
}
HEAD = Head(Header("fedpft", "r", "north", "f", ("a",)), torch.ones(1, 2), torch.zeros(1))
SITES = ("north", "south", "west")


def job(folder: Path, site: str, kind: str = "sealed", **info: object) -> Job:
    own = LabelledFeatures(torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
    found = SiteFeatures(own, own, ("a",), "f", 0.0, simulated=False)
    node = NodeConfig(site=site, state_dir=str(folder / site))
    told = {"lineage": "one"} | info
    return Job(parse_run(KINDS[kind]), node, site, found, info=told)


class Step:
    """Passes on what it received, with one letter more."""

    def __init__(self) -> None:
        self.got: list[bytes | None] = []

    def __call__(self, job: Job) -> tuple[MethodOutput, Head]:
        self.got.append(job.payload)
        return MethodOutput((job.payload or b"") + b"x", None, {"fact": 1.0}), HEAD


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_head_of_an_open_chain_can_be_asked_for_later(tmp_path: Path, kind: str) -> None:
    asked, step = job(tmp_path, "north", kind), Step()
    with pytest.raises(DataError, match="no head of this run"):
        kept_head(asked.state)
    made = pass_on(asked, step)
    name = "head.pb" if kind == "open" else "confidential-head.pb"
    assert made.keep == {asked.state / name: pack_classifier(HEAD)}
    assert asked.state == tmp_path / "north" / "runs" / "one-north"
    assert (made.answer, made.facts, made.sealed) == ({}, {"fact": 1.0}, kind == "sealed")
    assert step.got == [None]
    for file, content in made.keep.items():
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    if kind == "open":
        assert made.payload == b"x"
        assert kept_head(asked.state).header == HEAD.header
        again = pass_on(replace(asked, payload=b"before"), step)
        assert (again.payload, step.got[-1]) == (b"beforex", b"before")
    else:
        with pytest.raises(DataError, match="no head of this run"):
            kept_head(asked.state)
    assert (made.payload == b"x") == (kind != "sealed")


def test_a_sealed_relay_is_read_by_its_readers_in_its_place_of_the_chain(tmp_path: Path) -> None:
    nodes = {site: NodeConfig(site=site, state_dir=str(tmp_path / site)) for site in SITES}
    own = {site: public_key(private_key(nodes[site], site)).hex() for site in SITES}
    keys = json.dumps(own)
    step = Step()
    sent = pass_on(job(tmp_path, "north", keys=keys, readers="south,east", hop=1), step).payload
    right: dict[str, object] = {"keys": keys, "sender": "north", "sent-hop": 1, "hop": 2}

    def receive(site: str, payload: bytes = sent, **changes: object) -> bytes | None:
        asked = job(tmp_path, site, **(right | {"readers": "west"} | changes))
        pass_on(replace(asked, payload=payload), step)
        return step.got[-1]

    assert receive("south") == b"x"
    changed = bytes([*sent[:-1], sent[-1] ^ 1])
    for site, changes in (
        ("west", {}),
        ("south", {"sent-hop": 2}),
        ("south", {"sender": "west"}),
        ("south", {"lineage": "two"}),
        ("south", {"payload": changed}),
    ):
        with pytest.raises(SealError):
            receive(site, **changes)  # type: ignore[arg-type]
    for sender in ("gone", ""):
        with pytest.raises(
            SealError, match=f"a sealed chain message from '{sender}', whose key was not"
        ):
            receive("south", sender=sender)
    with pytest.raises(SealError, match="whose key was not received"):
        receive("south", keys=json.dumps({"south": own["south"]}))
    assert step.got.count(b"x") == 1
