"""The registry of targets: each kind of target has one file here. A new one is a file and its line
in `TARGETS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from common.errors import ConfigError
from common.settings import Settings
from common.settings.target import label_sets, ranges
from common.targets.labels import Labels
from common.targets.number import Number
from common.targets.target import Target
from common.targets.time import Time

# Settings that are for one kind of target, and those of which a run with it needs one.
OF_KIND = {
    "number": ("target_range", "value_columns"),
    "labels": ("label_columns", "label_sets"),
    "time": ("time_column", "event_column", "horizon", "bins", "time_unit"),
}


# Sites that must share in an exact sum, besides those that may collude.
LEAST_ANNOTATORS = 2


def target_of(settings: Settings) -> Target | None:
    """The target of a run; None for classes, which need no code.

    Args:
        settings: of the run.

    Raises:
        ConfigError: for settings that do not agree.
    """
    for kind, keys in OF_KIND.items():
        for key in keys if kind != settings.target else ():
            if getattr(settings, key) != type(settings).model_fields[key].default:
                raise ConfigError(
                    f"{key.replace('_', '-')} works only with target = {kind!r}, not "
                    f"{settings.target!r}; set that, or remove it"
                )
    make = TARGETS.get(settings.target)
    return None if make is None else make(settings)


def _number(settings: Settings) -> Target:
    columns, given = settings.value_columns or ("value",), ranges(settings.target_range)
    if not given:
        raise ConfigError(
            "target = 'number' needs target-range, the lowest and highest value that are known in "
            'public, such as target-range = "0,100"'
        )
    if len(given) not in (1, len(columns)):
        raise ConfigError(
            f"target-range = {settings.target_range!r} has {len(given)} ranges for {len(columns)} "
            "value-columns; give one for all, or one for each"
        )
    return Number(columns, given * len(columns) if len(given) == 1 else given)


def _labels(settings: Settings) -> Target:
    if not settings.label_columns:
        raise ConfigError(
            "target = 'labels' needs label-columns, the names of all labels of the run"
        )
    sets = label_sets(settings.label_sets)
    target = Labels(settings.label_columns, tuple(sets.items()))
    for site, labels in sets.items():
        if others := [name for name in labels if name not in target.columns]:
            raise ConfigError(
                f"label-sets: site {site!r} annotates {others[0]!r}, which is not in label-columns"
            )
    if settings.secure_sum and not settings.epsilon:
        _check_annotators(target, settings.colluding)
    return target


def _check_annotators(target: Labels, colluding: float) -> None:
    """Raise ConfigError for a label of which an exact sum would show the part of one site: a site
    that does not annotate it adds nothing.
    """
    if not target.sets:
        raise ConfigError(
            "secure-sum = true with target = 'labels' needs label-sets, which say who annotates "
            "what, or epsilon: the sum of a label that one site alone annotates is its own"
        )
    name, sites = target.fewest()
    needed = LEAST_ANNOTATORS + math.floor(colluding * len(target.sets))
    if sites < needed:
        raise ConfigError(
            f"label {name!r} is annotated by {sites} sites; a secure sum without noise needs "
            f"{needed} (colluding = {colluding:.3g}), so that no sum is that of one site; leave "
            "the label out, or set epsilon"
        )


def _time(settings: Settings) -> Target:
    if not settings.horizon:
        raise ConfigError("target = 'time' needs horizon, the time up to which survival is learned")
    columns = (settings.time_column or "time", settings.event_column or "event")
    if columns[0] == columns[1]:
        raise ConfigError(f"time-column and event-column are both {columns[0]!r}")
    if settings.time_column and not settings.time_unit:
        raise ConfigError(
            "target = 'time' needs time-unit, such as years, so that all sites mean the same"
        )
    bins = settings.bins or (5 if settings.epsilon else 20)
    edges = tuple(settings.horizon * i / bins for i in range(bins + 1))
    return Time(columns, edges, settings.time_unit)


TARGETS: dict[str, Callable[[Settings], Target]] = {
    "number": _number,
    "labels": _labels,
    "time": _time,
}
