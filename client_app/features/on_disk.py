"""Features of a large site: rows in a file that has no name, mapped into memory, so that they do
not fill it.

The system may take a mapped page out of memory at any time. The file goes when its last tensor
goes, or the process ends.
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

from fedsurrogate.common.privacy.gaussian_mechanism import clip

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
