"""What is made of a trained generator: a head, a stored file, messages to sites, and points of figures."""

from __future__ import annotations

import pytest
import torch

from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.generators import COUNTS, SUMS, Generator
from fedsurrogate.common.wire.generator_files import manifest_of, pack_generator
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    absorb_total,
)
from fedsurrogate.strategies.pooling.site_weights import Total
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


@pytest.mark.parametrize(("limit", "each"), [(1, 1), (3, 1), (5, 1), (6, 2), (31, 10)])
def test_points_of_a_figure_are_as_many_of_each_class(
    training: Training, limit: int, each: int
) -> None:
    generator = Generator(training.header(), training.config, training.model)
    features, labels = generator.sample(11, limit)
    assert torch.bincount(labels, minlength=3).tolist() == [each] * 3
    assert torch.equal(features, generator.draw(labels, stream(11, "picture")))
    other, _ = generator.sample(12, limit)
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
