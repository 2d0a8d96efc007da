"""The coordinator's use of class sums and of decoder updates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import LARGEST_COUNT, RunError, SurrogateError
from fedsurrogate.common.models.generators import COUNTS, MEANS, SUMS
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae import (
    SIZES,
    check_first_round,
    class_means,
    expected_shapes,
    head_of,
    take_in,
)

CLASSES = ("a", "b", "c")
PRIVATE: dict[str, Any] = {"epsilon": 6.0, "delta": 1e-5}


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


def test_class_means_are_those_of_all_records_of_all_sites() -> None:
    training = begun(run())
    assert training.model[COUNTS].tolist() == [4, 4, 0]
    means = training.model[MEANS] / 2
    assert means[0].tolist() == [0.75, 0.25, 0, 0]
    assert means[1].tolist() == [0, 0.5, 0, 0]
    # A class without records has the mean of all records.
    assert torch.allclose(means[2], torch.tensor([3.0, 3.0, 0, 0]) / 8)
    assert training.round == 1
    assert training.confirmed == {"one": 1, "other": 1}


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


def test_a_site_that_came_too_late_to_tell_its_size_weighs_as_the_median_one() -> None:
    training = begun(run())
    before = training.model["linear.weight"]
    assert {key for key in training.memory if key.startswith(SIZES)} == {
        SIZES + "one",
        SIZES + "other",
    }
    take_in(training, [moved("late", 2.0, training), moved("other", 0.0, training)])
    assert torch.allclose(training.model["linear.weight"] - before, torch.tensor(2.0 * 3 / 8))


def test_means_lost_in_noise_are_drawn_to_the_mean_of_all() -> None:
    config = run(**PRIVATE)
    assert config.mechanism is not None
    noise = config.mechanism.event(1).noise_multiplier
    random = torch.Generator().manual_seed(0)
    d, sigma = 400, noise / 0.93**0.5
    true = torch.nn.functional.normalize(torch.randn(3, d, generator=random), dim=1)
    counts = torch.tensor([4000.0, 150.0, 0.0])
    sums = counts[:, None] * true + sigma * torch.randn(3, d, generator=random)
    replies = [reported("one", counts.tolist(), sums, config)]
    means = class_means(replies, config.mechanism, config.settings.dpcvae) / d**0.5
    raw = sums / counts.clamp_min(1)[:, None]
    assert float((means[0] - true[0]).norm()) < 0.05
    assert float((means[1] - true[1]).norm()) < float((raw[1] - true[1]).norm())
    assert float((means[2] - means[:1].mean(0)).norm()) < 0.2
    with pytest.raises(RunError, match="no class stands out"):
        class_means(
            [reported("one", [0, 0, 0], sums, config)], config.mechanism, config.settings.dpcvae
        )


def test_a_checkpoint_keeps_the_sizes_and_the_means() -> None:
    training = begun(run())
    back = Training.load(training.config, training.save(), "file")
    assert all(torch.equal(back.model[name], tensor) for name, tensor in training.model.items())
    assert all(torch.equal(back.memory[name], tensor) for name, tensor in training.memory.items())


def test_a_head_of_what_is_drawn_tells_the_classes_apart() -> None:
    from fedsurrogate.common.models.generators import Generator

    training = begun(run(**{"dpcvae.synthetic": 200}))
    model = training.model | {MEANS: 20 * torch.eye(3, 4)}
    head = head_of(Generator(training.header(), training.config, model), training.config.settings)
    assert head.scores(torch.eye(3, 4)).argmax(1).tolist() == [0, 1, 2]
    assert head.clip == 0.0


@settings(max_examples=60)
@given(
    st.lists(st.integers(0, 20), min_size=3, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["", "negative", "longer"]),
)
def test_class_sizes_and_sums_are_those_that_some_records_have(
    counts: list[int], at: int, fault: str
) -> None:
    """Without noise, with the largest sums that embeddings of norm one have."""
    counts = [LARGEST_COUNT // 10 * count for count in counts]
    sums = torch.zeros(3, 4)
    sums[range(3), at] = torch.tensor(counts).float()
    sizes = [float(count) for count in counts]
    if fault == "negative":
        sizes[at] = -1.0
    if fault == "longer":
        sums[at] = sums[at] * 1.1 + 1
    reply = reported("one", sizes, sums, run())
    if fault or max(counts) > LARGEST_COUNT:
        with pytest.raises(SurrogateError, match=r"out of range|long"):
            check_first_round(reply, None, run().settings.dpcvae)
    else:
        check_first_round(reply, None, run().settings.dpcvae)
