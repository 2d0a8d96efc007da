"""Parity of a device with the processor: features, also where the memory does not hold a batch,
mixtures, statistics, heads, FedLAP, DP-CVAE, clipping; and the CUDA tests.

The tolerance of each row is stated with it. bfloat16 keeps eight bits, so features may differ by a
percent.
"""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import _gpu_limits
from benchmarks._gpu_rows import Case, LeftOutError, Row, Sizes, parity, relative
from fedsurrogate.client_app.features.device_processes import CudaTransfers, overlapped
from fedsurrogate.client_app.methods.dp.record_gradients import clipped_sum, clipped_sums
from fedsurrogate.client_app.methods.dpcvae.training import CVAETrainer
from fedsurrogate.client_app.methods.fedlap.approximation import (
    Batches,
    Matching,
    Search,
    effective_radius,
    synthesise,
)
from fedsurrogate.common.backbones.backbones import frozen_forward
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.models.generators import Decoder, Encoder
from fedsurrogate.common.models.loss_landscape import Descent, LandscapeRecords, gradient
from fedsurrogate.common.models.networks import convnet, parameters_of, split_input
from fedsurrogate.common.models.training_parts import draws, train_on_features
from fedsurrogate.common.surrogates.covariances import gram
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit, k_means
from fedsurrogate.strategies.closed_form.solvers import Solution, lda, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics
from tests.likelihood import log_likelihood

ROOT = Path(__file__).resolve().parents[1]
# Files whose tests need a GPU and nothing but torch, scikit-learn and hypothesis, and those that
# need Flower as well.
CUDA_TESTS = {
    "tests/client_app/features/test_transfers.py": ("hypothesis",),
    "tests/common/surrogates/test_mixtures.py": ("sklearn", "hypothesis"),
    "tests/strategies/fedpft/test_sampling.py": ("flwr", "pydantic", "hypothesis"),
}
BFLOAT = 2e-2


def generator(seed: int = 0) -> torch.Generator:
    """A generator on the processor, so that both sides draw the same numbers."""
    return torch.Generator().manual_seed(seed)


def cases(device: str, sizes: Sizes) -> Iterator[Case]:
    """All cases of parity. Convolutions keep their 24 bits for it, which is not the default of a
    GPU.
    """
    for name in sizes.backbones:
        short = name.partition(":")[2]
        yield _exact(f"features of {short}", 12, partial(features, device, sizes, name))
    yield _exact("images normalised on the device", 1, partial(prepared, device))
    yield _exact("a batch that does not fit", 10, partial(too_large, device, sizes))
    for family in ("full", "diag", "spherical", "lowrank", "gram"):
        yield _exact(f"mixtures, {family}", 3, partial(mixtures, device, family))
    yield _exact("k-means", 2, partial(clusters, device))
    yield _exact("second moments", 5, partial(second_moments, device, sizes))
    for solver in (lda, ridge):
        name = f"head in closed form, {solver.__name__}"
        yield _exact(name, 1, partial(heads, device, solver))
    yield _exact("a trained head", 3, partial(trained, device))
    yield _exact("FedLAP", 8, partial(fedlap, device))
    yield _exact("DP-CVAE", 3, partial(generators, device))
    yield _exact("DP-SGD", 3, partial(clipping, device))


def _exact(name: str, seconds: float, rows: Callable[[], Iterator[Row]]) -> Case:
    def exact() -> Iterator[Row]:
        allowed = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = False
        try:
            yield from rows()
        finally:
            torch.backends.cudnn.allow_tf32 = allowed

    return Case(name, seconds, exact)


def backbone(name: str) -> nn.Module:
    """A backbone with random weights, on the processor."""
    torch.manual_seed(0)
    try:
        return _gpu_limits.network(name, "cpu")
    except ImportError as error:
        raise LeftOutError(f"{name}: {error}") from error


def features(device: str, sizes: Sizes, name: str) -> Iterator[Row]:
    """Features of a backbone with random weights: float32 on the processor, bfloat16 on the device;
    and a head that each side learns from its own features of the same images.
    """
    model, short = backbone(name), name.partition(":")[2]
    batch = torch.randn(4, 3, sizes.image_size, sizes.image_size, generator=generator())
    here = frozen_forward(model, torch.device("cpu"))(batch)
    there_model = model.to(device, memory_format=torch.channels_last)
    there = frozen_forward(there_model, torch.device(device))(batch).cpu()
    yield parity(f"features of {short}", relative(there, here), BFLOAT)
    cosine = torch.nn.functional.cosine_similarity(there, here).min()
    yield parity(f"features of {short}, 1 - cosine", float(1 - cosine), BFLOAT / 50, "smallest")
    yield _head_of_half(short, there_model, device, sizes)


def _head_of_half(short: str, model: nn.Module, device: str, sizes: Sizes) -> Row:
    """The accuracy of a head that is learned in closed form from bfloat16 features and used on
    them, against the same with float32 features of the same device. Each image is a smooth pattern
    of its class and one of its own.
    """
    classes, count, size = 5, 40 if sizes.images < 100 else 400, sizes.image_size
    labels = torch.arange(2 * count) % classes
    kinds, features = smooth(classes, size, generator(5)), dict[str, Tensor]()
    for kind, forward in (
        ("half", frozen_forward(model, torch.device(device))),
        ("single", torch.inference_mode()(model)),
    ):
        own = generator(6)
        features[kind] = torch.cat(
            [
                forward((kinds[rows] + smooth(len(rows), size, own)).to(device)).double().cpu()
                for rows in torch.split(labels, 40)
            ]
        )
    found = {}
    for kind, x in features.items():
        means = torch.stack([x[:count][labels[:count] == each].mean(0) for each in range(classes)])
        apart = x[:count] - means[labels[:count]]
        counts = torch.bincount(labels[:count], minlength=classes).double()
        solution = lda(Statistics(counts, means, apart.T @ apart / count), 0.1)
        found[kind] = (x[count:] @ solution.weight.T + solution.bias).argmax(1)
    right = {kind: float((each == labels[count:]).double().mean()) for kind, each in found.items()}
    centred = [each - each.mean(0) for each in features.values()]
    row = parity(
        f"head on features of {short}, accuracy lost",
        max(0.0, right["single"] - right["half"]),
        0.02,
        "share of images",
    )
    changed = float((found["half"] != found["single"]).double().mean())
    apart = {"of another class": changed, "features around their mean": relative(*centred)}
    return replace(row, facts={f"accuracy, {kind}": each for kind, each in right.items()} | apart)


def smooth(count: int, size: int, chance: torch.Generator) -> Tensor:
    """Images (n, 3, size, size) of a few large spots."""
    spots = torch.randn(count, 3, 4, 4, generator=chance)
    return torch.nn.functional.interpolate(spots, (size, size), mode="bicubic")


def prepared(device: str) -> Iterator[Row]:
    """8-bit pixels that the device normalises: every bit must be the processor's."""
    prepare = Preprocessing(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    pixels = torch.randint(0, 256, (8, 3, 64, 64), generator=generator(), dtype=torch.uint8)
    apart = prepare.normalised(pixels.to(device)).cpu() - prepare.normalised(pixels)
    yield parity("images normalised on the device", float(apart.abs().max()), 0.0, "largest")


def too_large(device: str, sizes: Sizes) -> Iterator[Row]:
    """Extraction while others hold nearly all memory of the GPU: the batch is halved, the log says
    so, and the features are the same.
    """
    if not device.startswith("cuda"):
        raise LeftOutError("a batch that does not fit: it needs a GPU")
    target = torch.device(device)
    model = backbone(sizes.backbones[0]).to(device, memory_format=torch.channels_last)
    forward, transfers = frozen_forward(model, target), CudaTransfers(target)
    batches = torch.split(
        torch.randn(3 * sizes.batch, 3, sizes.image_size, sizes.image_size, generator=generator()),
        sizes.batch,
    )
    batches = tuple(each.contiguous(memory_format=torch.channels_last) for each in batches)

    def extracted() -> Tensor:
        return torch.cat(
            [x for _, x in overlapped(enumerate(batches), forward, transfers) if x is not None]
        )

    free = extracted()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(target)
    before = torch.cuda.memory_allocated(target)
    extracted()
    needed = torch.cuda.max_memory_allocated(target) - before
    torch.cuda.empty_cache()
    with warnings_of("fedsurrogate.site") as said:
        # Plain memory, until less than a third of what a batch needs is left.
        left, _ = torch.cuda.mem_get_info(target)
        held = [torch.empty(max(1, left - needed // 3), dtype=torch.uint8, device=device)]
        try:
            crowded = extracted()
        finally:
            held.clear()
            torch.cuda.empty_cache()
    yield parity("a batch that does not fit, features", relative(crowded, free), BFLOAT)
    halved = sum("at a time" in each for each in said)
    yield parity("a batch that does not fit, not halved", float(halved == 0), 0.0, "0 or 1")
    print(f"halved {halved} times: {said[-1:]}", flush=True)


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger warns of meanwhile."""
    said: list[str] = []

    class Keeper(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logger, keeper = logging.getLogger(name), Keeper(logging.WARNING)
    logger.addHandler(keeper)
    try:
        yield said
    finally:
        logger.removeHandler(keeper)


def mixtures(device: str, family: str) -> Iterator[Row]:
    """Mean log-likelihood of mixtures fitted on either side from the same seed."""
    x = torch.randn(400, 16, generator=generator(), dtype=torch.float64)
    y = torch.arange(400) % 2
    x[:, 0] += 6 * (torch.arange(400) % 4)
    for components in (1, 4) if family != "gram" else (1,):
        chosen = MixtureSettings(family, components, 3)
        here = fit(x, y, 2, chosen, generator())
        there = fit(x.to(device), y.to(device), 2, chosen, generator()).to("cpu")
        apart = abs(log_likelihood(there, x, y) - log_likelihood(here, x, y))
        yield parity(f"mixture, {family}, K={components}", apart, 1e-3, "nats a record")


def clusters(device: str) -> Iterator[Row]:
    """The sum of squared distances to the means of k-means' clusters."""
    x = torch.randn(600, 160, generator=generator())
    x[:, 0] += 8 * (torch.arange(600) % 6)
    costs = []
    for where in ("cpu", device):
        one_hot = k_means(x.to(where), 6, generator()).cpu()
        means = one_hot.T @ x / one_hot.sum(0)[:, None]
        costs.append(float((x - one_hot @ means).square().sum()))
    yield parity("k-means, cost", abs(costs[1] - costs[0]) / costs[0], 1e-3)


def second_moments(device: str, sizes: Sizes) -> Iterator[Row]:
    """The second moment of records in float32, against float64 on the same device."""
    for d in sizes.dimensions:
        x = torch.randn(sizes.records, d, generator=generator()).to(device)
        exact = x.double()
        yield parity(f"second moment, d={d}", relative(gram([x]), exact.T @ exact), 1e-5)


def heads(device: str, solver: Callable[[Statistics], Solution]) -> Iterator[Row]:
    """A head in closed form from pooled statistics."""
    known = pooled(8, 64, "cpu")
    here, there = solver(known), solver(pooled(8, 64, device))
    yield parity(
        f"head in closed form, {solver.__name__}", relative(there.weight, here.weight), 1e-5
    )


def trained(device: str) -> Iterator[Row]:
    """A head that is trained on features by Adam."""
    settings: Any = SimpleNamespace(batch_size=50, rate=lambda _: 1e-2, passes=lambda _: 4)
    x, labels = torch.randn(400, 32, generator=generator()), torch.arange(400) % 4
    x[:, 0] += labels
    here = train_on_features(x, labels, 4, settings, 0)
    there = train_on_features(x.to(device), labels.to(device), 4, settings, 0)
    yield parity("a trained head, weights", relative(there[0], here[0]), 1e-3)


def pooled(classes: int, dimension: int, device: str) -> Statistics:
    """Statistics of classes with random means and one covariance."""
    factor = (
        torch.randn(dimension, dimension, generator=generator(1), dtype=torch.float64)
        / dimension**0.5
    )
    covariance = factor @ factor.T + 0.1 * torch.eye(dimension, dtype=torch.float64)
    means = torch.randn(classes, dimension, generator=generator(2), dtype=torch.float64)
    counts = torch.full((classes,), 500.0, dtype=torch.float64)
    return Statistics(counts.to(device), means.to(device), covariance.to(device))


def images(count: int, size: int, device: str, channels: int = 3) -> LandscapeRecords:
    """Images of two classes; one has a bright upper half."""
    labels = torch.arange(count) % 2
    values = torch.randn(count, channels, size, size, generator=generator(3))
    values[labels == 1, :, : size // 2] += 2
    return LandscapeRecords.evenly(values.to(device), labels.to(device))


def network(size: int, width: int, device: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """FedLAP's ConvNet for ten classes without its first step, and its parameters."""
    module = convnet(3 * size * size, 10, width, 0)
    body, _ = split_input(module, torch.zeros(1, 3 * size * size))
    return body.to(device), {
        name: tensor.to(device) for name, tensor in parameters_of(module).items()
    }


def fedlap_settings(**changes: Any) -> SimpleNamespace:
    """FedLAP's settings that its synthesis reads, without the package that checks them."""
    usual = {
        "trajectories": 1,
        "loops": 1,
        "batches": 1,
        "image_steps": 5,
        "model_steps": 0,
        "trust_radius": 10.0,
    }
    return SimpleNamespace(**usual | {"image_learning_rate": 10.0} | changes)


def fedlap(device: str) -> Iterator[Row]:
    """The gradient, the images after a few steps, and the radius."""
    sides = []
    for where in ("cpu", device):
        body, model = network(16, 16, where)
        real, begin = images(64, 16, where), images(8, 16, where)
        slope = torch.cat([part.flatten() for part in gradient(body, model, real).values()])
        start = LandscapeRecords.evenly(begin.values * 0.1, begin.labels)
        looks = Batches(body, real, 0, generator())
        settings: Any = fedlap_settings()
        made, _ = synthesise(
            body, model, start, looks, Matching(settings, 0.1, 0.1), draws((), generator())
        )
        server = (body, model, Descent(0.1, 20, 10.0), draws((), generator()))
        sides.append(
            (slope, made.values, effective_radius(server, start, real, Search(20), generator()))
        )
    (slope, made, radius), (slope_there, made_there, radius_there) = sides
    yield parity("FedLAP, gradient", relative(slope_there, slope), 1e-3)
    yield parity("FedLAP, images after 5 steps", relative(made_there, made), 1e-2)
    yield parity("FedLAP, radius", abs(radius_there - radius) / radius, 1e-2)


def cvae(
    device: str, classes: int, dimension: int, hidden: int = 64, latent: int = 8
) -> CVAETrainer:
    """DP-CVAE's trainer with seeded weights and noise."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        decoder = Decoder(latent, hidden, classes, dimension, True, True)
        encoder = Encoder(latent, hidden, classes, dimension)
    settings: Any = SimpleNamespace(optimiser="adam")
    noise = generator()
    return CVAETrainer(
        decoder.to(device),
        encoder.to(device),
        settings,
        1e-3,
        1.0,
        lambda shape: torch.randn(tuple(shape), generator=noise),
    )


def generators(device: str) -> Iterator[Row]:
    """DP-CVAE: losses of records, and the sum of their clipped gradients."""
    sides = []
    x, labels = torch.randn(64, 48, generator=generator()), torch.arange(64) % 5
    for where in ("cpu", device):
        trainer = cvae(where, 5, 48)
        inputs = x.to(where), labels.to(where), trainer.noise(64).to(where)
        total, _ = clipped_sums(trainer.modules, trainer.losses, inputs, 0.1)
        sides.append(
            (
                trainer.losses(*inputs),
                torch.cat([part.value.flatten().cpu() for part in total.values()]),
            )
        )
    yield parity("DP-CVAE, losses", relative(sides[1][0], sides[0][0]), 1e-4)
    yield parity("DP-CVAE, clipped gradients", relative(sides[1][1], sides[0][1]), 1e-3)


def clipping(device: str) -> Iterator[Row]:
    """The sum of a ConvNet's clipped gradients, as in FedLAP-DP and DP-FedAvg; also against a loop
    over the records in double precision.
    """
    sides = []
    for where in ("cpu", device):
        body, model = network(16, 8, where)
        total, _ = clipped_sum(body, model, images(32, 16, where), 0.3, lambda values: values)
        sides.append(torch.cat([part.value.flatten().cpu() for part in total.values()]))
    yield parity("DP-SGD, clipped gradients of a ConvNet", relative(sides[1], sides[0]), 1e-3)
    body, model = network(16, 8, device)
    exact = {name: tensor.double() for name, tensor in model.items()}
    records, looped = images(32, 16, device), torch.zeros(len(sides[0]), dtype=torch.float64)
    records = LandscapeRecords.evenly(records.values.double(), records.labels)
    for row in range(32):
        one = gradient(body.double(), exact, records.take(torch.tensor([row], device=device)))
        flat = torch.cat([part.flatten() for part in one.values()]).cpu()
        looped += flat * min(1.0, 0.3 / float(flat.norm()))
    name = "DP-SGD, against a loop in float64"
    yield parity(name, relative(sides[1], looped), 1e-4)


def cuda_tests() -> Iterator[Case]:
    """The files with tests that need a GPU, one a case."""
    for file, needed in CUDA_TESTS.items():
        yield Case(f"CUDA tests in {file}", 25, partial(tests_of, file, needed))


def tests_of(file: str, needed: tuple[str, ...]) -> Iterator[Row]:
    """The tests of one file that need a GPU. A file whose packages are missing is left out."""
    missing = [name for name in ("pytest", *needed) if importlib.util.find_spec(name) is None]
    if missing:
        raise LeftOutError(f"{file}: {', '.join(missing)} is not installed")
    command = (
        *(sys.executable, "-m", "pytest", "-q", "-k", "gpu"),
        *("-p", "no:cacheprovider", "--noconftest", file),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    if done.returncode:
        print(done.stdout[-3000:])
    yield Row(
        f"CUDA tests in {file}",
        float(done.returncode),
        "exit code",
        "none fails",
        0.0,
        1.0,
        not done.returncode,
    )
