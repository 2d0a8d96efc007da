"""Copies of images and features between memory and a GPU, which overlap with the work of the GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Transfers(Protocol):
    """Copies that do not wait."""

    def send(self, images: Tensor) -> Tensor:
        """Images on the device; work on the device that uses them begins when they are there."""
        ...

    def fetch(self, features: Tensor) -> Callable[[], Tensor]:
        """A function that waits for these features, and returns them in memory as float16."""
        ...


class CudaTransfers:
    """Copies from and to pinned memory. Those to the GPU have a stream of their own, so that they
    run beside its work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, images: Tensor) -> Tensor:
        """Images on the device; its current stream waits for them."""
        with torch.cuda.stream(self._copies):
            there = images.pin_memory().to(self._device, non_blocking=True)
        working = torch.cuda.current_stream(self._device)
        working.wait_stream(self._copies)
        # Their memory is of the copies' stream; it must not be given to the next copy while the
        # model reads it.
        there.record_stream(working)
        return there

    def fetch(self, features: Tensor) -> Callable[[], Tensor]:
        """Copy float16 features (n, d) into pinned memory; the returned function waits for them."""
        here = torch.empty(features.shape, dtype=torch.float16, pin_memory=True)
        here.copy_(features.half(), non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(torch.cuda.current_stream(self._device))

        def wait() -> Tensor:
            done.synchronize()
            # Pinned memory is scarce, and the caller may keep features for long.
            return here.clone()

        return wait


def overlapped(
    batches: Iterable[tuple[T, Tensor | None]],
    forward: Callable[[Tensor], Tensor],
    transfers: Transfers,
) -> Iterator[tuple[T, Tensor | None]]:
    """Features of each batch of images, in order; None for None.

    Two batches are under way: while the device works on one, the next is decoded, copied and queued
    behind it.

    Args:
        batches: the first part of each entry is kept, the second are images or None.
        forward: computes features of images on the device.
        transfers: copies of images and features.
    """
    before: tuple[T, Callable[[], Tensor] | None] | None = None
    for name, images in batches:
        now = name, None if images is None else transfers.fetch(forward(transfers.send(images)))
        if before is not None:
            yield before[0], before[1] and before[1]()
        before = now
    if before is not None:
        yield before[0], before[1] and before[1]()
