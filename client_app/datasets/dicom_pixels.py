"""One DICOM image as a viewer shows it: pydicom's own steps, then 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from common.errors import DataError

if TYPE_CHECKING:
    from pydicom import Dataset

Array = np.ndarray[Any, np.dtype[Any]]

# All that decides how pixels are shown, and nothing that tells whose they are.
DISPLAY = (
    *("PhotometricInterpretation", "BitsStored", "PixelRepresentation", "ModalityLUTSequence", "RescaleSlope"),
    *("RescaleIntercept", "VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
    *("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence", "PaletteColorLookupTableUID"),
    *(f"{c}PaletteColorLookupTable{part}" for c in ("Red", "Green", "Blue") for part in ("Descriptor", "Data")),
    *(f"Segmented{c}PaletteColorLookupTableData" for c in ("Red", "Green", "Blue")),
)


def open_dicom(file: Path, frame: int = 0) -> Image.Image:
    """Return one frame as an 8-bit RGB image. Raises DataError, naming the file, for one that is broken.

    Grey values take pydicom's way: modality LUT or rescale, VOI LUT or (first) window. Then 0..255 is
    - with a VOI LUT or a window, the range of its output, so that the window's ends are black and white;
    - without, for up to 8 stored bits the range they have, so that they stay as they are, and for deeper images that from
      the least to the greatest value in this one, as most viewers show them.
    MONOCHROME1 is inverted after that. Colours come as RGB, whatever they are stored as, by the bits stored.
    """
    from pydicom import dcmread
    from pydicom.pixels.utils import pixel_array

    try:
        with file.open("rb") as stream:
            header = dcmread(stream, stop_before_pixels=True, specific_tags=list(DISPLAY))
            values = pixel_array(stream, index=frame)
        _take_from_groups(header, frame)
        shown = _colour(values, header) if _in_colour(values, header) else _grey(values, header)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # Decoders raise nearly anything on a damaged file; a panic in Rust is no Exception.
        why = " ".join(str(error).split())
        raise DataError(f"'{file}' cannot be shown ({type(error).__name__}: {why}); export it again") from error
    return Image.fromarray(shown).convert("RGB")


def _in_colour(values: Array, header: Dataset) -> bool:
    return values.ndim == 3 or header.PhotometricInterpretation == "PALETTE COLOR"


def _colour(values: Array, header: Dataset) -> Array:
    """Return (rows, columns, 3) uint8."""
    from pydicom.pixels.processing import apply_color_lut

    if values.ndim == 3:
        return _to_8_bits(values, 0, 2**header.BitsStored - 1)
    coloured = apply_color_lut(values, header)
    return _to_8_bits(coloured, 0, np.iinfo(coloured.dtype).max)


def _grey(values: Array, header: Dataset) -> Array:
    """Return (rows, columns) uint8."""
    from pydicom.pixels.processing import apply_modality_lut, apply_voi_lut

    values = apply_modality_lut(values, header)
    shown = _to_8_bits(apply_voi_lut(values, header), *_range(values, header))
    return 255 - shown if header.PhotometricInterpretation == "MONOCHROME1" else shown


def _range(values: Array, header: Dataset) -> tuple[float, float]:
    """What becomes black and white in the output of the VOI LUT or window, or in `values` where there is neither."""
    from pydicom.pixels.processing import apply_modality_lut, apply_windowing

    if header.get("VOILUTSequence"):
        return 0, 2 ** header.VOILUTSequence[0].LUTDescriptor[2] - 1
    if None not in (header.get("WindowCenter"), header.get("WindowWidth")):
        # Far below and far above any window are its ends, which pydicom derives from the stored bits and the rescaling.
        with np.errstate(over="ignore"):
            low, high = apply_windowing(np.array([-1e12, 1e12]), header)
        return low, high
    if header.get("BitsStored", 16) <= 8:
        lowest = -(2 ** (header.BitsStored - 1)) if header.PixelRepresentation else 0
        values = apply_modality_lut(np.arange(lowest, lowest + 2**header.BitsStored), header)
    return values.min(), values.max()


def _to_8_bits(values: Array, low: float, high: float) -> Array:
    # With a negative slope pydicom's window runs from high to low; its lower end is black all the same.
    if not abs(high - low) > 0:
        return np.zeros(values.shape, np.uint8)
    return np.rint((values.astype(np.float64) - low) * (255 / (high - low))).clip(0, 255).astype(np.uint8)


def _take_from_groups(header: Dataset, frame: int) -> None:
    """Enhanced multi-frame images keep rescaling and window in groups, for all frames or for each."""
    shared, own = header.get("SharedFunctionalGroupsSequence"), header.get("PerFrameFunctionalGroupsSequence")
    for groups in ([shared[0]] if shared else []) + ([own[frame]] if own else []):
        for name in ("PixelValueTransformationSequence", "FrameVOILUTSequence"):
            if inner := groups.get(name):
                header.update(inner[0])
