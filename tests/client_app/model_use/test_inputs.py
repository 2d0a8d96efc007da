"""Which images are answered, and in which bags: by plain lists over generated folders and tables."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.common.errors import DataError

PATHS = st.sampled_from(["1.png", "2.JPG", "a/1.png", "a/2.tiff", "b/c/1.webp"])
CELLS = st.sampled_from(["p", "q", "07"])
# A column that names bags, each image alone, or a model of single images.
BAGS = st.sampled_from([None, "", "study"])


def written(folder: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    with (folder / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(PATHS, CELLS, CELLS), min_size=1, max_size=7),
    patients=st.sampled_from(["", "who"]),
    bag=BAGS,
)
def test_a_table_names_each_image_once_with_its_patient_and_bag(
    rows: list[tuple[str, str, str]], patients: str, bag: str | None
) -> None:
    given_columns = [1] * bool(patients) + [2] * bool(bag)
    facts: dict[str, tuple[str, ...]] = {}
    torn = None
    for number, row in enumerate(rows, 2):
        own = tuple(row[at] for at in given_columns)
        if facts.setdefault(row[0], own) != own and torn is None:
            torn = number
    with TemporaryDirectory() as name:
        written(Path(name), ["path", "who", "study"], rows)
        if torn:
            with pytest.raises(DataError, match=rf"line {torn} of .* again"):
                find_inputs(name, patient_column=patients, bag_column=bag)
            return
        found = find_inputs(name, patient_column=patients, bag_column=bag)
    assert list(found.names) == list(facts)
    assert not found.dicom
    assert found.columns == ({"patient": [own[0] for own in facts.values()]} if patients else {})
    wanted = {None: None, "": list(facts), "study": [own[-1] for own in facts.values() if own]}[bag]
    assert (None if found.bags is None else list(found.bags)) == wanted


@settings(max_examples=40, deadline=None)
@given(
    good=st.integers(0, 3),
    bad=st.sampled_from(["/a.png", "../a.png", "a/../../b.png", ""]),
    gap=st.booleans(),
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(good: int, bad: str, gap: bool) -> None:
    """Also after rows that name an image again."""
    rows = [["1.png", "s"]] * good + ([["2.png", " "]] if gap else [[bad, "s"]])
    with TemporaryDirectory() as name:
        written(Path(name), ["path", "study"], rows)
        message = "has no study" if gap else "has no path inside"
        with pytest.raises(DataError, match=rf"line {good + 2} of .* {message}"):
            find_inputs(name, bag_column="study")
        if gap:
            assert len(find_inputs(name)) == 1 + bool(good)


@settings(max_examples=40, deadline=None)
@given(
    files=st.sets(PATHS, min_size=1),
    others=st.sets(st.sampled_from(["notes.txt", "a/x.docx", "README"])),
    bag=st.sampled_from([None, "", "folder", "study"]),
)
def test_images_of_a_folder_are_all_files_that_are_named_so(
    files: set[str], others: set[str], bag: str | None
) -> None:
    with TemporaryDirectory() as name:
        for each in files | others:
            (Path(name) / each).parent.mkdir(parents=True, exist_ok=True)
            (Path(name) / each).write_bytes(b"content")
        if bag == "study":
            with pytest.raises(DataError, match="no table"):
                find_inputs(name, bag_column=bag)
            return
        found = find_inputs(name, bag_column=bag)
    assert list(found.names) == sorted(files)
    folders = [str(Path(each).parent) if "/" in each else each for each in sorted(files)]
    wanted = {None: None, "": sorted(files), "folder": folders}[bag]
    assert (None if found.bags is None else list(found.bags)) == wanted
    rows, members = found.in_bags()
    in_bags: dict[str, list[int]] = {}
    for at, each in enumerate(wanted or sorted(files)):
        in_bags.setdefault(each, []).append(at)
    assert (list(rows.names), members) == (list(in_bags), list(in_bags.values()))
    assert rows.columns == {"images": [str(len(own)) for own in in_bags.values()]}


@pytest.mark.parametrize("kind", ["auto", "imagefolder", "dicom"])
def test_a_folder_without_images_is_refused_by_what_it_has(tmp_path: Path, kind: str) -> None:
    (tmp_path / "notes.txt").write_text("none")
    wanted = "no images in .*notes" if kind == "imagefolder" else "no DICOM image among 1 files"
    with pytest.raises(DataError, match=wanted):
        find_inputs(str(tmp_path), kind)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no such folder"):
        find_inputs(str(tmp_path / "none"), kind)  # type: ignore[arg-type]


def test_bags_of_one_name_are_told_apart_by_their_patients(tmp_path: Path) -> None:
    written(
        tmp_path,
        ["path", "who", "study"],
        [
            ["1.png", "p", "left"],
            ["2.png", "q", "left"],
            ["3.png", "p", "left"],
            ["4.png", "q", "x"],
        ],
    )
    rows, members = find_inputs(str(tmp_path), patient_column="who", bag_column="study").in_bags()
    assert list(rows.names) == ["left (p)", "left (q)", "x"]
    assert members == [[0, 2], [1], [3]]
    assert rows.columns == {"images": ["2", "1", "1"], "patient": ["p", "q", "q"]}
