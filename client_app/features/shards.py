"""Features that are being computed: complete shards of rows stay on disk, so that an ended process loses the last one only.

A folder `*.partial` holds `x` and `ok` as files of all rows, and `shards.jsonl`: one line a shard with its last row and
digest. A line is written when its rows are on disk. The next process checks the digests and continues after the last line
that holds.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Records of a shard: half a minute to some minutes of work, depending on the backbone.
SHARD = 2048
SHARDS = "shards.jsonl"
LOG = logging.getLogger("fedsurrogate.site")


@dataclass
class ShardWriter:
    """Writes features (count, dimension) float16 and ok (count,) bool to `folder`, shard by shard; it holds one shard.

    done: rows that are complete. size: of the images, (height, width), once one is known.
    """

    folder: Path
    count: int
    done: int = 0
    dimension: int = 0
    size: tuple[int, ...] = ()
    _rows: list[tuple[list[int], Tensor, Tensor]] = field(default_factory=list)
    _start: int = 0

    @classmethod
    def resumed(cls, folder: Path, count: int) -> ShardWriter:
        """A writer that continues after the complete shards in `folder`; from row zero if there are none."""
        writer = cls(folder, count)
        try:
            lines = [json.loads(line) for line in (folder / SHARDS).read_text().split("\n")[:-1]]
            if lines[0]["count"] != count:
                return writer
            writer.dimension, writer.size = int(lines[0]["dimension"]), tuple(lines[0]["size"])
            writer._start = writer._x_start()
            for shard in lines[1:]:
                if writer._digest(writer.done, int(shard["end"])) != shard["sha256"]:
                    raise ValueError("content differs from its digest")
                writer.done = int(shard["end"])
        except FileNotFoundError:
            return cls(folder, count)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            LOG.warning("computed features in %s are damaged after row %d (%s)", folder, writer.done, error)
            if not writer.done:
                return cls(folder, count)
        if writer.done:
            LOG.info("%d of %d records are done already; the work continues after them", writer.done, count)
        return writer

    def add(self, rows: list[int], features: Tensor, good: Tensor, size: tuple[int, ...]) -> None:
        """Features (n, dimension) float16 of these rows, in order; those that are not `good` (n,) stay zero."""
        if not self.dimension:
            self._create(features.shape[1], size)
        self._rows.append((rows, torch.where(good[:, None], features, 0), good))

    def complete(self, end: int) -> None:
        """The rows before `end` are computed. Flush them and note the shard if it is full, or the last one."""
        if self.dimension and (end - self.done >= SHARD or end == self.count):
            self._flush(end)

    def ok(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows are valid, (count,) bool, after the last shard."""
        found: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.fromfile(self.folder / "ok", dtype=np.bool_)
        return found

    def _create(self, dimension: int, size: tuple[int, ...]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dimension, self.size = dimension, size
        np.lib.format.open_memmap(self.folder / "x.npy", mode="w+", dtype=np.float16, shape=(self.count, dimension))
        np.zeros(self.count, dtype=np.bool_).tofile(self.folder / "ok")
        self._start = self._x_start()
        (self.folder / SHARDS).write_text(
            json.dumps({"count": self.count, "dimension": dimension, "size": list(size)}) + "\n"
        )

    def _x_start(self) -> int:
        """Bytes before the first row of x.npy."""
        return int(np.load(self.folder / "x.npy", mmap_mode="r").offset)

    def _flush(self, end: int) -> None:
        x = np.zeros((end - self.done, self.dimension), dtype=np.float16)
        ok = np.zeros(end - self.done, dtype=np.bool_)
        for rows, features, good in self._rows:
            at = np.asarray(rows) - self.done
            x[at], ok[at] = features.numpy(), good.numpy()
        for name, start, content in (("x.npy", self._start + x[:1].nbytes * self.done, x), ("ok", self.done, ok)):
            with (self.folder / name).open("r+b") as file:
                file.seek(start)
                file.write(content.tobytes())
                file.flush()
                os.fsync(file.fileno())
        with (self.folder / SHARDS).open("a") as notes:
            notes.write(json.dumps({"end": end, "sha256": _sha256(x.tobytes(), ok.tobytes())}) + "\n")
            notes.flush()
            os.fsync(notes.fileno())
        self.done, self._rows = end, []

    def _digest(self, begin: int, end: int) -> str:
        width = 2 * self.dimension
        contents = []
        for name, start, length in (
            ("x.npy", self._start + width * begin, width * (end - begin)),
            ("ok", begin, end - begin),
        ):
            with (self.folder / name).open("rb") as file:
                file.seek(start)
                contents.append(file.read(length))
        return _sha256(*contents)


def _sha256(*contents: bytes) -> str:
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()
