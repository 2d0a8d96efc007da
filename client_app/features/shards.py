"""Features that are being computed: complete shards of rows stay on disk, so that an ended process
loses open ones only.

A folder `*.partial` holds `x` and `ok` as files of all rows, and `shards.jsonl`: one line a shard,
in any order, with its first row, the row after its last, and its digest. A line is written when its
rows are on disk. The next process checks the digests and computes the other shards. Lines of
earlier versions have no first row: each began where the line before ended.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.features.parts import Part

# Records of a shard: half a minute to some minutes of work, depending on the backbone.
SHARD = 2048
SHARDS = "shards.jsonl"
LOG = logging.getLogger("fedsurrogate.site")


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
    _rows: defaultdict[int, list[tuple[list[int], Tensor, Tensor]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    _start: int = 0

    @classmethod
    def resumed(cls, folder: Path, count: int) -> ShardWriter:
        """A writer that continues with the shards that are not complete.

        Args:
            folder: of an earlier writer, perhaps.
            count: number of records.

        Raises:
            OSError: if it cannot write.
        """
        writer = cls(folder, count)
        try:
            text = (folder / SHARDS).read_text(errors="replace")
            first, *lines = text.splitlines()
            head = json.loads(first)
            if head["count"] != count:
                return writer
            writer.dimension, writer.size = int(head["dimension"]), tuple(head["size"])
            writer._start = writer._x_start()
            writer._check(lines)
        except FileNotFoundError:
            return cls(folder, count)
        # numpy raises almost anything for a damaged file, such as EOFError and TokenError.
        except Exception as error:
            LOG.warning(
                "computed features in %s are damaged (%s: %s)", folder, type(error).__name__, error
            )
            return cls(folder, count)
        if not writer._complete:
            return cls(folder, count)
        if not text.endswith("\n"):
            # It may fail on a full disk, which is no damage: the shards stay.
            with (folder / SHARDS).open("a") as notes:
                notes.write("\n")
        LOG.info(
            "%d of %d records are done already; the work continues with the others",
            writer.done,
            count,
        )
        return writer

    @property
    def done(self) -> int:
        """Number of records in complete shards."""
        return sum(len(self._shard(first)) for first in self._complete)

    def missing(self) -> list[range]:
        """Rows of the shards that are not complete."""
        return [
            self._shard(first)
            for first in range(0, self.count, SHARD)
            if first not in self._complete
        ]

    def add(self, part: Part, good: Tensor | None) -> None:
        """Add records of one shard.

        A shard whose records were all added is written to disk, once the dimension is known.

        Args:
            part: the records, with features (n, dimension) float16 of its rows.
            good: rows of features that are valid, (n,); the others stay zero. None without
                features.
        """
        first = min([*part.rows[:1], *(row for row, _ in part.broken[:1])]) // SHARD * SHARD
        self._added[first] += len(part)
        if part.features is not None and good is not None:
            if not self.dimension:
                self._create(part.features.shape[1], part.size)
            self._rows[first].append(
                (part.rows, torch.where(good[:, None], part.features, 0), good)
            )
        if self.dimension:
            for full in [
                each for each, added in self._added.items() if added == len(self._shard(each))
            ]:
                self._write(full)

    def ok(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows are valid, (count,) bool, after the last shard."""
        valid: np.ndarray[tuple[int], np.dtype[np.bool_]] = np.fromfile(
            self.folder / "ok", np.bool_, self.count
        )
        return valid

    def _shard(self, first: int) -> range:
        return range(first, min(first + SHARD, self.count))

    def _create(self, dimension: int, size: tuple[int, ...]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.dimension, self.size = dimension, size
        np.lib.format.open_memmap(
            self.folder / "x.npy", mode="w+", dtype=np.float16, shape=(self.count, dimension)
        )
        np.zeros(self.count, dtype=np.bool_).tofile(self.folder / "ok")
        self._start = self._x_start()
        (self.folder / SHARDS).write_text(
            json.dumps({"count": self.count, "dimension": dimension, "size": list(size)}) + "\n"
        )

    def _x_start(self) -> int:
        """Bytes before the first row of x.npy. Raises ValueError, and others of numpy, if its own
        header does not fit.
        """
        x = np.load(self.folder / "x.npy", mmap_mode="r")
        if (
            x.shape != (self.count, self.dimension)
            or x.dtype != np.float16
            or not x.flags.c_contiguous
        ):
            raise ValueError(f"x.npy holds {x.dtype.str} of shape {x.shape}")
        return int(x.offset)

    def _write(self, first: int) -> None:
        shard = self._shard(first)
        x = np.zeros((len(shard), self.dimension), dtype=np.float16)
        ok = np.zeros(len(shard), dtype=np.bool_)
        for rows, features, good in self._rows.pop(first, []):
            at = np.asarray(rows) - first
            x[at], ok[at] = features.numpy(), good.numpy()
        for name, start, content in (
            ("x.npy", self._start + x[:1].nbytes * first, x),
            ("ok", first, ok),
        ):
            with (self.folder / name).open("r+b") as file:
                file.seek(start)
                file.write(content.tobytes())
                file.flush()
                os.fsync(file.fileno())
        with (self.folder / SHARDS).open("a") as notes:
            line = {"begin": first, "end": shard.stop, "sha256": _sha256(x.tobytes(), ok.tobytes())}
            notes.write(json.dumps(line) + "\n")
            notes.flush()
            os.fsync(notes.fileno())
        self._complete.add(first)
        del self._added[first]

    def _check(self, lines: list[str]) -> None:
        """Take the shards whose rows have the digest in their last line."""
        noted: dict[int, str] = {}
        end = 0
        for line in lines:
            try:
                shard = json.loads(line)
                begin, end, digest = (
                    int(shard.get("begin", end)),
                    int(shard["end"]),
                    str(shard["sha256"]),
                )
            except (ValueError, KeyError, TypeError, AttributeError):
                # A line that was being written when the process ended.
                continue
            if begin % SHARD == 0 and 0 <= begin < self.count and end == self._shard(begin).stop:
                noted[begin] = digest
        self._complete = {
            begin for begin, digest in noted.items() if self._digest(self._shard(begin)) == digest
        }
        if damaged := noted.keys() - self._complete:
            LOG.warning(
                "%d shards in %s do not have their digests and are computed again",
                len(damaged),
                self.folder,
            )

    def _digest(self, shard: range) -> str:
        width = 2 * self.dimension
        contents = []
        for name, start, length in (
            ("x.npy", self._start + width * shard.start, width * len(shard)),
            ("ok", shard.start, len(shard)),
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
