"""Feature extraction: each image goes through a frozen backbone once; later runs memory-map the features from disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from client_app.features.cache import PARTIAL, digest_of, make_room, read_entry
from client_app.features.progress import progress
from client_app.features.shards import SHARDS, ShardWriter
from client_app.features.transfers import CudaTransfers, overlapped
from common.backbones.backbones import Backbone
from common.errors import BackboneError, DataError

if TYPE_CHECKING:
    from client_app.datasets.dataset import Dataset

LOG = logging.getLogger("fedsurrogate.site")
DECODE_TOGETHER = 32
# On a CPU each thread decodes eight images and forwards them in pairs, whose activations fit the caches of its core. The
# numbers are fixed, so that the bits of a feature depend neither on batch_size nor on the number of cores.
CPU_TOGETHER, CPU_FORWARD_TOGETHER = 8, 2
# Number of broken images that the log names.
MOST_NAMED = 20
NOT_FINITE = "features that are NaN or beyond +-65504"


@dataclass(frozen=True, eq=False)
class Features:
    """Features `x` (n, d) of every record, float16 from images; rows where `ok` (n,) is False are broken and zero.

    seconds: time to compute or load them. cached: whether they were on disk already.
    """

    x: Tensor
    ok: Tensor
    fingerprint: str
    seconds: float
    cached: bool


@dataclass(frozen=True, eq=False)
class Part:
    """Some records: rows with images and features, and broken rows with reasons."""

    rows: list[int]
    images: Tensor | None
    broken: list[tuple[int, str]]
    features: Tensor | None = None


def extract(
    dataset: Dataset,
    backbone: Backbone | Callable[[], Backbone],
    cache: Path,
    batch_size: int = 64,
    most_mib: float = math.inf,
) -> Features:
    """Return the features of every record, from `cache` if they were computed before.

    `backbone` may be a function that loads it; precomputed features never call it. Processes that share `cache` compute
    an entry once. All entries take at most `most_mib` on disk; this one always stays. Raises DataError when no image can be
    read or `cache` cannot be written, BackboneError when no features are finite or images differ in size.
    """
    start = time.perf_counter()
    if dataset.whole is not None and dataset.rows is not None and dataset.features is None:
        all_ = extract(dataset.whole, backbone, cache, batch_size, most_mib)
        return replace(all_, x=all_.x[dataset.rows], ok=all_.ok[dataset.rows])
    if dataset.features is not None:
        ok = torch.ones(len(dataset), dtype=torch.bool)
        fingerprint = dataset.fingerprint or f"features-{dataset.features.shape[1]}"
        return Features(dataset.features, ok, fingerprint, time.perf_counter() - start, cached=False)
    from filelock import FileLock

    model = backbone if isinstance(backbone, Backbone) else backbone()
    entry = cache / "features" / hashlib.sha256(f"{dataset.key} {model.fingerprint}".encode()).hexdigest()[:32]
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            found = read_entry(entry, len(dataset))
            cached = found is not None
            if found is None:
                _write(entry, dataset, model, batch_size)
                found = read_entry(entry, len(dataset))
            make_room(entry, most_mib)
    except OSError as error:
        raise DataError(
            f"cache '{cache}' cannot be used ({error}); set cache-dir in the node-config to another folder"
        ) from error
    if found is None:
        raise DataError(
            f"features written to '{entry}' cannot be read again; check the disk, or set cache-dir to another folder"
        )
    x, ok = found
    return Features(x, ok, model.fingerprint_at(x.shape[1]), time.perf_counter() - start, cached)


def _write(entry: Path, dataset: Dataset, backbone: Backbone, batch_size: int) -> None:
    """Compute into a folder of shards and rename it when complete. The caller holds the entry's lock.

    A failure leaves the complete shards for the next attempt.
    """
    folder = entry.with_name(f"{entry.name}{PARTIAL}")
    writer = ShardWriter.resumed(folder, len(dataset))
    try:
        np.save(folder / "ok.npy", _compute(writer, dataset, backbone, batch_size))
        digests = {name: digest_of(folder / name) for name in ("x.npy", "ok.npy")}
        (folder / "digests.json").write_text(json.dumps(digests))
        if entry.exists():
            shutil.rmtree(entry)
        folder.rename(entry)
        # Only now: a process that ends before the rename loses nothing.
        for name in (SHARDS, "ok"):
            (entry / name).unlink()
    except (BackboneError, DataError):
        # These images, or this backbone, cannot be used: another attempt would end in the same way.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if not writer.done:
            shutil.rmtree(folder, ignore_errors=True)


def _compute(
    writer: ShardWriter, dataset: Dataset, backbone: Backbone, batch_size: int
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Write features (n, d) float16 of the rows that are missing; return which rows are valid, (n,) bool."""
    broken: list[tuple[int, str]] = []
    start, begin = time.perf_counter(), writer.done
    at = begin
    with (
        progress(dataset.name, len(dataset), begin) as advance,
        closing(in_parts(dataset, backbone, batch_size, begin)) as parts,
    ):
        for part in parts:
            broken += part.broken
            if part.images is not None and part.features is not None:
                size = tuple(part.images.shape[2:])
                check_same_size(writer.size or size, size)
                finite = torch.isfinite(part.features).all(dim=1)
                broken += [(row, NOT_FINITE) for row, good in zip(part.rows, finite.tolist(), strict=True) if not good]
                writer.add(part.rows, part.features, finite, size)
            advance(count := len(part.rows) + len(part.broken))
            at += count
            writer.complete(at)
            if len(broken) > MOST_NAMED:
                broken = [*broken[:MOST_NAMED], broken[-1]]
    for row, reason in broken[:MOST_NAMED]:
        # Never to the coordinator: a path may name a patient.
        LOG.warning("%s: %s is broken and skipped (%s)", dataset.name, dataset.where(row), reason)
    if not writer.dimension:
        reason = broken[0][1] if broken else "it is empty"
        raise DataError(f"none of the {len(dataset)} images of {dataset.name!r} can be read; reason for the first: {reason}")
    ok = writer.ok()
    if not ok.any():
        raise BackboneError(f"backbone {backbone.name!r}: {NOT_FINITE} for every image; check weights-path, or use another")
    seconds = time.perf_counter() - start
    LOG.info(
        "%s: features of %d images in %.1f s (%.0f images/s), %d broken images skipped",
        *(dataset.name, int(ok.sum()), seconds, (len(dataset) - begin) / seconds, len(ok) - int(ok.sum())),
    )
    return ok


def in_parts(dataset: Dataset, backbone: Backbone, batch_size: int, begin: int = 0) -> Generator[Part]:
    """Yield the records from `begin` in order, with features; on a CPU each core decodes and forwards its own images."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if backbone.device.type != "cpu":
        parts = _batches(dataset, backbone, batch_size, min(16, cores), begin)
        if backbone.device.type == "cuda":
            batches = ((part, part.images) for part in parts)
            for part, features in overlapped(batches, backbone.forward, CudaTransfers(backbone.device)):
                yield replace(part, features=features)
            return
        for part in parts:
            yield _forward(part, backbone, len(part.rows))
        return

    def work(indices: range) -> Part:
        # Affects this thread only. Threads that share a forward pass would wait for each other at every layer.
        torch.set_num_threads(1)
        return _forward(_decode(dataset, backbone, indices), backbone, CPU_FORWARD_TOGETHER)

    threads = torch.get_num_threads()
    try:
        yield from _in_order(work, range(begin, len(dataset)), CPU_TOGETHER, cores, ahead=4 * cores)
    finally:
        # A worker also changed the default of threads started later.
        torch.set_num_threads(threads)


def _batches(dataset: Dataset, backbone: Backbone, batch_size: int, workers: int, begin: int) -> Iterator[Part]:
    """Decode in threads, at most a few batches ahead of the model, and yield batches in the order of the records."""
    together = min(DECODE_TOGETHER, batch_size)
    ahead = workers + 1 + -(-batch_size // together)
    decoded = _in_order(partial(_decode, dataset, backbone), range(begin, len(dataset)), together, workers, ahead)
    while parts := list(islice(decoded, -(-batch_size // together))):
        yield _join(parts)


def _in_order(work: Callable[[range], Part], rows: range, together: int, workers: int, ahead: int) -> Iterator[Part]:
    """Do `work` on `together` records at a time in threads, in order; at most `ahead` results are pending."""
    starts = iter(rows[::together])
    waiting: deque[Future[Part]] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="extract") as pool:
        try:
            while True:
                for start in islice(starts, ahead - len(waiting)):
                    waiting.append(pool.submit(work, range(start, min(start + together, rows.stop))))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _forward(part: Part, backbone: Backbone, together: int) -> Part:
    if part.images is None:
        return part
    features = [backbone.forward(images).to("cpu", torch.float16) for images in torch.split(part.images, together)]
    return replace(part, features=torch.cat(features))


def _decode(dataset: Dataset, backbone: Backbone, indices: range) -> Part:
    rows: list[int] = []
    broken: list[tuple[int, str]] = []
    images: Tensor | None = None
    for index in indices:
        try:
            image = backbone.preprocess(dataset.open_image(index, backbone.preprocess.resize))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # Decoders raise almost anything for a damaged file; a Rust panic is no Exception.
            broken.append((index, f"{type(error).__name__}: {error}"))
            continue
        if images is None:
            images = torch.empty((len(indices), *image.shape)).contiguous(memory_format=torch.channels_last)
        check_same_size(tuple(images.shape[2:]), tuple(image.shape[1:]))
        images[len(rows)] = image
        rows.append(index)
    return Part(rows, None if images is None else images[: len(rows)], broken)


def _join(parts: list[Part]) -> Part:
    images = [part.images for part in parts if part.images is not None]
    for part in images:
        check_same_size(tuple(images[0].shape[2:]), tuple(part.shape[2:]))
    joined = None if not images else images[0] if len(images) == 1 else torch.cat(images)
    return Part([row for part in parts for row in part.rows], joined, [b for part in parts for b in part.broken])


def check_same_size(size: tuple[int, ...], other: tuple[int, ...]) -> None:
    """Raise BackboneError for images of two sizes, each (height, width)."""
    if size != other:
        raise BackboneError(
            f"images of {size[1]}x{size[0]} and of {other[1]}x{other[0]} px give features of different lengths; "
            "set image-size, and all images are resized to it"
        )
