"""What is made of a trained generator: a head, a stored file, messages to sites, and points of figures."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from flwr.app import Message

from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import COUNTS, SUMS, Generator
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.wire.generator_files import manifest_of, pack_generator
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import INFO, from_record
from fedsurrogate.strategies import dpcvae
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    DPCVAE,
    GeneratorSource,
    absorb_total,
    expected_shapes,
    head_of,
)
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.strategies.base.test_courses_of_a_run import Kept
from tests.strategies.base.test_one_round_without_a_network import Held
from tests.strategies.dpcvae.test_generating_by_loops import D
from tests.strategies.dpcvae.test_rounds_from_sums import begun

FAST = {"dpcvae.synthetic": 30, "head.min-steps": 3, "head.epochs": 1}


@pytest.fixture
def training() -> Training:
    made = begun(**FAST)
    counts = torch.tensor([6.0, 5.0, 9.0]).double()
    sums = counts[:, None] * torch.eye(3, D).double() / 2
    absorb_total(Total(made.header(), {COUNTS: counts, SUMS: sums}), made, ["s0"])
    made.asked = 4
    return made


def test_the_generator_is_kept_and_sent_to_used_sites_and_its_head_is_the_model(
    training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        dpcvae, "pack_generator", lambda made, rounds: f"{rounds} {made.header.method}".encode()
    )
    strategy, recorder = DPCVAE(training.config, Kept(), "cpu"), Kept()
    strategy.recorder = recorder
    strategy.receipts = Held([])  # type: ignore[assignment]
    strategy.outcome.sites = {
        at: Site(f"s{at}", "dropped" if at == 1 else "used", "") for at in range(3)
    }
    found = strategy.classifier(training)
    generator = Generator(training.header(), training.config, training.model)
    wanted: Any = head_of(generator, training.config.settings, "cpu")
    torch.testing.assert_close(found.weight, wanted.weight)  # type: ignore[union-attr]
    torch.testing.assert_close(found.bias, wanted.bias)  # type: ignore[union-attr]
    assert found.clip == 0  # type: ignore[union-attr]
    assert recorder.surrogates == {"file generator.safetensors": b"4 dpcvae"}
    shapes = expected_shapes(training)
    size = sum(torch.Size(shape).numel() for shape in shapes.values())
    assert strategy.outcome.parameters == size > 0
    sent = pack_parameters(Parameters(training.header(), 1, training.model))
    messages: list[Message] = list(strategy._broadcast())
    assert [each.metadata.dst_node_id for each in messages] == [0, 2]
    for each in messages:
        payload, info = from_record(each.content, 2**30)
        assert (payload, info["bytes"]) == (sent, len(sent))
        assert each.metadata.message_type == "evaluate"
        assert INFO in each.content.config_records
    source = strategy.outcome.learned
    assert isinstance(source, GeneratorSource)
    assert source.generator.tensors is training.model


@pytest.mark.parametrize(("limit", "each"), [(1, 1), (3, 1), (5, 1), (6, 2), (31, 10)])
def test_points_of_a_figure_are_as_many_of_each_class(
    training: Training, limit: int, each: int
) -> None:
    generator = Generator(training.header(), training.config, training.model)
    features, labels = GeneratorSource(generator).sample(11, limit)
    assert torch.bincount(labels, minlength=3).tolist() == [each] * 3
    assert torch.equal(features, generator.draw(labels, stream(11, "picture")))
    other, _ = GeneratorSource(generator).sample(12, limit)
    assert not torch.equal(features, other)


def test_without_a_number_of_rounds_a_generator_has_cost_all_of_them() -> None:
    made = begun(epsilon=6.0, delta=1e-5)
    generator = Generator(made.header(), made.config, made.model)
    assert manifest_of(generator) == manifest_of(generator, 0)
    assert pack_generator(generator) == pack_generator(generator, rounds=0)
    claim = made.config.mechanism
    assert claim is not None
    assert manifest_of(generator)["privacy"]["epsilon"] == claim.epsilon == 6
    spent = [manifest_of(generator, rounds)["privacy"]["epsilon"] for rounds in (1, 2)]
    assert spent == [claim.epsilon_after(1), claim.epsilon_after(2)]
    assert 0 < spent[0] < spent[1] < 6
