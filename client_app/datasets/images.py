"""The reader of one image: any file or PIL image as RGB with 8 bits, the same for every entrance;
and images that are there twice.

Eight bits stay as they are. Deeper greys and colours have the range of their numbers, not that of a
single image, so that two images of one machine keep their difference:

- integers: 0 to 65535, or the bits that the file states (a 12-bit TIFF, the maximum of a PGM, the
  precision of a JPEG 2000); an unsigned 32-bit TIFF with greater values: 0 to 2^32 - 1;
- floating point: 0 to 1; NaN is no value, and black.

The high byte of an integer counts. "White is zero" is inverted. An image whose file says how it is to be
turned (the orientation of EXIF, as cameras write it) is turned, as viewers do. Where such a range would leave most
of the grey levels unused, black and white are a guess, and the image is refused.

Facts of an image that a survey counts: what its file states, and what its pixels show as models see
them.
"""

from __future__ import annotations

import hashlib
import io
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.image_histograms import (
    AXES,
    EMPTY,
    OPPOSITE,
    OTHER,
    TURNED,
    UPRIGHT,
    Value,
)

from .dicom_files import LARGEST_PIXELS, encoding_of, is_dicom, read_header, without_warnings
from .left_out import LeftOut, attempt, open_regular
from .records import Facts, Records, only

if TYPE_CHECKING:
    from pydicom import Dataset as Header


Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")
# Version of how images are read, DICOM too: features of another one are not taken from the cache.
READER = 3
# What is read, whatever a file is named: Pillow also knows EPS, for which it starts Ghostscript.
FORMATS = frozenset({"AVIF", "BMP", "DIB", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP"})
# Formats whose decoder scales to 16 bits from a maximum or a precision that the file states.
SCALED = frozenset({"JPEG2000", "PPM"})
# Formats that hold several images. The further ones of a photograph (MPO) are its previews.
SEVERAL = frozenset({"AVIF", "GIF", "PNG", "TIFF", "WEBP"})
# Tags of TIFF.
SUBFILE, BITS, PHOTOMETRIC, SAMPLE = 254, 258, 262, 339
# The orientation of EXIF, and what makes each upright.
ORIENTATION = 0x0112
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pages of a TIFF, most of them smaller copies of the image.
MOST_PAGES = 1000
# Bits of a subfile: a smaller copy, and a mask.
NO_IMAGE = 1 | 4
DICOM_AMONG_IMAGES = (
    "it is a DICOM file among image files; set data to 'dicom' if all are, or keep them in folders of "
    "their own"
)
ADVICE = "scale the values to the full range of 16 bits, or save the image with 8 bits"


def open_rgb(file: io.BytesIO | Path, shortest: int) -> Image.Image:
    """Open an image as RGB.

    A JPEG far larger than needed is decoded at 1/2, 1/4 or 1/8, never below twice `shortest`.

    Args:
        file: or its content.
        shortest: pixels that the shorter side needs; 0 for all.

    Raises:
        DataError: for an image whose black and white are not known, for one that is too large, or for
            several images.
        OSError: and other errors of Pillow, for a file that is broken or not an image.
    """
    with file if isinstance(file, io.BytesIO) else open_regular(file) as stream:
        try:
            opened = open_image(stream)
        except UnidentifiedImageError:
            if is_dicom(stream):
                raise DataError(DICOM_AMONG_IMAGES) from None
            raise
        with opened as image:
            if shortest:
                image.draft("RGB", (2 * shortest, 2 * shortest))
            return as_rgb(image)


def open_image(stream: Any) -> Image.Image:
    """An image as its file has it, of the formats that are read; not decoded yet.

    Args:
        stream: of the file.

    Raises:
        OSError: and other errors of Pillow, for a file that is broken or not an image.
    """
    return Image.open(stream, formats=_formats())


@cache
def _formats() -> list[str]:
    """FORMATS of which this Pillow has the decoder."""
    Image.init()
    return sorted(FORMATS.intersection(Image.OPEN))


def as_rgb(image: Image.Image) -> Image.Image:
    """An image as RGB, by the rule of this module.

    Args:
        image: of any mode; one that Pillow has opened, and not decoded yet, still states its format.

    Raises:
        DataError: for an image whose black and white are not known, for one that is too large, or for
            several images.
        OSError: and other errors of Pillow, for an image that cannot be decoded.
    """
    _choose_single(image)
    _check_size(image)
    # Pillow forgets how the values are stored when it decodes them.
    halved = any(";16" in str(tile.args) for tile in _waiting(image))
    if image.format == "TIFF" and image.mode == "L" and int(tag(image, SAMPLE, 1)) == 2:
        # Pillow reads numbers below zero as if they were the brightest.
        raise DataError(
            f"its values are signed, and the file does not state which are black and white; {ADVICE}"
        )
    image.load()
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        grey = _of_floats(image) if image.mode == "F" else _of_integers(image)
        return _upright(image, Image.fromarray(grey).convert("RGB"))
    if image.mode == "La":
        # Pillow knows no way from premultiplied grey to colour.
        image = image.convert("LA")
    rgb = image if image.mode == "RGB" else image.convert("RGB")
    if halved:
        # 16 bits for each colour, of which Pillow keeps the high byte.
        _refuse_dark(256 * max(high for _, high in cast(Any, rgb.getextrema())) + 255, 16)
    return _upright(image, rgb)


def _upright(image: Image.Image, rgb: Image.Image) -> Image.Image:
    """The pixels of an image, turned as its file says; broken metadata decide nothing."""
    # Pillow has turned a TIFF when it decoded it, and keeps no orientation of it.
    turn = attempt(lambda: TURNS.get(int(image.getexif().get(ORIENTATION, 1))))
    return rgb.transpose(turn) if isinstance(turn, Image.Transpose) else rgb


def _waiting(image: Image.Image) -> tuple[Any, ...]:
    """The parts of a file that Pillow has opened, and not decoded yet; none of other images."""
    return tuple(getattr(image, "tile", ()))


def _choose_single(image: Image.Image) -> None:
    """Raise DataError for several images in one file: which of them is the record is not known.

    Smaller copies and masks, as other pages of a TIFF, are no images of their own.
    """
    if image.format not in SEVERAL or (image.format in ("GIF", "TIFF") and not _waiting(image)):
        return
    if image.format == "TIFF":
        whole = _whole_pages(image)
        image.seek(whole[0] if whole else 0)
        count = len(whole)
    else:
        count = int(getattr(image, "n_frames", 1))
    if count > 1:
        raise DataError(
            f"the {image.format} file holds {count} images; save each one, or the one that counts, "
            "as a file of its own"
        )


def _check_size(image: Image.Image) -> None:
    """Raise DataError for an image that would take gigabytes, before it is decoded."""
    if image.width * image.height > LARGEST_PIXELS:
        raise DataError(
            f"it has {image.width} x {image.height} pixels; at most {LARGEST_PIXELS} are read; save it "
            "smaller, or cut it into several images"
        )


def _whole_pages(image: Image.Image) -> list[int]:
    """Pages of a TIFF that are no smaller copies and no masks. Raises DataError for too many pages:
    Pillow's time grows with the square of their number.
    """
    whole: list[int] = []
    for page in range(MOST_PAGES):
        try:
            image.seek(page)
        except EOFError:
            return whole
        if not int(tag(image, SUBFILE, 0)) & NO_IMAGE:
            whole.append(page)
    raise DataError(
        f"the TIFF file holds {MOST_PAGES} pages or more; save the image that counts alone"
    )


def tag(image: Image.Image, number: int, default: Any) -> Any:
    """A tag of a TIFF; the default for other formats.

    Args:
        image: that Pillow has opened.
        number: of the tag.
        default: where there is none.
    """
    found = getattr(image, "tag_v2", {}).get(number, default)
    return found[0] if isinstance(found, tuple) and found else found


def _of_integers(image: Image.Image) -> Array:
    """Grey levels (height, width) uint8, of integers deeper than 8 bits."""
    values = np.asarray(image)
    stored, kind = int(tag(image, BITS, 16)), int(tag(image, SAMPLE, 1))
    if image.format == "TIFF" and stored == 32 and kind == 1:
        # Pillow reads their bits as signed integers.
        values = values.view(np.uint32)
    low, high = int(values.min()), int(values.max())
    bits = 12 if stored == 12 else 32 if stored == 32 and kind == 1 and high >= 2**16 else 16
    signed = image.format == "TIFF" and kind == 2 and stored == 16
    if signed or low < 0 or high >= 2**bits:
        raise DataError(
            f"its {'signed ' if signed or low < 0 else ''}values go from {low} to {high}, and the "
            f"file does not state which are black and white; {ADVICE}"
        )
    if bits != 12 and image.format not in SCALED:
        _refuse_dark(high, bits)
    return _inverted(image, (values >> (bits - 8)).astype(np.uint8))


def _refuse_dark(high: int, bits: int) -> None:
    """Raise DataError for a range of which the image uses less than a quarter.

    It may be dark, or hold 8, 10, 12 or 14 bits in a file of 16, which a 16-bit file cannot state.

    Args:
        high: the greatest value. 0 for an image that is black in any range.
        bits: of the range.
    """
    if 0 < high < 2 ** (bits - 2):
        raise DataError(
            f"its values end at {high} of {2**bits - 1}: it is dark, or holds fewer bits than the "
            f"file; {ADVICE}"
        )


def _of_floats(image: Image.Image) -> Array:
    """Grey levels (height, width) uint8, of floating point."""
    values = np.asarray(image)
    known = ~np.isnan(values)
    low, high = (float(ends(values[known], initial=0)) for ends in (np.min, np.max))
    if not known.any() or low < 0 or high > 1:
        found = f"from {low:g} to {high:g}" if known.any() else "all NaN"
        raise DataError(
            f"its values are floating point, {found}; they must lie in 0 (black) to 1 (white)"
        )
    grey = np.rint(np.where(known, values, 0) * 255).astype(np.uint8)
    return np.where(known, _inverted(image, grey), 0).astype(np.uint8)


def _inverted(image: Image.Image, grey: Array) -> Array:
    """Grey levels whose black is 0; Pillow turns only 8 bits."""
    return 255 - grey if tag(image, PHOTOMETRIC, 1) == 0 else grey


# Bytes from the middle of a file that are compared before the whole file is: headers are often
# equal, and the last rows of a radiograph black.
COMPARED = 4096
# Results for the latest data sets: one process answers several requests on the same records.
MOST_KNOWN = 16
_known: dict[Hashable, Any] = {}


def remembered(key: Hashable, compute: Callable[[], T]) -> T:
    """The result of a function for the data of a key, computed once in this process.

    Args:
        key: of the data.
        compute: the function.
    """
    if key not in _known:
        while len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)))
        _known[key] = compute()
    known: T = _known[key]
    return known


def same_files(paths: Sequence[Path]) -> Tensor:
    """Group (n,) of each file: equal numbers for equal content. Reads files of equal size only, and
    mostly a part.
    """
    return _groups(
        len(paths),
        (lambda i: _size(paths[i]), lambda i: _sample(paths[i]), lambda i: _digest(paths[i])),
    )


def same_bytes(contents: Callable[[int], Any], count: int) -> Tensor:
    """Group of each record by its bytes.

    Args:
        contents: the bytes of a record; raises an error for a record without content.
        count: number of records.

    Returns:
        Group (n,) of each record.
    """
    return _groups(count, (lambda record: hashlib.sha256(contents(record)).digest(),))


def same_rows(x: Tensor) -> Tensor:
    """Group of each row of features.

    Args:
        x: features (n, d).

    Returns:
        Groups (n,), equal numbers for rows that are equal byte for byte.

    Example:
        >>> same_rows(torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])).tolist()
        [0, 1, 0]
    """
    if not x.numel():
        return torch.arange(len(x))
    rows = x.contiguous().view(torch.uint8).reshape(len(x), -1).numpy()
    return same_bytes(rows.__getitem__, len(x))


def once(records: Records, patients_protected: bool) -> Records:
    """Under privacy: the records with each content once, see the text of this module.

    Args:
        records: of a reader.
        patients_protected: whether the unit of privacy is the patient; then only copies within a
            patient are compared.
    """
    if records.same is None:
        return records
    units = records.patients if patients_protected else None
    kept, torn = _kept_once(records.same(), records.labels, units, records.is_train)
    copies = len(records.labels) - len(kept) - torn
    left = LeftOut(one_by_one=True)
    left.note_unread(copies, f"{copies} records are copies of others; each content counts once")
    left.note_unread(
        torn,
        f"{torn} records have the same content as another, but a different label; correct the "
        "labels",
    )
    if not left.reasons:
        return records
    return replace(only(records, kept), left_out=(*records.left_out, *left.reasons))


def _kept_once(
    group: Tensor, labels: Sequence[str], units: Sequence[str] | None, is_train: Tensor | None
) -> tuple[list[int], int]:
    """The records (ascending indices) that are left, and the number of records with contradictory
    labels.
    """
    members: dict[Hashable, list[int]] = defaultdict(list)
    for i, number in enumerate(group.tolist()):
        members[number if units is None else (units[i], number)].append(i)
    kept, torn = [], 0
    for rows in members.values():
        if len({labels[i] for i in rows}) > 1:
            torn += len(rows)
            continue
        training = [i for i in rows if is_train is None or is_train[i]]
        kept.append((training or rows)[0])
    return sorted(kept), torn


def without_leaks(records: Records, is_train: Tensor) -> tuple[list[int] | None, Records]:
    """Without privacy: leave out test records that are copies of training records.

    The data report names the first, and counts copies that stay.

    Args:
        records: of a reader.
        is_train: (n,) bool.

    Returns:
        The remaining records (ascending indices), None if all remain; and all records, with what
        the data report says.
    """
    if records.same is None or is_train.all():
        return None, records
    group = records.same()
    gone = ~is_train & torch.isin(group, group[is_train])
    left = LeftOut(one_by_one=True)
    kept, numbers = group[~gone].tolist(), group.tolist()
    if copies := len(kept) - len(set(kept)):
        torn = len(set(zip(numbers, records.labels, strict=True))) - len(set(numbers))
        labels = f", {torn} of them with another label" if torn else ""
        left.warn(f"{copies} records are copies of others in the same part{labels}")
    if not gone.any():
        return None, replace(records, warnings=(*records.warnings, *left.warnings))
    copies = int(gone.sum())
    first = f", such as {records.place(int(gone.nonzero()[0]))}" if records.place else ""
    left.note_unread(
        copies, f"{copies} test records are copies of training records{first}; they are not tested"
    )
    noted = replace(
        records,
        left_out=(*records.left_out, *left.reasons),
        warnings=(*records.warnings, *left.warnings),
    )
    return (~gone).nonzero().flatten().tolist(), noted


def _groups(count: int, steps: Sequence[Callable[[int], Hashable]]) -> Tensor:
    """Number the records by their keys, step by step: the next key is computed only for records
    with equal keys so far.

    A record with the key None is alone, and so is one whose key cannot be computed.
    """
    group = torch.arange(count)
    open_: list[list[int]] = [list(range(count))]
    for key in steps:
        alike: list[list[int]] = []
        for rows in open_:
            by_key: dict[Hashable, list[int]] = defaultdict(list)
            for i in rows:
                value = attempt(partial(key, i))
                if not (value is None or isinstance(value, BaseException)):
                    by_key[value].append(i)
            alike += [same for same in by_key.values() if len(same) > 1]
        open_ = alike
    for rows in open_:
        group[rows] = rows[0]
    return group


def _size(path: Path) -> int | None:
    return path.stat().st_size or None


def _sample(path: Path) -> bytes:
    with open_regular(path) as file:
        file.seek(path.stat().st_size // 2)
        return file.read(COMPARED)


def _digest(path: Path) -> bytes:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").digest()


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
