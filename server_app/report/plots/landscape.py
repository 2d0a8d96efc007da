"""Plots of a FedLAP run: the synthetic images, and the trust radius of each site's landscape."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.number_format import shorten
from fedsurrogate.common.pages.svg import BLUE, FAINT, INK, PURPLE, QUIET, make_axes, render
from fedsurrogate.server_app.runs.json_values import (
    Json,
    as_list,
    as_number,
    as_numbers,
    as_table,
    natural_order,
)
from fedsurrogate.server_app.runs.reader import RunFolder

SHEETS = ("first", "middle", "last")
# Most classes on a sheet, and most images of a class. The legend counts the sites if there are more
# than NAMED.
ROWS, COLUMNS, NAMED = 20, 10, 12
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


def radii(run: RunFolder) -> str | None:
    """Draw by round each site's radius, the radius used, and the model's movement; None without
    such rounds.
    """
    rounds = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    rounds = [entry for entry in rounds if as_numbers(entry.get("radii"))]
    if not rounds:
        return None
    numbers = [as_number(entry.get("round")) or 0.0 for entry in rounds]
    reported = [as_numbers(entry.get("radii")) for entry in rounds]
    sites = sorted({site for each in reported for site in each}, key=natural_order)

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.6, right=0.1, top=0.15, bottom=0.5)
        for site in sites:
            points = [
                (n, each[site]) for n, each in zip(numbers, reported, strict=True) if site in each
            ]
            axes.plot(*zip(*points, strict=True), color=QUIET, lw=0.8, marker=".", ms=4, alpha=0.6)
        for key, colour, label in (("radius", INK, "heeded"), ("moved", BLUE, "moved")):
            line = [as_number(entry.get(key)) for entry in rounds]
            axes.plot(
                numbers,
                [np.nan if v is None else v for v in line],
                color=colour,
                lw=2,
                marker="o",
                ms=4,
                label=label,
            )
        axes.plot(
            [],
            [],
            color=QUIET,
            lw=0.8,
            marker=".",
            label="a site" if len(sites) <= NAMED else f"{len(sites)} sites",
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: "")
        axes.grid(axis="y", color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel("distance from the round's model")
        axes.legend(frameon=False, fontsize=8.5)

    return render("radii", 2.8, draw)


def epsilons(run: RunFolder) -> str | None:
    """Draw epsilon spent by round; None without privacy."""
    rounds: list[Json] = [as_table(entry) for entry in as_list(run.metrics.get("rounds"))]
    points = [
        (n, e)
        for r in rounds
        if (n := as_number(r.get("round"))) and (e := as_number(r.get("epsilon"))) is not None
    ]
    if len(points) < 2:
        return None

    def draw(figure: Any) -> None:
        axes = make_axes(figure, left=0.6, right=0.1, top=0.15, bottom=0.5)
        axes.step(*zip(*points, strict=True), where="post", color=PURPLE, lw=2, marker="o", ms=4)
        axes.set_ylim(0, 1.12 * max(e for _, e in points))
        axes.grid(axis="y", color=FAINT)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("round")
        axes.set_ylabel("ε spent at each site")

    return render("epsilons", 2.4, draw)
