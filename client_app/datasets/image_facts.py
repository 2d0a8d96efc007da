"""Facts of an image that a survey counts: what its file states, and what its pixels show as models see
them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from fedsurrogate.common.image_histograms import (
    AXES,
    EMPTY,
    OPPOSITE,
    OTHER,
    TURNED,
    UPRIGHT,
    Value,
)

from .dicom_files import encoding_of, read_header, without_warnings
from .images import BITS, ORIENTATION, open_image, tag
from .left_out import attempt, open_regular
from .records import Facts

if TYPE_CHECKING:
    from pydicom import Dataset as Header

# Side of the squares to which images are averaged, so that their size does not decide their contrast.
SIDE = 64
# Sides mirror each other if they differ by less than this part of how both pairs of sides do.
ALIKE = 0.45
STATED = (
    *("Rows", "Columns", "BitsStored", "Manufacturer", "PatientOrientation", "ViewPosition"),
    *("ImageOrientationPatient", "PixelSpacing", "ImagerPixelSpacing"),
)
# Bits of a pixel by Pillow's name of its kind; others have 8 for each colour.
DEPTHS = {"1": 1, "I": 16, "F": 32}


def of_dicom(places: Sequence[tuple[Path, int]], index: int) -> Facts:
    """What the header of a DICOM file states.

    Args:
        places: files, each with a frame.
        index: of the place.

    Raises:
        Exception: of pydicom, for a broken header.
    """
    without_warnings()
    with open_regular(places[index][0]) as stream:
        header = read_header(stream, STATED, encoding_of(stream))
    own: dict[str, Callable[[], Value]] = {
        "size": lambda: min(int(header.Rows), int(header.Columns)),
        "spacing": lambda: float((header.get("PixelSpacing") or header.ImagerPixelSpacing)[0]),
        "bits": lambda: str(int(header.BitsStored)),
        "orientation": lambda: _directions(header),
        "view": lambda: str(header.get("ViewPosition") or "").strip().upper() or None,
        "maker": lambda: str(header.get("Manufacturer") or "").strip() or None,
    }
    return {name: _or_none(read) for name, read in own.items()}


def _or_none(read: Callable[[], Value]) -> Value:
    """A value of a header; None where it has none, or anything else than it must be."""
    value = attempt(read)
    return None if isinstance(value, BaseException) else value


def _directions(header: Header) -> str | None:
    """The direction in the patient of a row and of a column.

    Source: DICOM PS3.3 C.7.6.1.1.1 and C.7.6.2.1.1.
    """
    letters = [str(each)[:1].upper() for each in header.get("PatientOrientation") or ()]
    if not letters and (cosines := header.get("ImageOrientationPatient")):
        letters = [_letter(list(map(float, cosines[at : at + 3]))) for at in (0, 3)]
    if not letters:
        return None
    known = len(letters) == 2 and all(each in OPPOSITE for each in letters)
    return "/".join(letters) if known else OTHER


def _letter(cosines: Sequence[float]) -> str:
    """The direction nearest to a vector of cosines to the left, to the back and to the head."""
    axis = int(np.argmax(np.abs(cosines)))
    return ("LR", "PA", "HF")[axis][int(cosines[axis] < 0)]


def of_file(paths: Sequence[Path], index: int) -> Facts:
    """What an image file states. Raises OSError and errors of Pillow for one that is broken."""
    with open_regular(paths[index]) as stream:
        return _of_stream(stream)


def of_bytes(read: Callable[[int], bytes], index: int) -> Facts:
    """What the bytes of an image file state. Raises as `of_file`."""
    return _of_stream(io.BytesIO(read(index)))


def _of_stream(stream: Any) -> Facts:
    with open_image(stream) as image:
        deep = any(";16" in f"{image.mode} {tile.args}" for tile in getattr(image, "tile", ()))
        bits = int(tag(image, BITS, 0)) or (16 if deep else DEPTHS.get(image.mode, 8))
        turn = attempt(lambda: image.getexif().get(ORIENTATION))
        stated = None if turn is None or isinstance(turn, BaseException) else turn
        orientation = None if stated is None else UPRIGHT if stated == 1 else TURNED
        return {"size": min(image.size), "bits": str(bits), "orientation": orientation}


def of_pixels(image: Image.Image) -> Facts:
    """What the pixels of an image show.

    Args:
        image: as models see it.

    Example:
        >>> of_pixels(Image.new("RGB", (8, 8), "white"))
        {'brightness': 1.0, 'contrast': 0.0, 'mirror': None}
    """
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)
    grey = np.asarray(small, np.float64) / 255
    contrast, mirror = float(grey.std()), None
    if contrast >= EMPTY:
        across, down = (float(np.abs(grey - np.flip(grey, axis)).mean()) for axis in (1, 0))
        share = across / (across + down) if across + down else 0.5
        mirror = AXES[0] if share < ALIKE else AXES[2] if share > 1 - ALIKE else AXES[1]
    return {"brightness": float(grey.mean()), "contrast": contrast, "mirror": mirror}
