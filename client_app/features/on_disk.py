"""Features of a large site: rows in a file that has no name, mapped into memory, so that they do not fill it.

The system may take a mapped page out of memory at any time. The file goes when its last tensor goes, or the process ends.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.privacy.gaussian_mechanism import clip

# Numbers of a chunk: 32 MiB in double precision.
CHUNK = 2**22


def chunks(count: int, dimension: int) -> Iterator[slice]:
    """Slices that divide `count` rows of this dimension into chunks of a fixed size in bytes."""
    rows = max(1, CHUNK // max(1, dimension))
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def written(parts: Iterator[Tensor], dimension: int, folder: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """The rows (n, dimension) of all parts, written to a file in `folder` and mapped. Raises OSError."""
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
    """Let the system take the pages of these features, or of rows that follow one another, out of this process's memory at
    once. They must be of a tensor that `written` returned.

    They are read from the file again when they are needed. Rows that were changed in memory would be lost.
    """
    start, end = features.data_ptr(), features.data_ptr() + features.nbytes
    start += -start % mmap.PAGESIZE
    if end > start and hasattr(mmap, "MADV_DONTNEED"):
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise(ctypes.c_void_p(start), ctypes.c_size_t((end - start) // mmap.PAGESIZE * mmap.PAGESIZE), mmap.MADV_DONTNEED)


def clipped_features(
    features: Tensor, norm: float, folder: Path | None, change: Callable[[Tensor], Tensor]
) -> tuple[Tensor, float]:
    """Features (n, d) in double precision after `change`, clipped at `norm`, and the share of them that it shortened.

    With a `folder`, chunk by chunk into a file there.
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
    found = written(parts(), dimension, folder, torch.float64)
    return found, shortened / max(1, len(features))
