"""Parts of the readers, each against a count of its own: files of features, columns, names and remarks."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.datasets.feature_files import read_safetensors
from fedsurrogate.client_app.datasets.left_out import (
    LeftOut,
    warnings_of_data,
)
from fedsurrogate.client_app.datasets.readers import content_key, split_files
from fedsurrogate.client_app.datasets.source import some
from fedsurrogate.client_app.datasets.tables import name_or_blank, names_in
from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import DataError

SHAPES = ((3, 4), (3, 4), (3, 4), (3, 5), (2, 4), (0, 4), (3,), (3, 2, 2))
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
X = st.one_of(
    st.sampled_from(SHAPES).map(torch.ones),
    st.sampled_from((*FLOATS, torch.int64, torch.bool)).map(lambda k: torch.ones(3, 4, dtype=k)),
)
COLUMN = st.one_of(
    st.sampled_from([0, 2, 3, 3, 3, 3]).map(lambda size: torch.arange(size) % 2),
    st.sampled_from(
        (
            torch.int32,
            torch.int16,
            torch.int8,
            torch.uint8,
            torch.bool,
            *FLOATS[:2],
            torch.complex64,
        )
    ).map(lambda kind: torch.zeros(3, dtype=kind)),
    st.just(torch.zeros(3, 1, dtype=torch.int64)),
)
FILE = st.fixed_dictionaries({"x": X, "y": COLUMN}, optional={"who": COLUMN, "slide": COLUMN})


def usable(column: Any, rows: int) -> bool:
    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return column.ndim == 1 and column.dtype in whole and len(column) == rows


@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(FILE, min_size=1, max_size=2),
    prints=st.tuples(*[st.sampled_from(["a", "a", "b"])] * 2),
    patients=st.booleans(),
    bags=st.booleans(),
    names=st.sampled_from(["", "cat,dog", "dog"]),
)
def test_files_of_features_are_records_or_are_refused(
    files: list[dict[str, Any]],
    prints: tuple[str, str],
    patients: bool,
    bags: bool,
    names: str,
) -> None:
    wanted = [name for name, there in (("who", patients), ("slide", bags)) if there]
    with TemporaryDirectory() as place:
        folder = Path(place)
        ends = ("-train", "-test") if len(files) == 2 else ("",)
        for end, content, own in zip(ends, files, prints, strict=False):
            cloned = {name: each.clone() for name, each in content.items()}
            metadata = {"fingerprint": own, **({"classes": names} if names else {})}
            save_file(cloned, folder / f"own{end}.safetensors", metadata)

        def read() -> Any:
            source = DataSource(
                "safetensors",
                place,
                patient_column="who" if patients else "",
                bags="slide" if bags else None,
            )
            return read_safetensors(source, "own", LeftOut())

        whole = all({"x", "y", *wanted} <= each.keys() for each in files)
        whole = whole and all(
            each["x"].ndim == 2
            and each["x"].is_floating_point()
            and all(usable(each[name], len(each["x"])) for name in ("y", *wanted))
            for each in files
        )
        whole = whole and len({each["x"].shape[1] for each in files}) == 1
        whole = whole and len(set(prints[: len(files)])) == 1
        labels = [int(each) for file in files for each in file["y"].flatten().real.tolist()]
        classes = tuple(name for name in names.split(",") if name)
        whole = whole and (not classes or max(labels, default=0) < len(classes))
        if not whole:
            with pytest.raises(DataError):
                read()
            return
        found = read()
    assert found.labels == [classes[label] if classes else str(label) for label in labels]
    assert found.classes == (classes or None)
    assert torch.equal(found.features.float(), torch.cat([each["x"].float() for each in files]))
    assert found.fingerprint == prints[0]
    owners = {
        name: tuple(str(each) for file in files for each in file[name].tolist()) for name in wanted
    }
    assert found.patients == owners.get("who")
    assert found.bags == owners.get("slide")
    sizes = [len(each["y"]) for each in files]
    split = None if len(files) == 1 else [True] * sizes[0] + [False] * sizes[1]
    assert (None if found.is_train is None else found.is_train.tolist()) == split


def test_a_key_changes_with_place_name_size_and_time(tmp_path: Path) -> None:
    for name in ("a", "b", "a b"):
        (tmp_path / name).write_text("xy")
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    other = tmp_path / "other"
    other.mkdir()
    (other / "a").write_text("xy")
    os.utime(other / "a", ns=(10**18, 10**18))

    def key(*names: str, root: Path = tmp_path) -> str:
        return content_key(root, [root / name for name in names])

    first = key("a", "b")
    assert first == key("a", "b")
    keys = {first, key("b", "a"), key("a"), key("b"), key(), key("a b"), key("a", root=other)}
    keys.add(key("a", "gone"))
    assert len(keys) == 8
    os.utime(tmp_path / "a", ns=(10**18, 10**18 + 1))
    keys.add(key("a", "b"))
    (tmp_path / "a").write_text("xyz")
    os.utime(tmp_path / "a", ns=(10**18, 10**18 + 1))
    keys.add(key("a", "b"))
    assert len(keys) == 10
    # A name that holds the separators is no two names.
    assert key("b\nc") != key("b", "c")
    assert key("nul\0") != key("nul")


@settings(max_examples=80, deadline=None)
@given(
    there=st.sets(st.sampled_from(["train", "test", "own", "own-train", "own-test", "other"])),
    name=st.sampled_from(["", "own", "own.parquet", "gone"]),
)
def test_a_data_set_is_one_file_or_two_halves(there: set[str], name: str) -> None:
    with TemporaryDirectory() as place:
        folder = Path(place)
        for each in there:
            (folder / f"{each}.parquet").write_text("")
        (folder / "folder.csv").mkdir()
        stem = name.removesuffix(".parquet")
        halves = [f"{stem}-train", f"{stem}-test"] if stem else ["train", "test"]
        alone = [stem] if stem in there else [] if stem else sorted(there)
        if set(halves) <= there:
            expected = halves
        elif len(alone) == 1:
            expected = alone
        else:
            with pytest.raises(DataError) as error:
                split_files(folder, name, ".parquet")
            wanted = f"'{halves[0]}.parquet' and '{halves[1]}.parquet', or one "
            wanted += f"'{stem}.parquet'" if stem else ".parquet file"
            listed = sorted([*(f"{each}.parquet" for each in there), "folder.csv"])
            assert str(error.value) == (
                f"dataset = {name!r}: '{folder}' lacks {wanted}; it has {some(listed)}; name one of "
                "its data sets"
            )
            return
        assert split_files(folder, name, ".parquet") == [
            folder / f"{each}.parquet" for each in expected
        ]


FEATURES = {"info": {"features": {"label": {"names": ["cat", "dog"]}, "other": 3, "none": {}}}}


@pytest.mark.parametrize("column", ["label", "other", "none", "gone"])
@pytest.mark.parametrize(
    "text", [None, b"", b"{", b"[]", b"3", b"null", b"{}", json.dumps(FEATURES).encode()]
)
def test_classes_that_hugging_face_declares(
    tmp_path: Path, text: bytes | None, column: str
) -> None:
    """Whatever stands there: other metadata declare none."""
    table = pa.table({"scan": [b"1", b"2"], column: [0, 1]})
    schema = table.schema.with_metadata({"other": "{}"} if text is None else {"huggingface": text})
    pq.write_table(table.cast(schema), tmp_path / "own.parquet")
    found = load(DataSource("parquet", str(tmp_path), label_column=column), 0)
    whole = text is not None and len(text) > 9 and column == "label"
    assert found.classes == (("cat", "dog") if whole else ("0", "1"))


# Some are equal and have other names: a truth value and a number, numbers of single and double precision.
NUMBERS = {"1": [1, 1.0, np.int64(1), np.int32(1)], "True": [True, np.bool_(True)]}
NUMBERS |= {"0.1": [np.float32(0.1)], "0.10000000149011612": [0.10000000149011612]}
CELLS = st.sampled_from(["cat", " cat", "", "n/a", None, math.nan, 1j, object(), "None"])
CELLS |= st.sampled_from([np.str_("cat"), *itertools.chain(*NUMBERS.values())])


@settings(max_examples=150)
@given(cells=st.lists(CELLS, max_size=7), known=st.booleans(), one_by_one=st.booleans())
def test_each_row_has_its_own_name_or_none(cells: list[Any], known: bool, one_by_one: bool) -> None:
    def named(cell: Any) -> str | None:
        if isinstance(cell, str):
            text = cell.strip()
            return None if text in ("", "n/a") or (text == "None" and not known) else text
        return next(
            (name for name, own in NUMBERS.items() if any(cell is each for each in own)), None
        )

    odd = [at for at, cell in enumerate(cells) if type(cell) in (complex, object)]
    kinds = Counter(type(cells[at]).__name__ for at in odd)
    gaps = [at for at, cell in enumerate(cells) if at not in odd and named(cell) is None]
    left, names = LeftOut(one_by_one), ["None"] if known else []
    if (odd or gaps) and not one_by_one:
        with pytest.raises(DataError) as error:
            names_in(cells, "class", left, names)
        if gaps:
            words = (
                f"{len(gaps)} of {len(cells)} records have no class, such as row {gaps[0] + 1}; "
            )
            assert str(error.value) == f"{words}fill it in, or remove them"
        return
    found = names_in(cells, "class", left, names)
    assert found == tuple("" if at in odd else named(cell) or "" for at, cell in enumerate(cells))
    assert left.rows == {*odd, *gaps}
    expected = []
    if gaps:
        words = f"{len(gaps)} of {len(cells)} records have no class, such as row {gaps[0] + 1}; "
        expected.append(Loss(f"{words}fill it in, or remove them", len(gaps)))
    for kind, count in kinds.items():
        first = next(at for at in odd if type(cells[at]).__name__ == kind)
        words = (
            f"{count} of {len(cells)} records have a value of type {kind} as class, such as row "
        )
        expected.append(Loss(f"{words}{first + 1}; correct it", count))
    assert left.reasons == expected
    assert [name_or_blank(cell, names) for cell in cells] == list(found)


def test_bytes_that_are_no_text_are_a_name_only_where_records_are_left_out_one_by_one() -> None:
    assert names_in(["a\udcff"], "class", LeftOut(one_by_one=True)) == ("a\udcff",)
    with pytest.raises(DataError, match=r"1 of 2 records have a text that is not UTF-8 as class"):
        names_in(["b", "a\udcff"], "class", LeftOut())


@settings(max_examples=150)
@given(
    rows=st.lists(
        st.tuples(
            st.integers(0, 6), st.booleans(), st.sampled_from(["P1", "p1", "1E+11", "2E+11", "x"])
        ),
        max_size=9,
    ),
    classes=st.integers(1, 7),
    patients=st.booleans(),
    others=st.sampled_from([(), ("A",), ("Z",)]),
)
def test_warnings_of_classes_and_patients(
    rows: list[tuple[int, bool, str]], classes: int, patients: bool, others: tuple[str, ...]
) -> None:
    rows = [row for row in rows if row[0] < classes]
    names = tuple("abcdefg"[:classes])
    labels = torch.tensor([label for label, _, _ in rows], dtype=torch.int64)
    is_train = torch.tensor([part for _, part, _ in rows], dtype=torch.bool)
    owners = [who for *_, who in rows] if patients else None
    expected = []
    if "A" in others:
        expected.append(
            "the classes 'A', 'a' are likely one; they differ only by case, blanks or zeros in front"
        )
    there = {label for label, *_ in rows}
    if len(there) == 1 and classes > 1:
        expected.append(f"all records are of one class, {names[min(there)]!r}")
    if absent := [name for at, name in enumerate(names) if at not in there]:
        more = ", ..." if len(absent) > 5 else ""
        expected.append(f"no record of {', '.join(map(repr, absent[:5]))}{more}")
    if patients:
        both = {who for _, part, who in rows if part} & {who for _, part, who in rows if not part}
        if both:
            expected.append(f"{len(both)} patients have records in both training and test")
        if short := sum(who.endswith("E+11") for who in {who for *_, who in rows}):
            expected.append(
                f"{short} patient IDs are numbers in the short form of spreadsheets, such as "
                "1.2E+11: several patients may have become one; export them as text"
            )
        if {"P1", "p1"} <= {who for *_, who in rows}:
            expected.append(
                "1 pairs or more of patient IDs differ only by case, blanks or zeros in front"
            )
    assert warnings_of_data(labels, names, is_train, owners, others) == expected
