"""Sheets of the synthetic images of a FedLAP run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import make_axes, render
from fedsurrogate.server_app.runs.json_values import natural_order

SHEETS = ("first", "middle", "last")
# Most classes on a sheet, and most images of a class.
ROWS, COLUMNS = 20, 10
# Black and white lie this many standard deviations from grey.
CONTRAST = 2.5


def sheets(folder: Path) -> list[tuple[int, str]]:
    """The sheets of images that a run has stored.

    Args:
        folder: the run folder.

    Returns:
        (round, picture as an SVG string), each round once, in the order of rounds.
    """
    by_round: dict[int, str] = {}
    for name in SHEETS:
        try:
            number, names, images = _read(folder / f"synthetic-{name}.safetensors")
            drawn = _sheet(f"sheet-{name}", names, images)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            continue
        by_round.setdefault(number, drawn)
    return sorted(by_round.items())


def _read(file: Path) -> tuple[int, list[str], NDArray[np.float32]]:
    """Round, row names, and images (rows, columns, side, side, 3) in [0, 1] from one file that
    `strategies` stored.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), "numpy") as content:
            metadata = content.metadata() or {}
            tables = {key: content.get_tensor(key) for key in content.keys()}  # noqa: SIM118, it is no mapping
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if metadata.get("model") != "convnet":
        raise ValueError("the synthetic records are not images")
    rows: dict[str, NDArray[np.float32]] = {}
    spread = float(
        np.concatenate([tables[site].ravel() for site in json.loads(metadata["sites"])])
        .astype(np.float32)
        .std()
    )
    for site, classes in sorted(
        json.loads(metadata["sites"]).items(), key=lambda item: natural_order(item[0])
    ):
        for index, label in enumerate(classes):
            flat = tables[site][tables[f"{site} labels"] == index][:COLUMNS].astype(np.float32)
            rows.setdefault(str(label), _pixels(flat / max(spread, 1e-6)))
    names = sorted(rows, key=natural_order)[:ROWS]
    return int(metadata["round"]), names, np.stack([rows[name] for name in names])


def _pixels(flat: NDArray[np.float32]) -> NDArray[np.float32]:
    channels = 1 if round((flat.shape[1]) ** 0.5) ** 2 == flat.shape[1] else 3
    side = round((flat.shape[1] / channels) ** 0.5)
    images = flat.reshape(-1, channels, side, side) / (2 * CONTRAST) + 0.5
    shown: NDArray[np.float32] = np.clip(
        images.transpose(0, 2, 3, 1).repeat(3 // channels, axis=3), 0, 1
    )
    return shown


def _sheet(name: str, names: Sequence[str], images: NDArray[np.float32]) -> str:
    rows, columns, side = images.shape[:3]
    step = side + max(1, side // 16)
    # The last channel is opacity: the gaps show the page, which may be dark.
    page = np.zeros((rows * step, columns * step, 4), dtype=np.float32)
    for row in range(rows):
        for column in range(columns):
            place = page[row * step : row * step + side, column * step : column * step + side]
            place[..., :3], place[..., 3] = images[row, column], 1.0

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.95, right=0.05, top=0.05, bottom=0.25)
        axes.set(xlabel="images of the class", ylabel="class")
        axes.imshow(np.rint(page * 255).astype(np.uint8), interpolation="none", aspect="equal")
        axes.set_xticks([])
        axes.set_yticks(
            [row * step + side / 2 for row in range(rows)], [shorten(n, 10) for n in names]
        )
        for spine in axes.spines.values():
            spine.set_visible(False)

    return render(name, 4.2 * rows / max(columns, COLUMNS) + 0.3, draw)
