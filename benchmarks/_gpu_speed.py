"""Speed on a device: its limits as measured, then statistics, mixtures, heads, a FedLAP round of a
site and private steps, each against what these limits allow on paper.
"""

from __future__ import annotations

import importlib.util
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_extraction import decoding
from benchmarks._gpu_limits import Limits, counted, second_moment, sheet
from benchmarks._gpu_parity import cvae, fedlap_settings, generator, images, network, pooled
from benchmarks._gpu_rows import (
    Case,
    Clock,
    LeftOutError,
    Row,
    Sizes,
    once,
    reached,
    seconds,
    traced,
    wait,
)
from fedsurrogate.client_app.methods.dp.record_gradients import (
    NoisyMeans,
    PrivateGradient,
    clipped_sum,
    clipped_sums,
)
from fedsurrogate.client_app.methods.dpcvae.training import exact_gradient, private_gradient
from fedsurrogate.client_app.methods.fedlap.approximation import (
    GRADIENT,
    IMAGE_STEP,
    MODEL_STEP,
    Batches,
    Matching,
    Search,
    Synthesis,
    effective_radius,
    synthesise,
)
from fedsurrogate.client_app.methods.local_training import train
from fedsurrogate.common.models.loss_landscape import Descent, gradient, mismatch
from fedsurrogate.common.models.networks import mlp
from fedsurrogate.common.models.training_parts import draws, train_on_features
from fedsurrogate.common.surrogates.covariances import gram
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit, fit_streamed, k_means
from fedsurrogate.strategies.closed_form.solvers import Solution, lda, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics

# Seconds that a round of FedLAP may take a site, and how much faster than scikit-learn a fit is.
ROUND_SECONDS, TIMES_FASTER = 10.0, 3.0
BATCH = 256
# Passes over the records in the training of a head.
PASSES_OF = 3
FITS = (
    *(("gram", 1), ("lowrank", 1), ("diag", 1), ("spherical", 1), ("full", 1)),
    *(("diag", 10), ("lowrank", 10)),
)
TITLES = {
    "half": "products in bfloat16",
    "tf32": "products in TF32",
    "single": "products in float32",
    "double": "products in float64",
    "memory": "copy in its memory",
    "link": "copy from pinned memory",
}
# Shares of a device's limits that pass: of matrix products, of loops of small kernels, and of the
# limits in a data sheet.
PRODUCTS, LOOPS, SHEET = 0.5, 0.1, 0.6


def ceilings(device: str, sizes: Sizes) -> tuple[list[Row], Limits]:
    """What the device does at most, measured, against its data sheet if that is known."""
    side, length = sizes.square, sizes.mebibytes * 2**20
    there = torch.empty(length, dtype=torch.uint8, device=device).random_(0, 255)
    target = torch.empty_like(there)
    here = torch.empty(length // 4, dtype=torch.uint8, pin_memory=device.startswith("cuda"))

    def product(dtype: torch.dtype, size: int) -> float:
        a = torch.randn(size, size, device=device).to(dtype)
        return 2.0 * size**3 / seconds(lambda: a @ a, device, sizes.repeats)

    def starts() -> None:
        for _ in range(1000):
            small.add_(1.0)

    small = torch.zeros(1, device=device)
    found = Limits(
        half=product(torch.bfloat16, side),
        tf32=0.0,
        single=product(torch.float32, side),
        double=product(torch.float64, side // 2),
        memory=2.0 * length / seconds(lambda: target.copy_(there), device, sizes.repeats),
        link=len(here)
        / seconds(lambda: there[: len(here)].copy_(here, non_blocking=True), device, sizes.repeats),
        launch=seconds(starts, device, sizes.repeats) / 1000,
    )
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    found = replace(found, tf32=product(torch.float32, side))
    torch.backends.cuda.matmul.allow_tf32 = allowed
    known = sheet(torch.cuda.get_device_name(device) if device.startswith("cuda") else "")
    rows = [
        reached(
            f"limit: {title}",
            getattr(found, name),
            "bytes/s" if name in ("memory", "link") else "FLOP/s",
            "its data sheet" if known else "itself, no data sheet",
            getattr(known or found, name),
            SHEET if known else 0.0,
        )
        for name, title in TITLES.items()
    ]
    rows.append(
        reached(
            *("limit: start of a kernel", found.launch, "s", "without torch and a virtual machine"),
            *((known or found).launch, 0.0),
            smaller=True,
        )
    )
    fetched = seconds(lambda: here.copy_(there[: len(here)], non_blocking=True), device, 1)
    pageable = torch.empty_like(here, pin_memory=False)
    moved = seconds(lambda: there[: len(pageable)].copy_(pageable), device, 1)
    for name, took in (("device to host, pinned", fetched), ("host to device, not pinned", moved)):
        rows.append(
            reached(f"copy, {name}", len(here) / took, "bytes/s", "host to device", found.link, 0.1)
        )
    return rows, found


class Measured:
    """The limits of a device, measured once."""

    def __init__(self, device: str, sizes: Sizes) -> None:
        self._device, self._sizes = device, sizes
        self._clock: Clock | None = None

    def rows(self) -> Iterator[Row]:
        """The rows of the limits, and of the decoders of the host."""
        rows, limits = ceilings(self._device, self._sizes)
        row, images_a_second = decoding(self._sizes)
        limits = replace(limits, images=images_a_second)
        self._clock = Clock(self._device, limits, self._sizes.repeats)
        yield from (*rows, row)

    def clock(self) -> Clock:
        """With these limits. Raises LeftOutError if they could not be measured."""
        if self._clock is None:
            raise LeftOutError("a case of speed: the limits of the device could not be measured")
        return self._clock


def fits(clock: Callable[[], Clock], sizes: Sizes) -> Iterator[Case]:
    """The cases of second moments and mixtures."""
    yield Case("second moments", 2, lambda: second_moments(clock(), sizes))
    yield Case("k-means", 2, lambda: clusters(clock(), sizes))
    for family, components in FITS:
        yield Case(
            f"mixtures, {family}, K={components}",
            3,
            lambda family=family, components=components: mixtures(
                clock(), sizes, family, components
            ),
        )


def cases(clock: Callable[[], Clock], sizes: Sizes) -> Iterator[Case]:
    """All further cases, the longest last."""
    for kind, steps in (("DP-SGD", private_convnet), ("DP-CVAE", private_generator)):
        yield Case(f"{kind} steps", 5, lambda steps=steps: steps(clock(), sizes))
    yield Case("FedLAP, a site's round", 20, lambda: fedlap_round(clock(), sizes))
    yield Case("softmax regression", 4, lambda: regression(clock(), sizes))
    yield Case("a network of a hidden layer", 4, lambda: hidden_layer(clock(), sizes))
    yield Case("streamed fits", 8, lambda: streamed(clock(), sizes))
    for d in sizes.dimensions:
        yield Case(
            f"decompositions, d={d}",
            3 if d < 2000 else 15,
            lambda d=d: decompositions(clock(), d),
        )
        for classes in (10, sizes.wide):
            for solver in (lda, ridge):
                yield Case(
                    f"head in closed form, {solver.__name__}, d={d}, {classes} classes",
                    1 if d < 2000 else 5,
                    lambda d=d, classes=classes, solver=solver: heads(clock(), d, classes, solver),
                )
    yield Case("mixtures against scikit-learn", 10, lambda: against_sklearn(clock(), sizes))


def records_of(sizes: Sizes, d: int, device: str) -> tuple[Tensor, Tensor]:
    """Features (n, d) of ten classes with ten centres each, and their labels."""
    x = torch.randn(sizes.records, d, generator=generator())
    rows = torch.arange(sizes.records)
    x += torch.randn(100, d, generator=generator(1))[rows % 100]
    return x.to(device), (rows % 10).to(device)


def second_moments(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """X^T X of a site's records, float32 as in the product."""
    for d in sizes.dimensions:
        x, _ = records_of(sizes, d, clock.device)
        yield clock.row(
            f"second moment, n={len(x)}, d={d}",
            lambda x=x: gram([x]),
            PRODUCTS,
            needs=second_moment(len(x), d),
        )


def clusters(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """k-means of one class."""
    x, labels = records_of(sizes, sizes.dimensions[0], clock.device)
    one = x[labels == 0]
    yield clock.row("k-means of a class, K=10", lambda: k_means(one, 10, generator(), 20), LOOPS)


def mixtures(clock: Clock, sizes: Sizes, family: str, components: int) -> Iterator[Row]:
    """A fit of ten classes."""
    d = sizes.dimensions[0]
    x, labels = records_of(sizes, d, clock.device)
    # No step may be the last: every fit then has the same number of them.
    chosen = MixtureSettings(family, components, tolerance=-1e30, max_iterations=sizes.em_steps)
    yield clock.row(
        f"mixtures of ten classes, {family}, K={components}, d={d}",
        lambda: fit(x, labels, 10, chosen, generator()),
        LOOPS,
    )


def against_sklearn(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """A mixture of ten diagonal components for each of ten classes, against scikit-learn on the
    processor.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise LeftOutError("mixtures against scikit-learn: scikit-learn is not installed")
    from sklearn.mixture import GaussianMixture

    device = clock.device
    x, y = records_of(sizes, sizes.dimensions[0], "cpu")
    there, labels, chosen = x.to(device), y.to(device), MixtureSettings("diag", 10)
    ours = seconds(lambda: fit(there, labels, 10, chosen, generator()), device, sizes.repeats)

    def theirs() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for label in range(10):
                part = x[y == label].numpy()
                GaussianMixture(
                    min(10, len(part) // 10), covariance_type="diag", random_state=0
                ).fit(part)

    peer = once(theirs)
    yield reached(
        "mixtures, diagonal, K=10",
        ours,
        "s",
        "a third of scikit-learn's",
        peer / TIMES_FASTER,
        1.0,
        smaller=True,
    )


def streamed(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """The second moment of records that are in a file, in double precision and chunk by chunk. The
    product computes it on the processor, so it is held against products there.
    """
    d = sizes.dimensions[0]
    x, labels = records_of(sizes, d, "cpu")
    x, labels = torch.cat([x] * 4).half(), torch.cat([labels] * 4)
    square = torch.randn(2 * (min(2048, sizes.square),), dtype=torch.float64)
    rate = 2.0 * len(square) ** 3 / seconds(lambda: square @ square, "cpu", sizes.repeats)
    chosen, needed = MixtureSettings("gram"), 2.0 * len(x) * d * d
    ours = once(lambda: fit_streamed(x, labels, 10, chosen, generator()))
    yield reached(
        f"streamed fit of {len(x)} records, gram, d={d}",
        *(ours, "s", "products of the processor", needed / rate, 0.2),
        smaller=True,
        facts={"as products of the device, s": needed / clock.limits.double},
    )


def decompositions(clock: Clock, d: int) -> Iterator[Row]:
    """Eigenvectors and Cholesky factors of a covariance."""
    covariance = pooled(2, d, "cpu").covariance
    assert isinstance(covariance, Tensor)
    for dtype in (torch.float32, torch.float64):
        matrix, kind = covariance.to(dtype), str(dtype).removeprefix("torch.")
        moved = matrix.to(clock.device)
        for name, work in (
            ("eigenvectors", torch.linalg.eigh),
            ("Cholesky", torch.linalg.cholesky),
        ):
            here = once(partial(work, matrix))
            # What cuSOLVER reaches is not for this project to judge.
            yield clock.row(
                f"{name}, {kind}, d={d}",
                partial(work, moved),
                0.0,
                facts={"on the processor, s": here},
            )


def heads(
    clock: Clock, d: int, classes: int, solver: Callable[[Statistics], Solution]
) -> Iterator[Row]:
    """A head in closed form on the processor, where the coordinator's statistics are, and on the
    device.
    """
    known = pooled(classes, d, "cpu")
    here = once(partial(solver, known))
    name = f"head in closed form, {solver.__name__}, d={d}, {classes} classes"
    yield clock.row(
        name,
        partial(solver, pooled(classes, d, clock.device)),
        0.0,
        facts={"on the processor, s": here},
    )


def regression(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """Softmax regression by Adam on features."""
    x, labels = records_of(sizes, sizes.dimensions[0], clock.device)
    head: Any = SimpleNamespace(batch_size=BATCH, rate=lambda _: 1e-3, passes=lambda _: PASSES_OF)

    def trained(count: int) -> object:
        return train_on_features(x[:count], labels[:count], 10, head, 0)

    yield _steps(clock, "softmax regression", trained, len(x))


def hidden_layer(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """A network of one hidden layer by SGD on features."""
    d = sizes.dimensions[0]
    x, labels = records_of(sizes, d, clock.device)
    module = mlp(d, 10, 256).to(clock.device)
    settings: Any = SimpleNamespace(
        local_epochs=PASSES_OF, batch_size=BATCH, momentum=0.9, augment=()
    )

    def trained(count: int) -> object:
        return train(module, x[:count], labels[:count], settings, 0.01, generator())

    yield _steps(clock, "network of a hidden layer", trained, len(x))


def _steps(clock: Clock, name: str, trained: Callable[[int], object], records: int) -> Row:
    """The training on all records, counted on two batches."""
    batches = PASSES_OF * -(-records // BATCH)
    return clock.row(
        f"{name}, {batches} steps",
        lambda: trained(records),
        LOOPS,
        step=(lambda: trained(2 * BATCH), batches / (2 * PASSES_OF)),
    )


def fedlap_round(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """A site's whole round at the paper's size: 40 batches of 256 records, five image steps each,
    then the radius.
    """
    device = clock.device
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
        server = (body, model, Descent(0.1, 100, settings.trust_radius), draws((), generator()))
        effective_radius(server, made, real, search, generator())
        return story

    batch = real.take(torch.arange(min(BATCH, len(real.labels)), device=device))
    target = list(gradient(body, model, batch).values())
    change = next(draws((), generator()))
    compare = partial(mismatch, mse_weight=0.1)

    def step() -> object:
        return GRADIENT.slope(body, model, begin, change, target, compare)

    step()
    needs = counted(step)
    look = counted(lambda: gradient(body, model, batch))
    wait(device)
    started = time.perf_counter()
    story = work()
    wait(device)
    ours = time.perf_counter() - started
    whole = needs.times(story.looks * settings.image_steps).plus(look.times(story.looks))
    floor, slowest = clock.limits.floor(whole)
    facts = {
        "an image step, s": seconds(step, device, 5),
        "a gradient, s": seconds(lambda: gradient(body, model, batch), device, 5),
        "an image step, kernels": needs.launches,
        "an image step, gigaoperations": needs.operations / 1e9,
        **story.seconds,
        **traced(step, device),
    }
    name = f"FedLAP, a site's round, width {sizes.width}, {story.looks} batches"
    yield reached(name, ours, "s", "allowed", ROUND_SECONDS, 1.0, smaller=True)
    yield reached(
        f"{name}, on paper",
        ours,
        "s",
        f"on paper: {slowest}",
        floor,
        LOOPS,
        smaller=True,
        facts=facts,
    )


def private_convnet(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """A private step of FedLAP's ConvNet."""
    body, model = network(sizes.pixels, sizes.width, clock.device)
    real = images(min(BATCH, sizes.site_records), sizes.pixels, clock.device)
    private, noisy = PrivateGradient(body, real, 0.3, 1.0, 1.0, BATCH), noise_is_there()

    def step() -> object:
        return private(model, _same) if noisy else clipped_sum(body, model, real, 0.3, _same)

    name = f"{step_name(noisy)}, ConvNet, width {sizes.width}"
    numbers = sum(each.numel() for each in model.values())
    yield from _private(clock, name, step, lambda: gradient(body, model, real), numbers)


def private_generator(clock: Clock, sizes: Sizes) -> Iterator[Row]:
    """A private step of DP-CVAE."""
    d, noisy = sizes.dimensions[0], noise_is_there()
    trainer = cvae(clock.device, 10, d, 256, 32)
    x = torch.randn(BATCH, d, generator=generator()).to(clock.device)
    labels = (torch.arange(BATCH) % 10).to(clock.device)

    def step() -> object:
        if noisy:
            return private_gradient(trainer, NoisyMeans(0.1, 2.0, BATCH), x, labels)
        return clipped_sums(
            trainer.modules, trainer.losses, (x, labels, trainer.noise(BATCH).to(x)), 0.1
        )

    name = f"{step_name(noisy)}, DP-CVAE"
    numbers = sum(each.numel() for each in trainer.modules.parameters())
    yield from _private(clock, name, step, lambda: exact_gradient(trainer, x, labels), numbers)


def noise_is_there() -> bool:
    """Whether secret noise can be drawn."""
    return importlib.util.find_spec("cryptography") is not None


def step_name(noisy: bool) -> str:
    """What is measured without the package that secret noise needs."""
    return "DP-SGD step" if noisy else "DP-SGD step without noise"


def _private(
    clock: Clock, name: str, step: Callable[[], object], without: Callable[[], object], numbers: int
) -> Iterator[Row]:
    """A private step against the device's limits, and the noise of its numbers, which the processor
    draws from the operating system.
    """
    noise = 0.0
    if noise_is_there():
        from fedsurrogate.common.privacy.gaussian_mechanism import discrete_gaussian

        noise = once(lambda: discrete_gaussian(2**60, numbers))
    plain = seconds(without, clock.device, clock.repeats)
    step()
    row = clock.row(name, step, 0.0)
    floor = row.limit + noise
    facts = dict(row.facts) | {"noise alone, s": noise, "without privacy, s": plain}
    against = row.against + (" and noise" if noise else "")
    yield reached(name, row.ours, "s", against, floor, LOOPS, smaller=True, facts=facts)


def _same(values: Tensor) -> Tensor:
    return values
