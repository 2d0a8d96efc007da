"""Images and labels as users have them: PIL images, files, arrays, tensors, and data sets of
(image, label) pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.client_app.datasets.dicom_files import is_dicom_file
from fedsurrogate.client_app.datasets.dicom_pixels import open_single
from fedsurrogate.client_app.datasets.images import as_rgb, open_rgb
from fedsurrogate.client_app.datasets.one_record import described, ends_process, printable
from fedsurrogate.common.errors import DataError, PackageError

# What a data set may be: anything with `__len__` and `__getitem__`, an array or tensor of several
# images, or an iterable.
Images = Any
SHAPES = "(height, width), (height, width, 3) or (3, height, width)"


def records_of(data: Images) -> Iterator[tuple[int, Any, Any]]:
    """The records of a data set, one by one.

    Args:
        data: as in `fedsurrogate.features`.

    Returns:
        Number, image and label of every record; the label is None where a record is an image alone.

    Raises:
        DataError: if `data` cannot be read one by one.
    """
    for number, item in enumerate(_items(data)):
        if is_labelled(item):
            yield number, item[0], item[1]
        elif isinstance(item, tuple | dict):
            raise DataError(
                f"record {number} is a {type(item).__name__} of {len(item)}; a record is an image, "
                "or a pair (image, label) with one label"
            )
        else:
            yield number, item, None


def is_labelled(item: Any) -> bool:
    """Whether an item is a pair of an image and one label."""
    # Two numbers are a row of an array, not an image with its label.
    return (
        isinstance(item, tuple | list)
        and len(item) == 2
        and _is_label(item[1])
        and not _is_number(item[0])
    )


def _items(data: Images) -> Iterable[Any]:
    if isinstance(data, str | Path):
        raise DataError(
            f"'{data}' is one file or folder; give a list of files, images, or a data set"
        )
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, Mapping):
        # Not `iter`: a data set need not raise IndexError behind its last record.
        return (data[number] for number in range(len(data)))
    if isinstance(data, Mapping) or not isinstance(data, Iterable):
        raise DataError(f"{type(data).__name__} is no data set; it needs __len__ and __getitem__")
    return data


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.number)


def _is_label(value: Any) -> bool:
    if isinstance(value, str | int | float | np.generic):
        return True
    # Some data sets return a label as an array of one number.
    return (
        isinstance(value, Tensor | np.ndarray)
        and value.ndim <= 1
        and int(np.prod(value.shape)) == 1
    )


def label_of(value: Any, number: int) -> object:
    """A label as a plain value.

    Args:
        value: the label; a tensor or an array of one number too.
        number: of the record, for the error.

    Raises:
        DataError: for a record without a label.
    """
    if value is None:
        raise DataError(f"record {number} has no label; give pairs (image, label)")
    return value.reshape(-1)[0].item() if isinstance(value, Tensor | np.ndarray) else value


def picture(image: Any, number: int, shortest: int = 0) -> Image.Image:
    """An image in RGB, as a site reads it.

    Args:
        image: a PIL image, the path of a file, or an array or tensor (8 bits, or floating point in
            0 to 1).
        number: of the record, for the error.
        shortest: pixels that the shorter side needs; 0 for all. A large JPEG file may be decoded
            smaller, as at a site; a PIL image has the pixels that it has.

    Raises:
        DataError: for a wrong type, shape or range of values, or a file that cannot be read.
    """
    if isinstance(image, str | Path):
        return _read(partial(_from_file, Path(image), shortest), f"image '{image}'")
    if isinstance(image, Image.Image):
        return _read(partial(as_rgb, image), f"record {number}")
    if isinstance(image, Tensor | np.ndarray):
        return Image.fromarray(_pixels(image, number)).convert("RGB")
    raise DataError(
        f"record {number}: {type(image).__name__} is no image; give PIL images, paths, arrays or "
        "tensors, or a module of your own"
    )


def _from_file(file: Path, shortest: int) -> Image.Image:
    return open_single(file) if is_dicom_file(file) else open_rgb(file, shortest)


def _read(read: Callable[[], Image.Image], name: str) -> Image.Image:
    """What `read` returns. Raises DataError for whatever it raises: decoders raise almost anything
    for a broken image.
    """
    try:
        return read()
    except (MemoryError, PackageError):
        raise
    except BaseException as error:
        if ends_process(error):
            raise
        why = str(error) if isinstance(error, DataError) else described(error)
        raise DataError(printable(f"{name} cannot be read: {why}")) from error


def _pixels(
    image: Tensor | np.ndarray[Any, Any], number: int
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(height, width) or (height, width, 3), 8 bits."""
    values = image.detach().cpu().numpy() if isinstance(image, Tensor) else image
    shape = tuple(values.shape)
    if values.ndim == 3:
        # Where both fit, tensors have their channels first, arrays last.
        first, last = shape[0] in (1, 3), shape[2] in (1, 3)
        if first and (isinstance(image, Tensor) or not last):
            values = np.moveaxis(values, 0, 2)
        if values.shape[2] == 1:
            values = values[:, :, 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[2] != 3) or not values.size:
        raise DataError(
            f"record {number} of shape {shape} is no image; an image is {SHAPES}; for other "
            "records give a module of your own as the backbone"
        )
    low, high = float(values.min()), float(values.max())
    whole = not np.issubdtype(values.dtype, np.floating)
    limit = 255 if whole else 1
    if not (low >= 0 and high <= limit):
        kind = (
            "integers, which must lie in 0 to 255"
            if whole
            else "floating point, which must lie in 0 to 1"
        )
        raise DataError(
            f"record {number} has values from {low:g} to {high:g} in {kind}; scale them"
        )
    scaled = values.astype(np.float32) * (1 if whole else 255)
    if values.dtype == np.bool_:
        scaled *= 255
    return np.rint(scaled).astype(np.uint8)


def tensor_of(value: Any, number: int) -> Tensor:
    """What a module without a transform takes.

    Args:
        value: a record.
        number: of the record, for the error.

    Returns:
        Images and files as (3, height, width) in [0, 1]; arrays and tensors in their own shape as
        32-bit numbers, 8-bit ones divided by 255.

    Raises:
        DataError: for a value that is no image, array or tensor.
    """
    if isinstance(value, str | Path | Image.Image):
        return torch.from_numpy(np.array(picture(value, number), dtype=np.float32) / 255).permute(
            2, 0, 1
        )
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"record {number}: {type(value).__name__} is no image, array or tensor ({error})"
        ) from error
    return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor.float()
