"""Features that are being computed: complete shards of rows stay on disk, so that an ended process
loses open ones only.

A folder `*.partial` holds a file for each complete shard, named by its first row. It is put in its
place whole, and numpy's archives have a checksum of each array; the next process computes the shards
without such a file.
"""

from __future__ import annotations

import io
import logging
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedsurrogate.client_app.features.parts import Part
from fedsurrogate.common.files import replace_file

# Records of a shard: half a minute to some minutes of work, depending on the backbone.
SHARD = 2048
LOG = logging.getLogger("fedsurrogate.site")
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
