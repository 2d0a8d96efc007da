"""Columns are matched by name, never by position, wherever they come in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import fedsurrogate as fs
from fedsurrogate.common.backbones.backbone_names import with_columns
from fedsurrogate.common.errors import DataError, FedSurrogateError
from fedsurrogate.strategies.base.identifications import Identification, settle

N = 120
NAMES = ("age", "bmi", "heart rate", "\xe9l\xe9vation")
Y = np.arange(N) % 2
X = np.random.default_rng(0).normal(size=(N, 4)) + Y[:, None] * np.array([4.0, -3.0, 0.0, 0.0])
HALVES = (slice(None, N // 2), slice(N // 2, None))
orders = st.permutations(range(4))
# Of a data frame, and of what else has names of columns.
TABLES: dict[str, Any] = {
    "pandas": lambda frame: frame,
    "pyarrow": pa.Table.from_pandas,
    "objects": lambda frame: frame.astype(object),
    "nullable": lambda frame: frame.convert_dtypes(),
    "blanks at the ends": lambda frame: frame.rename(columns=lambda name: f" {name} "),
}


def table(order: Any, rows: slice = slice(None), kind: str = "pandas") -> Any:
    frame = pd.DataFrame(X[rows], columns=NAMES).iloc[:, list(order)]
    return TABLES[kind](frame)


def fitted(tables: Sequence[Any], ys: Sequence[Any] = (Y, Y), **settings: Any) -> list[Any]:
    """What two sites send of the halves of these tables and targets."""
    each = zip(HALVES, tables, ys, "ab", strict=True)
    return [fs.fit(x[rows], y[rows], site=name, **settings) for rows, x, y, name in each]


@hypothesis_settings(deadline=None, max_examples=15)
@given(orders, orders, orders, st.sampled_from(sorted(TABLES)))
def test_the_order_of_columns_at_a_site_or_in_a_question_changes_nothing(
    first: list[int], second: list[int], asked: list[int], kind: str
) -> None:
    sites = [
        fs.fit(table(order, rows, kind), Y[rows], site=name)
        for order, rows, name in zip((first, second), HALVES, "ab", strict=True)
    ]
    model, wanted = fs.learn(sites), fs.learn(fitted([table(range(4))] * 2))
    oracle = wanted.predict_proba(table(range(4)))
    assert np.array_equal(model.predict_proba(table(asked, kind=kind)), oracle)
    assert model.score(table(asked), Y) > 0.9


@hypothesis_settings(deadline=None, max_examples=10)
@given(st.permutations(range(4)))
def test_whole_numbers_as_names_are_names(order: list[int]) -> None:
    frame = pd.DataFrame(X)
    model = fs.learn(fitted([frame, frame.iloc[:, order]]))
    # Numbers 0 to d - 1 in their order are an array.
    assert model.score(X, Y) == model.score(frame.iloc[:, order], Y) > 0.9


SECURE = {"secure_aggregation": True, "classes": "0,1"}
PRIVATE = {"epsilon": 20.0, "delta": 1e-3, "noise_seed": 1}
RUNS: dict[str, dict[str, Any]] = {
    "once": {},
    "in rounds": {"method": "fedavg"},
    "secure aggregation": SECURE,
    "secure aggregation in rounds": SECURE | {"method": "fedavg"},
    "one noise for all": SECURE | PRIVATE,
}


@pytest.mark.parametrize("run", RUNS)
def test_a_simulation_reads_every_site_and_test_records_by_name(run: str, tmp_path: Path) -> None:
    own = RUNS[run]
    orders = ([3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 1, 0])
    sites = [(table(order, rows), Y[rows]) for order, rows in zip(orders, HALVES, strict=False)]
    found = fs.simulate(sites, test=(table(orders[2]) + 1e-3, Y), output_dir=tmp_path, **own)
    assert found.accuracy > 0.9
    assert found.model.score(table([1, 0, 3, 2]), Y) > 0.9
    other = (table(orders[0]).rename(columns={"bmi": "weight"}), Y)
    with pytest.raises(DataError, match=r"'weight'.*'bmi'"):
        fs.simulate([*sites, other], output_dir=tmp_path, **own)


def test_names_stay_with_a_surrogate_and_a_model_in_a_file(tmp_path: Path) -> None:
    sent = fitted([table([3, 2, 1, 0]), table([1, 0, 3, 2])])
    read = [fs.load(each.save(tmp_path / f"{each.site}.pb"), fs.Surrogate) for each in sent]
    file = fs.learn(read).save(tmp_path / "m.safetensors")
    assert fs.load(file, fs.Model).score(table([2, 0, 3, 1]), Y) > 0.9


OTHERS: dict[str, Any] = {
    "an array": X,
    "a tensor": torch.from_numpy(X),
    "another name": table(range(4)).rename(columns={"bmi": "weight"}),
    "one column less": table([0, 1, 2]),
    "one column more": table(range(4)).assign(weight=1.0),
    "a name twice": table(range(4)).set_axis(["age", "age", "bmi", "weight"], axis=1),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("entrance", ["predict", "predict_proba", "score", "learn"])
def test_other_columns_are_refused_with_both_lists(kind: str, entrance: str) -> None:
    own, other = fs.fit(table(range(4)), Y, site="a"), OTHERS[kind]
    model = fs.learn([own])

    def ask() -> Any:
        if entrance == "learn":
            return fs.learn([own, fs.fit(other, Y, site="b")])
        return model.score(other, Y) if entrance == "score" else getattr(model, entrance)(other)

    with pytest.raises(FedSurrogateError, match="column") as error:
        ask()
    if kind in ("another name", "one column less", "one column more"):
        assert "'age'" in str(error.value)
        assert "'bmi'" in str(error.value)


def test_a_model_of_an_array_takes_no_frame_with_names() -> None:
    with pytest.raises(DataError, match="to_numpy"):
        fs.learn([fs.fit(X, Y)]).predict(table(range(4)))


@hypothesis_settings(deadline=None, max_examples=10)
@given(orders, orders)
def test_files_of_features_are_read_by_their_names(train: list[int], test: list[int]) -> None:
    from tempfile import TemporaryDirectory

    from fedsurrogate.client_app.datasets.dataset import DataSource, load, read_schema

    with TemporaryDirectory() as folder:
        for part, order, rows in (("train", train, HALVES[0]), ("test", test, HALVES[1])):
            content = {
                "x": torch.from_numpy(X[rows][:, order]).contiguous(),
                "y": torch.from_numpy(Y[rows]),
            }
            names = json.dumps([NAMES[at] for at in order])
            save_file(content, Path(folder) / f"{part}.safetensors", {"columns": names})
        source = DataSource("safetensors", folder)
        found = load(source, 0)
        assert read_schema(source)[1] == found.fingerprint
    assert found.features is not None
    assert np.array_equal(found.features.numpy(), X[:, np.argsort(np.array(NAMES))])


@pytest.mark.parametrize(
    "columns", ["age,bmi", '["age"]', '["a", "a", "b", "c"]', '{"a": 1}', "[1, 2, 3, 4]"]
)
def test_broken_names_of_a_file_are_refused(columns: str, tmp_path: Path) -> None:
    from fedsurrogate.client_app.datasets.dataset import DataSource, load

    save_file(
        {"x": torch.from_numpy(X), "y": torch.from_numpy(Y)},
        tmp_path / "f.safetensors",
        {"columns": columns},
    )
    with pytest.raises(DataError, match="column"):
        load(DataSource("safetensors", str(tmp_path)), 0)


# Targets by name: settings, values of a frame, and what a model scores.
TIMES = np.exp(-X[:, 0] / 4) + 0.1
TARGETS: dict[str, tuple[dict[str, Any], Any]] = {
    "labels": ({"task": "multilabel"}, pd.DataFrame({"edema": Y, "mass": 1 - Y})),
    "nullable labels": (
        {"task": "multilabel"},
        pd.DataFrame({"edema": Y, "mass": 1 - Y}).astype("boolean").mask(X[:, :2] > 6),
    ),
    "numbers": (
        {"task": "regression", "target_range": "-20,20"},
        pd.DataFrame({"dose": X[:, 0], "score": -X[:, 1] * 2}),
    ),
    "times": (
        {"task": "survival", "time_unit": "days", "horizon": 3.0},
        pd.DataFrame({"time": TIMES, "event": np.ones(N, int)}),
    ),
    "named times": (
        {
            "task": "survival",
            "time_unit": "days",
            "horizon": 3.0,
            "time_column": "days",
            "event_column": "died",
        },
        pd.DataFrame({"days": TIMES, "died": np.ones(N, bool)}),
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_columns_of_a_target_are_matched_by_name(kind: str, tmp_path: Path) -> None:
    settings, frame = TARGETS[kind]
    swapped = frame.iloc[:, ::-1]
    sites = [(X[HALVES[0]], frame[HALVES[0]]), (X[HALVES[1]], swapped[HALVES[1]])]
    found = fs.simulate(sites, test=(X + 1e-3, swapped), output_dir=tmp_path, **settings)
    plain = [(x, y[list(frame)]) for x, y in sites]
    straight = fs.simulate(plain, test=(X + 1e-3, frame), output_dir=tmp_path, **settings)
    for output, own in straight.metric_values.items():
        assert found.metric_values[output] == pytest.approx(own, nan_ok=True)
    assert found.model.score(X, swapped) == pytest.approx(straight.model.score(X, frame))
    assert found.model.score(X, frame) > 0.6
    if kind != "times":
        renamed = swapped.rename(columns={frame.columns[0]: "other"})
        with pytest.raises(DataError, match="'other'"):
            found.model.score(X, renamed.astype(object))


@pytest.mark.parametrize("blank", ["", " ", "\ufeff"])
@pytest.mark.parametrize("kind", [kind for kind in TARGETS if "times" not in kind])
def test_sites_with_other_orders_of_targets_fit_each_other(kind: str, blank: str) -> None:
    settings, frame = TARGETS[kind]
    swapped = frame.iloc[:, ::-1].rename(columns=lambda name: blank + name)
    straight, turned = (
        fs.learn(fitted([X, X], ys, **settings)) for ys in ((frame, frame), (swapped, frame))
    )
    assert list(turned.classes_) == list(straight.classes_) == sorted(frame)
    assert np.array_equal(turned.predict(X), straight.predict(X))


def test_an_order_that_settings_give_stays(tmp_path: Path) -> None:
    """Each column has its own range, by position."""
    frame = TARGETS["numbers"][1]
    settings = {"task": "regression", "target_range": "-40,40; -20,20"}
    sent = fs.fit(X, frame.iloc[:, ::-1], **settings)
    assert dict(sent.config.settings.flat())["value-columns"] == "score,dose"
    frame, two = TARGETS["labels"][1], []
    for site, order in (("a", ["edema", "mass"]), ("b", ["mass", "edema"])):
        two.append(fs.fit(X, frame[order], site=site, task="multilabel", label_columns=order))
    with pytest.raises(FedSurrogateError, match=r"label-columns = 'mass,edema'.*'edema,mass'"):
        fs.learn(two)


@pytest.mark.parametrize(
    ("key", "first", "second"),
    [
        ("classes", [0, 1], [1, 0]),
        ("time-unit", "days", "years"),
        ("horizon", 3.0, 4.0),
        ("epsilon", 4.0, 8.0),
        ("fedpft.rank", 1, 2),
    ],
)
def test_surrogates_of_other_settings_are_refused_by_the_name_of_the_setting(
    key: str, first: Any, second: Any
) -> None:
    times = key in ("time-unit", "horizon")
    settings: dict[str, Any] = {"classes": [0, 1]} | ({"delta": 1e-5} if key == "epsilon" else {})
    if times:
        settings = {"task": "survival", "time_unit": "days", "horizon": 3.0}
    y = TARGETS["times"][1] if times else Y
    name = key.rpartition(".")[2].replace("-", "_")
    sent = [
        fs.fit(X, y, site=site, **(settings | {name: value}))
        for site, value in (("a", first), ("b", second))
    ]
    with pytest.raises(FedSurrogateError, match=f"'b': {key} = .*same settings"):
        fs.learn(sent)


@pytest.mark.parametrize("other", [["age", "weight"], ["bmi"], []])
def test_before_a_sum_a_site_with_other_columns_is_refused_with_both_lists(
    other: list[str],
) -> None:
    """A sum shows no site's columns, so they are compared as sites identify themselves."""
    identified = {
        node: Identification(str(node), with_columns("f", names), 2, ("0", "1"), "", False)
        for node, names in enumerate([["age", "bmi"], ["age", "bmi"], other])
    }
    group, refused = settle(identified, ("0", "1"), "")
    assert list(group.nodes) == ["0", "1"]
    assert list(refused) == [2]
    assert "'age', 'bmi'" in refused[2]
    assert all(repr(name) in refused[2] for name in other)
