"""Feature extraction: each image goes through a frozen backbone once; later runs memory-map the
features from disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.errors import BackboneError, DataError
from fedsurrogate.common.logs import counted
from fedsurrogate.common.machine import available_memory, usable_cores
from fedsurrogate.common.models.devices import gpus_of

from ..datasets.images import READER
from ..datasets.left_out import NoRecordsError, SourceError
from ..disk_errors import told_as
from .cache import PARTIAL, ShardWriter, digest_of, make_room, read_entry
from .device_processes import Devices, Part, check_same_size, in_parts, in_processes

if TYPE_CHECKING:
    from ..datasets.dataset import Dataset

LOG = logging.getLogger("fedsurrogate.site")
# Shards for which a further process is worth the seconds that its start takes.
SHARDS_EACH = 4
# Decoding threads of a process on a GPU. More of them wait for the lock of the interpreter: with 1, 2,
# 4, 8 and 16 threads a process decoded 529, 869, 1,515, 1,919 and 1,544 small photos a second.
THREADS_EACH = 4
# Memory that a process needs, bytes: on the GPU beside the backbone, for CUDA itself and the
# activations of a batch; and on the host, for the program, CUDA and two batches.
GPU_EACH, HOST_EACH = 3 * 2**30, 4 * 2**30
# Numbers of the features of a bag that are in memory at a time: 4 MiB.
PIECE = 2**20
# Number of broken images that the log names.
MOST_NAMED = 20
NOT_FINITE = "features that are NaN or beyond +-65504"
# Loads the backbone on a device.
Load = Callable[[str], Backbone]


@dataclass(frozen=True, eq=False)
class Features:
    """Features of every image of a data set, and of its records.

    Attributes:
        x: of the images, (m, d), float16 from images; rows of broken ones are zero.
        ok: whether each record is usable, (n,) bool; False for a broken one, and for a bag without
            a usable image.
        fingerprint: of the backbone.
        seconds: time to compute or load them.
        cached: whether they were on disk already.
        bags: the images of each record, where it is a bag; None where records are images.
    """

    x: Tensor
    ok: Tensor
    fingerprint: str
    seconds: float
    cached: bool
    bags: Bags | None = None

    def of(self, rows: Tensor, power: float = 1.0) -> Tensor:
        """Features of records: of a bag the mean of its usable images'.

        Args:
            rows: indices of records, (k,).
            power: of every image's feature, before the mean.

        Returns:
            Features (k, d), float32; not finite for a record that no image makes.
        """
        if self.bags is None:
            return raised(torch.as_tensor(self.x[rows]).float(), power)
        return self.bags.means(self.x, rows, power)

    def pooled(self, members: Sequence[Tensor]) -> Features:
        """Features of bags of these records.

        Args:
            members: indices of each bag's images, (m,).
        """
        usable = torch.as_tensor(self.ok)
        bags = Bags(tuple(members), usable)
        return replace(
            self, ok=torch.tensor([bool(usable[own].any()) for own in members]), bags=bags
        )


@dataclass(frozen=True, eq=False)
class Bags:
    """Which images make each record.

    Attributes:
        members: indices of each bag's images, (m,).
        ok: whether each image can be used, (M,) bool.
    """

    members: tuple[Tensor, ...]
    ok: Tensor

    def means(self, x: Tensor, rows: Tensor, power: float) -> Tensor:
        """Means of the features of bags; images are read in chunks, whatever the size of a bag.

        Args:
            x: features of all images, (M, d).
            rows: indices of bags, (k,).
            power: of every feature, before the mean.

        Returns:
            Means (k, d), float32; NaN for a bag without an image whose feature is finite.
        """
        means = torch.full((len(rows), x.shape[1]), torch.nan)
        for at, row in enumerate(rows.tolist()):
            own = self.members[row]
            own = own[self.ok[own]]
            total, count = torch.zeros(x.shape[1], dtype=torch.float64), 0
            for part in torch.split(own, max(1, PIECE // x.shape[1])):
                each = raised(torch.as_tensor(x[part]).float(), power)
                good = each.isfinite().all(1)
                each = each if good.all() else each[good]
                total += each.sum(0, dtype=torch.float64)
                count += len(each)
            if count:
                means[at] = (total / count).float()
        return means


def extract(
    dataset: Dataset,
    backbone: Backbone | Callable[[], Backbone],
    cache: Path,
    batch_size: int = 64,
    most_mib: float = math.inf,
    load: Load | None = None,
) -> Features:
    """The features of every record, from the cache if they were computed before.

    Processes that share `cache` compute an entry once.

    Args:
        dataset: the records.
        backbone: may be a function that loads it; precomputed features never call it.
        cache: folder of computed features.
        batch_size: images in a batch.
        most_mib: of all entries on disk, MiB; this one always stays.
        load: loads the same backbone on a device. With it, many images are shared out to several
            processes: on every GPU if the backbone's device is "cuda" without a number, and as many
            on each as its cores can feed.

    Raises:
        DataError: when no image can be read or `cache` cannot be written.
        BackboneError: when no features are finite or images differ in size.
        FedSurrogateError: when a process of a GPU fails.
    """
    start = time.perf_counter()
    if dataset.whole is not None and dataset.members is not None:
        images = extract(dataset.whole, backbone, cache, batch_size, most_mib, load)
        return images.pooled(dataset.members)
    if dataset.whole is not None and dataset.rows is not None and dataset.features is None:
        all_ = extract(dataset.whole, backbone, cache, batch_size, most_mib, load)
        if torch.equal(dataset.rows, torch.arange(len(all_.ok))):
            # Not a copy: they may be more than the memory holds.
            return all_
        return replace(all_, x=all_.x[dataset.rows], ok=all_.ok[dataset.rows])
    if dataset.features is not None:
        ok = torch.ones(len(dataset), dtype=torch.bool)
        fingerprint = dataset.fingerprint or f"features-{dataset.features.shape[1]}"
        return Features(
            dataset.features, ok, fingerprint, time.perf_counter() - start, cached=False
        )
    from filelock import FileLock

    model = backbone if isinstance(backbone, Backbone) else backbone()
    entry = (
        cache
        / "features"
        / hashlib.sha256(f"{dataset.key} {model.fingerprint} {READER}".encode()).hexdigest()[:32]
    )
    todo = (
        "set cache-dir in the node-config, or the variable XDG_CACHE_HOME of the environment, to "
        "another folder"
    )
    with told_as(SourceError, f"cache '{cache}' cannot be used", todo):
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            stored = read_entry(entry, len(dataset))
            cached = stored is not None
            if stored is None:
                _write(entry, dataset, model, batch_size, load)
                stored = read_entry(entry, len(dataset))
            make_room(entry, most_mib)
    if stored is None:
        raise SourceError(
            f"features written to '{entry}' cannot be read again; check the disk, or set cache-dir "
            "to another folder"
        )
    x, ok = stored
    return Features(x, ok, model.fingerprint_at(x.shape[1]), time.perf_counter() - start, cached)


def _write(
    entry: Path, dataset: Dataset, backbone: Backbone, batch_size: int, load: Load | None
) -> None:
    """Compute into a folder of shards and rename it when complete. The caller holds the entry's
    lock.

    A failure leaves the complete shards for the next attempt.
    """
    folder = entry.with_name(f"{entry.name}{PARTIAL}")
    writer = ShardWriter.resumed(folder, len(dataset))
    try:
        np.save(folder / "ok.npy", _compute(writer, dataset, backbone, batch_size, load))
        digests = {name: digest_of(folder / name) for name in ("x.npy", "ok.npy")}
        (folder / "digests.json").write_text(json.dumps(digests))
        for name in ("ok.npy", "digests.json"):
            # x.npy is on disk. After a power failure an entry without these would be computed again.
            with (folder / name).open("rb") as file:
                os.fsync(file.fileno())
        if entry.exists():
            shutil.rmtree(entry)
        folder.rename(entry)
        # Only now: a process that ends before the rename loses nothing.
        writer.remove(entry)
    except (BackboneError, DataError):
        # These images, or this backbone, cannot be used: another attempt would end in the same way.
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        if not writer.done:
            shutil.rmtree(folder, ignore_errors=True)


def _compute(
    writer: ShardWriter, dataset: Dataset, backbone: Backbone, batch_size: int, load: Load | None
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Write features (n, d) float16 of the rows that are missing; return which rows are valid, (n,)
    bool.
    """
    broken: list[tuple[int, str]] = []
    start, before = time.perf_counter(), writer.done
    with (
        counted(dataset.name, len(dataset), before, "images") as advance,
        closing(_parts(writer.missing(), dataset, backbone, batch_size, load)) as parts,
    ):
        for part in parts:
            broken += part.broken
            finite = None
            if part.features is not None:
                check_same_size(writer.size or part.size, part.size)
                finite = torch.isfinite(part.features).all(dim=1)
                broken += [
                    (row, NOT_FINITE)
                    for row, good in zip(part.rows, finite.tolist(), strict=True)
                    if not good
                ]
            writer.add(part, finite)
            advance(len(part))
            if len(broken) > MOST_NAMED:
                broken = [*broken[:MOST_NAMED], broken[-1]]
    for row, reason in broken[:MOST_NAMED]:
        # Never to the coordinator: a path may name a patient.
        LOG.warning("%s: %s is broken and skipped (%s)", dataset.name, dataset.where(row), reason)
    if not writer.dimension:
        reason = broken[0][1] if broken else "it is empty"
        raise NoRecordsError(
            f"none of the {len(dataset)} images of {dataset.name!r} can be read; reason for the "
            f"first: {reason}"
        )
    ok = writer.finish()
    if not ok.any():
        raise BackboneError(
            f"backbone {backbone.name!r}: {NOT_FINITE} for every image; check weights-path, or use "
            "another"
        )
    seconds = time.perf_counter() - start
    LOG.info(
        "%s: features of %d images in %.1f s (%.0f images/s), %d broken images skipped",
        *(
            dataset.name,
            int(ok.sum()),
            seconds,
            (len(dataset) - before) / seconds,
            len(ok) - int(ok.sum()),
        ),
    )
    return ok


def _parts(
    shards: list[range], dataset: Dataset, backbone: Backbone, batch_size: int, load: Load | None
) -> Generator[Part]:
    """The records of these shards, with features: by this process, or by several on the GPUs."""
    names = () if load is None or dataset.opener is None else _places(backbone.device, len(shards))
    if load is None or dataset.opener is None or len(names) < 2:
        return in_parts(dataset.open_image, shards, backbone, batch_size)
    LOG.info(
        "%s: features are computed by %d processes, on %s",
        *(dataset.name, len(names), ", ".join(dict.fromkeys(names))),
    )
    return in_processes(
        dataset.opener, shards, Devices(names, load, backbone.fingerprint), batch_size
    )


def _places(device: torch.device, shards: int) -> tuple[str, ...]:
    """The GPU of each process that computes features: none for a processor."""
    gpus = gpus_of(device) or ((str(device),) if device.type == "cuda" else ())
    return (gpus * _on_each(gpus))[: shards // SHARDS_EACH] if gpus else ()


def _on_each(gpus: tuple[str, ...]) -> int:
    """Processes on each GPU: as many as it takes to use all cores, if their memory is free."""
    each = usable_cores() // (THREADS_EACH * len(gpus))
    if each < 2:
        return 1
    # This process has loaded the backbone on the first one; to ask another would take its memory.
    free, _ = torch.cuda.mem_get_info(gpus[0])
    weights = torch.cuda.memory_allocated(gpus[0])
    rooms = free // (GPU_EACH + 2 * weights), available_memory() // (HOST_EACH * len(gpus))
    return max(1, min(each, *rooms))
