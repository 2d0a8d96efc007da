"""Cells of tables: a cell of another type is never blank, truth values have one reading, and a table that
is not read is not passed over.
"""

from __future__ import annotations

import datetime as dt
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file
from sklearn.preprocessing import MultiLabelBinarizer
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load, read_schema
from fedsurrogate.client_app.datasets.tables import csv_header, number_in
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from tests import dicom_files

N = 8
KINDS = ("parquet", "imagefolder", "dicom")
TARGETS: dict[str, dict[str, Any]] = {
    "class": {},
    "labels": {"task": "multilabel", "label-columns": "label"},
    "number": {"task": "regression", "value-columns": "label", "target-range": "-5,500"},
    "time": {"task": "survival", "horizon": 5.0, "time-unit": "days", "time-column": "label"},
}


def write(folder: Path, kind: str, cells: Any, suffix: str = ".parquet") -> None:
    """N images, with cells of a column 'label'."""
    write_columns(folder, kind, {"label": cells, "event": [True] * N}, suffix)


def write_columns(folder: Path, kind: str, columns: dict[str, Any], suffix: str) -> None:
    images, names = [], []
    for number in range(len(next(iter(columns.values())))):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), dtype=np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        images.append(stream.getvalue())
        names.append(f"{number}.{'dcm' if kind == 'dicom' else 'png'}")
        if kind == "imagefolder":
            (folder / names[-1]).write_bytes(images[-1])
        if kind == "dicom":
            dicom_files.save(folder / names[-1], dicom_files.image(pixels, PatientID=f"P{number}"))
    columns = columns | ({"image": images} if kind == "parquet" else {"path": names})
    if suffix == ".parquet":
        pq.write_table(pa.table(columns), folder / "table.parquet")
    else:
        separator = "\t" if suffix == ".tsv" else ","
        pd.DataFrame(columns).to_csv(folder / f"table{suffix}", index=False, sep=separator)


def source(folder: Path, kind: Any, target: str) -> DataSource:
    run = parse_run({"method": "fedpft"} | TARGETS[target])
    return DataSource(kind, str(folder), target=run.target)


def read(folder: Path, kind: str, target: str) -> Dataset:
    return load(source(folder, kind, target), 0)


OTHERS: dict[str, Any] = {
    "duration": [dt.timedelta(days=row + 1) for row in range(N)],
    "date": [dt.date(2020, 1, row + 1) for row in range(N)],
    "timestamp": [dt.datetime(2020, 1, row + 1) for row in range(N)],
    "time": [dt.time(row) for row in range(N)],
    "list": [["edema", "mass"][: row % 3] for row in range(N)],
    "struct": [{"edema": 1}] * N,
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_column_of_another_type_is_refused_with_its_type(
    what: str, target: str, kind: str, tmp_path: Path
) -> None:
    write(tmp_path, kind, pa.array(OTHERS[what]))
    for ask in (
        lambda: read(tmp_path, kind, target),
        lambda: read_schema(source(tmp_path, kind, target)),
    ):
        with pytest.raises(DataError, match=f"'label'.*{what}.*; write") as error:
            ask()
    assert "2020" not in str(error.value)


LABELS = ["edema", "mass", "nodule"]
cells = st.none() | st.lists(st.sampled_from([*LABELS, " edema", "normal"]), max_size=4)


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=10)
@given(rows=st.lists(cells, min_size=N, max_size=N), large=st.booleans())
def test_a_column_of_lists_holds_the_labels_that_are_present(
    kind: str, private: bool, rows: list[list[str] | None], large: bool
) -> None:
    """As scikit-learn's MultiLabelBinarizer; without a list, a record is not annotated."""
    run = parse_run({"task": "multilabel", "label-columns": ",".join(LABELS)})
    texts = pa.large_list(pa.string()) if large else pa.list_(pa.string())
    known = [[text.strip() for text in row if text != "normal"] for row in rows if row is not None]
    wanted = np.full((N, len(LABELS)), np.nan)
    wanted[[row is not None for row in rows]] = MultiLabelBinarizer(classes=LABELS).fit_transform(
        known
    )
    with TemporaryDirectory() as place:
        write(Path(place), kind, pa.array(rows, texts))
        own = DataSource(kind, place, target=run.target, one_by_one=private)
        found = load(own, 0)
        assert read_schema(own) == (0, "")
        # Of a run of classes, and under another name, lists stay what they are: refused.
        for other in (replace(own, target=None), replace(own, label_column="other")):
            with pytest.raises(DataError, match=r"cells of type|lacks the columns 'edema'"):
                load(other, 0)
    assert found.values is not None
    assert np.array_equal(found.values.numpy(), wanted, equal_nan=True)


LISTS: dict[str, Any] = {
    "python": str,
    "json": json.dumps,
    "numpy": lambda row: str(np.array(row, dtype=object)),
    "blanks": lambda row: f" {row} ",
}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
@settings(deadline=None, max_examples=10)
@given(
    rows=st.lists(cells, min_size=N, max_size=N),
    written=st.sampled_from(sorted(LISTS)),
    suffix=st.sampled_from([".csv", ".tsv"]),
)
def test_texts_that_list_labels_are_such_lists(
    kind: str, private: bool, rows: list[list[str] | None], written: str, suffix: str
) -> None:
    run = parse_run({"task": "multilabel", "label-columns": ",".join(LABELS)})
    known = [[text.strip() for text in row if text != "normal"] for row in rows if row is not None]
    wanted = np.full((N, len(LABELS)), np.nan)
    wanted[[row is not None for row in rows]] = MultiLabelBinarizer(classes=LABELS).fit_transform(
        known
    )
    with TemporaryDirectory() as place:
        write(
            Path(place),
            kind,
            [r and LISTS[written](r) if r != [] else "[]" for r in rows],
            suffix,
        )
        own = DataSource(kind, place, target=run.target, one_by_one=private)
        found = load(own, 0)
        assert read_schema(own) == (0, "")
    assert found.values is not None
    assert np.array_equal(found.values.numpy(), wanted, equal_nan=True)


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
@pytest.mark.parametrize("cell", ["edema|mass", "[edema]", "edema", "['edema", "('edema',)"])
def test_a_text_that_is_no_list_of_labels_is_refused_and_in_a_private_run_left_out_alone(
    kind: str, cell: str, tmp_path: Path
) -> None:
    run = parse_run({"task": "multilabel", "label-columns": ",".join(LABELS)})
    write(tmp_path, kind, ["['mass']"] * (N - 1) + [cell], ".csv")
    own = DataSource(kind, str(tmp_path), target=run.target)
    with pytest.raises(
        DataError, match=r"hold no list of labels in 'label'.*write a column of 1 and 0"
    ):
        load(own, 0)
    found = load(replace(own, one_by_one=True), 0)
    assert found.values is not None
    assert found.values.tolist() == [[0.0, 1.0, 0.0]] * (N - 1)


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
@pytest.mark.parametrize("cell", ["['edema', 'mass']", '["edema"]', "['edema' 'mass']"])
def test_a_list_is_no_class(kind: str, cell: str, tmp_path: Path) -> None:
    write(tmp_path, kind, ["edema", "mass"] * (N // 2 - 1) + ["mass", cell], ".csv")
    own = DataSource(kind, str(tmp_path))
    with pytest.raises(
        DataError, match=r"hold a list of labels in 'label'.*write one class in a cell"
    ):
        load(own, 0)
    assert load(replace(own, one_by_one=True), 0).classes == ("edema", "mass")


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
def test_a_column_that_is_not_read_may_have_any_type(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, [1, 0] * 4)
    table = pq.read_table(tmp_path / "table.parquet")
    pq.write_table(
        table.append_column("seen", pa.array(OTHERS["date"])), tmp_path / "table.parquet"
    )
    assert len(read(tmp_path, kind, "labels")) == N


WRITTEN: dict[str, Any] = {
    "truth values": [True, False, None, True, False, True, False, True],
    "capitals": ["TRUE", "FALSE", "", "TRUE", "FALSE", "TRUE", "FALSE", "TRUE"],
    "texts": ["True", "False", None, "true", "false", "True", "False", " True "],
    "numbers": [1, 0, None, 1, 0, 1, 0, 1],
    "texts of numbers": ["1", "0", "", "1.0", "0", "1", "0.0", "1"],
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("suffix", [".csv", ".parquet", ".tsv"])
def test_truth_values_have_one_reading(
    written: str, kind: str, suffix: str, tmp_path: Path
) -> None:
    if kind == "parquet" and suffix != ".parquet":
        pytest.skip("images in the table")
    write(tmp_path, kind, WRITTEN[written], suffix)
    found = read(tmp_path, kind, "labels")
    assert found.values is not None
    wanted = np.array([[1], [0], [np.nan], [1], [0], [1], [0], [1]])
    assert np.array_equal(found.values.numpy(), wanted, equal_nan=True)


@settings(deadline=None, max_examples=20)
@given(st.integers(5, 60), st.sampled_from(["residuals", "cells"]), st.integers(0, 9))
def test_few_times_are_tested_too(count: int, head: str, seed: int) -> None:
    """Each cell of time and event has one or two records, of which a fifth is none."""
    random = np.random.default_rng(seed)
    flat = {"task": "survival", "time-column": "t", "event-column": "d", "horizon": 10.0}
    target = parse_run({**flat, "time-unit": "years", "time-head": head}).target
    with TemporaryDirectory() as folder:
        content = {
            "x": torch.from_numpy(random.normal(size=(count, 2))),
            "t": torch.linspace(0.1, 9.9, count),
            "d": torch.from_numpy(random.integers(0, 2, count)),
        }
        save_file(content, Path(folder) / "all.safetensors")
        found = load(DataSource("safetensors", folder, target=target), 0)
    assert 0 < (~found.is_train).sum() <= max(1, 0.4 * count)


@settings(deadline=None)
@given(st.text(st.sampled_from("0123456789_.,eE+-"), min_size=1, max_size=8))
@example("1_2")
@example("0E310")
def test_a_text_is_the_number_that_pandas_reads(text: str) -> None:
    found = number_in(text)
    try:
        wanted = float(pd.to_numeric(text))
    except (ValueError, TypeError):
        assert not found  # Nor does pandas read a zero with a large exponent.
        return
    assert found == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "labels.xlsx",
        "Labels.XLS",
        "labels.ods",
        "labels.csv.gz",
        "labels.feather",
        # As Hugging Face names classes beside folders of images, and as pandas compresses and stores.
        "metadata.jsonl",
        "labels.csv.bz2",
        "Labels.TSV.XZ",
        "labels.pkl",
        "labels.json.zst",
        "Labels.txt",
        "annotations.json",
    ],
)
@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
def test_a_table_that_is_not_read_is_not_passed_over(name: str, kind: str, tmp_path: Path) -> None:
    for year in ("2019", "2020"):
        (tmp_path / year).mkdir()
        write(tmp_path / year, kind, [1] * N)
        (tmp_path / year / "table.parquet").unlink()
    assert read(tmp_path, kind, "class").classes == ("2019", "2020")
    (tmp_path / name).write_bytes(b"PK\3\4")
    for ask in (
        lambda: read(tmp_path, kind, "class"),
        lambda: read_schema(source(tmp_path, kind, "class")),
    ):
        with pytest.raises(DataError, match=f"'{name}'.*CSV"):
            ask()
    # Of Office, while a table is open.
    (tmp_path / name).rename(tmp_path / f"~${name}")
    assert read(tmp_path, kind, "class").classes == ("2019", "2020")


column = st.text(st.sampled_from("ab ,;\t"), min_size=1, max_size=5).filter(
    lambda text: text.strip() == text
)


@settings(deadline=None)
@given(
    st.lists(column, min_size=2, max_size=5, unique=True),
    st.sampled_from(",;\t"),
    st.booleans(),
)
def test_what_lies_between_names_is_found_beside_other_signs_in_them(
    names: list[str], separator: str, quoted: bool
) -> None:
    others = {each: sum(name.count(each) for name in names) for each in ",;\t" if each != separator}
    if not quoted and (
        any(separator in name for name in names) or max(others.values()) >= len(names) - 1
    ):
        return
    shown = [f'"{name}"' if quoted else name for name in names]
    with TemporaryDirectory() as folder:
        file = Path(folder) / "t.csv"
        file.write_text(separator.join(shown) + "\n1\n")
        assert csv_header(file) == (names, separator)


Cells = list[tuple[Any, Any]]
KINDS_VALUES = ("imagefolder", "dicom", "parquet", "safetensors")
LABELS_VALUES: dict[str, Scalar] = {"task": "multilabel", "label-columns": "edema,nodule"}
NUMBER: dict[str, Scalar] = {
    "task": "regression",
    "value-columns": "edema,nodule",
    "target-range": "0,10",
}
nan = math.nan


def write_values(folder: Path, kind: str, cells: Cells) -> None:
    """Records with two columns, None for an empty cell."""
    columns = dict(zip(("edema", "nodule"), map(list, zip(*cells, strict=True)), strict=True))
    if kind != "safetensors":
        write_columns(folder, kind, columns, ".parquet" if kind == "parquet" else ".csv")
        return
    tensors = {
        name: torch.tensor([nan if cell is None else cell for cell in own]).double()
        for name, own in columns.items()
    }
    # A list of classes is nothing to a run of other targets.
    x = torch.randn(len(cells), 16)
    save_file({"x": x, **tensors}, folder / "f.safetensors", {"classes": "absent,present"})


def read_values(
    folder: Path, kind: Any, settings: dict[str, Scalar], one_by_one: bool = False
) -> Dataset:
    run = parse_run(settings)
    source = DataSource(
        kind,
        str(folder),
        classes=run.settings.classes,
        target=run.target,
        one_by_one=one_by_one,
        noisy=one_by_one,
        test_fraction=0.2,
    )
    return load(source, seed=0)


def rows_of(dataset: Dataset) -> list[list[float]]:
    assert isinstance(dataset.values, Tensor)
    return sorted(dataset.values.nan_to_num(nan=-1).tolist())


@pytest.mark.parametrize("kind", KINDS_VALUES)
def test_labels_are_read_with_their_gaps(kind: str, tmp_path: Path) -> None:
    write_values(tmp_path, kind, [(1, 0), (0, None), (None, 1), (1, 1)])
    found = read_values(tmp_path, kind, LABELS_VALUES)
    assert rows_of(found) == [[-1, 1], [0, -1], [1, 0], [1, 1]]
    assert len(found) == 4
    assert (found.labels == 0).all()


@pytest.mark.parametrize("kind", KINDS_VALUES)
@pytest.mark.parametrize("bad", [(2, 1), (0.5, 0)])
def test_a_value_that_no_label_has_is_refused_and_under_privacy_left_out(
    kind: str, bad: tuple[float, float], tmp_path: Path
) -> None:
    # One type for each column, as parquet has it.
    write_values(tmp_path, kind, [(1.0, 0.0), (float(bad[0]), float(bad[1])), (0.0, 1.0)])
    with pytest.raises(DataError, match="not 1, 0 or empty"):
        read_values(tmp_path, kind, LABELS_VALUES)
    left = read_values(tmp_path, kind, LABELS_VALUES, one_by_one=True)
    assert rows_of(left) == [[0, 1], [1, 0]]
    assert left.report.lost == 1


@pytest.mark.parametrize("kind", KINDS_VALUES)
def test_a_missing_number_is_refused_and_under_privacy_left_out(kind: str, tmp_path: Path) -> None:
    write_values(tmp_path, kind, [(1.5, 2.0), (None, 3.0), (4.0, 25.0)])
    with pytest.raises(DataError, match="no value"):
        read_values(tmp_path, kind, NUMBER)
    left = read_values(tmp_path, kind, NUMBER, one_by_one=True)
    assert rows_of(left) == [[1.5, 2.0], [4.0, 25.0]]


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
def test_a_text_is_no_number(kind: str, tmp_path: Path) -> None:
    write_values(tmp_path, kind, [(1, 2), ("mild", 3), (4, 5)])
    with pytest.raises(DataError, match="no number in 'edema', such as line 3"):
        read_values(tmp_path, kind, NUMBER)
    assert len(read_values(tmp_path, kind, NUMBER, one_by_one=True)) == 2


def test_values_beyond_the_range_are_warned_of(tmp_path: Path) -> None:
    write_values(tmp_path, "imagefolder", [(1, 2), (40, 3), (4, 5)])
    found = read_values(tmp_path, "imagefolder", NUMBER)
    assert any("'edema'" in text and "33.3%" in text for text in found.report.warnings)


def test_a_folder_of_classes_has_no_values(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "0.png")
    for kind in ("imagefolder", "dicom"):
        with pytest.raises(DataError, match="needs one"):
            read_values(tmp_path, kind, LABELS_VALUES)
