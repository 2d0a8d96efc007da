"""Copies of images and features between memory and a GPU, which overlap with the work of the GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fedsurrogate.common.errors import FedSurrogateError

LOG = logging.getLogger("fedsurrogate.site")
T = TypeVar("T")


class Transfers(Protocol):
    """Copies that do not wait."""

    def send(self, images: Tensor) -> Tensor:
        """Images on the device; work on the device that uses them begins when they are there."""
        ...

    def fetch(self, features: Tensor) -> Callable[[], Tensor]:
        """A function that waits for these features, and returns them in memory as float16."""
        ...

    def release(self) -> None:
        """Give memory that is kept for later copies and batches back to the device."""
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

    def release(self) -> None:
        """Empty torch's pool, whose pieces fit the batches so far."""
        torch.cuda.empty_cache()


class Fitting:
    """Features of batches in pieces that fit into the memory of the device.

    Others may use the same device, so its free memory is known only when it does not suffice: then
    the batch is halved, and later ones are cut in the same way.

    Args:
        forward: computes features of images on the device.
        transfers: copies of images and features.
    """

    def __init__(self, forward: Callable[[Tensor], Tensor], transfers: Transfers) -> None:
        self._forward, self._transfers = forward, transfers
        self._most: int | None = None

    def begin(self, images: Tensor) -> Callable[[], Tensor]:
        """Queue a batch.

        Args:
            images: (n, channels, height, width), with n > 0.

        Returns:
            A function that waits for its features, (n, d) float16.

        Raises:
            FedSurrogateError: if one image alone does not fit.
        """
        while True:
            together = min(len(images), self._most or len(images))
            waits = self._queued(images, together)
            if waits is not None:
                return partial(_joined, waits)
            # Only now: until the error is forgotten, it keeps the tensors of its frames.
            self._transfers.release()
            if together == 1:
                raise FedSurrogateError(
                    "the GPU has not enough free memory for the backbone and one image; free "
                    "memory on it, choose a smaller backbone, or set device in the node-config to "
                    "another GPU, or to 'cpu'"
                )
            self._most = together // 2
            LOG.warning(
                "the GPU has not enough free memory for a batch of %d images; from here on "
                "features are computed for %d at a time",
                *(together, self._most),
            )

    def _queued(self, images: Tensor, together: int) -> list[Callable[[], Tensor]] | None:
        """What waits for each piece; None if the memory does not suffice."""
        try:
            return [
                self._transfers.fetch(self._forward(self._transfers.send(piece)))
                for piece in torch.split(images, together)
            ]
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            return None


def _joined(waits: Sequence[Callable[[], Tensor]]) -> Tensor:
    return waits[0]() if len(waits) == 1 else torch.cat([wait() for wait in waits])


def _out_of_memory(error: RuntimeError) -> bool:
    """Whether memory is what lacks: torch's own error, or one of a library or of pinned memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        sign in str(error) for sign in ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    )


def overlapped(
    batches: Iterable[tuple[T, Tensor | None]],
    forward: Callable[[Tensor], Tensor],
    transfers: Transfers,
) -> Iterator[tuple[T, Tensor | None]]:
    """Features of each batch of images, in order; None for None.

    Two batches are under way: while the device works on one, the next is decoded, copied and queued
    behind it. A batch that does not fit into the device's memory is halved.

    Args:
        batches: the first part of each entry is kept, the second are images or None.
        forward: computes features of images on the device.
        transfers: copies of images and features.

    Raises:
        FedSurrogateError: as in `Fitting.begin`.
    """
    fitting = Fitting(forward, transfers)
    before: tuple[T, Callable[[], Tensor] | None] | None = None
    for name, images in batches:
        now = name, None if images is None else fitting.begin(images)
        if before is not None:
            yield before[0], before[1] and before[1]()
        before = now
    if before is not None:
        yield before[0], before[1] and before[1]()
