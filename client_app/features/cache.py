"""Features on disk: the cache of computed ones, shards of those that are being computed, and
rows in a file without a name.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import logging
import mmap
import os
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy.gaussian_mechanism import clip

from .device_processes import Part

MIB = 2**20
# Ending of a folder whose features are being computed, or were when the process ended.
PARTIAL = ".partial"
LOG = logging.getLogger("fedsurrogate.site")


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
    return (
        sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        if folder.is_dir()
        else 0
    )


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
        madvise(
            ctypes.c_void_p(start),
            ctypes.c_size_t((end - start) // mmap.PAGESIZE * mmap.PAGESIZE),
            mmap.MADV_DONTNEED,
        )


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
