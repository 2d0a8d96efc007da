"""MNIST and Fashion-MNIST from the files of the original archives (idx, as they are or gzipped)."""

import gzip
import math
import struct
from pathlib import Path

import torch
from torch import Tensor

BYTES = 8  # the format's code for unsigned bytes, the only type that these archives have
PARTS = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(file: Path) -> Tensor:
    """An array of unsigned bytes: two zero bytes, type, number of dimensions, sizes (big-endian),
    then the entries.

    Raises ValueError for another type, or a file of another length than its sizes give.
    """
    content = file.read_bytes()
    if content[:2] == b"\x1f\x8b":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != bytes((0, 0, BYTES)):
        raise ValueError(
            f"{file}: starts with {content[:4].hex()}; an idx file of bytes starts with 000008"
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(
            f"{file}: {len(content)} bytes, shorter than its header of {start}; fetch it again"
        )
    shape = struct.unpack(f">{content[3]}I", content[4:start])
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{file}: {len(content) - start} entries, but its sizes {shape} give "
            f"{math.prod(shape)}; fetch it again"
        )
    return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).reshape(shape)


def read_images(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pixels (n, height x width) from 0 to 1 and labels (n,) of "train" or "test". Raises
    ValueError, FileNotFoundError.
    """
    images, labels = (read_idx(_find(folder, name)) for name in PARTS[part])
    if len(images) != len(labels):
        raise ValueError(f"{folder}: {len(images)} images but {len(labels)} labels of {part}")
    return images.flatten(1).float() / 255, labels.long()


def _find(folder: Path, name: str) -> Path:
    # Some copies have a dot before "idx".
    for stem in (name, name.replace("-idx", ".idx")):
        for file in (folder / stem, folder / f"{stem}.gz"):
            if file.exists():
                return file
    raise FileNotFoundError(f"{folder} has no {name} or {name}.gz")
