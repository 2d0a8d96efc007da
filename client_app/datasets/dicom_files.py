"""A DICOM file as it is: with or without a preamble, a transfer syntax, or data that follow it. And its
pixels as 8-bit grey or colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

import numpy as np
from PIL import Image

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.extras import DECODERS, install_command, needed_for

from .left_out import described, ends_process, open_regular, printable

if TYPE_CHECKING:
    from pydicom import Dataset
    from pydicom.uid import UID

# Largest image that is decoded: twice that of a mammogram. A file of some kilobytes may state a larger
# one, and decoders take up to 15 bytes for each pixel.
LARGEST_PIXELS = 2**26

Array = np.ndarray[Any, np.dtype[Any]]
DICOM = "a folder of DICOM files"
# Bytes before the mark of a file, and the mark.
PREAMBLE, MARK = 128, b"DICM"
# The group of a file's meta information; and groups with which a file without a preamble begins.
META = 0x0002
FIRST_GROUPS = frozenset({META, 0x0008})
# Longest value of a first element: a name or an identifier.
LONGEST_FIRST = 1024


def is_dicom(stream: BinaryIO) -> bool:
    """Whether a file is DICOM by its content: by its mark, or by its first element. Leaves the
    stream at its beginning.
    """
    stream.seek(0)
    start = stream.read(PREAMBLE + len(MARK))
    stream.seek(0)
    if start[PREAMBLE:] == MARK:
        return True
    explicit = _is_vr(start[4:6])
    if len(start) < 8 or not (explicit or not start[6] | start[7]):
        return False
    orders: tuple[Literal["little", "big"], ...] = ("little", "big") if explicit else ("little",)
    length = start[6:8] if explicit else start[4:8]
    return any(
        int.from_bytes(start[:2], order) in FIRST_GROUPS
        and int.from_bytes(length, order) <= LONGEST_FIRST
        for order in orders
    )


def is_dicom_file(file: Path) -> bool:
    """The same for a path. Raises OSError for a file that cannot be opened."""
    with open_regular(file) as stream:
        return is_dicom(stream)


def _is_vr(letters: bytes) -> bool:
    """Whether two bytes are a value representation, as every explicit element has. pydicom's rule:
    capital letters.
    """
    return len(letters) == 2 and letters.isalpha() and letters.isupper()


@dataclass(frozen=True)
class Encoding:
    """How a file says that its data are encoded, and how they are.

    Attributes:
        stated: the transfer syntax in the file's meta information; empty if there is none.
        found: Implicit VR Little Endian, or Explicit VR in either byte order, as the first element
            has it; empty if there is none.
    """

    stated: UID
    found: UID

    @property
    def follows(self) -> bool:
        """Whether the data are as stated, so that parts of the file can be read by themselves."""
        return bool(self.stated) and (
            not self.found or self.stated.is_implicit_VR == self.found.is_implicit_VR
        )

    @property
    def syntax(self) -> UID:
        """The transfer syntax by which the file is read."""
        return self.stated or self.found


def encoding_of(stream: BinaryIO) -> Encoding:
    """The encoding of a file; leaves the stream at its beginning.

    Args:
        stream: of the file.

    Raises:
        InvalidDicomError: if the file is not DICOM.
        DataError: for data in another byte order than the file states, and for a file that is
            deflated, which may inflate to anything.
    """
    with needed_for(DICOM):
        from pydicom.errors import InvalidDicomError
        from pydicom.filereader import read_partial
        from pydicom.uid import (
            UID,
            ExplicitVRBigEndian,
            ExplicitVRLittleEndian,
            ImplicitVRLittleEndian,
        )

    if not is_dicom(stream):
        raise InvalidDicomError("neither the mark of DICOM nor a first element of it")
    if _is_deflated(stream):
        raise DataError(
            "it is deflated as a whole; export it uncompressed (Explicit VR Little Endian)"
        )
    # Stops before the first element behind the meta information.
    header = read_partial(stream, stop_when=lambda *_: True, force=True)
    first = stream.read(6)
    stream.seek(0)
    stated = UID(header.file_meta.get("TransferSyntaxUID") or "")
    if not first:
        return Encoding(stated, UID(""))
    # The group of every public element is below 256, in its own byte order.
    swapped = not first[0] and bool(first[1])
    explicit = _is_vr(first[4:6])
    public = not (first[0] and first[1])
    if stated and public and swapped == (stated != ExplicitVRBigEndian):
        raise DataError(
            f"it states the transfer syntax {stated.name}, and its data have the other byte order"
        )
    if not explicit:
        return Encoding(stated, ImplicitVRLittleEndian)
    return Encoding(stated, ExplicitVRBigEndian if swapped else ExplicitVRLittleEndian)


def _is_deflated(stream: BinaryIO) -> bool:
    """Whether a file states that it is deflated; leaves the stream at its beginning.

    pydicom inflates such a file as a whole, however little of it is read.
    """
    with needed_for(DICOM):
        from pydicom.filereader import read_dataset, read_preamble
        from pydicom.uid import DeflatedExplicitVRLittleEndian

    read_preamble(stream, force=True)
    # The meta information is never deflated.
    meta = read_dataset(stream, False, True, stop_when=lambda tag, *_: tag.group != META)
    stream.seek(0)
    return bool(meta.get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian)


def read_header(stream: BinaryIO, tags: Sequence[str], encoding: Encoding) -> Dataset:
    """The header of a DICOM file, without pixels; leaves the stream at its beginning.

    Args:
        stream: of the file.
        tags: to read.
        encoding: of the file.
    """
    with needed_for(DICOM):
        from pydicom import dcmread

    header = dcmread(stream, stop_before_pixels=True, specific_tags=list(tags), force=True)
    header.file_meta.TransferSyntaxUID = encoding.syntax
    stream.seek(0)
    return header


def read_pixels(stream: BinaryIO, frame: int, encoding: Encoding) -> Array:
    """The pixels of one frame, as pydicom decodes them.

    Args:
        stream: of the file.
        frame: its number, from zero.
        encoding: of the file. pydicom reads one frame alone by the stated transfer syntax, so a
            file that does not follow it is read as a whole.

    Raises:
        DataError: for compressed pixels whose compression the file does not state.
    """
    with needed_for(DICOM):
        from pydicom import dcmread
        from pydicom.pixels.utils import pixel_array

    if encoding.follows:
        return np.asarray(pixel_array(stream, index=frame))
    dataset = dcmread(stream, force=True)
    if not encoding.stated:
        if "PixelData" in dataset and dataset["PixelData"].is_undefined_length:
            raise DataError("its pixels are compressed, and it states no transfer syntax")
        dataset.file_meta.TransferSyntaxUID = encoding.found
    return np.asarray(pixel_array(dataset, index=frame))


def plugins_for(syntax: str, deep: bool) -> tuple[str, ...] | None:
    """The decoders of a transfer syntax that are installed here and can decode it.

    Args:
        syntax: UID of the transfer syntax.
        deep: whether more than 8 bits are stored.

    Returns:
        Their names, none for pixels that are not compressed; None if there is no decoder.

    Raises:
        NotImplementedError: for a transfer syntax that pydicom does not know.
    """
    with needed_for(DICOM):
        from pydicom.pixels.decoders.base import get_decoder
        from pydicom.uid import UID, JPEGExtended12Bit

    decoder = get_decoder(UID(syntax))
    if not decoder.is_available:
        return None
    # Pillow's JPEG has 8 bits.
    able = [
        name
        for name in decoder.available_plugins
        if not (deep and syntax == JPEGExtended12Bit and name == "pillow")
    ]
    return None if decoder.available_plugins and not able else tuple(able)


def remedy_for(syntax: str) -> str:
    """What to do about an image that cannot be decoded: a decoder may be missing.

    Args:
        syntax: UID of its transfer syntax.
    """
    with needed_for(DICOM):
        from pydicom.pixels.decoders.base import get_decoder
        from pydicom.uid import UID

    export = "export it again"
    try:
        missing = get_decoder(UID(syntax)).missing_dependencies
    except NotImplementedError:
        return export
    uncompressed = "export it uncompressed (Explicit VR Little Endian)"
    return f"run {install_command(DECODERS)}, or {uncompressed}" if missing else export


# Values that are no pixels, one or a range, of integers and of floating point.
PADDING = tuple(
    f"{kind}PixelPadding{end}"
    for kind in ("", "Float", "DoubleFloat")
    for end in ("Value", "RangeLimit")
)
# All tags that affect how pixels are shown, and none that identifies the patient.
DISPLAY = (
    *(
        "PhotometricInterpretation",
        "BitsStored",
        "HighBit",
        "PixelRepresentation",
        "ModalityLUTSequence",
        "RescaleSlope",
    ),
    *("Rows", "Columns", *PADDING),
    *("RescaleIntercept", "VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *(
        "SharedFunctionalGroupsSequence",
        "PerFrameFunctionalGroupsSequence",
        "PaletteColorLookupTableUID",
    ),
    *(
        f"{c}PaletteColorLookupTable{part}"
        for c in ("Red", "Green", "Blue")
        for part in ("Descriptor", "Data")
    ),
    *(f"Segmented{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
)

# Colours that are shown as if they were red, green and blue.
RETIRED = ("HSV", "ARGB", "CMYK")


def open_place(places: Sequence[tuple[Path, int]], index: int, _: int = 0) -> Image.Image:
    """The image at one of several places; an `Opener`.

    Args:
        places: each a file and a frame.
        index: of the place.

    Raises:
        DataError: for a broken file.
    """
    without_warnings()
    return open_dicom(*places[index])


def open_single(file: Path) -> Image.Image:
    """The image of a DICOM file that holds one.

    Args:
        file: to read.

    Raises:
        DataError: for a broken file, or one with several images.
        Exception: of pydicom, for a broken header.
    """
    without_warnings()
    with open_regular(file) as stream:
        header = read_header(stream, ("NumberOfFrames",), encoding_of(stream))
    frames = int(header.get("NumberOfFrames") or 1)
    if frames > 1:
        raise DataError(f"it holds {frames} images; give each as a file or an array of its own")
    return open_dicom(file)


def without_warnings() -> None:
    """Turn off pydicom's warnings in this process: they show malformed values, and a value may
    identify a patient.
    """
    with needed_for(DICOM):
        from pydicom import config

    config.settings.reading_validation_mode = config.IGNORE


def open_dicom(file: Path, frame: int = 0) -> Image.Image:
    """One frame of a DICOM file as an 8-bit RGB image.

    Grey values follow pydicom: modality LUT or rescale, then VOI LUT or (first) window. The range
    mapped to 0..255 is
    - with a VOI LUT or a window: the range of its output, so the window's ends are black and white;
    - otherwise, with up to 8 stored bits: the range of these bits, so values do not change;
    - otherwise: the smallest to the largest value in this image, as in most viewers. Padding is no
      pixel: it sets no range, and is black.

    A value that is NaN is black. MONOCHROME1 is then inverted. Colours of any encoding are
    converted to RGB and scaled by the stored bits.

    Args:
        file: to read.
        frame: its number, from zero.

    Raises:
        DataError: for a broken file; it names the file.
    """
    remedy = "export it again"
    try:
        with open_regular(file) as stream:
            encoding = encoding_of(stream)
            header = read_header(stream, DISPLAY, encoding)
            if "Rows" not in header:
                raise DataError("it holds no image, as a report or a plan")
            _check_size(header)
            _check_kind(header)
            remedy = remedy_for(encoding.syntax)
            values = read_pixels(stream, frame, encoding)
        _take_from_groups(header, frame)
        if header.get("RescaleSlope") == 0:
            raise DataError("its Rescale Slope is 0, which makes all pixels one value")
        coloured = values.ndim == 3 or header.PhotometricInterpretation == "PALETTE COLOR"
        shown = _colour(values, header) if coloured else _grey(values, header)
    except MemoryError:
        raise
    except BaseException as error:
        # Decoders raise almost anything for a damaged file; a Rust panic is no Exception.
        if ends_process(error):
            raise
        why = printable(f"'{file}' cannot be shown ({described(error)}); {remedy}")
        raise DataError(why) from error
    return Image.fromarray(shown).convert("RGB")


def _check_size(header: Dataset) -> None:
    """Raise ValueError for an image that no hospital has, before anything is decoded."""
    rows, columns = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    if rows * columns > LARGEST_PIXELS:
        raise ValueError(f"an image of {rows} x {columns} pixels; at most {LARGEST_PIXELS}")


def _check_kind(header: Dataset) -> None:
    """Raise DataError for pixels that pydicom gives as something else than what they are."""
    stored, highest = header.get("BitsStored"), header.get("HighBit")
    if stored and highest is not None and int(highest) != int(stored) - 1:
        raise DataError(
            f"its High Bit is {highest} with {stored} bits stored; DICOM allows {int(stored) - 1} only"
        )
    if (kind := str(header.get("PhotometricInterpretation") or "")) in RETIRED:
        raise DataError(
            f"its Photometric Interpretation {kind!r} is retired and cannot be converted"
        )


def _colour(values: Array, header: Dataset) -> Array:
    """Return (rows, columns, 3) uint8."""
    with needed_for(DICOM):
        from pydicom.pixels.processing import apply_color_lut

    if values.ndim == 3:
        return _to_8_bits(values, 0, 2**header.BitsStored - 1)
    coloured = apply_color_lut(values, header)
    return _to_8_bits(coloured, 0, np.iinfo(coloured.dtype).max)


def _grey(values: Array, header: Dataset) -> Array:
    """Return (rows, columns) uint8."""
    with needed_for(DICOM):
        from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    if "BitsStored" not in header:
        # Floating point states no bits; pydicom's window has an output of some bits, here 16.
        header.BitsStored, header.PixelRepresentation = 16, 0
    stored, values = values, apply_modality_lut(values, header)
    pixels = ~np.isnan(values)
    ends = _stated_range(header)
    if ends is None:
        pixels &= _are_no_padding(stored, header)
        known = values[pixels & np.isfinite(values)]
        ends = (known.min(), known.max()) if known.size else (0, 0)
    with np.errstate(invalid="ignore"):
        shown = _to_8_bits(apply_voi_lut(values, header), *ends)
    inverse = header.PhotometricInterpretation == "MONOCHROME1"
    return np.where(pixels, 255 - shown if inverse else shown, 0).astype(np.uint8)


def _are_no_padding(stored: Array, header: Dataset) -> Array:
    """Which stored values are pixels (rows, columns), and not padding.

    Source: DICOM PS3.3 C.7.5.1.1.2. Padding is one value, or the range from it to a limit.
    """
    pixels = np.ones(stored.shape, bool)
    for value, limit in zip(PADDING[::2], PADDING[1::2], strict=True):
        first, last = header.get(value), header.get(limit)
        if first is None:
            continue
        # Some devices write a negative value as an unsigned one.
        ends = np.array([first, first if last is None else last]).astype(stored.dtype)
        pixels &= ~((stored >= ends.min()) & (stored <= ends.max()))
    return pixels


def _stated_range(header: Dataset) -> tuple[float, float] | None:
    """The values that the header shows as black and as white: of the output of the VOI LUT or
    window, or of up to 8 stored bits; None for deeper images without either.
    """
    with needed_for(DICOM):
        from pydicom.pixels.processing import apply_modality_lut, apply_voi, apply_windowing

    lookup: Any = header.VOILUTSequence[0] if header.get("VOILUTSequence") else {}
    if None not in (lookup.get("LUTDescriptor"), lookup.get("LUTData")):
        count, first, bits = lookup.LUTDescriptor
        entries = apply_voi(np.arange(int(first), int(first) + (int(count) or 2**16)), header)
        # Devices state 16 bits for entries of 12. A table of 8 bits may be dark on purpose.
        return 0, 2 ** min(int(bits), max(8, int(entries.max()).bit_length())) - 1
    if None not in (header.get("WindowCenter"), header.get("WindowWidth")):
        # Values far below and far above any window map to its ends, which depend on the stored bits
        # and the rescaling.
        with np.errstate(over="ignore"):
            low, high = apply_windowing(np.array([-1e12, 1e12]), header)
        return low, high
    if header.get("BitsStored", 16) <= 8:
        lowest = -(2 ** (header.BitsStored - 1)) if header.PixelRepresentation else 0
        levels = apply_modality_lut(np.arange(lowest, lowest + 2**header.BitsStored), header)
        return levels.min(), levels.max()
    return None


def _to_8_bits(values: Array, low: float, high: float) -> Array:
    # With a negative slope pydicom's window runs from high to low; its lower end is still black.
    if not abs(high - low) > 0:
        return np.zeros(values.shape, np.uint8)
    scaled = np.rint((values.astype(np.float64) - low) * (255 / (high - low))).clip(0, 255)
    levels: Array = np.nan_to_num(scaled).astype(np.uint8)
    return levels


def _take_from_groups(header: Dataset, frame: int) -> None:
    """Copy rescaling and window into the header: enhanced multi-frame images have them in groups,
    shared or per frame.
    """
    shared = header.get("SharedFunctionalGroupsSequence")
    own = header.get("PerFrameFunctionalGroupsSequence")
    for groups in ([shared[0]] if shared else []) + ([own[frame]] if own else []):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            if inner := groups.get(name):
                header.update(inner[0])
