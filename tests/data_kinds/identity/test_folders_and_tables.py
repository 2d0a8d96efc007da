"""What lies next to the records: images that no table names, folders that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.client_app.datasets.dataset import Dataset
from fedsurrogate.common.identity import likely_one
from tests.data_kinds.identity.sources import csv_source, folders, read


def losses(found: Dataset, why: str) -> list[tuple[int, str]]:
    return [(loss.count, loss.why) for loss in found.left_out if why in loss.why]


@pytest.mark.parametrize("name", ["found", "found.1000", "tmp", "thumb", "recycling", "a@tmp"])
def test_a_class_with_a_like_name_stays(name: str, tmp_path: Path) -> None:
    folders(tmp_path, {"a": 2, name: 2})
    assert set(read("imagefolder", tmp_path).classes) == {"a", name}


@pytest.mark.parametrize(
    "end", ["\0", "\u200e", "\u200f", "\u202c", "\u00ad", "\u2069", "\u200d", "\u00a0", "\ufeff"]
)
def test_a_character_that_cannot_be_seen_makes_no_other_patient_and_no_other_class(
    end: str, tmp_path: Path
) -> None:
    """Exports from right to left, fixed widths and the clipboard leave them at the ends of cells."""
    labels = [each + end * (number % 2) for number, each in enumerate("aabbaabb")]
    patients = [f"{end * (number % 2)}P{number // 2}" for number in range(8)]
    csv_source(tmp_path, {"label": labels, "patient": patients})
    found = read("imagefolder", tmp_path, patient_column="patient")
    assert set(found.classes) == {"a", "b"}
    assert set(found.patients or ()) == {"P0", "P1", "P2", "P3"}


@pytest.mark.parametrize(("one", "other"), [("7", "007"), ("0", "00"), ("12", "0012")])
def test_numbers_that_differ_by_zeros_in_front_are_likely_one(
    one: str, other: str, tmp_path: Path
) -> None:
    """A spreadsheet drops the zeros of one export, and not of the other."""
    csv_source(tmp_path, {"label": ["a", "b"] * 4, "patient": [one, other] * 4})
    found = read("imagefolder", tmp_path, patient_column="patient")
    assert set(found.patients or ()) == {one, other}
    assert any("zeros in front" in each for each in found.warnings)
    assert likely_one(["10", "1", "100"]) == []


@pytest.mark.parametrize("short", ["1.2E+11", "1E+05", "1,23E+11", "1.20e+11"])
def test_patients_that_a_spreadsheet_has_rounded_are_odd(short: str, tmp_path: Path) -> None:
    patients = [short, short, "120000000000", "12e4", "P1", "P2"]
    csv_source(tmp_path, {"label": ["a", "b"] * 3, "patient": patients})
    found = read("imagefolder", tmp_path, patient_column="patient")
    (line,) = (line for line in found.warnings if "short form of spreadsheets" in line)
    assert line.startswith("1 patient IDs")
    assert short not in line.replace("such as 1.2E+11", "")
