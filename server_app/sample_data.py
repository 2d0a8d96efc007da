"""Folders of drawn chest X-rays for several hospitals, with tables of what is known of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import csv_text
from fedsurrogate.common.logs import counted

Drawing = npt.NDArray[np.float64]

# Levels of what takes up X-rays: air, lung, soft tissue, bone.
LUNG, TISSUE, BONE = -0.42, 0.62, 0.14


@dataclass(frozen=True)
class Chest:
    """The body of one patient.

    Attributes:
        width: of the chest, as a share of the picture's half.
        lung: half width of a lung.
        height: half height of a lung.
        ratio: width of the heart by that of the chest, the cardiothoracic ratio.
        tilt: of the body, in radians.
        turn: where the pattern of the ribs begins.
    """

    width: float
    lung: float
    height: float
    ratio: float
    tilt: float
    turn: float

    @classmethod
    def drawn(cls, random: np.random.Generator) -> Chest:
        """A patient at random."""
        return cls(
            width=random.uniform(0.78, 0.92),
            lung=random.uniform(0.27, 0.32),
            height=random.uniform(0.60, 0.70),
            ratio=float(np.clip(random.normal(0.46, 0.035), 0.36, 0.60)),
            tilt=random.normal(0.0, 0.025),
            turn=random.uniform(0.0, 1.0),
        )


@dataclass(frozen=True)
class Canvas:
    """A picture that is drawn: coordinates from -1 to 1, and where the lungs are.

    Attributes:
        x: from the patient's right, at the left, to the left.
        y: from the top down.
        chest: of the patient.
        lungs: how much lung is in each place, 0 to 1, of the right and of the left one.
        random: for what is different in each picture.
    """

    x: Drawing
    y: Drawing
    chest: Chest
    lungs: tuple[Drawing, Drawing]
    random: np.random.Generator

    def side(self) -> int:
        """A lung at random: 0 for the right one, 1 for the left."""
        return int(self.random.integers(2))

    def place(self, side: int, low: float, high: float) -> tuple[float, float]:
        """A place in a lung, between two heights of it from -1 (top) to 1."""
        towards = self.random.uniform(-0.5, 0.5) * self.chest.lung
        centre = (2 * side - 1) * 0.43 + towards
        return centre, self.chest.height * self.random.uniform(low, high)

    def spot(self, centre: tuple[float, float], radii: tuple[float, float], edge: float) -> Drawing:
        """An ellipse whose border is as sharp as `edge` says."""
        along = ((self.x - centre[0]) / radii[0]) ** 2 + ((self.y - centre[1]) / radii[1]) ** 2
        return _step(1 - along, edge)

    def cloud(self, cells: int) -> Drawing:
        """A smooth pattern of as many cells along each side, 0 to 1."""
        return _cloud(self.x.shape[0], cells, self.random)

    def both(self) -> Drawing:
        """Where lungs are."""
        return self.lungs[0] + self.lungs[1]


def xray(
    chest: Chest,
    findings: frozenset[str],
    exposure: tuple[float, float],
    pixels: int,
    random: np.random.Generator,
) -> npt.NDArray[np.uint8]:
    """One picture.

    Args:
        chest: the patient.
        findings: names of those of FINDINGS that the picture shows.
        exposure: brightness and contrast of the hospital's device; 0 and 1 for a usual one.
        pixels: height and width.
        random: for what is different in each picture.

    Returns:
        (pixels, pixels), grey, white where much is taken up.
    """
    canvas = _canvas(chest, pixels, random)
    ratio = chest.ratio + (random.uniform(0.12, 0.18) if "Cardiomegaly" in findings else 0.0)
    taken = _body(canvas)
    taken += LUNG * canvas.both()
    taken += _bones(canvas)
    taken += _vessels(canvas)
    heart = _heart(canvas, ratio)
    taken = np.maximum(taken, 0.62 * heart)
    seen = replace(canvas, lungs=(canvas.lungs[0] * (1 - heart), canvas.lungs[1] * (1 - heart)))
    for name, (_, draw) in FINDINGS.items():
        if name in findings:
            taken = taken + draw(seen)
    # Film saturates: what is dense already becomes little denser.
    taken = np.where(taken < 0.6, taken, 0.6 + 0.35 * np.tanh((taken - 0.6) / 0.35))
    brightness, contrast = exposure
    taken = 0.5 + contrast * (np.clip(taken, 0, 1) - 0.5) + brightness
    taken += random.normal(0.0, 0.015, taken.shape)
    return np.asarray(255 * np.clip(taken, 0, 1), dtype=np.uint8)


def _canvas(chest: Chest, pixels: int, random: np.random.Generator) -> Canvas:
    line = np.linspace(-1, 1, pixels)
    x, y = np.meshgrid(line, line)
    shift = random.normal(0.0, 0.02, 2)
    x, y = x - shift[0], y - shift[1]
    x, y = (
        x * np.cos(chest.tilt) + y * np.sin(chest.tilt),
        y * np.cos(chest.tilt) - x * np.sin(chest.tilt),
    )
    lungs = []
    for sign in (-1, 1):
        # A lung is narrow at the top, and its base follows the diaphragm.
        width = chest.lung * (1 - 0.32 * np.clip(-y / chest.height, 0, 1) ** 2)
        along = ((x - sign * 0.43) / width) ** 2 + (y / chest.height) ** 2
        base = 0.50 * chest.height + 0.10 * np.abs(x - sign * 0.43) / chest.lung
        lungs.append(_step(1 - along, 9.0) * _step(base + 0.12 - y, 22.0))
    return Canvas(x, y, chest, (lungs[0], lungs[1]), random)


def _body(canvas: Canvas) -> Drawing:
    x, y, width = canvas.x, canvas.y, canvas.chest.width
    trunk = _step(1 - (np.abs(x) / width) ** 3 - 0.02 * y**2, 9.0)
    shoulders = _step(0.75 + 0.55 * np.abs(x) + y, 12.0)
    belly = 0.10 * _step(y - 0.55 * canvas.chest.height, 8.0)
    return TISSUE * trunk * shoulders + belly * trunk


def _bones(canvas: Canvas) -> Drawing:
    x, y, chest = canvas.x, canvas.y, canvas.chest
    spine = 0.9 * np.exp(-((x / 0.075) ** 2)) * (0.75 + 0.25 * np.cos(34 * y))
    inside = _step(1 - (np.abs(x) / (chest.width - 0.06)) ** 2 - 0.25 * y**2, 7.0)
    inside = inside * _step(0.95 * chest.height - y, 9.0)
    course = y + 0.32 * np.abs(x) ** 2 - 0.05 * np.abs(x)
    ribs = np.clip(np.cos(2 * np.pi * (course * 4.6 + chest.turn)), 0, 1) ** 5
    collar = np.exp(-(((y + 0.80 * chest.height + 0.10 * np.abs(x)) / 0.03) ** 2))
    away = 1 - np.exp(-((x / 0.12) ** 2))
    return np.asarray(BONE * (1.6 * spine + 0.9 * (ribs + collar) * inside * away))


def _vessels(canvas: Canvas) -> Drawing:
    near = np.exp(-(((np.abs(canvas.x) - 0.22) / 0.20) ** 2) - (canvas.y / 0.30) ** 2)
    return (0.16 * near + 0.05 * canvas.cloud(14)) * canvas.both()


def _heart(canvas: Canvas, ratio: float) -> Drawing:
    wide = ratio * canvas.chest.width
    low = 0.26 * canvas.chest.height
    body = canvas.spot((0.30 * wide, low), (wide, 0.38 * canvas.chest.height), 7.0)
    vessel = canvas.spot((0.02, -0.35 * canvas.chest.height), (0.14, 0.42), 7.0)
    return np.maximum(body, 0.85 * vessel)


def _step(values: Drawing, edge: float) -> Drawing:
    return np.asarray(1 / (1 + np.exp(-np.clip(edge * values, -30, 30))))


def _cloud(pixels: int, cells: int, random: np.random.Generator) -> Drawing:
    grid = random.uniform(0, 1, (cells + 2, cells + 2))
    at = np.linspace(0, cells, pixels)
    whole = at.astype(int)
    part = at - whole
    part = part * part * (3 - 2 * part)
    rows = grid[whole] * (1 - part)[:, None] + grid[whole + 1] * part[:, None]
    return np.asarray(rows[:, whole] * (1 - part) + rows[:, whole + 1] * part)


def _patch(
    canvas: Canvas, low: float, high: float, size: float, level: float, edge: float
) -> Drawing:
    """A region of a lung that has become denser."""
    side = canvas.side()
    centre = canvas.place(side, low, high)
    radii = (size * canvas.random.uniform(0.8, 1.2), size * canvas.random.uniform(0.8, 1.2))
    shape = canvas.spot(centre, radii, edge)
    return level * shape * (0.65 + 0.35 * canvas.cloud(9)) * canvas.lungs[side]


def _atelectasis(canvas: Canvas) -> Drawing:
    side = canvas.side()
    height = canvas.chest.height * canvas.random.uniform(0.15, 0.45)
    lean = canvas.random.uniform(-0.25, 0.25)
    band = np.exp(-(((canvas.y - height - lean * canvas.x) / 0.035) ** 2))
    return 0.34 * band * canvas.lungs[side]


def _effusion(canvas: Canvas) -> Drawing:
    side = canvas.side()
    sign = 2 * side - 1
    level = canvas.chest.height * canvas.random.uniform(0.15, 0.40)
    surface = level - 0.9 * np.clip(sign * canvas.x - 0.43, -0.3, 0.3)
    return 0.46 * _step(canvas.y - surface, 22.0) * canvas.lungs[side]


def _pneumothorax(canvas: Canvas) -> Drawing:
    side = canvas.side()
    sign = 2 * side - 1
    outer = _step(sign * canvas.x - 0.43 - canvas.random.uniform(0.02, 0.08), 30.0)
    upper = _step(0.25 - canvas.y, 10.0)
    return -0.30 * outer * upper * canvas.lungs[side]


def _edema(canvas: Canvas) -> Drawing:
    near = np.exp(-(((np.abs(canvas.x) - 0.26) / 0.22) ** 2) - (canvas.y / 0.42) ** 2)
    level = canvas.random.uniform(0.26, 0.36)
    return level * near * (0.6 + 0.4 * canvas.cloud(12)) * canvas.both()


def _emphysema(canvas: Canvas) -> Drawing:
    return -0.13 * canvas.both() - 0.05 * canvas.spot((0.0, 0.35), (0.9, 0.35), 5.0)


def _fibrosis(canvas: Canvas) -> Drawing:
    net = np.abs(canvas.cloud(26) - 0.5) < 0.09
    low = _step(canvas.y - 0.0, 5.0)
    return 0.20 * net * low * canvas.both()


def _thickening(canvas: Canvas) -> Drawing:
    side = canvas.side()
    lung = canvas.lungs[side]
    outer = _step((2 * side - 1) * canvas.x - 0.43 - 0.55 * canvas.chest.lung, 30.0)
    return 0.60 * outer * lung * (1 - 0.5 * lung)


def _hernia(canvas: Canvas) -> Drawing:
    height = 0.42 * canvas.chest.height
    outside = canvas.spot((0.05, height), (0.20, 0.17), 14.0)
    inside = canvas.spot((0.05, height - 0.02), (0.13, 0.10), 14.0)
    return 0.22 * outside - 0.34 * inside


# How often each finding is there, before the differences between hospitals, and what draws it.
FINDINGS: dict[str, tuple[float, Callable[[Canvas], Drawing]]] = {
    "Atelectasis": (0.20, _atelectasis),
    "Cardiomegaly": (0.20, lambda canvas: np.zeros_like(canvas.x)),  # The heart is drawn wider.
    "Effusion": (0.25, _effusion),
    "Infiltration": (0.25, lambda canvas: _patch(canvas, -0.4, 0.4, 0.24, 0.26, 3.0)),
    "Mass": (0.12, lambda canvas: _patch(canvas, -0.5, 0.3, 0.11, 0.52, 12.0)),
    "Nodule": (0.15, lambda canvas: _patch(canvas, -0.6, 0.3, 0.05, 0.50, 12.0)),
    "Pneumonia": (0.30, lambda canvas: _patch(canvas, 0.0, 0.5, 0.26, 0.44, 4.0)),
    "Pneumothorax": (0.12, _pneumothorax),
    "Consolidation": (0.12, lambda canvas: _patch(canvas, -0.3, 0.5, 0.20, 0.52, 7.0)),
    "Edema": (0.12, _edema),
    "Emphysema": (0.10, _emphysema),
    "Fibrosis": (0.10, _fibrosis),
    "Pleural_Thickening": (0.10, _thickening),
    "Hernia": (0.06, _hernia),
}


NAMES = ("north", "south", "east", "west")
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
    together, later = [], max(1, images // 2)
    with counted("drawing", hospitals * images + later, what="pictures") as advance:

        def drawn(place: Path, count: int, of: tuple[int, ...]) -> list[dict[str, str]]:
            rows = []
            for row in _drawn(place, place.name, count, pixels, np.random.default_rng(of)):
                rows.append(row)
                advance(1)
            return rows

        for index, name in enumerate(names):
            skipped = dict.fromkeys(skips(index, hospitals), "")
            own = drawn(folder / "hospitals" / name, images, (seed, index))
            rows = [row | skipped for row in own]
            _write_table(folder / "hospitals" / name, rows)
            together += [row | {"path": f"{name}/{row['path']}"} for row in rows]
        new = drawn(folder / "new", later, (seed, hospitals, 1))
    _write_table(folder / "hospitals", together)
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
) -> Iterator[dict[str, str]]:
    """Draw one hospital's pictures, and yield the rows of its table."""
    (folder / "images").mkdir(parents=True)
    often = {name: each * random.uniform(0.6, 1.5) for name, (each, _) in FINDINGS.items()}
    exposure = (random.normal(0.0, 0.01), random.uniform(0.95, 1.05))
    notice = PngInfo()
    notice.add_text("Description", NOTICE)
    count = 0
    for patient in _patients(hospital, often, random):
        for _ in range(min(int(random.integers(1, 4)), images - count)):
            name = f"images/{count:04}.png"
            picture = xray(patient.chest, patient.findings, exposure, pixels, random)
            Image.fromarray(picture).save(folder / name, pnginfo=notice)
            count += 1
            yield _row(name, hospital, patient)
        if count == images:
            break


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
