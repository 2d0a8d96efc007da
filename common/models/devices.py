"""The device that computes, a processor or a GPU; work that is shared out to the threads of a processor;
and random generators that depend on a seed and a purpose alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
R = TypeVar("R")


def pick_device(wanted: str) -> str:
    """The device, with "auto" resolved.

    Args:
        wanted: "auto", "cpu", "cuda", or a GPU such as "cuda:1".

    Raises:
        ConfigError: for a GPU that this machine does not have.
    """
    import torch

    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if (
        wanted.startswith("cuda")
        and int(wanted.partition(":")[2] or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"device = {wanted!r}: this machine has {torch.cuda.device_count()} GPUs; use 'cpu' or "
            "'auto'"
        )
    return wanted


def gpus_of(device: torch.device) -> tuple[str, ...]:
    """The GPUs that `device` leaves open: all that this process sees for "cuda" without a number,
    otherwise none.
    """
    import torch

    if device.type != "cuda" or device.index is not None:
        return ()
    return tuple(f"cuda:{index}" for index in range(torch.cuda.device_count()))


def one_thread_each(work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int]) -> list[R]:
    """The results of work on all items: torch's threads take whole items, and none shares an item.

    Threads that share a small operation wait for each other at its end. On a machine with other
    work one of them is always late, and the others spin: small operations then take ten times as
    long.

    Args:
        work: on one item.
        items: in the order of the results.
        sizes: of the items; the largest one is begun first.

    Returns:
        The results, in order.

    Example:
        >>> one_thread_each(lambda number: number * 2, [3, 1, 2], sizes=[3, 1, 2])
        [6, 2, 4]
    """
    import torch

    threads = torch.get_num_threads()
    if threads == 1:
        return [work(item) for item in items]

    def alone(item: T) -> R:
        # Affects this thread only.
        torch.set_num_threads(1)
        return work(item)

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="torch-alone") as pool:
            order = sorted(range(len(items)), key=lambda index: -sizes[index])
            waiting = {index: pool.submit(alone, items[index]) for index in order}
            return [waiting[index].result() for index in range(len(items))]
    finally:
        # A worker also changed the default of threads started later.
        torch.set_num_threads(threads)


def stream(*parts: object) -> torch.Generator:
    """A generator for these parts, which include a seed; independent of those of other parts. Never
    for privacy noise.
    """
    import torch

    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
