"""No record changes a computed sum by more than the clip, for all allowed clips. Differences are
exact fractions.

The tests use the sum as the machine computes it, with and without the record. Rounding could make a
clipping factor too large, or change other records' contributions. Then the noise would be too
small.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.harness.site_data import clipped
from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import clipped_sum, clipped_sums
from fedsurrogate.client_app.methods.dpcvae.training import CVAETrainer, GanTrainer, Trainer
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.generators import fresh_companion, fresh_generator
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import fresh, split_input
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import weigh_mean_over_columns
from fedsurrogate.common.privacy.shares import KEPT, KEPT_OF_FEW, REMOVED
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import statistics
from fedsurrogate.common.surrogates.mixtures import PublicMap

CLIP_KEYS = ("fedavg.clip", "fedlap.clip", "dpcvae.clip", "fedpft.clip")
KINDS = [("linear", 7), ("mlp", 7), ("convnet", 16)]
# Ways to sum gradients: from the selected rows to one flat vector for all parameters.
SumOf = Callable[[Tensor], Tensor]

powers = st.floats(-45, 38)
clips = st.one_of(
    st.sampled_from([1e-6, 1e6, 0.1, 1.0]), st.floats(1e-6, 1e-3), st.floats(1e-3, 1e6)
)
searched = settings(
    max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def too_far(one: Tensor, other: Tensor, bound: float) -> bool:
    """Whether the distance of two vectors exceeds `bound`, in exact arithmetic."""
    estimate = float((one.double() - other.double()).norm())
    if abs(estimate - bound) > 1e-6 * bound:
        return estimate > bound
    pairs = zip(one.double().flatten().tolist(), other.double().flatten().tolist(), strict=True)
    return sum((Fraction(a) - Fraction(b)) ** 2 for a, b in pairs if a != b) > Fraction(bound) ** 2


def flat(parts: Iterable[IntegerSum]) -> Tensor:
    return torch.cat([part.value.flatten() for part in parts])


def values(
    shape: tuple[int, ...], power: float, seed: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Numbers up to 10^power in a wide range; infinite beyond the range of the type."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10.0 ** (power - 3 * torch.rand(shape, generator=generator, dtype=torch.float64))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread).to(dtype)


def resized(module: nn.Module, power: float) -> nn.Module:
    """A model with parameters of any size: the coordinator chooses the model."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.where(parameter == 0, torch.ones_like(parameter), parameter) * 10.0**power
            )
    return module


def linear_sum(module: nn.Module, features: Tensor, labels: Tensor, clip: float) -> SumOf:
    modules = nn.ModuleList([module])

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y, reduction="none")

    return lambda rows: flat(
        clipped_sums(modules, losses, (features[rows], labels[rows]), clip)[0].values()
    )


def fedlap_sum(module: nn.Module, features: Tensor, labels: Tensor, clip: float) -> SumOf:
    body, inner = (
        split_input(module, features) if isinstance(module, nn.Sequential) else (module, features)
    )
    tensors = {name: parameter.detach() for name, parameter in module.named_parameters()}
    change = next(draws((), torch.Generator()))
    return lambda rows: flat(
        clipped_sum(
            body, tensors, LandscapeRecords.evenly(inner[rows], labels[rows]), clip, change
        )[0].values()
    )


def generator_sum(
    method: str, power: float, embeddings: Tensor, labels: Tensor, clip: float, hidden: int
) -> SumOf:
    run = parse_run({"method": method, "dpcvae.hidden": hidden, "dpcvae.latent": 3})
    shared, companion = (
        resized(make(run.settings, run.method.adversarial, 3, embeddings.shape[1]), power)
        for make in (fresh_generator, fresh_companion)
    )

    def trainer() -> Trainer:
        if method == "dpcgan":
            return GanTrainer(
                shared, companion, run.settings.dpcvae, 1.0, torch.ones(3), torch.Generator()
            )  # type: ignore[arg-type]
        return CVAETrainer(shared, companion, run.settings.dpcvae, 1.0, 1.0, torch.randn)  # type: ignore[arg-type]

    steps = trainer()
    # Every record has the same noise, with and without other records.
    inputs = embeddings, labels, steps.noise(len(labels))
    return lambda rows: flat(
        clipped_sums(steps.modules, steps.losses, [part[rows] for part in inputs], clip)[0].values()
    )


def check_every_record(of: SumOf, count: int, clip: float) -> None:
    everyone = torch.arange(count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = of(everyone)
        assert whole.isfinite().all()
        for row in range(count):
            assert not too_far(whole, of(everyone[everyone != row]), clip), row


@pytest.mark.parametrize(
    ("way", "kind", "inputs"),
    [
        *((fedlap_sum, *kind) for kind in KINDS),
        *((linear_sum, *kind) for kind in KINDS if kind[0] != "convnet"),
    ],
)
@searched
@given(
    clip=clips,
    size=powers,
    model=st.floats(-20, 20),
    count=st.integers(1, 5),
    seed=st.integers(0, 999),
)
@example(clip=1e-6, size=38, model=0, count=3, seed=0)
@example(clip=1e6, size=-45, model=0, count=3, seed=0)
def test_of_a_network(
    way: Any, kind: Any, inputs: int, clip: float, size: float, model: float, count: int, seed: int
) -> None:
    module = resized(fresh(kind, inputs, 3, 4), model)
    labels = torch.arange(count) % 3
    check_every_record(way(module, values((count, inputs), size, seed), labels, clip), count, clip)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@searched
@given(
    clip=clips,
    size=st.floats(-300, 300),
    shape=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    seed=st.integers(0, 999),
)
def test_of_other_number_types(
    dtype: torch.dtype, clip: float, size: float, shape: tuple[int, int], seed: int
) -> None:
    module = fresh("linear", shape[1], 3, 0).to(dtype)
    labels = torch.arange(shape[0]) % 3
    check_every_record(
        fedlap_sum(module, values(shape, size, seed, dtype), labels, clip), shape[0], clip
    )


@pytest.mark.parametrize("method", ["dpcvae", "dpcgan"])
@searched
@given(
    clip=clips,
    size=powers,
    model=st.floats(-6, 6),
    hidden=st.sampled_from([0, 5]),
    seed=st.integers(0, 999),
)
@example(clip=1e-6, size=38, model=0, hidden=5, seed=1)
def test_of_a_generator(
    method: str, clip: float, size: float, model: float, hidden: int, seed: int
) -> None:
    labels = torch.arange(4) % 3
    check_every_record(
        generator_sum(method, model, values((4, 6), size, seed), labels, clip, hidden), 4, clip
    )


def cancelling(module: nn.Module) -> nn.Module:
    """A hostile model: large weights that nearly cancel in pairs, so that results depend on the
    last digit of a sum.
    """
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                half = parameter.shape[1] // 2
                values[:, half : 2 * half] = -values[:, :half] * (1 + 1e-6)
                values = values * 1e3
            parameter.copy_(values)
    return module


NETWORKS: list[tuple[Any, int, int]] = [
    ("linear", 7, 0),
    ("linear", 512, 0),
    ("mlp", 7, 5),
    ("mlp", 64, 32),
    ("convnet", 64, 5),
    ("convnet", 64, 8),
]


def check_alone_and_among_others(of: SumOf, count: int) -> None:
    """A record's contribution is bit-identical alone, among others, and at another position.

    Contributions are multiples of 2^-44 of the clip, so sums of a few records are exact.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole, alone = (
            of(torch.arange(count)),
            torch.stack([of(torch.tensor([row])) for row in range(count)]),
        )
        assert torch.equal(whole, alone.sum(0))
        for seed in range(3):
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            assert torch.equal(whole, of(order))
            some = order[: count // (seed + 2)]
            assert torch.equal(of(some), alone[some].sum(0))


@pytest.mark.parametrize(("kind", "inputs", "width"), NETWORKS)
def test_no_record_changes_what_another_contributes_to_a_network(
    kind: Any, inputs: int, width: int
) -> None:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(75, inputs, generator=generator)
    features = (features + torch.roll(features, inputs // 2, 1)) / 2
    module = cancelling(fresh(kind, inputs, 3, width))
    check_alone_and_among_others(fedlap_sum(module, features, torch.arange(75) % 3, 0.1), 75)


@pytest.mark.parametrize(
    ("kind", "inputs", "width"), [each for each in NETWORKS if each[0] != "convnet"]
)
def test_no_record_changes_what_another_contributes_where_no_gradient_is_stored(
    kind: Any, inputs: int, width: int
) -> None:
    """More records than one call takes, so that a record changes its call and its place in it."""
    count = 300
    features = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    module = cancelling(fresh(kind, inputs, 3, width))
    check_alone_and_among_others(linear_sum(module, features, torch.arange(count) % 3, 0.1), count)


@pytest.mark.parametrize(
    ("method", "dimension", "hidden"),
    [
        *(("dpcvae", *size) for size in ((6, 0), (64, 0), (6, 5), (64, 16))),
        *(("dpcgan", *size) for size in ((6, 0), (64, 16))),
    ],
)
def test_no_record_changes_what_another_contributes_to_a_generator(
    method: str, dimension: int, hidden: int
) -> None:
    embeddings = torch.randn(75, dimension, generator=torch.Generator().manual_seed(1))
    check_alone_and_among_others(
        generator_sum(method, 0.0, embeddings, torch.arange(75) % 3, 0.1, hidden), 75
    )


@pytest.mark.parametrize(
    "change",
    [
        PublicMap().apply,
        *(partial(weigh_mean_over_columns, weight=each) for each in (KEPT, KEPT_OF_FEW, REMOVED)),
    ],
)
@pytest.mark.parametrize("family", ["spherical", "diag", "full"])
@searched
@given(
    norm=st.one_of(st.just(0.0), clips),
    size=st.floats(-300, 300),
    shape=st.tuples(st.integers(1, 60), st.integers(1, 9)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    patient=st.booleans(),
    seed=st.integers(0, 999),
)
@example(norm=0.0, size=0, shape=(49, 1), dtype=torch.float32, patient=True, seed=0)
def test_of_class_sums_and_second_moments(
    family: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    norm: float,
    size: float,
    shape: tuple[int, int],
    dtype: torch.dtype,
    patient: bool,
    seed: int,
) -> None:
    own = shape[0] if patient else 1
    features, others = (
        values(shape, size, seed, dtype)[:own],
        values((5, shape[1]), size / 2, seed + 1, dtype),
    )
    labels = torch.randint(0, 2, (5 + own,), generator=torch.Generator().manual_seed(seed))
    if seed % 2:
        # The worst case for a patient: all records are equal.
        features, labels[5:] = features[:1].repeat(own, 1), 1
    units = [*"abcde", *("p" * own)] if patient else None
    found = []
    for rows in (5, 5 + own):
        every = torch.cat([others, features])[:rows]
        whose = units[:rows] if units else None
        data = clipped(every, labels[:rows], whose, norm, change)
        found.append(statistics(data.features, data.labels, data.weights, 2, family))
    for less, more in zip(*found, strict=True):
        assert not too_far(less.value, more.value, less.bound), less.name


MILLION = 1_000_000


@pytest.mark.parametrize(
    ("way", "clip"),
    [
        ("private_gradients", 1e-6),
        ("private_gradients", 0.7),
        ("clipped_linear", 1e-6),
        ("clipped_linear", 0.7),
    ],
)
def test_among_a_million_others(monkeypatch: pytest.MonkeyPatch, way: str, clip: float) -> None:
    # A few large batches instead of many small ones: the total that is rounded is the same.
    monkeypatch.setattr(record_gradients, "TOGETHER", 2**14)
    # All records are equal, so their gradients have the same direction.
    features, labels = (
        torch.full((MILLION + 2, 1), 30.0),
        torch.zeros(MILLION + 2, dtype=torch.int64),
    )
    layer = nn.Linear(1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.0], [1e6]]))
        layer.bias.zero_()
    sum_of = fedlap_sum if way == "private_gradients" else linear_sum
    of = sum_of(layer, features, labels, clip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sums = [of(torch.arange(MILLION + more)) for more in range(3)]
    for less, more in pairwise(sums):
        assert not too_far(less, more, clip)
        assert too_far(less, more, 0.99 * clip), "each of them counts"


def test_of_class_sums_among_a_million_others() -> None:
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(MILLION + 3, 2, generator=generator) + 2
    labels = torch.zeros(MILLION + 3, dtype=torch.int64)
    units = [*map(str, range(MILLION)), "p", "p", "p"]
    found = []
    for rows in (MILLION, MILLION + 3):
        data = clipped(features[:rows], labels[:rows], units[:rows])
        found.append(statistics(data.features, data.labels, data.weights, 1, "full"))
    for less, more in zip(*found, strict=True):
        assert not too_far(less.value, more.value, 1.0), less.name


@pytest.mark.parametrize("key", CLIP_KEYS)
@pytest.mark.parametrize("clip", [1.4e-45, 1e-300, 9e-7, 1.1e6, 1e300, math.inf, math.nan, -1.0])
def test_a_clip_outside_the_range_is_refused_with_the_range(key: str, clip: float) -> None:
    with pytest.raises(ConfigError, match=rf"{key} = .* from 1e-06 to 1e\+06"):
        parse_run({key: clip})


@pytest.mark.parametrize("key", CLIP_KEYS)
@pytest.mark.parametrize("clip", [1e-6, 1.0, 1e6])
def test_a_clip_in_the_range_is_taken(key: str, clip: float) -> None:
    section, name = key.split(".")
    assert getattr(getattr(parse_run({key: clip}).settings, section), name) == clip


@pytest.mark.parametrize("key", [key for key in CLIP_KEYS if key != "fedpft.clip"])
def test_no_clip_at_all_is_refused_where_gradients_are_clipped(key: str) -> None:
    with pytest.raises(ConfigError, match="must be a clip"):
        parse_run({key: 0.0})
