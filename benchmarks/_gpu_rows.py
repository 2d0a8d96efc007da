"""Rows of the GPU benchmark, its cases, sizes and clock. Needs torch alone."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks._gpu_limits import Limits, Work, counted

# Kernels of a piece of work that is traced: of more, the profiler takes seconds.
MOST_TRACED = 5000


class LeftOutError(Exception):
    """A row that this machine cannot have: a package or a device is missing."""


@dataclass(frozen=True)
class Row:
    """One result.

    Attributes:
        name: what is measured.
        ours: what was measured, in `unit`.
        unit: of it.
        against: what the limit is.
        limit: what it is held against.
        fraction: the share of the limit that is reached; of a tolerance, the share that is used.
        passes: whether that is enough.
        reason: why it failed without a measurement.
        facts: further numbers and words, by name.
    """

    name: str
    ours: float
    unit: str
    against: str
    limit: float
    fraction: float
    passes: bool
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has only finite numbers."""

        def finite(value: Any) -> Any:
            return None if isinstance(value, float) and not math.isfinite(value) else value

        facts = {key: finite(value) for key, value in self.facts.items()}
        return {key: finite(value) for key, value in vars(self).items()} | {"facts": facts}


@dataclass(frozen=True)
class Case:
    """Some rows that are made together; if one of them fails, the rest of the case is lost.

    Attributes:
        name: printed before it begins, and of the row if it fails.
        seconds: that it may take on an H100.
        rows: makes them.
    """

    name: str
    seconds: float
    rows: Callable[[], Iterable[Row]]


def failed(name: str, reason: str) -> Row:
    """The row of a case that failed."""
    return Row(name, math.nan, "", "failed", math.nan, math.nan, False, reason)


def parity(name: str, difference: float, tolerance: float, unit: str = "relative") -> Row:
    """The difference between the device and the processor, held against a tolerance; a number that
    is no number fails.
    """
    return Row(
        name,
        difference,
        unit,
        "tolerance",
        tolerance,
        difference / tolerance if tolerance else float(difference != 0),
        difference <= tolerance,
    )


def reached(
    name: str,
    ours: float,
    unit: str,
    against: str,
    limit: float,
    least: float,
    smaller: bool = False,
    facts: Mapping[str, Any] | None = None,
) -> Row:
    """A speed, held against a limit. smaller: the numbers are times, of which the smaller is
    better.
    """
    fraction = limit / ours if smaller else ours / limit
    return Row(name, ours, unit, against, limit, fraction, fraction >= least, "", facts or {})


def relative(there: Tensor, here: Tensor) -> float:
    """Norm of the difference between a result and the expected one, over the norm of the latter."""
    there, here = there.detach().double().cpu(), here.detach().double().cpu()
    return float((there - here).norm() / here.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; `FULL` on a GPU, `TINY` for a dry run on a processor.

    Attributes:
        images: of extraction; at most.
        image_size: pixels of a side.
        batch: images in a batch.
        backbones: library and name of each.
        records: with features.
        dimensions: of features, few and many.
        wide: classes of the larger heads.
        width: of FedLAP's ConvNet.
        pixels: of a side of its images.
        per_class: its synthetic images of a class.
        real_batches: of a loop of FedLAP.
        site_records: of its site.
        repeats: of what is timed.
        square: rows of the largest matrix product.
        mebibytes: that are copied.
        em_steps: of a mixture.
        processes: numbers of them that extract on one device.
    """

    images: int
    image_size: int
    batch: int
    backbones: tuple[str, ...]
    records: int
    dimensions: tuple[int, int]
    wide: int
    width: int
    pixels: int
    per_class: int
    real_batches: int
    site_records: int
    repeats: int
    square: int
    mebibytes: int
    em_steps: int
    processes: tuple[int, ...]


FULL = Sizes(
    images=4096,
    image_size=224,
    batch=256,
    backbones=("torchvision:vit_b_16", "torchvision:resnet50", "timm:vit_large_patch14_dinov2"),
    records=10_000,
    dimensions=(1280, 4096),
    wide=1000,
    width=128,
    pixels=32,
    per_class=50,
    real_batches=40,
    site_records=10_000,
    repeats=3,
    square=8192,
    mebibytes=1024,
    em_steps=20,
    processes=(4,),
)
TINY = Sizes(
    images=6,
    image_size=32,
    batch=4,
    backbones=("torchvision:resnet18",),
    records=200,
    dimensions=(16, 24),
    wide=5,
    width=8,
    pixels=8,
    per_class=2,
    real_batches=1,
    site_records=60,
    repeats=1,
    square=32,
    mebibytes=1,
    em_steps=3,
    processes=(2,),
)


def once(work: Callable[[], Any]) -> float:
    """Seconds of a piece of work on the processor."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def seconds(work: Callable[[], Any], device: str, repeats: int) -> float:
    """Median seconds of a piece of work, after one call that warms up; the device is waited for."""
    times = []
    for repeat in range(repeats + 1):
        wait(device)
        started = time.perf_counter()
        work()
        wait(device)
        if repeat:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def wait(device: str) -> None:
    """Wait for the device to finish."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Clock:
    """Times work on a device against what its limits allow.

    Attributes:
        device: name of it.
        limits: of it, as measured.
        repeats: of each piece of work.
    """

    device: str
    limits: Limits
    repeats: int

    def row(
        self,
        name: str,
        work: Callable[[], Any],
        least: float,
        step: tuple[Callable[[], Any], float] | None = None,
        needs: Work | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Row:
        """Seconds of a piece of work, against the floor on paper.

        Args:
            name: of the row.
            work: what is timed.
            least: share of the floor's speed that passes.
            step: a part of the work that is counted in its place, and how often the work has it.
            needs: what the work needs, if it is known.
            facts: further ones.
        """
        part, often = step or (work, 1.0)
        needs = needs or counted(part).times(often)
        floor, slowest = self.limits.floor(needs)
        ours = seconds(work, self.device, self.repeats)
        found = {
            "gigaoperations": needs.operations / 1e9,
            "gigabytes": needs.memory / 1e9,
            "kernels": needs.launches,
            "kernel starts, s": needs.launches * self.limits.launch,
        }
        if needs.launches < MOST_TRACED * often:
            found |= traced(part, self.device)
        return reached(
            *(name, ours, "s", f"on paper: {slowest}", floor, least),
            smaller=True,
            facts=found | dict(facts or {}),
        )


def traced(work: Callable[[], Any], device: str) -> dict[str, Any]:
    """What the profiler sees of a piece of work on a GPU: seconds in which its kernels ran, how many
    there were, how often the host waited, and the slowest kernels. Nothing on a processor.
    """
    if not device.startswith("cuda"):
        return {}
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    try:
        wait(device)
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            started = time.perf_counter()
            work()
            wait(device)
            took = time.perf_counter() - started
        kernels: dict[str, tuple[int, float]] = {}
        waits = 0
        for each in profiler.key_averages():
            if each.device_type == DeviceType.CUDA:
                kernels[each.key] = (each.count, each.self_device_time_total / 1e6)
            elif "Synchronize" in each.key:
                waits += each.count
        top = sorted(kernels.items(), key=lambda item: -item[1][1])[:4]
        return {
            "traced, s": took,
            "traced, busy s": sum(busy for _, busy in kernels.values()),
            "traced, kernels": sum(count for count, _ in kernels.values()),
            "traced, waits": waits,
            "traced, slowest": [f"{busy:.3g} s, {n} x {key[:70]}" for key, (n, busy) in top],
        }
    except Exception as error:  # A profiler that does not work here spoils no row.
        return {"traced": f"{type(error).__name__}: {error}"[:200]}
