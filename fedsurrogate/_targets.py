"""Targets other than classes in arrays of users: labels, numbers, or times with events."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate._arrays import columns_of, reals_of
from fedsurrogate._inputs import flat_settings
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.tables import checked
from fedsurrogate.common.backbones.backbone_names import listed
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.identity import normal
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import parse_settings
from fedsurrogate.common.settings.heads import TargetSettings
from fedsurrogate.common.targets.registry import CLASS, TARGETS, target_of
from fedsurrogate.common.targets.target import Target
from fedsurrogate.common.targets.time import Time

Floats = NDArray[np.float64]
# Settings besides those of targets on which a target depends.
DECIDING = ("epsilon", "delta", "secure_aggregation", "colluding")
# Times that all lie so many horizons away are of another unit, such as nanoseconds.
FARTHEST = 1000


def target_in(settings: Mapping[str, Any]) -> Target | None:
    """The target that settings name; None for classes.

    Args:
        settings: as keyword arguments, others among them.

    Raises:
        ConfigError: for settings that do not agree.
    """
    names = {*TargetSettings.model_fields, *DECIDING}
    own = {key: settings[key] for key in settings.keys() & names}
    return target_of(parse_settings(Settings, flat_settings("fedpft", own)))


def with_target_columns(
    settings: Mapping[str, Any], entries: Sequence[Any], *, alone: bool = False
) -> dict[str, Any]:
    """Settings with names for the columns of a target, where the user gave none.

    Args:
        settings: as keyword arguments.
        entries: pairs of records and targets, of which the first is looked at.
        alone: whether others are read elsewhere, so that their names alone can give a common order.
    """
    kind = TARGETS.get(str(settings.get("task", CLASS)))
    key, word = ("", "") if kind is None else kind.columns
    if not key or key in settings or not entries or not isinstance(entries[0], tuple | list):
        return dict(settings)
    targets = entries[0][1]
    columns = list(columns_of(targets))
    # Ranges of several numbers are in the order of the columns.
    if alone and ";" not in str(settings.get("target_range", "")):
        columns.sort(key=normal)
    count = table_of(targets).shape[1]
    if not columns:
        columns = [word] if count == 1 else [f"{word} {number + 1}" for number in range(count)]
    return {**settings, key: columns}


def sent_at_once(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with which a site sends all of a target at once, where the user chose nothing else.

    Args:
        settings: as keyword arguments.
    """
    kind = TARGETS.get(str(settings.get("task", CLASS)))
    return dict(settings) if kind is None else {**kind.once, **settings}


def values_of(targets: Any, count: int, target: Target) -> Tensor:
    """The values of records, (n, k), float64, checked; NaN where missing.

    Args:
        targets: (n,), (n, k), or for times a structured array of time and event, as scikit-survival
            has it, or (n, 2).
        count: number of records.
        target: of the run.

    Raises:
        DataError: for another shape, or a value that no record can have.
    """
    table = table_of(targets, target.columns)
    if table.shape != (count, len(target.columns)):
        raise DataError(
            f"y of shape {table.shape} for {count} records; task = {target.name!r} needs "
            f"({count}, {len(target.columns)}): {', '.join(target.columns)}"
        )
    values = torch.from_numpy(np.ascontiguousarray(table))
    horizon = target.edges[-1] if isinstance(target, Time) else math.inf
    if count and (least := float(values[:, 0].min())) > FARTHEST * horizon:
        raise DataError(
            f"times of y begin at {least:.3g}, and the horizon is {horizon:g}: they are of another unit; "
            "give durations as numbers of the horizon's, such as durations / numpy.timedelta64(1, 'D')"
        )
    return checked(values, target, "y", LeftOut())


def table_of(targets: Any, columns: Sequence[str] = ()) -> Floats:
    """Targets as a table (n, k), float64; NaN where a value is missing.

    Args:
        targets: as in `values_of`.
        columns: names of the target's columns, by which those of a data frame or the fields of a
            structured array are matched; empty takes them as they come.

    Raises:
        DataError: for what is no numbers, or other columns.
    """
    fields: tuple[str, ...] = getattr(getattr(targets, "dtype", None), "names", None) or ()
    structured = bool(fields)
    if structured:
        parts = [reals_of(targets[name], f"{name!r} of y") for name in fields]
    else:
        found = reals_of(targets, "values of y")
        if found.ndim not in (1, 2):
            raise DataError(f"y of shape {found.shape}; (n,) or (n, k) is needed")
        parts = list(found.reshape(len(found), -1).T)
        fields = columns_of(targets)
    if structured or (fields and columns):
        order = _order(targets, fields, [normal(name) for name in columns])
        parts = [parts[at] for at in order]
    return np.stack([part.astype(np.float64) for part in parts], 1)


def _order(targets: Any, fields: Sequence[str], columns: Sequence[str]) -> list[int]:
    """The position of each of the target's columns among named ones: by name; or of two, of which
    one is of truth values, the time before the event.
    """
    names = [normal(name) for name in fields]
    if sorted(names) == sorted(columns):
        return [names.index(name) for name in columns]
    kinds = [np.asarray(targets[name]).dtype.kind for name in fields] if len(names) == 2 else []
    if len(set(names)) == 2 and kinds.count("b") == 1 and len(columns) in (0, 2):
        return [1 - kinds.index("b"), kinds.index("b")]
    if not columns:
        raise DataError(
            f"y with the fields {', '.join(fields)}; times need two, of which the event is true or "
            "false"
        )
    raise DataError(
        f"y has the columns {listed(fields)}, and the target has {listed(columns)}; columns are "
        "matched by name: rename or select them, or give an array with the columns in this order"
    )
