"""The coordinator's use of class sums and of decoder updates."""

from __future__ import annotations

from typing import Any

import torch

from fedsurrogate.common.models.generators import COUNTS, SUMS
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    expected_shapes,
    take_in,
)

CLASSES = ("a", "b", "c")


def run(**settings: Any) -> Run:
    return parse_run({"method": "dpcvae", "dpcvae.latent": 2, "dpcvae.hidden": 0} | settings)


def reported(site: str, counts: list[float], sums: torch.Tensor, config: Run) -> Parameters:
    header = Header("dpcvae", "run", site, "f", CLASSES)
    return Parameters(header, 1, {COUNTS: torch.tensor(counts), SUMS: sums}, 0, config.mechanism)


def moved(site: str, by: float, training: Training) -> Parameters:
    tensors = {name: torch.full(shape, by) for name, shape in expected_shapes(training).items()}
    return Parameters(Header("dpcvae", "run", site, "f", CLASSES), training.round + 1, tensors, 0)


def begun(config: Run) -> Training:
    training = Training.begin(config, CLASSES, "f", 4)
    one = torch.tensor([[3.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    other = torch.tensor([[0, 1.0, 0, 0], [0, 2.0, 0, 0], [0, 0, 0, 0]])
    take_in(
        training,
        [reported("one", [3, 0, 0], one, config), reported("other", [1, 4, 0], other, config)],
    )
    return training


def test_decoders_are_averaged_by_the_reported_sizes_in_single_precision() -> None:
    training = begun(run())
    before = training.model["linear.weight"]
    take_in(training, [moved("one", 1.0, training), moved("other", 5.0, training)])
    # Three records and five records.
    assert torch.allclose(training.model["linear.weight"] - before, torch.tensor(3.5))
    assert training.model["linear.weight"].dtype == torch.float32
    equal = begun(run(**{"dpcvae.weights": "equal"}))
    before = equal.model["linear.weight"]
    take_in(equal, [moved("one", 1.0, equal), moved("other", 5.0, equal)])
    assert torch.allclose(equal.model["linear.weight"] - before, torch.tensor(3.0))
