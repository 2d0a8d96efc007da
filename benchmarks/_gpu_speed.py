"""Speed on a device: extraction, mixtures, heads in closed form, a FedLAP round of a site, private
steps.
"""

from __future__ import annotations

import importlib.util
import io
import time
import warnings
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from benchmarks._gpu_parity import cvae, fedlap_settings, generator, images, network, pooled
from benchmarks._gpu_rows import Row, Sizes, reached, seconds, wait
from fedsurrogate.client_app.features.device_processes import Devices, in_processes
from fedsurrogate.client_app.features.parts import in_parts
from fedsurrogate.client_app.methods.dp.linear_clipping import clipped_sums
from fedsurrogate.client_app.methods.dp.record_gradients import PrivateGradient, clipped_sum
from fedsurrogate.client_app.methods.dpcvae.training_steps import exact_gradient, private_gradient
from fedsurrogate.client_app.methods.fedlap.image_synthesis import Matching, Synthesis, synthesise
from fedsurrogate.client_app.methods.fedlap.statistics import Batches
from fedsurrogate.client_app.methods.fedlap.trust_region import (
    IMAGE_STEP,
    MODEL_STEP,
    Search,
    ServerWalk,
    effective_radius,
)
from fedsurrogate.common.backbones.backbones import Backbone, frozen_forward
from fedsurrogate.common.backbones.preprocessing import Preprocessing
from fedsurrogate.common.models.augmentation import draws
from fedsurrogate.common.models.devices import gpus_of
from fedsurrogate.common.models.loss_landscape import gradient
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.strategies.closed_form.solvers import lda

# Seconds that a round of FedLAP may take a site; images a second as a share of the bare forward
# pass, and on all GPUs as a share of those on one, times their number; times faster.
ROUND_SECONDS, OF_BARE, OF_ALL, TIMES_FASTER = 10.0, 0.9, 0.8, 3.0
BATCH = 256
# Shards of a process on each of several GPUs, and batches of a shard.
SHARDS_EACH, BATCHES = 16, 8


def rows(device: str, sizes: Sizes) -> Iterator[Row]:
    """All rows of speed, one at a time."""
    yield from extraction(device, sizes)
    yield from all_gpus(device, sizes)
    yield from mixtures(device, sizes)
    yield head(device, sizes)
    yield fedlap_round(device, sizes)
    yield from private_steps(device, sizes)


class Jpegs:
    """A data set of JPEG images in memory, in the form that extraction reads."""

    def __init__(self, count: int, size: int) -> None:
        self._files, self._count = [], count
        for seed in range(min(count, 16)):
            coarse = torch.randint(0, 256, (1, 3, 8, 8), generator=generator(seed)).float()
            smooth = torch.nn.functional.interpolate(
                coarse, (size + size // 7, size + size // 3), mode="bicubic"
            )[0]
            file = io.BytesIO()
            pixels = smooth.clamp(0, 255).byte().permute(1, 2, 0).contiguous().numpy()
            Image.fromarray(pixels).save(file, "JPEG", quality=90)
            self._files.append(file.getvalue())

    def __len__(self) -> int:
        return self._count

    def encoded(self, index: int) -> Tensor:
        """The bytes of a row's file (n,), as uint8."""
        return torch.frombuffer(bytearray(self._files[index % len(self._files)]), dtype=torch.uint8)

    def open_image(self, index: int, size: int = 0) -> Image.Image:
        """The image of a row; the decoder may shrink it to at least `size`."""
        image = Image.open(io.BytesIO(self._files[index % len(self._files)]))
        image.draft("RGB", (size, size))
        return image.convert("RGB")


def backbone_of(name: str, size: int, compiled: bool, device: str) -> Backbone:
    """A torchvision model with random weights that ends in its features."""
    import torchvision

    model = torchvision.models.get_model(name, weights=None).eval().requires_grad_(False)
    model = model.to(device, memory_format=torch.channels_last)
    run = torch.compile(model) if compiled else model
    preprocessing = Preprocessing(
        size, size, "bilinear", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    )
    target = torch.device(device)
    return Backbone(name, 1000, "random", preprocessing, frozen_forward(run, target), target)


def extraction(device: str, sizes: Sizes, compiled: bool = False) -> Iterator[Row]:
    """Images a second from JPEG in memory, against the forward pass on a batch that is on the
    device already.
    """
    jpegs: Any = Jpegs(sizes.images, sizes.image_size)
    for name in sizes.backbones:
        backbone = backbone_of(name, sizes.image_size, compiled, device)
        batch = torch.randn(sizes.batch, 3, sizes.image_size, sizes.image_size).to(device)
        bare = sizes.batch / seconds(
            lambda b=backbone, x=batch: b.forward(x), device, 5 * sizes.repeats
        )
        rates = []
        for _ in range(sizes.repeats):
            started, done = time.perf_counter(), 0
            with closing(
                in_parts(jpegs.open_image, [range(sizes.images)], backbone, sizes.batch)
            ) as parts:
                done = sum(len(part.rows) for part in parts)
            rates.append(done / (time.perf_counter() - started))
        assert done == sizes.images, "an image was not read"
        yield reached(
            f"extraction, {name}",
            sorted(rates)[len(rates) // 2],
            "images/s",
            "bare forward",
            bare,
            OF_BARE,
        )
        try:
            took = seconds(
                lambda b=backbone: decoded_there(jpegs, b, sizes.batch), device, sizes.repeats
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            print(
                "not compared: JPEG decoded on the device, as where torchvision is built without "
                f"nvJPEG: {reason}"
            )
            continue
        yield reached(
            f"extraction, decoded on the device, {name}",
            sizes.images / took,
            "images/s",
            "bare forward",
            bare,
            OF_BARE,
        )


def all_gpus(device: str, sizes: Sizes) -> Iterator[Row]:
    """Images a second of one process a GPU, from their first batch on, against those on one GPU; on
    a CPU, two processes.
    """
    names = ("cpu", "cpu") if device == "cpu" else gpus_of(torch.device(device))
    if len(names) < 2:
        print("not measured: extraction over all GPUs, there is one, or --device names one")
        return
    jpegs, length = Jpegs(sizes.images, sizes.image_size), BATCHES * sizes.batch
    load = partial(backbone_of, sizes.backbones[0], sizes.image_size, False)

    def rate(devices: tuple[str, ...]) -> float:
        pieces = [
            range(piece * length, (piece + 1) * length)
            for piece in range(SHARDS_EACH * len(devices))
        ]
        with closing(
            in_processes(jpegs.open_image, pieces, Devices(devices, load, "random"), sizes.batch)
        ) as parts:
            next(parts)
            started = time.perf_counter()
            return sum(len(part.rows) for part in parts) / (time.perf_counter() - started)

    one = rate(names[:1])
    name = f"extraction, {len(names)} processes, {sizes.backbones[0]}"
    yield reached(
        name, rate(names), "images/s", f"{len(names)} times one process", len(names) * one, OF_ALL
    )


def decoded_there(jpegs: Jpegs, backbone: Backbone, together: int) -> None:
    """Features of all JPEG images, which the device itself decodes (nvJPEG on a GPU), resizes and
    normalises.

    Its features differ in the last digits from those of the product, whose decoder and resampling
    are Pillow's.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    chosen, device = backbone.preprocess, backbone.device
    assert isinstance(chosen, Preprocessing)
    mean, std = (
        torch.tensor(each, device=device)[:, None, None] for each in (chosen.mean, chosen.std)
    )
    for start in range(0, len(jpegs), together):
        rows = range(start, min(start + together, len(jpegs)))
        images = decode_jpeg(
            [jpegs.encoded(row) for row in rows], mode=ImageReadMode.RGB, device=device
        )
        square = [
            torch.nn.functional.interpolate(
                image[None].float(), (chosen.crop, chosen.crop), mode="bilinear", antialias=True
            )
            for image in images
        ]
        backbone.forward((torch.cat(square) / 255 - mean) / std).to("cpu", torch.float16)


def mixtures(device: str, sizes: Sizes) -> Iterator[Row]:
    """A mixture of ten diagonal components for each of ten classes, against scikit-learn on the
    processor.
    """
    x = torch.randn(sizes.records, sizes.dimension, generator=generator())
    y = torch.arange(sizes.records) % 10
    x += torch.randn(100, sizes.dimension, generator=generator(1))[
        torch.arange(sizes.records) % 100
    ]
    there, labels = x.to(device), y.to(device)
    chosen = MixtureSettings("diag", 10)
    ours = seconds(lambda: fit(there, labels, 10, chosen, generator()), device, sizes.repeats)
    if importlib.util.find_spec("sklearn") is None:
        print("not compared: mixtures, scikit-learn is not installed")
        return
    from sklearn.mixture import GaussianMixture

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for label in range(10):
                part = x[y == label].numpy()
                GaussianMixture(
                    min(10, len(part) // 10), covariance_type="diag", random_state=0
                ).fit(part)

    peer = seconds(theirs, "cpu", 1)
    yield reached(
        "mixtures, diagonal, K=10",
        ours,
        "s",
        "a third of scikit-learn's",
        peer / TIMES_FASTER,
        1.0,
        smaller=True,
    )


def head(device: str, sizes: Sizes) -> Row:
    """A head in closed form from pooled statistics, against its factorisations alone."""
    known = pooled(sizes.head_classes, sizes.head_dimension, device)
    ours = seconds(lambda: lda(known), device, 1)

    def factorised() -> None:
        torch.linalg.eigh(known.covariance.float())
        torch.cholesky_solve(known.means.T, torch.linalg.cholesky(known.covariance))

    name = f"head in closed form, d={sizes.head_dimension}, {sizes.head_classes} classes"
    return reached(
        name, ours, "s", "its factorisations", seconds(factorised, device, 1), 0.3, smaller=True
    )


def fedlap_round(device: str, sizes: Sizes) -> Row:
    """A site's whole round at the paper's size: 40 batches of 256 records, five image steps each,
    then the radius.
    """
    body, model = network(sizes.pixels, sizes.width, device)
    real = images(sizes.site_records, sizes.pixels, device)
    begin = images(2 * sizes.per_class, sizes.pixels, device)
    settings: Any = fedlap_settings(loops=5, batches=sizes.real_batches, image_learning_rate=100.0)

    def work() -> Synthesis:
        looks = Batches(body, real, BATCH, generator())
        made, story = synthesise(
            body, model, begin, looks, Matching(settings, 0.1, 0.1), draws((), generator())
        )
        cost = story.looks * (
            settings.image_steps * IMAGE_STEP * len(made.labels) + MODEL_STEP * BATCH
        )
        search = Search.within(cost, len(made.labels), len(real.labels), 100)
        server = ServerWalk(body, model, 0.1, 100, settings.trust_radius, draws((), generator()))
        effective_radius(server, made, real, search, generator())
        return story

    wait(device)
    started = time.perf_counter()
    story = work()
    wait(device)
    ours = time.perf_counter() - started
    name = f"FedLAP, a site's round, width {sizes.width}, {story.looks} batches"
    return reached(name, ours, "s", "allowed", ROUND_SECONDS, 1.0, smaller=True)


def private_steps(device: str, sizes: Sizes) -> Iterator[Row]:
    """A private step with clipping and noise, against the same step without privacy. Secret noise
    needs `cryptography`.
    """
    noisy = importlib.util.find_spec("cryptography") is not None
    if not noisy:
        print("private steps are measured without their noise: cryptography is not installed")
    step = "DP-SGD step" if noisy else "DP-SGD step without noise"
    body, model = network(sizes.pixels, sizes.width, device)
    real = images(min(BATCH, sizes.site_records), sizes.pixels, device)
    private = PrivateGradient(body, real, 0.3, 1.0, 1.0, BATCH)

    def convnet_step() -> object:
        return private(model, _same) if noisy else clipped_sum(body, model, real, 0.3, _same)

    ours = seconds(convnet_step, device, sizes.repeats)
    plain = seconds(lambda: gradient(body, model, real), device, sizes.repeats)
    yield reached(
        f"{step}, ConvNet, width {sizes.width}",
        ours,
        "s",
        "without privacy",
        plain,
        0.1,
        smaller=True,
    )
    trainer = cvae(device, 10, sizes.dimension, 256, 32)
    x = torch.randn(BATCH, sizes.dimension, generator=generator()).to(device)
    labels = (torch.arange(BATCH) % 10).to(device)

    def cvae_step() -> object:
        if noisy:
            return private_gradient(trainer, x, labels, 0.1, 2.0, BATCH)
        return clipped_sums(
            trainer.modules, trainer.losses, (x, labels, trainer.noise(BATCH).to(x)), 0.1
        )

    ours = seconds(cvae_step, device, sizes.repeats)
    plain = seconds(lambda: exact_gradient(trainer, x, labels), device, sizes.repeats)
    yield reached(f"{step}, DP-CVAE", ours, "s", "without privacy", plain, 0.1, smaller=True)


def _same(values: Tensor) -> Tensor:
    return values
