"""Folders of drawn chest X-rays for several hospitals, with tables of what is known of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import csv_text
from fedsurrogate.server_app.sample_data.chest import FINDINGS, Chest, xray

NAMES = ("north", "south", "east", "west")
# How often findings are there, before the differences between hospitals.
FREQUENCY = {
    "Atelectasis": 0.20,
    "Cardiomegaly": 0.20,
    "Effusion": 0.25,
    "Infiltration": 0.25,
    "Mass": 0.12,
    "Nodule": 0.15,
    "Pneumonia": 0.30,
    "Pneumothorax": 0.12,
    "Consolidation": 0.12,
    "Edema": 0.12,
    "Emphysema": 0.10,
    "Fibrosis": 0.10,
    "Pleural_Thickening": 0.10,
    "Hernia": 0.06,
}
# Logarithms of the factors by which findings raise the hazard of the event.
HAZARD = {"Mass": 1.2, "Edema": 0.9, "Effusion": 0.8, "Emphysema": 0.9, "Cardiomegaly": 0.6}
YEARLY, LONGEST = 0.10, 8.0
TESTED = 0.2
NOTICE = "Drawn by fedsurrogate. No patient is in this picture."
COLUMNS = (
    *("path", "hospital", "patient", "split", "label"),
    *FINDINGS,
    *("cardiothoracic_ratio", "years", "event"),
)


@dataclass(frozen=True)
class Patient:
    """A patient, with what is true of all pictures.

    Attributes:
        name: of the patient.
        chest: the body.
        findings: what the pictures show.
        years: to the event, or to the end of observation.
        event: whether the event was seen.
        split: train or test.
    """

    name: str
    chest: Chest
    findings: frozenset[str]
    years: float
    event: bool
    split: str


def write_xrays(
    folder: Path, hospitals: int = 4, images: int = 400, seed: int = 0, pixels: int = 64
) -> list[str]:
    """Draw the pictures of several hospitals, and those of new patients.

    Every hospital has 1 to 3 pictures of each patient, its own device, findings of its own
    frequency, and with three hospitals or more some findings that it did not annotate.

    Args:
        folder: that is made: `hospitals/NAME` with `table.csv` for each, `hospitals/table.csv` for
            all, and `new` with a table of all findings.
        hospitals: their number.
        images: of each hospital; of new patients half as many.
        seed: of the pictures.
        pixels: height and width.

    Returns:
        Names of the hospitals.

    Raises:
        ConfigError: if the folder exists.
    """
    if folder.exists():
        raise ConfigError(f"'{folder}' exists; name a folder that does not")
    names = [NAMES[i] if i < len(NAMES) else f"hospital-{i + 1}" for i in range(hospitals)]
    together = []
    for index, name in enumerate(names):
        random = np.random.default_rng((seed, index))
        skipped = skips(index, hospitals)
        rows = [
            row | dict.fromkeys(skipped, "")
            for row in _drawn(folder / "hospitals" / name, name, images, pixels, random)
        ]
        _write_table(folder / "hospitals" / name, rows)
        together += [row | {"path": f"{name}/{row['path']}"} for row in rows]
    _write_table(folder / "hospitals", together)
    random = np.random.default_rng((seed, hospitals, 1))
    new = _drawn(folder / "new", "new", max(1, images // 2), pixels, random)
    _write_table(folder / "new", [row | {"split": "test"} for row in new])
    return names


def skips(index: int, hospitals: int) -> list[str]:
    """The findings that a hospital does not annotate: each finding is missing at one hospital.

    Args:
        index: of the hospital.
        hospitals: their number; two or fewer annotate everything.

    Example:
        >>> skips(0, 4), skips(0, 2)
        (['Atelectasis', 'Mass', 'Consolidation', 'Pleural_Thickening'], [])
    """
    return [] if hospitals < 3 else list(FINDINGS)[index::hospitals]


def _drawn(
    folder: Path, hospital: str, images: int, pixels: int, random: np.random.Generator
) -> list[dict[str, str]]:
    """Draw one hospital's pictures, and return the rows of its table."""
    (folder / "images").mkdir(parents=True)
    often = {name: each * random.uniform(0.6, 1.5) for name, each in FREQUENCY.items()}
    exposure = (random.normal(0.0, 0.01), random.uniform(0.95, 1.05))
    notice = PngInfo()
    notice.add_text("Description", NOTICE)
    rows: list[dict[str, str]] = []
    for patient in _patients(hospital, often, random):
        for _ in range(min(int(random.integers(1, 4)), images - len(rows))):
            name = f"images/{len(rows):04}.png"
            picture = xray(patient.chest, patient.findings, exposure, pixels, random)
            Image.fromarray(picture).save(folder / name, pnginfo=notice)
            rows.append(_row(name, hospital, patient))
        if len(rows) == images:
            break
    return rows


def _patients(
    hospital: str, often: Mapping[str, float], random: np.random.Generator
) -> Iterator[Patient]:
    number = 0
    while True:
        number += 1
        chest = Chest.drawn(random)
        findings = frozenset(name for name, each in often.items() if random.uniform() < each)
        risk = sum(HAZARD.get(name, 0.0) for name in findings) + 8 * (chest.ratio - 0.46)
        until = random.exponential() / (YEARLY * math.exp(risk))
        observed = random.uniform(0.5, LONGEST)
        yield Patient(
            f"{hospital[0].upper()}{number:04}",
            chest,
            findings,
            min(until, observed),
            until <= observed,
            "test" if random.uniform() < TESTED else "train",
        )


def _row(path: str, hospital: str, patient: Patient) -> dict[str, str]:
    found = {name: str(int(name in patient.findings)) for name in FINDINGS}
    label = "pneumonia" if "Pneumonia" in patient.findings else "normal"
    return {
        "path": path,
        "hospital": hospital,
        "patient": patient.name,
        "split": patient.split,
        "label": label,
        **found,
        "cardiothoracic_ratio": f"{patient.chest.ratio:.3f}",
        "years": f"{max(patient.years, 0.01):.2f}",
        "event": str(int(patient.event)),
    }


def _write_table(folder: Path, rows: Sequence[Mapping[str, str]]) -> None:
    table = csv_text([COLUMNS, *([row[name] for name in COLUMNS] for row in rows)])
    (folder / "table.csv").write_text(table, encoding="utf-8")
