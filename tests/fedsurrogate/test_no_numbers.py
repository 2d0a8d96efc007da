"""What is no number is refused in features and targets alike, and what is missing is missing in both."""

from __future__ import annotations

from datetime import date, datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sksurv.util import Surv

import fedsurrogate as fs
from fedsurrogate.common.errors import DataError

N = 80
X = np.random.default_rng(1).normal(size=(N, 3))
DAYS = np.exp(X[:, 0]) + 0.5
DIED = np.arange(N) % 3 > 0
TIME: dict[str, Any] = {"task": "survival", "horizon": 5.0, "time_unit": "years", "bins": 2}
NUMBER: dict[str, Any] = {"task": "regression", "target_range": "-9,9"}

# Values that are no real numbers, (n,).
WRONG: dict[str, Any] = {
    "durations": DAYS.astype("timedelta64[D]"),
    "durations in nanoseconds": (DAYS * 1e9).astype("timedelta64[ns]"),
    "durations of pandas": pd.Series(pd.to_timedelta(DAYS, unit="D")),
    "durations of Python": np.array([timedelta(days=float(each)) for each in DAYS], object),
    "dates": np.datetime64("2020-01-01") + DAYS.astype("timedelta64[D]"),
    "dates of Python": np.array([date(2020, 1, 1 + row % 28) for row in range(N)], object),
    "times of Python": [datetime(2020, 1, 1 + row % 28, 5) for row in range(N)],
    "dates as objects": np.fromiter(
        (np.datetime64("2020-01-01", "ns") + row for row in range(N)), object, N
    ),
    "complex": DAYS + 1j,
    "complex tensor": torch.from_numpy(DAYS + 1j),
    "texts": DAYS.astype(str),
    "text objects": DAYS.astype(str).astype(object),
}


@pytest.mark.parametrize("kind", WRONG)
def test_values_that_are_no_numbers_are_refused(kind: str, tmp_path: Any) -> None:
    y, model = WRONG[kind], fs.learn([fs.fit(X, DAYS, **NUMBER)])
    for ask in (
        lambda: fs.fit(X, y, **NUMBER),
        lambda: fs.simulate([(X, y), (X, y)], output_dir=tmp_path, **NUMBER),
        lambda: model.score(X, y),
    ):
        with pytest.raises(DataError):
            ask()


NAMED = [name for name in WRONG if "text" not in name and "tensor" not in name]


@pytest.mark.parametrize("kind", NAMED)
def test_times_that_are_no_numbers_are_refused_by_their_field(kind: str) -> None:
    values = np.asarray(WRONG[kind])
    y = np.empty(N, [("event", bool), ("time", values.dtype)])
    y["event"], y["time"] = DIED, values
    frame = pd.DataFrame({"event": DIED, "time": WRONG[kind]})
    for given in (y, frame):
        for ask in (
            lambda given=given: fs.fit(X, given, **TIME),
            lambda given=given: fs.FederatedSurvival(horizon=5.0).fit(X, given),
        ):
            with pytest.raises(DataError, match=r"'time'|values of y"):
                ask()


@pytest.mark.parametrize("unit", ["ns", "us", "s"])
def test_durations_that_scikit_survival_made_numbers_are_refused(unit: str) -> None:
    days = pd.to_timedelta(DAYS, unit="D").to_numpy().astype(f"timedelta64[{unit}]")
    for ask in (
        lambda: fs.fit(X, Surv.from_arrays(DIED, days), **TIME),
        lambda: fs.FederatedSurvival(horizon=5.0).fit(X, Surv.from_arrays(DIED, days)),
    ):
        with pytest.raises(DataError, match=r"times of y begin at .* another unit"):
            ask()


def test_structured_times_are_read_whatever_the_order_of_their_fields() -> None:
    y = Surv.from_arrays(DIED, DAYS)
    other = np.empty(N, [("t", "f8"), ("dead", bool)])
    other["t"], other["dead"] = DAYS, DIED
    frame = pd.DataFrame({"event": DIED, "time": DAYS})
    table = np.column_stack([DAYS, DIED])
    wanted = fs.fit(X, table, **TIME).payload
    for given in (y, other, frame, frame[["time", "event"]], frame.convert_dtypes()):
        assert fs.fit(X, given, **TIME).payload == wanted
        own = fs.FederatedSurvival(horizon=5.0).fit(X, given)
        assert own.score(X, given) == fs.FederatedSurvival(horizon=5.0).fit(X, table).score(
            X, table
        )


@pytest.mark.parametrize(
    "dtype", ["Int64", "boolean", "Float32", "object", "int64[pyarrow]", "bool[pyarrow]"]
)
def test_labels_that_are_missing_are_missing_in_every_type(dtype: str) -> None:
    known = (X[:, :2] > 0).astype(float)
    known[X[:, 2] > 1] = np.nan
    frame = pd.DataFrame(known, columns=["edema", "mass"])
    if dtype in ("boolean", "bool[pyarrow]"):
        typed = frame.astype("boolean").astype(dtype)
    elif dtype == "object":
        typed = frame.astype(object).where(frame.notna(), None)
    else:
        typed = frame.astype(dtype)
    wanted = fs.fit(X, frame, task="multilabel")
    assert fs.fit(X, typed, task="multilabel").payload == wanted.payload
    model = fs.learn([wanted])
    assert model.score(X, typed) == model.score(X, frame)


@pytest.mark.parametrize("kind", NAMED)
@pytest.mark.parametrize("as_frame", [False, True])
def test_the_column_and_the_type_of_what_is_no_number_are_named(kind: str, as_frame: bool) -> None:
    """Beside a column of numbers; and no error of numpy or scikit-learn says less."""
    y = WRONG[kind]
    frame = pd.DataFrame({"age": DAYS, "when": y})
    x = frame if as_frame else frame.to_numpy(dtype=object)
    column = "'when'" if as_frame else "1"
    labels = np.arange(N) % 2
    asked: list[Any] = [
        lambda: fs.fit(x, labels),
        lambda: fs.FederatedRegressor(target_range=(-9, 9)).fit(x, DAYS),
        lambda: fs.FederatedClassifier().fit(x, labels),
        lambda: fs.FederatedSurvival(horizon=5.0).fit(x, np.column_stack([DAYS, DIED])),
        lambda: fs.FederatedClassifier().fit(frame.assign(when=DAYS), labels).predict(x),
    ]
    regressor = fs.FederatedRegressor(target_range=(-9, 9))
    of_y: list[Any] = [
        *(lambda y=y: regressor.fit(X, y) for y in (y, pd.Series(y), [*y])),
        lambda: fs.FederatedClassifier().fit(X, y),
        lambda: fs.fit(X, y),
    ]
    for ask in of_y:
        with pytest.raises((DataError, ValueError), match=r"durations|of type|row 0|[Cc]omplex"):
            ask()
    for ask in asked:
        # All columns of a frame of complex numbers are complex to numpy.
        with pytest.raises((DataError, ValueError), match=f"column {column} holds|[Cc]omplex"):
            ask()


@pytest.mark.parametrize("missing", [pd.NA, pd.NaT])
@pytest.mark.parametrize("row", [0, N - 1])
def test_a_missing_value_of_pandas_is_named_by_its_place(missing: Any, row: int) -> None:
    frame = pd.DataFrame(X, columns=[*"abc"]).astype(object)
    frame.iloc[row, 1] = missing
    texts = np.where(DIED, "yes", "no").astype(object)
    with pytest.raises(DataError, match=f"row {row}, column 'b' has no value"):
        fs.FederatedClassifier().fit(frame, texts)
    texts[row] = missing
    with pytest.raises(DataError, match=f"row {row} has no value"):
        fs.FederatedClassifier().fit(X, texts)
