"""Parity of a device with the processor: features, mixtures, statistics, FedLAP, DP-CVAE, clipping;
and the CUDA tests.

The tolerance of each row is stated with it. bfloat16 keeps eight bits, so features may differ by a
percent.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks._gpu_rows import Row, Sizes, parity, relative
from fedsurrogate.client_app.methods.dp.linear_clipping import clipped_sums
from fedsurrogate.client_app.methods.dp.record_gradients import clipped_sum
from fedsurrogate.client_app.methods.dpcvae.training_steps import CVAETrainer
from fedsurrogate.client_app.methods.fedlap.image_synthesis import Matching, synthesise
from fedsurrogate.client_app.methods.fedlap.statistics import Batches
from fedsurrogate.client_app.methods.fedlap.trust_region import Search, ServerWalk, effective_radius
from fedsurrogate.common.backbones.backbones import frozen_forward
from fedsurrogate.common.models.augmentation import draws
from fedsurrogate.common.models.generators import Decoder, Encoder
from fedsurrogate.common.models.loss_landscape import LandscapeRecords, gradient
from fedsurrogate.common.models.networks import convnet, parameters_of, split_input
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.shared_covariances import gram
from fedsurrogate.strategies.closed_form.solvers import lda, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics

ROOT = Path(__file__).resolve().parents[1]
# Files whose tests need a GPU and nothing but torch, scikit-learn and hypothesis, and those that
# need Flower as well.
CUDA_TESTS = {
    "tests/client_app/features/test_transfers.py": (),
    "tests/common/surrogates/test_mixtures.py": ("sklearn", "hypothesis"),
    "tests/strategies/fedpft/test_sampling.py": ("flwr", "pydantic", "hypothesis"),
}
BFLOAT = 2e-2


def generator(seed: int = 0) -> torch.Generator:
    """A generator on the processor, so that both sides draw the same numbers."""
    return torch.Generator().manual_seed(seed)


def rows(device: str, sizes: Sizes) -> Iterator[Row]:
    """All rows of parity, one at a time. Convolutions keep their 24 bits for it, which is not the
    default of a GPU.
    """
    torch.backends.cudnn.allow_tf32 = False
    yield from features(device, sizes)
    yield from mixtures(device, sizes)
    yield from statistics(device, sizes)
    yield from fedlap(device)
    yield from generators(device)
    yield from clipping(device)
    torch.backends.cudnn.allow_tf32 = True


def features(device: str, sizes: Sizes) -> Iterator[Row]:
    """Features of the backbones with random weights: float32 on the processor, bfloat16 on the
    device.
    """
    import torchvision

    for name in sizes.backbones:
        torch.manual_seed(0)
        model = torchvision.models.get_model(name, weights=None).eval().requires_grad_(False)
        batch = torch.randn(4, 3, sizes.image_size, sizes.image_size, generator=generator())
        here = frozen_forward(model, torch.device("cpu"))(batch)
        there = frozen_forward(
            model.to(device, memory_format=torch.channels_last), torch.device(device)
        )(batch)
        yield parity(f"features of {name}", relative(there, here), BFLOAT)


def mixtures(device: str, sizes: Sizes) -> Iterator[Row]:
    """Mean log-likelihood of mixtures fitted on either side from the same seed."""
    x = torch.randn(400, 16, generator=generator(), dtype=torch.float64)
    y = torch.arange(400) % 2
    x[:, 0] += 6 * (torch.arange(400) % 4)
    for family in ("full", "diag", "spherical", "lowrank"):
        for components in (1, 4):
            chosen = MixtureSettings(family, components, 3)
            here = fit(x, y, 2, chosen, generator())
            there = fit(x.to(device), y.to(device), 2, chosen, generator()).to("cpu")
            apart = abs(there.log_likelihood(x, y) - here.log_likelihood(x, y))
            yield parity(f"mixture, {family}, K={components}", apart, 1e-3, "nats a record")


def statistics(device: str, sizes: Sizes) -> Iterator[Row]:
    """The second moment of records, and the heads in closed form that follow from pooled
    statistics.
    """
    x = torch.randn(sizes.records, sizes.dimension, generator=generator())
    yield parity("second moment", relative(gram([x.to(device)]), gram([x])), 1e-4)
    known = pooled(8, min(64, sizes.dimension), "cpu")
    moved = Statistics(
        *(tensor.to(device) for tensor in (known.counts, known.means, known.covariance))
    )
    for solver in (lda, ridge):
        here, there = solver(known), solver(moved)
        yield parity(
            f"head in closed form, {solver.__name__}", relative(there.weight, here.weight), 1e-5
        )


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
    return SimpleNamespace(**usual | {"image_learning_rate": 10.0, "image_momentum": 0.5} | changes)


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
        server = ServerWalk(body, model, 0.1, 20, 10.0, draws((), generator()))
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
    """The sum of a ConvNet's clipped gradients, as in FedLAP-DP and DP-FedAvg."""
    sides = []
    for where in ("cpu", device):
        body, model = network(16, 8, where)
        total, _ = clipped_sum(body, model, images(32, 16, where), 0.3, lambda values: values)
        sides.append(torch.cat([part.value.flatten().cpu() for part in total]))
    yield parity("DP-SGD, clipped gradients of a ConvNet", relative(sides[1], sides[0]), 1e-3)


def cuda_tests() -> Iterator[Row]:
    """The tests that need a GPU. A file whose packages are missing is reported as such, and is no
    failure.
    """
    for file, needed in CUDA_TESTS.items():
        missing = [name for name in ("pytest", *needed) if importlib.util.find_spec(name) is None]
        if missing:
            print(f"not run: {file} needs {', '.join(missing)}")
            continue
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-k",
            "gpu",
            "-p",
            "no:cacheprovider",
            "--noconftest",
            file,
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
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
