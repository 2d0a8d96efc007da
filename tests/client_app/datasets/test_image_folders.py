"""Folders of images and tables next to them, of files that nothing opens: classes, parts of a split, and
what a person is asked to correct.
"""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.image_folders import (
    find_table,
    find_tables,
    in_class_folders,
    read_imagefolder,
)
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.datasets.source import DataSource
from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import DataError


def make(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def read(root: Path, name: str = "", one_by_one: bool = False, **more: Any) -> Records:
    source = DataSource("imagefolder", str(root), **more)
    return read_imagefolder(source, name, LeftOut(one_by_one))


def shown(records: Records, root: Path) -> list[tuple[str, str]]:
    assert records.place is not None
    places = [records.place(at) for at in range(len(records.labels))]
    return [
        (str(Path(at).relative_to(root)), k) for at, k in zip(places, records.labels, strict=True)
    ]


def test_a_folder_is_a_class_and_parts_of_a_split_are_none(tmp_path: Path) -> None:
    files = ("a/1.png", "b/deep/2.PNG", "b/3.jpg", "0/4.tif")
    root = make(tmp_path / "plain", *files, "5.png", "a/notes.txt")
    found = read(root)
    assert shown(found, root) == [
        ("0/4.tif", "0"),
        ("a/1.png", "a"),
        ("b/3.jpg", "b"),
        ("b/deep/2.PNG", "b"),
    ]
    assert (found.is_train, found.bags, found.origin, found.patients) == (None, None, None, None)
    assert sorted(each.count for each in found.left_out) == [1, 1]
    halves = [f"{part}/{name}" for part in ("train", "test") for name in files[:2]]
    root = make(tmp_path / "split", *halves, "other/6.png")
    found = read(root)
    assert shown(found, root) == [(name, name.split("/")[1]) for name in halves]
    assert found.is_train is not None
    assert found.is_train.tolist() == [True, True, False, False]


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        ((), {"train/a/1.png": True, "test/b/2.png": False, "c/3.png": True}),
        (("train",), {"test/b/2.png": False, "c/3.png": True, "train/a/1.png": True}),
    ],
)
def test_under_noise_a_files_own_path_decides(
    tmp_path: Path, classes: tuple[str, ...], expected: dict[str, bool]
) -> None:
    root = make(tmp_path, *expected)
    source = DataSource("imagefolder", str(root), noisy=True, classes=classes)
    png, left = lambda path: path.suffix == ".png", LeftOut(one_by_one=True)
    files, is_train = in_class_folders(root, png, left, source)
    assert is_train is not None
    found = {
        str(path.relative_to(root)): train
        for (path, _), train in zip(files, is_train.tolist(), strict=True)
    }
    assert found == expected
    names = {str(path.relative_to(root)): name for path, name in files}
    assert names["train/a/1.png"] == ("train" if classes else "a")
    assert (names["test/b/2.png"], names["c/3.png"]) == ("b", "c")
    # A missing part of the split is no fault.
    (root / "test" / "b" / "2.png").unlink()
    (root / "test" / "b").rmdir()
    (root / "test").rmdir()
    assert len(in_class_folders(root, png, left, source)[0]) == 2


@pytest.mark.parametrize(
    ("names", "classes", "bags", "why"),
    [
        (("train/a/1.png", "val/a/2.png"), (), None, "the folders 'train', 'val' in 'ROOT' are parts"),
        (("Train/a/1.png",), (), None, "set data-dir to 'ROOT/Train', which is then split here"),
        (("train/a/1.png", "val/a/2.png"), (), None, "not classes; name them 'train' and 'test'"),
        (("train/1.png", "val/2.png"), ("val",), None, ""),
        (("all/a/1.png", "all/b/2.png"), (), None, "all images in 'ROOT' are in folders inside 'all'"),
        (("all/a/1.png", "all/b/2.png"), (), "folder", ""),
        (("all/a/1.png", "all/a/2.png"), (), None, ""),
        (("all/a/1.png", "all/b/2.png", "all/3.png"), (), None, ""),
        (("all/a/1.png", "all/b/2.png"), ("all",), None, ""),
        (("all/a/1.png", "more/b/2.png"), (), None, ""),
    ],
)  # fmt: skip
def test_folders_that_are_no_classes_are_named(
    tmp_path: Path, names: tuple[str, ...], classes: tuple[str, ...], bags: str | None, why: str
) -> None:
    root = make(tmp_path, *names)
    if why:
        with pytest.raises(DataError, match=re.escape(why.replace("ROOT", str(root)))):
            read(root, bags=bags, classes=classes)
        odd = read(root, one_by_one=True, bags=bags, classes=classes).warnings
        assert why.replace("ROOT", str(root)) in odd[0]
    else:
        assert read(root, bags=bags, classes=classes).warnings == ()


def test_a_folder_without_images_is_refused_by_what_it_has(tmp_path: Path) -> None:
    root = make(tmp_path, "a/notes.txt")
    with pytest.raises(
        DataError, match=r"has no images in class folders; it has .*'path' and 'lab"
    ):
        read(root)
    assert read(root, one_by_one=True).labels == []
    make(root, "a/1.png")
    for more in ({"site_column": "ward"}, {"patient_column": "id"}):
        with pytest.raises(
            DataError, match="has no table with columns; put one next to the images"
        ):
            read(root, **more)
    dicom = root / "a" / "2"
    flat = root.with_name("flat")
    flat.mkdir()
    (flat / "IM1").write_bytes(bytes(128) + b"DICM")
    with pytest.raises(DataError, match="has 'IM1'; set data to 'dicom' for DICOM files, or make"):
        read(flat)
    dicom.write_bytes(bytes(128) + b"DICM")
    wanted = f"1 files in the class folders are DICOM, such as '{dicom}'; set data to 'dicom'"
    with pytest.raises(DataError, match=re.escape(wanted)):
        read(root)
    found = read(root, one_by_one=True)
    assert shown(found, root) == [("a/1.png", "a")]
    assert sum(each.count for each in found.left_out) == 2


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_split_is_train_and_test(tmp_path: Path, one_by_one: bool) -> None:
    parts = [" train", "test", "test ", "val", "1", "", "Train"]
    names = [f"{at}.png" for at in range(len(parts))]
    rows = (f"{name},a,v,8,{part}" for name, part in zip(names, parts, strict=True))
    root = table(make(tmp_path, *names), *rows)
    if not one_by_one:
        with pytest.raises(
            DataError, match=r"column 'split' of .* holds .*; allowed are 'train' and"
        ):
            read(root)
        return
    found = read(root, one_by_one=True)
    assert found.is_train is not None
    assert found.is_train.tolist() == [True, False, False]


HEADER = "path,label,ward,person,split\n"


def table(root: Path, *rows: str) -> Path:
    (root / "t.csv").write_text(HEADER + "\n".join(rows) + "\n")
    return root


def test_a_table_says_label_site_patient_and_part_of_each_file(tmp_path: Path) -> None:
    root = table(
        make(tmp_path, "1.png", "d/2.png", "3.png"), "d/2.png,b,w,007,test", "1.png,a,v,8,train"
    )
    found = read(root, site_column="ward", patient_column="person")
    assert shown(found, root) == [("d/2.png", "b"), ("1.png", "a")]
    assert (found.origin, found.patients) == (("w", "v"), ("007", "8"))
    assert found.is_train is not None
    assert found.is_train.tolist() == [False, True]
    why = f"1 images are not in the table '{root / 't.csv'}', such as '{root / '3.png'}'"
    assert found.left_out == (Loss(why, 1),)
    # With another table, it may name the others.
    make(root, "u.csv")
    assert read(root, "t", site_column="ward", patient_column="person").left_out == ()


@pytest.mark.parametrize(
    ("rows", "why", "kept"),
    [
        (["1.png,a,v,8,train", ",b,v,8,train"], "1 rows of 'T' have no path, such as line 3; fill", 1),
        (["../1.png,a,v,8,train", "1.png,a,v,8,train"], "line 2 of 'T': path '../1.png' leaves", 1),
        (["/1.png,a,v,8,train", "1.png,a,v,8,train"], "line 2 of 'T': path '/1.png' leaves", 1),
        (["1.png,a,v,8,train", "1.png,a,v,9,train"], "line 2 and line 3 of 'T' name the same image but", 2),
        (["1.png,a,v,8,train", "1.png,a,v,8,test"], "line 2 and line 3 of 'T' name the same image but", 2),
        (["2.png,a,v,8,train"], "none of the 1 files in 'T' exists, such as 'ROOT/2.png'", 1),
        (["1.png,,v,8,train"], "1 of 1 records have no label ('label' of 'T'), such as line 2", 0),
        (["1.png,a,,8,train"], "1 of 1 records have no site ('ward' of 'T'), such as line 2", 0),
        (["1.png,a,v,,train"], "1 of 1 records have no patient ID", 0),
    ],
)  # fmt: skip
def test_a_row_that_cannot_be_right_is_named_or_left_out(
    tmp_path: Path, rows: list[str], why: str, kept: int
) -> None:
    root = table(make(tmp_path, "1.png"), *rows)
    wanted = re.escape(why.replace("'T'", f"'{root / 't.csv'}'").replace("ROOT", str(root)))
    with pytest.raises(DataError, match=f"^{wanted}"):
        read(root, site_column="ward", patient_column="person")
    found = read(root, one_by_one=True, site_column="ward", patient_column="person")
    assert len(found.labels) == kept


# Tables, and what is none: another file, a system's copy, a folder named like a table.
TABLES = ["a.csv", "b.parquet", "b.CSV", "c.d.csv"]
OTHERS = ["a.txt", "notes", ".a.csv", "~$a.csv"]
FILES = st.sets(st.sampled_from(TABLES + OTHERS))


def fill(folder: Path, files: set[str], folders: set[str]) -> None:
    folder.mkdir(exist_ok=True)
    for name in files:
        (folder / name).write_text("x")
    for name in folders:
        (folder / name).mkdir()


@settings(max_examples=120, deadline=None)
@given(
    files=FILES,
    inside=FILES,
    has_folder=st.booleans(),
    name=st.sampled_from(["", "a", "b", "a.csv", "c.d", "b.CSV", "sub", "none"]),
)
def test_a_name_means_a_folder_inside_or_one_table(
    files: set[str], inside: set[str], has_folder: bool, name: str
) -> None:
    with TemporaryDirectory() as given_folder:
        root = Path(given_folder)
        fill(root, files, {"sub", "z.csv"} if has_folder else {"z.csv"})
        if has_folder:
            fill(root / "sub", inside, set())
        folder, tables = root, [each for each in sorted(files) if each in TABLES]
        assert [each.name for each in find_tables(root)] == tables
        if name == "sub" and has_folder:
            folder, tables = root / "sub", [each for each in sorted(inside) if each in TABLES]
        elif name:
            exact = [each for each in (name, f"{name}.csv", f"{name}.parquet") if each in files]
            tables = exact or [each for each in tables if Path(each).stem == name]
            if not tables:
                with pytest.raises(DataError, match="no such sub-folder or table"):
                    find_table(root, name)
                return
        if len(tables) > 1:
            with pytest.raises(DataError, match="several tables"):
                find_table(root, name)
            return
        assert find_table(root, name) == (folder, folder / tables[0] if tables else None)
