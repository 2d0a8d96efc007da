"""Patients of `site predict --by-patient`: whose an image is, and how a patient is decided."""

from __future__ import annotations

import csv
import logging
from pathlib import Path

import pytest
from PIL import Image

from fedsurrogate.client_app.model_use.calibration import Calibration
from fedsurrogate.client_app.model_use.inputs import find_inputs
from fedsurrogate.client_app.model_use.prediction import Predictor, by_patient, predict
from fedsurrogate.common.backbones.backbones import load_backbone
from tests.attacks.sites.test_hostile_names import model_of
from tests.data_kinds.images.corpus import LEVELS
from tests.data_kinds.images.predictions import predicted
from tests.dicom_files import image, save


def patients(folder: Path, home: Path) -> list[dict[str, str]]:
    """The rows of --by-patient."""
    predicted(folder, home / "p.csv")
    found = by_patient(home / "p.csv", home / "patients.csv", Calibration(), ("a", "b", "c"))
    rows = list(csv.DictReader((home / "patients.csv").open(encoding="utf-8", newline="")))
    assert len(rows) == found
    return rows


@pytest.mark.parametrize(
    ("images", "wanted"),
    [
        # (patient, issuer) of each image -> (patient, issuer, images).
        ([("P", "A"), ("P", "B")], [("P", "A", 1), ("P", "B", 1)]),
        ([("P", "A"), ("P", "A")], [("P", "A", 2)]),
        ([("P", "A"), ("P", "")], [("P", "A", 2)]),
        ([("P", ""), ("P", "A"), ("P", "B")], [("P", "", 1), ("P", "A", 1), ("P", "B", 1)]),
        ([("P", ""), ("P", "")], [("P", "", 2)]),
        ([("", ""), ("", ""), ("Q", "")], [("Q", "", 1)]),
        ([("", "A"), (" ", "A"), ("Q", "A")], [("Q", "A", 1)]),
        ([("P ", "A "), ("P", "A")], [("P", "A", 2)]),
    ],
)
def test_the_issuer_is_part_of_a_patient_and_no_id_is_no_patient(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    images: list[tuple[str, str]],
    wanted: list[tuple[str, str, int]],
) -> None:
    for number, (patient, issuer) in enumerate(images):
        tags = {"PatientID": patient, "IssuerOfPatientID": issuer}
        save(tmp_path / "new" / f"{number}", image(LEVELS, **tags))
    caplog.set_level(logging.WARNING)
    rows = patients(tmp_path / "new", tmp_path)
    found = [(row["patient"], row["issuer"], int(row["images"])) for row in rows]
    assert sorted(found) == sorted(wanted)
    nameless = sum(not patient.strip() for patient, _ in images)
    assert (f"{nameless} images have no patient ID" in caplog.text) == (nameless > 0)


@pytest.mark.parametrize("gap", ["", " ", "\t", '" "'])
def test_gaps_of_a_table_are_no_patient(tmp_path: Path, gap: str) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    for number in range(4):
        Image.fromarray(LEVELS).save(folder / f"{number}.png")
    lines = [f"0.png,{gap}", f"1.png,{gap}", "2.png,P", "3.png,P "]
    (folder / "list.csv").write_text("path,who\n" + "\n".join(lines) + "\n")
    signed = model_of(["a", "b", "c"])
    inputs = find_inputs(str(folder), "auto", "who")
    predictor, out = Predictor(signed.classifier, Calibration()), tmp_path / "p.csv"
    predict(signed, predictor, inputs, load_backbone("pixels", image_size=8), out)
    assert by_patient(out, tmp_path / "patients.csv", Calibration(), ("a", "b", "c")) == 1
    (row,) = csv.DictReader((tmp_path / "patients.csv").open())
    assert (row["patient"], row["images"]) == ("P", "2")


@pytest.mark.parametrize("apart", [1e-7, 1e-8, 1e-10, -1e-7, 0])
def test_a_patient_of_one_image_is_decided_as_that_image(tmp_path: Path, apart: float) -> None:
    """However near the threshold is to the probability."""
    save(tmp_path / "new" / "x", image(LEVELS))
    (row,) = predicted(tmp_path / "new", tmp_path / "p.csv")
    for name in "abc":
        threshold = float(row[f"p_{name}"]) + apart
        calibration = Calibration(threshold=threshold, positive=name)
        signed, home = model_of(["a", "b", "c"]), tmp_path / name
        home.mkdir()
        predictor = Predictor(signed.classifier, calibration)
        inputs = find_inputs(str(tmp_path / "new"))
        predict(signed, predictor, inputs, load_backbone("pixels", image_size=8), home / "p.csv")
        by_patient(home / "p.csv", home / "q.csv", calibration, ("a", "b", "c"))
        (one,) = csv.DictReader((home / "p.csv").open())
        (together,) = csv.DictReader((home / "q.csv").open())
        assert together["decision"] == one["decision"]
        assert (one["decision"] == name) == (apart <= 0)
