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
from fedsurrogate.common.targets.target import CODE, PRODUCTS, SQUARES, SUMS
from fedsurrogate.strategies import stored_strategy
from tests.attacks.sites.test_hostile_coded_sums import honest, lied, set_to, times

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


def with_lie(kind: str, lie: Any) -> object:
    """What the coordinator makes of a message that no records have."""
    sent = honest(kind)
    return stored_strategy(sent.config)(sent.config).unpack(lied(sent, lie))


Case = tuple[Callable[[], object], type[Exception], str]
REFUSED: dict[str, Case] = {
    "every target: another range": (
        lambda: both(y, NUMBER, NUMBER | {"target_range": (0, 5)}),
        SurrogateError,
        "target-range = '0,5', but here target-range = '0,4'",
    ),
    "every target: other bins": (
        lambda: both(seen, TIME, TIME | {"bins": 2}),
        SurrogateError,
        "bins = 2, but here bins = 1",
    ),
    "every target: another horizon": (
        lambda: both(seen, TIME, TIME | {"horizon": 2.0}),
        SurrogateError,
        "horizon = 2.0, but here horizon = 3.0",
    ),
    "every target: another label list": (
        lambda: both(found, LABELS, LABELS | {"label_columns": "edema,nodule"}),
        SurrogateError,
        "label-columns = 'edema,nodule', but here label-columns = 'edema,mass'",
    ),
    "every target: another target": (
        lambda: fs.learn([fs.fit(x, y, **NUMBER), fs.fit(x, found, **LABELS)]),
        SurrogateError,
        "label-columns = 'edema,mass', but here label-columns = ''",
    ),
    "every target: missing": (
        lambda: fs.fit(x, put(y, 3, np.nan), **NUMBER),
        DataError,
        "1 of 60 records have no value in 'value' of 'y', such as row 4",
    ),
    "every target: infinite": (
        lambda: fs.fit(x, put(y, 3, np.inf), **NUMBER),
        DataError,
        "a number that is not finite in 'value' of 'y', such as row 4",
    ),
    "every target: sums beyond their counts": (
        lambda: with_lie("number", times(SUMS, 100.0)),
        SurrogateError,
        "longer than their second moment allows",
    ),
    "every target: no positive semidefinite moment": (
        lambda: with_lie("number", times(SQUARES, -1.0)),
        SurrogateError,
        "eigenvalue|second moments that no records have",
    ),
    "number: no range": (
        lambda: fs.fit(x, y, task="regression", epsilon=1.0, delta=1e-5),
        ConfigError,
        "needs target-range, the lowest and highest value that are known in public",
    ),
    "number: low not below high": (
        lambda: fs.fit(x, y, task="regression", target_range=(4, 4)),
        ConfigError,
        "the first number must be below the second",
    ),
    "number: no variance": (
        lambda: fs.learn([fs.fit(x, np.full(60, 2.0), **NUMBER)]),
        RunError,
        "so it does not vary: nothing can be learned",
    ),
    "number: a sum beyond n": (
        lambda: with_lie("number", set_to(CODE, 300.0)),
        SurrogateError,
        "a code with the sum 300 of 200 records",
    ),
    "number: squares beyond n": (
        lambda: with_lie("number", set_to(PRODUCTS, 300.0)),
        SurrogateError,
        "squares of numbers with the sum 300",
    ),
    "labels: another value": (
        lambda: fs.fit(x, put(found, (2, 0), 2), **LABELS),
        DataError,
        "a label that is not 1, 0 or empty in 'edema', 'mass' of 'y', such as row 3",
    ),
    "labels: more annotations than records": (
        lambda: with_lie("labels", times(CODE, 3.0)),
        SurrogateError,
        "a code with the sum",
    ),
    "labels: none has enough records": (
        lambda: fs.fit(x, np.zeros((60, 2)), **LABELS),
        DataError,
        "no label has 1 records that are present, and as many that are absent",
    ),
    "time: negative": (
        lambda: fs.fit(x, put(seen, (2, 0), -1), **TIME),
        DataError,
        "a time that is negative or infinite in 'time', 'event' of 'y', such as row 3",
    ),
    "time: event not 0 or 1": (
        lambda: fs.fit(x, put(seen, (2, 1), 2), **TIME),
        DataError,
        "an event that is not 1 or 0 in 'time', 'event' of 'y', such as row 3",
    ),
    "time: no event": (
        lambda: fs.learn([fs.fit(x, put(seen, (slice(None), 1), 0), **TIME)]),
        RunError,
        "0 events before the horizon: nothing can be learned; set a later horizon",
    ),
    "time: no horizon": (
        lambda: fs.fit(x, seen, task="survival"),
        ConfigError,
        "needs horizon, the time up to which survival is learned",
    ),
    "time: no unit": (
        lambda: fs.fit(x, seen, **TIME, time_column="t", event_column="e"),
        ConfigError,
        "needs time-unit, such as years, so that all sites mean the same",
    ),
    "time: left truncation": (
        lambda: parse_run({"task": "survival", "horizon": 3.0, "entry-column": "start"}),
        ConfigError,
        "entry-column",
    ),
    "bags: two targets": (
        lambda: fs.fit(x, y, bags=np.arange(60) // 2, **NUMBER),
        DataError,
        "30 of 30 bags have images with different targets.*such as bag '0'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_one_takes_is_refused_with_its_reason(name: str) -> None:
    make, kind, match = REFUSED[name]
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
