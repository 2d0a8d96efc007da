"""Feature extraction: each image goes through a frozen backbone once; later runs memory-map the
features from disk. And features on disk: the cache of computed ones, shards of those that are being
computed, and rows in a file without a name.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import math
import mmap
import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.backbones.backbones import Backbone
from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.errors import LOG, BackboneError, DataError, told_as
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.logs import counted
from fedsurrogate.common.machine import available_memory, usable_cores
from fedsurrogate.common.models.devices import gpus_of
from fedsurrogate.common.privacy.gaussian_mechanism import clip

from ..datasets.dataset import Dataset
from ..datasets.images import READER
from ..datasets.left_out import NoRecordsError, SourceError
from .device_processes import Devices, Part, check_same_size, in_parts, in_processes

MIB = 2**20
# Ending of a folder whose features are being computed, or were when the process ended.
PARTIAL = ".partial"


def read_entry(entry: Path, count: int) -> tuple[Tensor, Tensor] | None:
    """A complete and undamaged entry of the cache.

    Args:
        entry: its folder.
        count: n, the number of records that it must have.

    Returns:
        Features (n, d), and which rows are valid, (n,) bool; None without such an entry.
    """
    try:
        digests = json.loads((entry / "digests.json").read_text())
        if any(digest_of(entry / name) != digests[name] for name in ("x.npy", "ok.npy")):
            raise ValueError("content differs from its digest")
        # Copy on write: torch needs writable memory, and the file must never change.
        x, ok = np.load(entry / "x.npy", mmap_mode="c"), np.load(entry / "ok.npy")
        if len(x) != count or len(ok) != count:
            raise ValueError(f"{len(x)} rows for {count} records")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        LOG.warning("cached features in %s are damaged (%s) and are computed again", entry, error)
        return None
    return torch.from_numpy(x), torch.from_numpy(ok)


def digest_of(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_room(entry: Path, most_mib: float) -> None:
    """Mark an entry as used, and remove others until all take at most `most_mib`.

    `entry` itself stays even if it alone is larger: otherwise every request would compute it again,
    and a refusal would depend on the number of records. Entries that another process has locked are
    in use and stay. Memory-mapped files stay readable after they are removed.

    Args:
        entry: a folder that this process has locked.
        most_mib: of all entries, MiB; infinity for no limit.
    """
    from filelock import FileLock, Timeout

    os.utime(entry)
    if most_mib == float("inf"):
        return
    others = [folder for folder in entry.parent.iterdir() if _is_entry(folder) and folder != entry]
    sizes = {folder: _size(folder) for folder in others}
    total = _size(entry) + sum(sizes.values())
    if _size(entry) > most_mib * MIB:
        LOG.warning(
            "these features need more than cache-mib = %g in the policy; they stay, all others go",
            most_mib,
        )
    for folder in sorted(others, key=_last_used):
        if total <= most_mib * MIB:
            return
        try:
            with FileLock(f"{str(folder).removesuffix(PARTIAL)}.lock", timeout=0):
                shutil.rmtree(folder, ignore_errors=True)
        except Timeout:
            continue
        total -= sizes[folder]
        LOG.info(
            "cached features %s, the least recently used, are removed: the cache may take %g MiB",
            folder.name,
            most_mib,
        )


def _is_entry(folder: Path) -> bool:
    """Whether this is a folder of features, complete or not."""
    return folder.is_dir() and "." not in folder.name.removesuffix(PARTIAL)


def _size(folder: Path) -> int:
    if folder.is_dir():
        return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
    return 0


def _last_used(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        return 0.0


# Numbers of a chunk: 32 MiB in double precision.
CHUNK = 2**22


def chunks(count: int, dimension: int) -> Iterator[slice]:
    """Slices that divide rows into chunks of a fixed size in bytes.

    Args:
        count: number of rows.
        dimension: numbers in a row.

    Example:
        >>> list(chunks(5, CHUNK // 2))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rows = max(1, CHUNK // max(1, dimension))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def written(
    parts: Iterator[Tensor], dimension: int, folder: Path, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Rows of all parts, written to a file and mapped.

    Args:
        parts: rows, each part (m, d).
        dimension: d.
        folder: of the file, which has no name.
        dtype: of the file, float32 or float64.

    Returns:
        The rows (n, d).

    Raises:
        OSError: if the file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = np.float64 if dtype == torch.float64 else np.float32
    with tempfile.TemporaryFile(dir=folder) as file:
        for part in parts:
            file.write(part.to(dtype).contiguous().numpy().data)
        file.flush()
        rows = file.tell() // (np.dtype(kind).itemsize * dimension)
        if not rows:
            return torch.zeros(0, dimension, dtype=dtype)
        # Copy on write: torch needs writable memory.
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="c", shape=(rows, dimension)))


def forget(features: Tensor) -> None:
    """Let the system take the pages of these features out of this process's memory at once.

    They are read from the file again when they are needed. Rows that were changed in memory would
    be lost.

    Args:
        features: (n, d), a tensor that `written` returned, or rows of it that follow one another.
    """
    start, end = features.data_ptr(), features.data_ptr() + features.nbytes
    start += -start % mmap.PAGESIZE
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        length = (end - start) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def clipped_features(
    features: Tensor, norm: float, folder: Path | None, change: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """Features in double precision after a change, clipped.

    Args:
        features: (n, d).
        norm: to clip at.
        folder: for a file to which they are written chunk by chunk; None: they stay in memory.
        change: of the features before the clip.

    Returns:
        The clipped features, and the share of them that was shortened.
    """
    if folder is None:
        return clip(change(features.double().cpu()), norm)
    shortened = 0.0

    def parts() -> Iterator[Tensor]:
        nonlocal shortened
        for rows in chunks(*features.shape):
            clipped, share = clip(change(features[rows].double()), norm)
            shortened += share * len(clipped)
            forget(features[rows])
            yield clipped

    dimension = change(features[:0].double()).shape[1]
    mapped = written(parts(), dimension, folder, torch.float64)
    return mapped, shortened / max(1, len(features))


# Records of a shard: half a minute to some minutes of work, depending on the backbone.
SHARD = 2048

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class ShardWriter:
    """Writes features of records, shard by shard; it holds open shards.

    Attributes:
        folder: for features (count, dimension) float16 and ok (count,) bool.
        count: number of records.
        dimension: of the features; 0 until it is known.
        size: of the images, (height, width), once one is known.
    """

    folder: Path
    count: int
    dimension: int = 0
    size: tuple[int, ...] = ()
    # First rows of complete shards.
    _complete: set[int] = field(default_factory=set)
    # By the first row of a shard: how many records were added, and the readable rows among them.
    _added: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))
    _parts: defaultdict[int, list[tuple[Part, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    @classmethod
    def resumed(cls, folder: Path, count: int) -> ShardWriter:
        """A writer that continues with the shards that are not complete.

        Args:
            folder: of an earlier writer, perhaps.
            count: number of records.
        """
        writer = cls(folder, count)
        for first in range(0, count, SHARD):
            try:
                x, _, size = writer._read(first)
                shown = x.shape[1], tuple(size.tolist())
                if writer._complete and shown != (writer.dimension, writer.size):
                    raise ValueError(f"features and images of {shown}")
                writer.dimension, writer.size = shown
                writer._complete.add(first)
            except FileNotFoundError:
                continue
            # numpy raises almost anything for a damaged file, such as EOFError and BadZipFile.
            except Exception as error:
                LOG.warning(
                    "computed features in %s are damaged (%s: %s), and are computed again",
                    *(writer._file(first), type(error).__name__, error),
                )
        if writer.done:
            LOG.info(
                "%d of %d records are done already; the work continues with the others",
                *(writer.done, count),
            )
        return writer

    @property
    def done(self) -> int:
        """Number of records in complete shards."""
        return sum(len(self._shard(first)) for first in self._complete)

    def missing(self) -> list[range]:
        """Rows of the shards that are not complete."""
        firsts = range(0, self.count, SHARD)
        return [self._shard(first) for first in firsts if first not in self._complete]

    def add(self, part: Part, good: Tensor | None) -> None:
        """Add records of one shard.

        A shard whose records were all added is written to disk, once the dimension is known.

        Args:
            part: the records, with features (n, dimension) float16 of its rows.
            good: rows of features that are valid, (n,); the others stay zero. None without
                features.

        Raises:
            OSError: if it cannot write.
        """
        first = min([*part.rows[:1], *(row for row, _ in part.broken[:1])]) // SHARD * SHARD
        self._added[first] += len(part)
        if part.features is not None and good is not None:
            self.dimension, self.size = part.features.shape[1], part.size
            self._parts[first].append((part, good))
        if self.dimension:
            for each in [at for at, added in self._added.items() if added == len(self._shard(at))]:
                self._write(each)

    def finish(self) -> Array:
        """Write x.npy, the features of all records, after the last shard.

        Returns:
            Which rows are valid, (count,) bool.

        Raises:
            OSError: if it cannot write.
        """
        valid = []
        with (self.folder / "x.npy").open("wb") as file:
            shape = self.count, self.dimension
            header = {"descr": "<f2", "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            for first in range(0, self.count, SHARD):
                x, ok, _ = self._read(first)
                file.write(x.tobytes())
                valid.append(ok)
            file.flush()
            os.fsync(file.fileno())
        return np.concatenate(valid)

    def remove(self, folder: Path) -> None:
        """Remove the files of shards, once their features are elsewhere.

        Args:
            folder: where they are now.
        """
        for first in range(0, self.count, SHARD):
            (folder / self._file(first).name).unlink()

    def _file(self, first: int) -> Path:
        return self.folder / f"{first}.npz"

    def _shard(self, first: int) -> range:
        return range(first, min(first + SHARD, self.count))

    def _write(self, first: int) -> None:
        x = np.zeros((len(self._shard(first)), self.dimension), "<f2")
        ok = np.zeros(len(x), bool)
        for part, good in self._parts.pop(first, []):
            assert part.features is not None
            at = np.asarray(part.rows)[good.numpy()] - first
            x[at], ok[at] = part.features[good].numpy(), True
        content = io.BytesIO()
        np.savez(content, x=x, ok=ok, size=np.array(self.size, int))
        replace_file(self._file(first), content.getvalue())
        self._complete.add(first)
        del self._added[first]

    def _read(self, first: int) -> tuple[Array, Array, Array]:
        """Features, which rows are valid, and the size of the images. Raises almost anything."""
        with np.load(self._file(first)) as stored:
            x, ok, size = stored["x"], stored["ok"], stored["size"]
        rows = len(self._shard(first))
        if x.dtype != np.dtype("<f2") or x.ndim != 2 or ok.dtype != bool:
            raise ValueError(f"features of type {x.dtype}, shape {x.shape}")
        if not (len(x) == len(ok) == rows and x.shape[1]):
            raise ValueError(f"{len(x)} rows for {rows} records")
        return x, ok, size


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
        members: indices of each record's images, (m,), where it is a bag; None where records are
            images.
        images_ok: whether each image of bags can be used, (M,) bool.
    """

    x: Tensor
    ok: Tensor
    fingerprint: str
    seconds: float
    cached: bool
    members: tuple[Tensor, ...] | None = None
    images_ok: Tensor | None = None

    def of(self, rows: Tensor, power: float = 1.0) -> Tensor:
        """Features of records: of a bag the mean of its usable images'.

        Args:
            rows: indices of records, (k,).
            power: of every image's feature, before the mean.

        Returns:
            Features (k, d), float32; not finite for a record that no image makes.
        """
        if self.members is None or self.images_ok is None:
            return raised(torch.as_tensor(self.x[rows]).float(), power)
        chosen = [self.members[row] for row in rows.tolist()]
        return means_of(self.x, chosen, self.images_ok, power)

    def pooled(self, members: Sequence[Tensor]) -> Features:
        """Features of bags of these records.

        Args:
            members: indices of each bag's images, (m,).
        """
        usable = torch.as_tensor(self.ok)
        ok = torch.tensor([bool(usable[own].any()) for own in members])
        return replace(self, ok=ok, members=tuple(members), images_ok=usable)


def means_of(x: Tensor, members: Sequence[Tensor], ok: Tensor, power: float) -> Tensor:
    """Means of the features of bags; images are read in chunks, whatever the size of a bag.

    Args:
        x: features of all images, (M, d).
        members: indices of each bag's images, (m,).
        ok: whether each image can be used, (M,) bool.
        power: of every feature, before the mean.

    Returns:
        Means (k, d), float32; NaN for a bag without an image whose feature is finite.
    """
    means = torch.full((len(members), x.shape[1]), torch.nan)
    for at, own in enumerate(members):
        total, count = torch.zeros(x.shape[1], dtype=torch.float64), 0
        for part in torch.split(own[ok[own]], max(1, PIECE // x.shape[1])):
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
    made_of = f"{dataset.key} {model.fingerprint} {READER}"
    entry = cache / "features" / hashlib.sha256(made_of.encode()).hexdigest()[:32]
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
