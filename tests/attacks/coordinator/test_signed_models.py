"""A coordinator, or someone between, sends a site a model that it must not keep; the reply shows
nothing of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from fedsurrogate.client_app.model_use.store import models_folder, read_index
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.requests import answer
from fedsurrogate.common.errors import FedSurrogateError, SealError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from fedsurrogate.common.signed_models.signed_model import (
    PURPOSE,
    SignedModel,
    make_signed_model,
    read_signed_model,
    signed_values,
)
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.records import Info, from_record, to_record
from tests.client_app.model_use.hospitals import PRIVATE, federation
from tests.grid import FAST, default_run_config

KEY = bytes(range(32))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[NodeConfig, dict[str, Any], SignedModel]:
    """A hospital after a run, the run's settings, and the model that it kept."""
    nodes, folder = federation(tmp_path_factory.mktemp("ran"))
    settings = default_run_config() | {"device": "cpu"} | FAST | PRIVATE
    return parse_node_config(nodes[0]), settings, read_signed_model(folder / "model.fedsurrogate")


Send = Callable[..., RecordDict]


@pytest.fixture
def send(ran: tuple[NodeConfig, dict[str, Any], SignedModel]) -> Send:
    """Send a model to the hospital as its run does, with changes of the values next to it."""
    node, settings, kept = ran

    def sent(
        model: SignedModel,
        payload: bytes | None = None,
        pinned: str = "",
        run: str = "",
        **changes: str,
    ) -> RecordDict:
        payload = pack_classifier(model.classifier) if payload is None else payload
        info: Info = {**signed_values(model), **changes, "bytes": len(payload)}
        site = node.model_copy(update={"coordinator_key": pinned})
        flower_run = run or kept.manifest.flower_run
        return answer("evaluation", to_record(payload, info), settings, flower_run, site, node.site)

    return sent


def another(kept: SignedModel, flower_run: str = "", key: bytes = KEY) -> SignedModel:
    """A model of the same run with other weights."""
    settings = default_run_config() | FAST | PRIVATE
    head = kept.classifier
    assert isinstance(head, Head)
    facts = kept.manifest
    header = Header("fedpft", facts.run, "coordinator", facts.fingerprint, tuple(facts.classes))
    changed = Head(header, head.weight + 1, head.bias, head.clip)
    config = parse_run(settings)
    return make_signed_model(changed, config, None, flower_run or kept.manifest.flower_run, 2, key)


def files(node: NodeConfig) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in models_folder(node).iterdir()
        if path.suffix != ".lock"
    }


@pytest.fixture
def model(ran: Any) -> Iterator[SignedModel]:
    """A model of which the hospital must keep nothing."""
    node, _, kept = ran
    before = files(node)
    yield another(kept)
    assert files(node) == before


def test_a_model_whose_manifest_was_changed_is_refused(model: SignedModel, send: Send) -> None:
    facts = json.loads(model.manifest.signed_bytes())
    facts["privacy"]["epsilon"] = 0.001
    with pytest.raises(SealError):
        send(model, manifest=json.dumps(facts, sort_keys=True, separators=(",", ":")))


def test_weights_that_were_exchanged_are_refused(model: SignedModel, send: Send) -> None:
    head = model.classifier
    assert isinstance(head, Head)
    with pytest.raises(SealError):
        send(model, payload=pack_classifier(Head(head.header, -head.weight, head.bias, head.clip)))


def test_a_name_that_leaves_the_folder_is_refused_even_when_signed(
    ran: Any, model: SignedModel, send: Send
) -> None:
    for name in ("../../smuggled", "/tmp/x", ".hidden", "a/b"):
        facts = json.loads(model.manifest.signed_bytes()) | {"name": name}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        with pytest.raises(SurrogateError, match="manifest cannot be read"):
            send(model, manifest=text, signature=sign(text.encode(), KEY, PURPOSE).hex())
    assert not list(Path(ran[0].state).rglob("smuggled*"))


@pytest.mark.parametrize(
    "changes",
    [
        {"signature": "zz"},
        {"signer": "00"},
        {"manifest": "[]"},
        {"gaussians": "!"},
        {"signature": "ab"},
    ],
)
def test_values_that_are_no_model_are_refused_with_a_code(
    model: SignedModel, send: Send, changes: dict[str, str]
) -> None:
    with pytest.raises(FedSurrogateError):
        send(model, **changes)


def test_a_pinned_site_keeps_no_model_of_another_key_and_its_reply_is_the_same(
    ran: Any, send: Send
) -> None:
    node, _, kept = ran
    before = files(node)
    refused = from_record(send(another(kept), pinned=public_key(new_key()).hex()), 0)
    assert files(node) == before
    taken = from_record(send(another(kept)), 0)
    assert len(read_index(node).models) == 2
    assert refused == taken
    assert read_index(node).in_use == kept.manifest.name, (
        "what arrives is not used before a person decides it"
    )


def test_a_site_that_took_no_part_keeps_nothing(ran: Any, send: Send) -> None:
    node, _, kept = ran
    before = files(node)
    send(another(kept, "424242", new_key()), run="424242")
    assert files(node) == before


def test_a_model_of_another_run_is_refused(ran: Any, send: Send) -> None:
    _, _, kept = ran
    with pytest.raises(SurrogateError, match="a signed model of run"):
        send(another(kept, "5"))


def test_gaussians_that_would_divide_by_zero_are_refused(ran: Any, send: Send) -> None:
    _, _, kept = ran
    from dataclasses import replace

    from fedsurrogate.common.signed_models.signed_model import pack_gaussians

    assert kept.gaussians is not None
    broken = replace(kept.gaussians, within=replace(kept.gaussians.within, rest=torch.zeros(1)))
    with pytest.raises(SurrogateError, match="Gaussians cannot be read"):
        send(another(kept), gaussians=pack_gaussians(broken))
