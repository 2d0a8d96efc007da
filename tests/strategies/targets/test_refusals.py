"""What no site or coordinator takes, each with the message that a person reads: one table for all
targets. Rules in detail are tested beside each part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, DataError, RunError, SurrogateError
from fedsurrogate.common.run import parse_run

draw = np.random.default_rng(0)
x, y = draw.normal(size=(60, 3)), draw.uniform(0, 4, 60)
found, seen = (
    draw.integers(0, 2, (60, 2)).astype(float),
    np.stack([draw.exponential(2, 60), draw.integers(0, 2, 60)], 1),
)
NUMBER: dict[str, Any] = {"task": "regression", "target_range": (0, 4)}
LABELS: dict[str, Any] = {"task": "multilabel", "label_columns": "edema,mass"}
TIME: dict[str, Any] = {"task": "survival", "horizon": 3.0, "bins": 1}


def put(values: Any, at: Any, value: float) -> Any:
    changed = values.copy()
    changed[at] = value
    return changed


def both(values: Any, one: dict[str, Any], other: dict[str, Any]) -> fs.Model:
    """A model of two sites whose settings differ."""
    return fs.learn([fs.fit(x, values, **one), fs.fit(x, values, **other)])


# That sums which no records have are refused is in test_limits_of_checks.py.
REFUSED: dict[type[Exception], list[tuple[Callable[[], object], str]]] = {
    SurrogateError: [
        (lambda: both(y, NUMBER, NUMBER | {"target_range": (0, 5)}), "here target-range = '0,4'"),
        (lambda: both(seen, TIME, TIME | {"bins": 2}), "here bins = 1"),
        (lambda: both(seen, TIME, TIME | {"horizon": 2.0}), "here horizon = 3.0"),
        (lambda: both(found, LABELS, LABELS | {"label_columns": "a,b"}), "here label-columns = 'edema,mass'"),
        (lambda: fs.learn([fs.fit(x, y, **NUMBER), fs.fit(x, found, **LABELS)]), "here label-columns = ''"),
    ],
    DataError: [
        (lambda: fs.fit(x, put(y, 3, np.nan), **NUMBER), "no value in 'value' of 'y', such as row 4"),
        (lambda: fs.fit(x, put(y, 3, np.inf), **NUMBER), "not finite in 'value' of 'y', such as row 4"),
        (
            lambda: fs.fit(x, put(found, (2, 0), 2), **LABELS),
            "not 1, 0 or empty in 'edema', 'mass' of 'y', such as row 3",
        ),
        (lambda: fs.fit(x, np.zeros((60, 2)), **LABELS), "no label has 1 records that are present"),
        (
            lambda: fs.fit(x, put(seen, (2, 0), -1), **TIME),
            "negative or infinite in 'time', 'event' of 'y', such as row 3",
        ),
        (lambda: fs.fit(x, put(seen, (2, 1), 2), **TIME), "not 1 or 0 in 'time', 'event' of 'y', such as row 3"),
        (lambda: fs.fit(x, y, bags=np.arange(60) // 2, **NUMBER), "images with different targets.*such as bag '0'"),
    ],
    ConfigError: [
        (lambda: fs.fit(x, y, task="regression", epsilon=1.0, delta=1e-5), "needs target-range"),
        (lambda: fs.fit(x, y, task="regression", target_range=(4, 4)), "must be below the second"),
        (lambda: fs.fit(x, seen, task="survival"), "needs horizon"),
        (lambda: fs.fit(x, seen, **TIME, time_column="t", event_column="e"), "needs time-unit"),
        (lambda: parse_run({"task": "survival", "horizon": 3.0, "entry-column": "start"}), "entry-column"),
    ],
    RunError: [
        (lambda: fs.learn([fs.fit(x, np.full(60, 2.0), **NUMBER)]), "so it does not vary"),
        (
            lambda: fs.learn([fs.fit(x, put(seen, (slice(None), 1), 0), **TIME)]),
            "0 events before the horizon",
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "make", "match"), [(kind, *case) for kind, own in REFUSED.items() for case in own]
)
def test_what_no_one_takes_is_refused_with_its_reason(
    kind: type[Exception], make: Callable[[], object], match: str
) -> None:
    with pytest.raises(kind, match=match):
        make()


@pytest.mark.parametrize(
    ("values", "settings", "warning"),
    [
        (y * 10, NUMBER, "lie beyond target-range 0,4 and count as its ends; is the unit right"),
        (seen * [365, 1], TIME, "of the records are beyond the horizon 3; are the times in"),
        (seen / [365, 1], TIME, "of the records are in the first bin; are the times in"),
    ],
)
def test_a_likely_wrong_unit_is_warned_of(
    values: Any, settings: dict[str, Any], warning: str
) -> None:
    flat = {key.replace("_", "-"): value for key, value in settings.items()}
    flat |= {"target-range": "0,4"} if settings is NUMBER else {"bins": 3}
    target = parse_run(flat).target
    assert target is not None
    (said,) = target.warnings(torch.from_numpy(values.reshape(len(values), -1)))
    assert warning in said
