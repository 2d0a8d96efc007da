"""FedRep: bodies are averaged, heads stay at home."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedavg.update import own_network, top_layer, update_body
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.local_training import local_head
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.models.classifiers import Network
from fedsurrogate.common.models.networks import HEAD, body_of, fresh, parameters_of
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import (
    pack_classifier,
    pack_parameters,
    unpack_classifier,
    unpack_parameters,
)
from fedsurrogate.common.wire.records import from_record
from tests.grid import FAST, InProcessGrid, run_federation, sites

CLASSES = ("a", "b", "c")
LABELS = torch.arange(90) % 3


def run(**settings: Any) -> Run:
    return parse_run(
        {"method": "fedrep", "fedavg.width": 6, "fedavg.local-epochs": 3} | FAST | settings
    )


def job(config: Run, question: bytes | None = None) -> Job:
    values = torch.randn(len(LABELS), 8, generator=torch.Generator().manual_seed(1))
    values[:, 0] += 3 * LABELS
    records = LabelledFeatures(values, LABELS, None)
    found = SiteFeatures(records, records, CLASSES, "f", 0.0, simulated=False)
    return Job(
        config, NodeConfig(), "s", found, payload=question, info={"round": 1, "lineage": "abc"}
    )


def header(config: Run) -> Header:
    return replace(job(config).header(CLASSES), site="coordinator")


def body() -> dict[str, torch.Tensor]:
    return body_of(parameters_of(fresh("mlp", 8, 3, 6, 0)))


def test_an_empty_body_gives_the_local_head() -> None:
    config = run()
    linear = config.settings.fedavg.model_copy(update={"model": "linear"})
    here = job(replace(config, settings=config.settings.model_copy(update={"fedavg": linear})))
    assert body_of(parameters_of(fresh("linear", 8, 3, 0))) == {}
    weight, bias = top_layer(here, {}, *here.training_data(CLASSES), 3)
    alone = local_head(here)
    assert torch.equal(weight, alone.weight)
    assert torch.equal(bias, alone.bias)


def test_only_the_body_leaves_and_it_was_trained_below_a_fixed_head() -> None:
    config = run()
    question = pack_parameters(Parameters(header(config), 1, body()))
    here = job(config, question)
    moved = unpack_parameters(update_body(here).payload).tensors
    assert moved.keys() == body().keys() == {"hidden.weight", "hidden.bias"}
    features, labels = here.training_data(CLASSES)
    weight, bias = top_layer(here, here.received_model().tensors, features, labels, 3)

    def loss(tensors: dict[str, torch.Tensor]) -> float:
        head = {HEAD + "weight": weight, HEAD + "bias": bias}
        scores = Network(here.header(CLASSES), "mlp", 8, {**tensors, **head}).scores(features)
        return float(torch.nn.functional.cross_entropy(scores, labels))

    assert loss({name: tensor + moved[name] for name, tensor in body().items()}) < loss(body())


def test_a_site_judges_the_body_with_its_own_head() -> None:
    config = run(**{"head.min-steps": 300})
    zeros = {HEAD + "weight": torch.zeros(3, 6), HEAD + "bias": torch.zeros(3)}
    here = job(config, pack_classifier(Network(header(config), "mlp", 8, {**body(), **zeros})))
    own = own_network(here)
    assert isinstance(own, Network)
    test = here.found.test
    assert own.accuracy(test.features, CLASSES, LABELS)[0] > 0.6 * len(LABELS)
    strange = Network(header(config), "convnet", 64, parameters_of(fresh("convnet", 64, 3, 6)))
    with pytest.raises(SurrogateError):
        own_network(job(config, pack_classifier(strange)))


def test_a_body_of_another_network_is_refused() -> None:
    config = run()
    for wrong in (
        {},
        {"hidden.weight": torch.zeros(6, 8)},
        body() | {HEAD + "weight": torch.zeros(3, 6)},
    ):
        question = pack_parameters(Parameters(header(config), 1, wrong))
        with pytest.raises(SurrogateError):
            update_body(job(config, question))


@pytest.mark.slow
def test_no_message_of_a_run_holds_a_head(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2))
    settings = FAST | {
        "method": "fedrep",
        "fedavg.rounds": 2,
        "fedavg.local-epochs": 1,
        "alpha": 1.0,
    }
    run_federation(tmp_path, grid, **settings)
    seen = 0
    for message in [*grid.sent, *grid.received]:
        kind = message.metadata.message_type
        payload = from_record(message.content, 2**30)[0] if message.has_content() else None
        if payload is None:
            continue
        if kind == "train":
            assert not [
                name for name in unpack_parameters(payload).tensors if name.startswith(HEAD)
            ]
        else:
            model = unpack_classifier(payload)
            assert isinstance(model, Network)
            assert not model.tensors[HEAD + "weight"].any()
        seen += 1
    assert seen > 8


def test_a_linear_model_has_nothing_to_share() -> None:
    with pytest.raises(ConfigError, match="no representation below its head"):
        run(**{"fedavg.model": "linear"})
    assert run().settings.fedavg.model == "mlp"
    assert parse_run({"method": "fedavg"}).settings.fedavg.model == "linear"
