"""Labels, patients and arrays as users of Python have them; scikit-learn, pandas and numpy say what
is right.
"""

from __future__ import annotations

import unicodedata
import warnings
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import sparse

import fedsurrogate as fs
from fedsurrogate.common.errors import DataError, FedSurrogateError

N = 24
X = np.random.default_rng(0).normal(size=(N, 3)) + np.arange(N)[:, None] % 2 * 6
HALF = np.arange(N) % 2
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
QUICK: dict[str, Any] = {"head__min_steps": 20, "head__epochs": 1}


def fitted(x: Any, y: Any, **settings: Any) -> Any:
    return fs.learn([fs.fit(x, y, **settings)], **QUICK)


def simulated(x: Any, y: Any, **settings: Any) -> Any:
    return fs.simulate([(x, y), (x, y)], output_dir=settings.pop("folder"), **QUICK).model


LABELS: dict[str, Any] = {
    "bool": HALF.astype(bool),
    "bool list": HALF.astype(bool).tolist(),
    "halves": HALF + 0.5,
    "single precision": (HALF + 0.1).astype(np.float32),
    "whole floats": HALF.astype(float),
    "bytes": np.array([b"mel", b"nevus"])[HALF],
    "uint8": HALF.astype(np.uint8),
    "negative": HALF * 2 - 1,
    "big endian": HALF.astype(">i4"),
    "digits as text": np.array(["0", "1"])[HALF],
    "objects": np.array(["mel", "nevus"], dtype=object)[HALF],
    "text": np.array(["mel", "nevus"])[HALF],
    "torch": torch.tensor(HALF),
    "torch bool": torch.tensor(HALF).bool(),
    "torch floats": torch.tensor(HALF + 0.5),
    "reversed": HALF[::-1],
    "nullable integers": pd.array(HALF, dtype="Int64"),
    "nullable truth": pd.Series(HALF.astype(bool), dtype="boolean"),
    "series of text": pd.Series(np.array(["mel", "nevus"])[HALF]),
    "categories": pd.Series(pd.Categorical(np.array(["mel", "nevus"])[HALF])),
    "tuple": tuple(HALF.tolist()),
    "list of tensors": list(torch.tensor(HALF)),
    "masked without a mask": np.ma.array(HALF),
}


@pytest.mark.parametrize("kind", LABELS)
def test_predictions_equal_the_labels_in_their_own_type(kind: str) -> None:
    y = LABELS[kind]
    model, numbers = fitted(X, y), np.asarray(y if not isinstance(y, list) else [*map(_item, y)])
    wanted = np.unique(numbers)
    assert model.classes_.dtype.kind == wanted.dtype.kind or wanted.dtype == object
    assert np.array_equal(model.classes_, wanted)
    order = slice(None, None, -1) if kind == "reversed" else slice(None)
    assert (model.predict(X) == numbers).all(), order
    assert model.score(X, y) == 1.0


def _item(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(
    "kind", ["bool", "halves", "bytes", "digits as text", "torch", "objects", "nullable integers"]
)
def test_a_simulation_gives_labels_back_in_their_type(kind: str, tmp_path: Any) -> None:
    y = LABELS[kind]
    model = simulated(X, y, folder=tmp_path)
    assert np.array_equal(model.classes_, np.unique(np.asarray(y)))
    assert (model.predict(X) == np.asarray(y)).all()


# Where names come in; the folder is for runs.
ENTRANCES: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda y, folder: fs.fit(X, y),
    "patients": lambda ids, folder: fs.fit(X, HALF, classes=[0, 1], patients=ids, **PRIVATE),
    "simulate": lambda y, folder: fs.simulate([(X, y)], output_dir=folder),
    "score": lambda y, folder: fitted(X, HALF).score(X, y),
}
MISSING: dict[str, Any] = {
    "None": None,
    "NaN": float("nan"),
    "numpy NaN": np.float32("nan"),
    "NA": pd.NA,
    "NaT": pd.NaT,
    "numpy NaT": np.datetime64("NaT"),
    "masked": np.ma.masked,
    "empty": "",
    "blank": " ",
    "no-break space": "\xa0",
    "zero width": "\u200b",
    "text NA": "NA",
    "text nan": "nan",
    "text None": "None",
    "text <NA>": " <NA> ",
    "text null": "null",
    "a list": ["a"],
    "an empty list": [],
    "a dictionary": {},
    "a tuple": ("a", "b"),
    "infinity": float("inf"),
    "complex": 1j,
    "bytes that are no text": b"\xff",
    "a decimal NaN": Decimal("NaN"),
    "a failed formula": "#REF!",
    "a date": np.datetime64("2020-01-01"),
    "a duration": np.timedelta64(1, "D"),
    "a duration of pandas": pd.Timedelta(1, "D"),
}


@pytest.mark.parametrize("kind", MISSING)
@pytest.mark.parametrize("what", ["fit", "patients"])
def test_a_missing_label_or_patient_is_refused_with_its_record(kind: str, what: str) -> None:
    values: list[Any] = [f"name {number % 2}" for number in range(N)]
    values[5] = MISSING[kind]
    for given_as in (list, tuple, _objects):
        with pytest.raises(DataError, match="record 5"):
            ENTRANCES[what](given_as(values), None)


def _objects(values: list[Any]) -> Any:
    made = np.empty(len(values), dtype=object)
    for number, each in enumerate(values):
        made[number] = each
    return made


GAPS: dict[str, Callable[[], Any]] = {
    "a series of floats": lambda: pd.Series([0.0, 1.0] * 12).where(np.arange(N) != 5),
    "a nullable series": lambda: pd.Series([0, 1] * 12, dtype="Int64").where(np.arange(N) != 5),
    "a series of texts": lambda: pd.Series(["a", "b"] * 12, dtype="string").where(
        np.arange(N) != 5
    ),
    "categories": lambda: pd.Categorical(np.where(np.arange(N) == 5, "c", "a"), categories=["a"]),
    "a masked array": lambda: np.ma.array(HALF, mask=np.arange(N) == 5),
    "a tensor": lambda: torch.tensor(HALF).float().where(torch.arange(N) != 5, torch.nan),
    "dates": lambda: pd.Series([pd.NaT] * N),
    "an array of floats": lambda: np.where(np.arange(N) == 5, np.nan, HALF),
}


@pytest.mark.parametrize("kind", GAPS)
@pytest.mark.parametrize("entrance", list(ENTRANCES))
def test_a_gap_in_an_array_is_refused_with_its_record(
    kind: str, entrance: str, tmp_path: Any
) -> None:
    with pytest.raises(DataError, match=r"record (5|0)\b"):
        ENTRANCES[entrance](GAPS[kind](), tmp_path)


@pytest.mark.parametrize("count", [0, 1, N - 1, N + 1, 2 * N])
def test_a_wrong_number_of_labels_or_patients_is_refused(count: int) -> None:
    for make in (list, np.array, pd.Series, torch.tensor):
        values = make([number % 2 for number in range(count)])
        with pytest.raises(DataError, match=f"{N} records"):
            fs.fit(X, values)
        with pytest.raises(DataError, match=f"{N} records"):
            fs.fit(X, HALF, classes=[0, 1], patients=values, **PRIVATE)


COLUMNS: dict[str, Any] = {
    "array": HALF[:, None],
    "list": HALF[:, None].tolist(),
    "tensor": torch.tensor(HALF)[:, None],
    "frame": pd.DataFrame({"y": HALF}),
    "matrix of texts": np.array(["a", "b"])[HALF][:, None],
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_a_column_of_labels_is_taken_with_one_warning(kind: str) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        surrogate = fs.fit(X, COLUMNS[kind])
    assert [str(each.message) for each in seen if "column" in str(each.message)] == [
        f"a column of labels, of shape ({N}, 1), is taken as ({N},)"
    ]
    assert len(surrogate.classes) == 2


@pytest.mark.parametrize(
    "labels",
    [np.eye(2)[HALF], np.zeros((N, 1, 1)), {"a": 1}, set(range(N)), 5, "a" * N, None, np.array(1)],
)
def test_what_is_no_list_of_labels_is_refused(labels: Any) -> None:
    with pytest.raises(DataError, match="one label for each record"):
        fs.fit(X, labels)


def forms(name: str) -> list[Any]:
    """Ways to write one name."""
    return [
        name,
        f" {name}",
        f"{name}\t",
        f"\u3000{name}\xa0",
        f"\ufeff{name}",
        f"{name}\u200b\n",
        unicodedata.normalize("NFD", name),
        unicodedata.normalize("NFC", name),
        name.encode(),
    ]


@pytest.mark.parametrize("name", ["café", "Å", "한국", "2", "mel"])
def test_one_class_or_patient_has_one_name_however_it_is_written(name: str) -> None:
    wanted = unicodedata.normalize("NFC", name)
    ways = forms(name)
    labels = [ways[number % len(ways)] if number % 2 else "other" for number in range(N)]
    surrogate = fs.fit(X, labels)
    assert set(surrogate.classes) == {wanted, "other"}
    for way in ways:
        assert fs.fit(X, labels, classes=["other", way]).classes == ("other", wanted)
    one = fs.fit(X, HALF, classes=[0, 1], patients=[ways[i % len(ways)] for i in range(N)])
    assert one.records == N


@pytest.mark.parametrize(
    "same",
    [
        [0, 0.0, "0", "0.0", " 0", "-0", -0.0, np.int8(0), torch.tensor(0), Decimal("0.0"), False + 0],
    ],
)  # fmt: skip
def test_a_number_is_one_class_in_every_type(same: list[Any]) -> None:
    labels = [same[number % len(same)] if number % 2 else 1 for number in range(N)]
    assert fs.fit(X, labels).classes == ("0", "1")


ALIKE = [("01", "1"), ("Nevus", "nevus"), ("no finding", "no  finding"), ("\uff21", "A")]


@pytest.mark.parametrize("entrance", ["learn", "simulate", "estimator"])
@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_classes_of_two_sites_that_are_likely_one_are_named(
    one: str, other: str, entrance: str, tmp_path: Any
) -> None:
    """No site sees that another one writes it in another way; such a model has one class more."""
    sites = [np.array(["x", name])[HALF] for name in (one, other)]

    def learned() -> Any:
        if entrance == "learn":
            return fs.learn([fs.fit(X, y, site=at) for y, at in zip(sites, "ab", strict=True)])
        if entrance == "simulate":
            pairs = [(X, y) for y in sites]
            return fs.simulate(pairs, output_dir=tmp_path, **QUICK).model
        x, y = np.concatenate([X, X]), np.concatenate(sites)
        return fs.FederatedClassifier(settings=QUICK).fit(x, y, sites=["a"] * N + ["b"] * N)

    with pytest.warns(UserWarning, match="likely one") as found:
        learned()
    assert all(repr(name) in str(found[0].message) for name in (one, other))


def test_units_of_privacy_are_patients_after_normalisation(monkeypatch: Any) -> None:
    """Two ways to write an ID were two units, each with its own share of the noise's protection."""
    from fedsurrogate.client_app.methods import job

    seen: list[Any] = []
    made = job.Job.__init__

    def spy(self: Any, *args: Any, **named: Any) -> None:
        made(self, *args, **named)
        seen.append(self.found.train.units)

    monkeypatch.setattr(job.Job, "__init__", spy)
    ids = ["P1", "P1 ", "P1\xa0", "\u200bP1", " P1", "p2"] * (N // 6)
    fs.fit(X, HALF, classes=[0, 1], patients=ids, **PRIVATE)
    assert set(seen[0]) == {"P1", "p2"}


ARRAYS: dict[str, Callable[[], Any]] = {
    "reversed": lambda: X[::-1][::-1],
    "negative strides": lambda: np.ascontiguousarray(X[:, ::-1])[:, ::-1],
    "Fortran": lambda: np.asfortranarray(X),
    "sparse": lambda: sparse.csr_matrix(X),
    "sparse array": lambda: sparse.coo_array(X),
    "sparse tensor": lambda: torch.tensor(X).to_sparse(),
    "sparse frame": lambda: pd.DataFrame(X).astype(pd.SparseDtype(float)),
    "objects": lambda: X.astype(object),
    "frame of objects": lambda: pd.DataFrame(X).astype(object),
    "nullable frame": lambda: pd.DataFrame(X).astype("Float64"),
    "mixed frame": lambda: pd.DataFrame(X).astype({0: "Float64", 1: "float32", 2: object}),
    "big endian": lambda: X.astype(">f8"),
    "a gradient": lambda: torch.tensor(X, requires_grad=True),
    "long double": lambda: X.astype(np.longdouble),
    "nested lists": lambda: X.tolist(),
    "a list of tensors": lambda: list(torch.tensor(X)),
    "decimals": lambda: np.array([[Decimal(str(v)) for v in row] for row in X.tolist()]),
    "read-only": lambda: np.frombuffer(X.tobytes()).reshape(X.shape),
    "a lazy minus": lambda: (torch.complex(torch.zeros(X.shape).double(), -torch.tensor(X)).conj().imag),
    "a compressed tensor": lambda: torch.tensor(X).to_sparse_coo().coalesce(),
    "a memory map": lambda: np.ndarray.view(X, np.memmap),
    "columns of columns": lambda: pd.DataFrame(X, columns=pd.MultiIndex.from_product([["a"], list("bcd")])),
    "one name for all columns": lambda: pd.DataFrame(X, columns=["a"] * 3, index=[0] * N),
    "a table of arrow": lambda: pa.table({f"{column}": X[:, column] for column in range(3)}),
    "an object with an array": lambda: Wrapped(X),
}  # fmt: skip


class Wrapped:
    """As arrays of other libraries are."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize("kind", ARRAYS)
def test_every_kind_of_array_is_the_same_features(kind: str, tmp_path: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fitted(ARRAYS[kind](), HALF)
    plain = fitted(X, HALF)
    assert np.allclose(model.predict_proba(ARRAYS[kind]()), plain.predict_proba(X), atol=1e-6)
    fs.simulate([(ARRAYS[kind](), HALF)], output_dir=tmp_path, **QUICK)


OF_ARRAYS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda x, folder: fs.fit(x, HALF),
    "simulate": lambda x, folder: fs.simulate([(x, HALF)], output_dir=folder),
    "predict": lambda x, folder: fitted(X, HALF).predict(x),
    "score": lambda x, folder: fitted(X, HALF).score(x, HALF),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "complex": (lambda: X + 1j, "complex"),
    "complex tensor": (lambda: torch.tensor(X) + 1j, "complex"),
    "complex objects": (lambda: (X + 1j).astype(object), "complex"),
    "text column": (lambda: pd.DataFrame(X).assign(sex="f"), "'sex'"),
    "categories": (lambda: pd.DataFrame(X).assign(sex=pd.Categorical(["f"] * N)), "'sex'"),
    "array of texts": (lambda: X.astype(str), "row 0"),
    "bytes": (lambda: X.astype("S8"), "row 0"),
    "dates": (lambda: X.astype("datetime64[s]"), "datetime64"),
    "a date column": (lambda: pd.DataFrame(X).assign(day=pd.Timestamp("2020-01-01")), "'day'"),
    "NA in a nullable frame": (
        lambda: pd.DataFrame(X).astype("Float64").mask(np.eye(N, 3, dtype=bool)),
        "row 0",
    ),
    "masked": (lambda: np.ma.array(X, mask=np.eye(N, 3, dtype=bool)), "row 0"),
    "None among objects": (lambda: np.where(np.eye(N, 3), None, X), "row 0"),
    "ragged": (lambda: [[1.0, 2.0], [1.0]] * (N // 2), "number of columns|shape"),
    "a dictionary": (lambda: {"x": X}, "shape|data set"),
    "None": (lambda: None, "shape|data set"),
    "structured": (lambda: np.zeros(N, dtype=[("a", float)]), "shape"),
    "no columns": (lambda: np.zeros((N, 0)), "shape"),
    "too large": (lambda: X * 1e300, "row 0"),
    "too small": (lambda: X * np.array([1, 1e-60, 1]), "column 1 has no number above"),
    "no data": (lambda: torch.empty(N, 3, device="meta"), "on meta"),
    "rows that come one by one": (lambda: (row for row in X), "object|data set|no image"),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("entrance", list(OF_ARRAYS))
def test_what_is_no_array_of_numbers_is_refused_with_what_is_accepted(
    kind: str, entrance: str, tmp_path: Any
) -> None:
    make, named = REFUSED[kind]
    with pytest.raises(DataError, match=named):
        OF_ARRAYS[entrance](make(), tmp_path)


@pytest.mark.parametrize("truth", [True, np.True_])
@pytest.mark.parametrize("other", [0, 0.0, np.int64(2)])
def test_truth_values_next_to_numbers_are_refused(truth: Any, other: Any) -> None:
    with pytest.raises(DataError, match="truth values and numbers, mixed"):
        fs.fit(X, [truth, other] * (N // 2))


anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.complex_numbers(),
    st.dates(),
    st.decimals(),
    st.lists(st.integers(), max_size=2),
    st.sampled_from(
        ["0", "0.0", "\udcff", "\ud800", "a,b", "9" * 5000, pd.NA, pd.NaT, np.ma.masked]
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(anything, min_size=N, max_size=N), st.booleans(), st.booleans())
def test_any_labels_and_patients_give_a_result_or_one_error(
    values: list[Any], plain: bool, as_patients: bool
) -> None:
    given_as = values if plain else _objects(values)
    settings = {"classes": [0, 1], "patients": given_as} if as_patients else {}
    try:
        made = fs.fit(X, HALF if as_patients else given_as, covariance="gram", **settings)
    except FedSurrogateError as error:
        refused = str(error)
    else:
        refused = ""
        assert made.records == N
    assert refused == " ".join(refused.split("\n"))
