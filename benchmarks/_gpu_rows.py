"""Rows of the GPU benchmark, its sizes and clock. Needs torch alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One result. ours: what was measured, in `unit`. limit: what it is held against. fraction: the
    share of the limit that is reached (parity: the share of the tolerance that is used). least: the
    fraction that passes; parity: at most one.
    """

    name: str
    ours: float
    unit: str
    against: str
    limit: float
    fraction: float
    passes: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


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
        difference / tolerance,
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
) -> Row:
    """A speed, held against a limit. smaller: the numbers are times, of which the smaller is
    better.
    """
    fraction = limit / ours if smaller else ours / limit
    return Row(name, ours, unit, against, limit, fraction, fraction >= least)


def relative(there: Tensor, here: Tensor) -> float:
    """Norm of the difference between a result and the expected one, over the norm of the latter."""
    there, here = there.detach().double().cpu(), here.detach().double().cpu()
    return float((there - here).norm() / here.norm().clamp_min(1e-30))


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work; `FULL` on a GPU, `TINY` for a dry run on a processor."""

    images: int
    image_size: int
    batch: int
    backbones: tuple[str, ...]
    records: int
    dimension: int
    head_dimension: int
    head_classes: int
    width: int
    pixels: int
    per_class: int
    real_batches: int
    site_records: int
    repeats: int


FULL = Sizes(
    4096, 224, 256, ("vit_b_16", "resnet50"), 10_000, 1280, 4096, 1000, 128, 32, 50, 40, 10_000, 3
)
TINY = Sizes(6, 32, 4, ("resnet18",), 200, 16, 24, 5, 8, 8, 2, 1, 60, 1)


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
