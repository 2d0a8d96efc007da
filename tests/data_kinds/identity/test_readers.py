"""Names in tables, folders and DICOM files: one identity, gaps refused or counted, tables of other
programs read or explained, and folders of systems left out.
"""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import ImageFolder

from fedsurrogate.client_app.datasets.dataset import DataSource, load, read_schema
from fedsurrogate.common.errors import DataError, FedSurrogateError
from fedsurrogate.common.identity import likely_one, name_of, normal
from fedsurrogate.common.run import parse_run
from tests.data_kinds.identity.sources import (
    PRIVATE,
    WRITERS,
    classes_of,
    csv_source,
    folders,
    picture,
    pictures,
    read,
)

BLANKS = [" ", "\t", "\xa0", "\u3000", "\u200b", "\ufeff", "\u2009"]
NA = sorted(pd._libs.parsers.STR_NA_VALUES - {""})
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(st.text(max_size=12))
def test_the_normal_form_is_nfc_without_blanks_at_the_ends_and_is_its_own(text: str) -> None:
    made = normal(text)
    assert normal(made) == made == unicodedata.normalize("NFC", made)
    assert made == normal(unicodedata.normalize("NFD", text))
    assert all(made == normal(f"{blank}{text}{blank}") for blank in BLANKS)
    assert made in unicodedata.normalize("NFC", text)
    assert made == made.strip()


@QUICK
@given(st.lists(st.text(max_size=6), max_size=8))
def test_names_that_are_likely_one_are_different_and_fold_alike(names: list[str]) -> None:
    found = likely_one(map(normal, names))
    assert all(len(group) == len(set(group)) > 1 for group in found)
    folded = {name for group in found for name in group}
    for name in map(normal, names):
        twins = {each for each in map(normal, names) if each.casefold() == name.casefold()}
        assert len(twins) == 1 or twins <= folded


def test_a_missing_value_is_what_pandas_takes_for_one() -> None:
    assert all(name_of(text) is None for text in NA)
    assert all(name_of(text, [text]) == text for text in NA)
    assert all(name_of(f" {text} ") is None for text in FAILED)


# What Excel and LibreOffice save for a formula that fails.
FAILED = ("#REF!", "#VALUE!", "#DIV/0!", "#NAME?", "#NULL!", "#NUM!", "#N/A")


@pytest.mark.parametrize("writer", WRITERS)
def test_one_class_and_one_patient_have_one_name_in_every_reader(
    writer: str, tmp_path: Path
) -> None:
    kind, write = WRITERS[writer]
    nfd = unicodedata.normalize("NFD", "café")
    labels = ["café", nfd, " café", "café\u3000", "\u200bcafé", "0", "0.0", " 0 ", "0\xa0", "0.00"]
    ids = ["P1", "P1 ", "P1\t", "\xa0P1", "\u200bP1", "7", "7.0", " 7", "7\u3000", "7"]
    write(tmp_path, {"label": labels, "who": ids, "hospital": ids})
    found = read(kind, tmp_path, patient_column="who", site_column="hospital")
    assert classes_of(found) == ["café"] * 5 + ["0"] * 5
    assert found.patients == found.origin == ("P1",) * 5 + ("7",) * 5
    assert not {found.is_train[0].item()} ^ set(found.is_train[:5].tolist())
    private = read(kind, tmp_path, patient_column="who", classes=("0", "café"), **PRIVATE)
    assert (len(private), set(private.patients or ())) == (10, {"P1", "7"})


def test_folders_have_the_classes_of_tables(tmp_path: Path) -> None:
    nfd = unicodedata.normalize("NFD", "café")
    folders(tmp_path, {"café": 2, nfd: 2, " café": 2, "café\u3000": 2, "0": 2, "0.0": 2, "None": 2})
    found = read("imagefolder", tmp_path)
    assert sorted(classes_of(found)) == ["0"] * 4 + ["None"] * 2 + ["café"] * 8
    run = parse_run({"classes": f"{nfd},0.0, None ", "label-column": f" {nfd}"})
    assert run.settings.classes == ("café", "0", "None")
    assert run.settings.label_column == "café"
    assert len(read("imagefolder", tmp_path, classes=run.settings.classes, **PRIVATE)) == 14


@pytest.mark.parametrize("classes", ["a,a ", "café,cafe\u0301", "0,0.0"])
def test_settings_that_name_a_class_twice_are_refused(classes: str) -> None:
    with pytest.raises(FedSurrogateError, match="stands twice"):
        parse_run({"classes": classes})


def test_names_that_differ_by_case_are_reported_as_likely_one(tmp_path: Path) -> None:
    csv_source(tmp_path, {"label": ["Nevus", "nevus", "mel", "No finding", "no  finding"] * 2})
    found = read("imagefolder", tmp_path, classes=("Nevus", "mel", "absent"))
    odd = " ".join(found.warnings)
    assert "'Nevus', 'nevus'" in odd
    assert "'No finding', 'no  finding'" in odd
    assert "no record of 'absent'" in odd


MISSING = [None, "", " ", "\u3000", "\u200b", *NA]


@pytest.mark.parametrize("what", ["label", "who"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_gap_is_refused_with_its_row_and_in_a_private_run_left_out_alone(
    writer: str, what: str, tmp_path: Path
) -> None:
    kind, write = WRITERS[writer]
    for number, gap in enumerate(MISSING if writer == "table" else MISSING[:8]):
        columns: dict[str, list[Any]] = {"label": ["a", "b"] * 3, "who": [*"123456"]}
        columns[what][3] = gap
        folder = tmp_path / str(number)
        write(folder, columns)
        with pytest.raises(DataError, match=r"\b(row 4|line 5|no patient ID)\b"):
            read(kind, folder, patient_column="who")
        found = read(kind, folder, patient_column="who", classes=("a", "b"), **PRIVATE)
        assert len(found) == 5
        assert sum(loss.count for loss in found.left_out) == 1


def test_a_class_called_none_is_one_where_the_run_names_it(tmp_path: Path) -> None:
    csv_source(tmp_path, {"label": ["None", "a"] * 3})
    found = read("imagefolder", tmp_path, classes=("None", "a"), **PRIVATE)
    assert sorted(classes_of(found)) == ["None"] * 3 + ["a"] * 3


TABLES: dict[str, dict[str, Any]] = {
    "comma": {},
    "semicolon": {"sep": ";"},
    "tab": {"sep": "\t"},
    "byte order mark": {"encoding": "utf-8-sig"},
    "semicolon and mark": {"sep": ";", "encoding": "utf-8-sig"},
    "upper case ending": {"file": "labels.CSV"},
    "mixed case ending": {"file": "Labels.Csv"},
    "Windows lines": {"lineterminator": "\r\n"},
}


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("form", TABLES)
def test_tables_of_other_programs_are_read(form: str, private: bool, tmp_path: Path) -> None:
    csv_source(
        tmp_path, {" label ": ["é", "b"] * 3, "who ": [1.0, None, 2, 3, 4, 5]}, **TABLES[form]
    )
    more = PRIVATE if private else {}
    read_schema(DataSource("imagefolder", str(tmp_path), patient_column="who", **more))
    found = read("imagefolder", tmp_path, classes=("é", "b"), **more)
    assert classes_of(found) == ["é", "b"] * 3


SYSTEM = [
    *('__MACOSX', '@eaDir', '$RECYCLE.BIN', 'lost+found', '.Trash', '.ipynb_checkpoints', '#recycle'),
    *('System Volume Information', 'x.png', 'scan.JPEG', '.git', '@Recycle'),
    *('__MACOSX ', '@__thumb', '@tmp', '~snapshot', 'FOUND.000', 'found.012', '$AV_ASW'),
    *('$WinREAgent', '_vti_cnf', 'TheVolumeSettingsFolder', 'Recycler\u200b'),
]  # fmt: skip


@pytest.mark.parametrize("place", ["class", "below", "split"])
@pytest.mark.parametrize("private", [False, True])
def test_folders_of_systems_are_left_out_and_counted(
    place: str, private: bool, tmp_path: Path
) -> None:
    tops = ["train/", "test/"] if place == "split" else [""]
    for top in tops:
        folders(tmp_path / top, {"a": 3, "b": 3})
        for name in SYSTEM:
            inside = tmp_path / top / ("a/" if place == "below" else "") / name
            inside.mkdir()
            (inside / "0.png").write_bytes(picture(77))
        for name in ("._x.png", ".DS_Store", "~$labels.csv", ".hidden.png", "Thumbs.db"):
            (tmp_path / top / "b" / name).write_bytes(picture(78))
    found = read("imagefolder", tmp_path, classes=("a", "b"), **(PRIVATE if private else {}))
    assert found.classes == ("a", "b")
    losses = {
        loss.why.split(", such as")[0].split(" ", 1)[1]: loss.count for loss in found.left_out
    }
    assert losses["folders of systems"] == (len(SYSTEM) - 2) * len(tops)
    assert losses["folders with the name of a file"] == 2 * len(tops)
    assert losses["files of systems"] == 5 * len(tops)


@pytest.mark.parametrize("links", ["inside", "two levels", "outside", "file"])
def test_linked_folders_below_a_class_are_read_as_torchvision_reads_them(
    links: str, tmp_path: Path
) -> None:
    root = tmp_path / "data"
    folders(root, {"a": 3, "b": 3})
    folders(tmp_path / "store", {"more": 4}, first=100)
    if links == "file":
        (root / "a" / "link.png").symlink_to(tmp_path / "store" / "more" / "100.png")
    else:
        place = root / "a" / "deep" if links == "two levels" else root / "a"
        place.mkdir(exist_ok=True)
        (place / "link").symlink_to(tmp_path / "store" / ("more" if links == "inside" else ""))
    found = read("imagefolder", root)
    oracle = ImageFolder(str(root)).samples
    assert sorted(map(found.where, range(len(found)))) == sorted(path for path, _ in oracle)


@pytest.mark.parametrize("target", [".", "..", "../../data", "../b", "../b/back"])
def test_a_loop_of_links_ends_and_is_counted(target: str, tmp_path: Path) -> None:
    root = tmp_path / "data"
    folders(root, {"a": 3, "b": 3})
    (root / "a" / "loop").symlink_to(target)
    (root / "b" / "back").symlink_to("..")
    found = read("imagefolder", root)
    read_files = {Path(found.where(i)).name for i in range(len(found))}
    assert read_files == {f"{number}.png" for number in range(6)}
    assert any("lead back" in loss.why for loss in found.left_out)
    if target != "../b" and target != "../b/back":
        # No class has the images of another one through a folder above both.
        assert sorted(classes_of(found)) == ["a"] * 3 + ["b"] * 3


def test_patients_in_both_parts_of_a_given_split_and_copies_are_odd(tmp_path: Path) -> None:
    split = ["train", "train", "test ", "train", "test", "test"]
    csv_source(tmp_path, {"label": [*"abaabb"], "who": [*"112345"], "split": split})
    (tmp_path / "3.png").write_bytes(picture(0))
    (tmp_path / "5.png").write_bytes(picture(1))
    found = read("imagefolder", tmp_path, patient_column="who")
    assert "1 records are copies of others in the same part" in " ".join(found.warnings)
    assert "1 test records are copies of training" in found.left_out[0].why
    (tmp_path / "labels.csv").write_text(
        (tmp_path / "labels.csv").read_text().replace("a,2,test", "a,1,test")
    )
    assert "1 patients have records in both" in " ".join(
        read("imagefolder", tmp_path, patient_column="who").warnings
    )


cells = st.one_of(
    st.text(max_size=10).map(lambda text: text.encode(errors="surrogatepass")),
    st.binary(max_size=10),
    st.sampled_from([b"a", b"0.0", b" ", b"\xff", b'"', b"\0", b"a;b", b"x" * 70000, b"1e999"]),
)


@QUICK
@given(st.lists(st.tuples(cells, cells), min_size=1, max_size=4), st.booleans(), cells)
def test_any_bytes_in_a_csv_table_give_records_or_one_error(
    tmp_path_factory: Any, rows: list[tuple[bytes, bytes]], private: bool, header: bytes
) -> None:
    folder = tmp_path_factory.mktemp("table")
    names = pictures(folder, len(rows))
    lines = [b"path,label,who" + (b"," + header if len(header) % 2 else b"")]
    lines += [name.encode() + b"," + b",".join(row) for name, row in zip(names, rows, strict=True)]
    (folder / "t.csv").write_bytes(b"\n".join(lines))
    more = PRIVATE | {"classes": ("a", "b")} if private else {}
    try:
        found = read("imagefolder", folder, patient_column="who", **more)
    except FedSurrogateError:
        return
    assert len(found) <= len(rows)
    assert all(name == normal(name) != "" for name in found.classes)


@QUICK
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.text(max_size=8),
            st.sampled_from(["nan", "\u200b", "9" * 5000, "0.0", "a"]),
        ),
        min_size=2,
        max_size=4,
    ),
    st.sampled_from(sorted(set(WRITERS) - {"dicom", "table"})),
    st.booleans(),
)
def test_any_text_in_parquet_cells_gives_records_or_one_error(
    tmp_path_factory: Any, values: list[str | None], writer: str, private: bool
) -> None:
    kind, write = WRITERS[writer]
    folder = tmp_path_factory.mktemp("parquet")
    values = [None if each is None else each.encode(errors="ignore").decode() for each in values]
    write(folder, {"label": values, "who": values[::-1]})
    more = PRIVATE | {"classes": ("a", "b")} if private else {}
    try:
        found = read(kind, folder, patient_column="who", **more)
    except FedSurrogateError:
        return
    assert not set(found.patients or ()) & {"", "nan", "None"}


@QUICK
@given(st.lists(st.binary(min_size=1, max_size=12), min_size=1, max_size=5), st.booleans())
def test_any_bytes_as_names_of_folders_and_files_give_records_or_one_error(
    tmp_path_factory: Any, names: list[bytes], private: bool
) -> None:
    root = tmp_path_factory.mktemp("folders")
    for name in [*names, b"a"]:
        clean = os.fsdecode(name.replace(b"/", b"").replace(b"\0", b""))
        for place in (root / clean, root / "a" / clean):
            if clean.strip("."):
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{clean[:4]}.png").write_bytes(picture(len(clean)))
    more = PRIVATE | {"classes": ("a", "b")} if private else {}
    try:
        found = read("imagefolder", root, **more)
    except FedSurrogateError:
        return
    assert "a" in found.classes
    assert all(loss.why.isprintable() or loss.why for loss in found.left_out)


@pytest.mark.parametrize("name", ["a ", "\u3000a", "e\u0301", "A", "1.0", "train "])
@pytest.mark.parametrize("inside", [("",), ("x", "y"), ("train/x",)])
def test_one_class_folder_of_any_name_is_read_where_records_are_left_out_alone(
    tmp_path: Path, name: str, inside: tuple[str, ...]
) -> None:
    """It once ended the reading of all: no part of its path was the class by its normal form."""
    for below in inside:
        folder = tmp_path / name / below
        folder.mkdir(parents=True)
        for number in range(2):
            Image.new("L", (4, 4), number).save(folder / f"{number}.png")
    source = DataSource("imagefolder", str(tmp_path), classes=("b",), one_by_one=True, noisy=True)
    assert len(load(source, seed=0)) == 0
