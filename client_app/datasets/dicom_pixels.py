"""Pixels of a DICOM image as a viewer shows it: pydicom's own steps, then conversion to 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from client_app.datasets.one_record import described, ends_process, open_regular
from common.errors import DataError
from common.extras.packages import needed_for

if TYPE_CHECKING:
    from pydicom import Dataset

Array = np.ndarray[Any, np.dtype[Any]]
DICOM = "a folder of DICOM files"

# Largest image: twice that of a mammogram. Decoders take memory for the size that a file states.
LARGEST_PIXELS = 2**26
# All tags that affect how pixels are shown, and none that identifies the patient.
DISPLAY = (
    *(
        "PhotometricInterpretation",
        "BitsStored",
        "PixelRepresentation",
        "ModalityLUTSequence",
        "RescaleSlope",
    ),
    *("Rows", "Columns"),
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
    - otherwise: the smallest to the largest value in this image, as in most viewers.

    MONOCHROME1 is then inverted. Colours of any encoding are converted to RGB and scaled by the
    stored bits.

    Args:
        file: to read.
        frame: its number, from zero.

    Raises:
        DataError: for a broken file; it names the file.
    """
    with needed_for(DICOM):
        from pydicom import dcmread
        from pydicom.pixels.utils import pixel_array

    try:
        with open_regular(file) as stream:
            header = dcmread(stream, stop_before_pixels=True, specific_tags=list(DISPLAY))
            _check_size(header)
            values = pixel_array(stream, index=frame)
        _take_from_groups(header, frame)
        shown = _colour(values, header) if _in_colour(values, header) else _grey(values, header)
    except MemoryError:
        raise
    except BaseException as error:
        # Decoders raise almost anything for a damaged file; a Rust panic is no Exception.
        if ends_process(error):
            raise
        raise DataError(
            f"'{file}' cannot be shown ({described(error)}); export it again"
        ) from error
    return Image.fromarray(shown).convert("RGB")


def _check_size(header: Dataset) -> None:
    """Raise ValueError for an image that no hospital has, before anything is decoded."""
    rows, columns = int(header.get("Rows") or 0), int(header.get("Columns") or 0)
    if rows * columns > LARGEST_PIXELS:
        raise ValueError(f"an image of {rows} x {columns} pixels; at most {LARGEST_PIXELS}")


def _in_colour(values: Array, header: Dataset) -> bool:
    return values.ndim == 3 or header.PhotometricInterpretation == "PALETTE COLOR"


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

    values = apply_modality_lut(values, header)
    shown = _to_8_bits(apply_voi_lut(values, header), *_range(values, header))
    return 255 - shown if header.PhotometricInterpretation == "MONOCHROME1" else shown


def _range(values: Array, header: Dataset) -> tuple[float, float]:
    """The values shown as black and as white: of the output of the VOI LUT or window, or of
    `values` without either.
    """
    with needed_for(DICOM):
        from pydicom.pixels.processing import apply_modality_lut, apply_windowing

    if header.get("VOILUTSequence"):
        return 0, 2 ** header.VOILUTSequence[0].LUTDescriptor[2] - 1
    if None not in (header.get("WindowCenter"), header.get("WindowWidth")):
        # Values far below and far above any window map to its ends, which depend on the stored bits
        # and the rescaling.
        with np.errstate(over="ignore"):
            low, high = apply_windowing(np.array([-1e12, 1e12]), header)
        return low, high
    if header.get("BitsStored", 16) <= 8:
        lowest = -(2 ** (header.BitsStored - 1)) if header.PixelRepresentation else 0
        values = apply_modality_lut(np.arange(lowest, lowest + 2**header.BitsStored), header)
    return values.min(), values.max()


def _to_8_bits(values: Array, low: float, high: float) -> Array:
    # With a negative slope pydicom's window runs from high to low; its lower end is still black.
    if not abs(high - low) > 0:
        return np.zeros(values.shape, np.uint8)
    return (
        np.rint((values.astype(np.float64) - low) * (255 / (high - low)))
        .clip(0, 255)
        .astype(np.uint8)
    )


def _take_from_groups(header: Dataset, frame: int) -> None:
    """Copy rescaling and window into the header: enhanced multi-frame images have them in groups,
    shared or per frame.
    """
    shared, own = (
        header.get("SharedFunctionalGroupsSequence"),
        header.get("PerFrameFunctionalGroupsSequence"),
    )
    for groups in ([shared[0]] if shared else []) + ([own[frame]] if own else []):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            if inner := groups.get(name):
                header.update(inner[0])
