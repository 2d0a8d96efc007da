"""Arrays of numbers and lists of names, of any library, as users of Python have them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.datasets.records import pooled as pooled_records
from fedsurrogate.client_app.datasets.tables import names_in
from fedsurrogate.client_app.features.extraction import means_of
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.identity import is_missing
from fedsurrogate.common.settings.base import short

# Array-likes: tensors, numpy arrays, lists, data frames, sparse matrices.
Array = Any
ACCEPTED = (
    "real numbers: a numpy array, tensor, sparse matrix or data frame of numbers, or a list of rows"
)
# Types that `float` takes, or that it takes from some of their values.
NO_NUMBERS = (str, bytes, complex, np.complexfloating, np.datetime64, np.timedelta64)
ADVICE = (
    "give durations as numbers of one unit, such as durations / numpy.timedelta64(1, 'D'), and dates "
    "as durations since the record began"
)


@dataclass(frozen=True)
class Labels:
    """Class names of records.

    Attributes:
        names: of each record, in normal form (common/identity.py).
        values: by name, as the user has it, so that predictions have the labels' own type.
    """

    names: list[str] = field(default_factory=list)
    values: Mapping[str, Any] = field(default_factory=dict)


def shown(value: object) -> str:
    """A wrong value for an error, on one line."""
    if value is None or isinstance(value, str | bool | Real):
        return short(value)
    return f"an object of type {type(value).__name__}"


def columns_of(values: Array) -> tuple[str, ...]:
    """Names of the columns of a data frame or table as it has them, of any library; empty without
    names.
    """
    names: Any = getattr(values, "column_names", None)
    if names is None:
        names = getattr(values, "columns", ())
    return () if callable(names) else tuple(map(str, names))


def numbers_of(values: Array) -> np.ndarray[Any, np.dtype[np.float32]]:
    """An array-like as an array in single precision, of the same shape.

    Args:
        values: real numbers, also as objects, sparse, masked, or in any byte order.

    Returns:
        A contiguous array; NaN where a value is missing.

    Raises:
        DataError: for anything else.
    """
    array = reals_of(values)
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(array, dtype=np.float32)
    if array.dtype == np.float64 and array.ndim == 2 and array.size:
        largest = np.abs(array).max(axis=0)
        lost = np.flatnonzero((largest > 0) & (largest < np.finfo(np.float32).tiny))
        if len(lost):
            raise DataError(
                f"column {lost[0]} has no number above {largest[lost[0]]:g}, too small for single "
                "precision; measure it in another unit"
            )
    return single if single.flags.writeable else single.copy()


def reals_of(values: Array, what: str = "features") -> np.ndarray[Any, Any]:
    """An array-like as an array of real numbers, of the same shape: the one reading of numbers.

    Args:
        values: as in `numbers_of`.
        what: they are, for errors.

    Returns:
        An array of truth values, integers or floating point; NaN where a value is missing.

    Raises:
        DataError: for anything else: text, complex numbers, dates and durations are no numbers.
    """
    columns, accepted = columns_of(values), f"{what} are {ACCEPTED}"
    if isinstance(values, Tensor):
        values = _of_tensor(values)
    elif hasattr(values, "toarray"):
        values = values.toarray()
    masked = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{type(values).__name__} is no array ({error}), perhaps of rows with another number "
            f"of columns each; {accepted}"
        ) from None
    if array.dtype.kind in "OSU" and array.ndim in (1, 2):
        array = _of_objects(array, columns, accepted)
    refuse_times(array, what)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{array.dtype} of shape {array.shape} holds no real numbers; {accepted}")
    if masked is not None and masked.any():
        array = np.where(masked, np.float32(np.nan), array)
    return array


def refuse_times(values: Array, what: str) -> None:
    """Raise DataError for dates or durations, which numpy converts without a word, and for cells of these
    or complex numbers, which it refuses without their place.
    """
    if isinstance(values, Tensor) or hasattr(values, "toarray"):
        return
    try:
        array = np.asarray(values)
    except (TypeError, ValueError):
        return
    if array.dtype.kind in ("m", "M"):
        raise DataError(f"{what} are dates or durations, {array.dtype}; {ADVICE}")
    kinds = {*map(type, array.ravel().tolist())} if array.dtype == object else {}
    # pandas' NA and NaT are no numbers to scikit-learn, which then names neither place nor cause.
    lost = {kind for kind in kinds if kind.__name__ in ("NAType", "NaTType")}
    columns = columns_of(values)
    if any(map(_is_time_or_complex, {*kinds} - lost)) and array.ndim in (1, 2):
        _of_objects(array, columns, f"{what} are {ACCEPTED}")
    for place, cell in np.ndenumerate(array) if lost else ():
        if type(cell) in lost:
            raise DataError(f"{_where(place, columns)} has no value; fill it in, or leave it out")


def _is_time_or_complex(kind: type) -> bool:
    time = hasattr(kind, "isoformat") or hasattr(kind, "total_seconds")
    return time or (issubclass(kind, NO_NUMBERS) and not issubclass(kind, str | bytes))


def _of_tensor(values: Tensor) -> np.ndarray[Any, Any]:
    """A tensor of any device, layout and type as an array. Raises DataError for one without data."""
    try:
        values = values.detach().cpu()
        values = values.dequantize() if values.is_quantized else values.to_dense()
        values = values.float() if values.dtype == torch.bfloat16 else values
        return values.resolve_conj().resolve_neg().numpy()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise DataError(f"a tensor of {values.dtype} on {values.device}: {why}") from None


def _of_objects(
    array: np.ndarray[Any, Any], columns: Sequence[str], accepted: str
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Cells of any type as numbers. Raises DataError with the row and the column of another one."""
    numbers = np.empty(array.shape, dtype=np.float64)
    for place, cell in np.ndenumerate(array):
        try:
            if isinstance(cell, NO_NUMBERS) and not is_missing(cell):
                raise TypeError
            numbers[place] = np.nan if is_missing(cell) else float(cell)
        except (TypeError, ValueError, OverflowError):
            where = _where(place, columns)
            times = hasattr(cell, "isoformat") or hasattr(cell, "total_seconds")
            todo = ADVICE if times else "leave such columns out, or code them as numbers"
            raise DataError(
                f"{where} holds {type(cell).__name__} {str(cell)[:40]!r}; {accepted}; {todo}"
            ) from None
    return numbers


def _where(place: tuple[int, ...], columns: Sequence[str]) -> str:
    if len(place) < 2:
        return f"row {place[0]}"
    return f"row {place[0]}, column {columns[place[1]] if columns else place[1]!r}"


def names_of(values: Array, count: int, what: str = "label", known: Sequence[str] = ()) -> Labels:
    """Names of the records' classes or patients.

    Args:
        values: array-like, (count,): texts, whole numbers, or other numbers; or one column of them.
        count: number of records.
        what: they name, for errors.
        known: names of classes, which are names even if they mean "missing" elsewhere.

    Returns:
        A name for each record.

    Raises:
        DataError: if their number is not `count`, or for a record without a name.

    Example:
        >>> names_of([1.0, 0.0], 2).names
        ['1', '0']
    """
    listed = _listed(values, what)
    if listed is None or len(listed) != count:
        shown = type(values).__name__ if listed is None else f"{len(listed)} {what}s"
        raise DataError(f"{shown} for {count} records; give one {what} for each record")
    left, own = LeftOut(), dict[str, Any]()
    left.place = lambda row: f"record {row}"
    names = list(names_in(listed, what, left, known))
    for name, value in zip(names, listed, strict=True):
        own.setdefault(name, value)
    truths = [type(value).__name__ in ("bool", "bool_") for value in listed]
    if any(truths) and not all(truths):
        numbers = (
            isinstance(each, Real) and not truth for each, truth in zip(listed, truths, strict=True)
        )
        if any(numbers):
            raise DataError(f"{what}s are truth values and numbers, mixed; use one of both")
    return Labels(names, own)


def _listed(values: Array, what: str) -> list[Any] | None:
    """The values one by one, None where masked; None instead of a list for another shape."""
    if isinstance(values, Tensor):
        values = _of_tensor(values)
    elif isinstance(values, list | tuple | range):
        alone = [_alone(each) for each in values]
        if alone and all(isinstance(each, list | tuple) and len(each) == 1 for each in alone):
            _warn_of_column(what, len(alone))
            return [_alone(each[0]) for each in alone]
        return alone
    elif not hasattr(values, "__array__"):
        return None
    hidden = np.ma.getmaskarray(values) if isinstance(values, np.ma.MaskedArray) else None
    array = np.asarray(values)
    if array.ndim == 2 and array.shape[1] == 1:
        _warn_of_column(what, len(array))
        array = array[:, 0]
        hidden = None if hidden is None else hidden[:, 0]
    if array.ndim != 1:
        return None
    listed = [_alone(each) for each in array]
    if hidden is not None:
        listed = [
            None if gone else each for each, gone in zip(listed, hidden.tolist(), strict=True)
        ]
    return listed


def _alone(value: Any) -> Any:
    """A single number that is stored as a tensor or an array."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 0:
        return value.item() if isinstance(value, Tensor) else value[()]
    return value


def _warn_of_column(what: str, count: int) -> None:
    warnings.warn(
        f"a column of {what}s, of shape ({count}, 1), is taken as ({count},)", stacklevel=5
    )


def in_own_type(names: Sequence[str], *values: Mapping[str, Any]) -> Any:
    """Class names as an array in the type of the labels, as scikit-learn's `classes_`.

    Args:
        names: of the classes, in order.
        values: of the labels by name, from each site; where they are unknown, names that are all
            whole numbers become integers.

    Returns:
        An array; of texts where the sites' types differ.

    Example:
        >>> in_own_type(["0", "1"], {"0": False, "1": True}).tolist(), in_own_type(["0", "1"]).tolist()
        ([False, True], [0, 1])
    """
    own = {name: value for each in reversed(values) for name, value in each.items()}
    if not set(names) <= own.keys():
        whole = all(re.fullmatch("0|-?[1-9][0-9]{0,17}", name) for name in names)
        return np.array([int(name) for name in names]) if whole else np.array(names)
    kinds = {_kind(value) for each in values for value in each.values()}
    if kinds == {"text"} or len(kinds) > 1:
        return np.array(names)
    if kinds == {"bytes"}:
        return np.array([name.encode() for name in names])
    return np.array([own[name] for name in names])


def _kind(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "truth"
    if isinstance(value, str):
        return "text"
    return "bytes" if isinstance(value, bytes) else "number"


# The column of a file that names the bag of an image.
COLUMN = "bag"


def pooled(images: LabelledFeatures, names: Sequence[str]) -> LabelledFeatures:
    """Bags of images, as a site pools them.

    Args:
        images: with n rows, their power applied.
        names: of the bag of each, (n,); they hold within a patient.

    Raises:
        DataError: for a bag whose images have different targets.
    """
    labels = list(map(str, images.labels.tolist()))
    records = Records(labels, "", patients=images.units, values=images.values, bags=tuple(names))
    found = pooled_records(records, LeftOut(), by_patient=True)
    assert found.images is not None
    members, firsts = found.images.members, found.images.firsts
    usable = torch.ones(len(labels), dtype=torch.bool)
    means = means_of(images.features, members, usable, 1.0)
    return LabelledFeatures(means, images.labels[firsts], found.patients, values=found.values)


def numbered(given: object, sizes: Sequence[int]) -> list[Tensor] | None:
    """Numbers of the bags of each entry of a simulation, as its files have them.

    Args:
        given: arrays of names, one for each pair of features and labels, that of test records last;
            None where images are records.
        sizes: number of images of each entry.

    Returns:
        For each entry a number for every image, (n,), in the order of appearance; no two entries
        have one in common.

    Raises:
        ConfigError: for another number of arrays.
        DataError: for an array of another length.
    """
    if given is None:
        return None
    if not isinstance(given, list | tuple):
        raise ConfigError(f"bags = {shown(given)}: must be a list with an array for each entry")
    if len(given) != len(sizes):
        raise ConfigError(
            f"bags has {len(given)} arrays for {len(sizes)} pairs of features and labels; give one "
            "for each site, or one for data, and one more for test records"
        )
    numbers, seen = [], dict[tuple[int, str], int]()
    for entry, (own, size) in enumerate(zip(given, sizes, strict=True)):
        names = names_of(own, size, "bag").names
        numbers.append(torch.tensor([seen.setdefault((entry, name), len(seen)) for name in names]))
    return numbers


def data_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas data frame with one row for each mapping.

    Args:
        rows: values by column.

    Raises:
        PackageError: without the extra `pandas`.
    """
    with needed_for("a data frame"):
        import pandas as pd
    return pd.DataFrame(rows)
