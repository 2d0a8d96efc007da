"""Histograms of images that a survey counts: public, and an image is in exactly one cell of each.

Their cells are those of this file or of the run's settings. No image decides them.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

# The last cell of each histogram: what its kind of data does not state.
UNKNOWN, OTHER = "unknown", "other"
# Most cells that settings may give a histogram, and characters of a name in them.
MOST_CELLS, LONGEST_NAME = 64, 40
# Directions in a patient: left and right, anterior and posterior, head and feet.
OPPOSITE = dict(zip("LRAPHF", "RLPAFH", strict=True))
UPRIGHT, TURNED = "upright by EXIF", "turned by EXIF when read"
Value = float | str | None


@dataclass(frozen=True)
class Histogram:
    """A histogram of images.

    Attributes:
        title: for people.
        edges: between its cells, of numbers; values of an edge are in the cell above it.
        names: of its cells, of texts.
        unit: of the numbers.
        open: whether other texts than `names` have a cell of their own.
        settable: whether settings may give its edges, or names.
    """

    title: str
    edges: tuple[float, ...] = ()
    names: tuple[str, ...] = ()
    unit: str = ""
    open: bool = False
    settable: bool = True

    @property
    def cells(self) -> tuple[str, ...]:
        """The names of all cells."""
        own = (*self.names, *((OTHER,) if self.open else ()))
        if self.edges:
            ends = [f"{edge:.6g}" for edge in self.edges]
            between = (f"{a} to {b}" for a, b in pairwise(ends))
            own = (f"below {ends[0]}", *between, f"{ends[-1]} or more")
        return (*own, UNKNOWN)

    def cell(self, value: Value) -> int:
        """The cell of an image.

        Args:
            value: of the image; None, or NaN, where it is not known.

        Example:
            >>> sizes = Histogram("size", edges=(64.0, 128.0))
            >>> [sizes.cells[sizes.cell(value)] for value in (3.0, 64.0, None)]
            ['below 64', '64 to 128', 'unknown']
        """
        if isinstance(value, str) and not self.edges:
            # Behind the names is the cell of others, or of what is not known.
            return self.names.index(value) if value in self.names else len(self.names)
        if self.edges and isinstance(value, float | int) and not math.isnan(value):
            return bisect_right(self.edges, value)
        return len(self.cells) - 1


def _pairs() -> tuple[str, ...]:
    """Directions of a row and of a column, as PatientOrientation has them."""
    return tuple(
        f"{row}/{column}"
        for row in OPPOSITE
        for column in OPPOSITE
        if column not in (row, OPPOSITE[row])
    )


MAKERS = (
    *("Agfa", "Canon", "Carestream", "Esaote", "Fuji", "GE", "Hamamatsu", "Hologic", "Kodak", "Konica"),
    *("Leica", "Philips", "Samsung", "Shimadzu", "Siemens", "Toshiba", "United Imaging", "Varian"),
    "Zeiss",
)  # fmt: skip
AXES = ("left and right", "neither", "top and bottom")
# Below this contrast, an image is empty.
EMPTY = 0.01
EIGHTHS = tuple(part / 8 for part in range(1, 8))
HISTOGRAMS = {
    "size": Histogram("Shorter side", (64, 128, 256, 512, 1024, 2048, 4096), unit="pixels"),
    "spacing": Histogram("Pixel spacing", (0.05, 0.1, 0.15, 0.2, 0.5, 1, 2), unit="mm"),
    "bits": Histogram(
        "Bits stored", names=("1", "8", "10", "12", "14", "16", "32"), open=True, settable=False
    ),
    "brightness": Histogram(
        "Mean brightness", EIGHTHS, unit="0 is black, 1 is white", settable=False
    ),
    "contrast": Histogram(
        "Contrast",
        (EMPTY, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3),
        unit="standard deviation of brightness",
        settable=False,
    ),
    "orientation": Histogram(
        "Orientation in the file",
        names=(*_pairs(), UPRIGHT, TURNED),
        unit="rows/columns run to the Left, Right, Anterior, Posterior, Head, Feet",
        open=True,
        settable=False,
    ),
    "view": Histogram(
        "View", names=("AP", "PA", "LL", "RL", "CC", "MLO"), open=True, settable=False
    ),
    "mirror": Histogram("Sides that mirror each other", names=AXES, settable=False),
    "maker": Histogram("Device maker", names=MAKERS, open=True),
}


def maker_among(value: str, names: Sequence[str]) -> str:
    """The maker that a file states, as a public list has it.

    Args:
        value: in the file.
        names: of the list.

    Returns:
        The name in the list; or `OTHER`.

    Example:
        >>> maker_among("FUJIFILM Corporation", MAKERS), maker_among("Gendex", MAKERS)
        ('Fuji', 'other')
    """
    words = re.split(r"[\W_]+", value.casefold())
    for name in names:
        first, *more = name.casefold().split() or [""]
        for at, word in enumerate(words):
            # Companies add words to their names: of short names only the whole word is meant.
            same = word == first or (len(first) > 3 and word.startswith(first))
            if first and same and words[at + 1 :][: len(more)] == more:
                return name
    return OTHER


def read_bins(text: str) -> dict[str, Histogram]:
    """The histograms whose cells a setting gives.

    Args:
        text: such as "size: 512, 1024; maker: Siemens, Acme".

    Returns:
        The histograms by name.

    Raises:
        ValueError: unless edges are finite and ascend, and names differ.

    Example:
        >>> read_bins("size: 512, 1024")["size"].cells
        ('below 512', '512 to 1024', '1024 or more', 'unknown')
    """
    given: dict[str, Histogram] = {}
    for part in filter(str.strip, text.split(";")):
        name, _, values = (each.strip() for each in part.partition(":"))
        usual, cells = HISTOGRAMS.get(name), [each.strip() for each in values.split(",")]
        if usual is None or not usual.settable or name in given:
            able = ", ".join(key for key, each in HISTOGRAMS.items() if each.settable)
            raise ValueError(
                f"{part.strip()[:60]!r} must begin with one of {able}, each once, and a colon, such as "
                "'size: 512, 1024'"
            )
        if len(cells) > MOST_CELLS:
            raise ValueError(f"{len(cells)} cells for {name!r}; at most {MOST_CELLS}")
        given[name] = _with_edges(name, usual, cells) if usual.edges else _named(name, usual, cells)
    return given


def _with_edges(name: str, usual: Histogram, cells: Sequence[str]) -> Histogram:
    try:
        edges = tuple(map(float, cells))
    except ValueError:
        edges = ()
    ascend = all(a < b for a, b in pairwise(edges))
    if not edges or not ascend or not all(map(math.isfinite, edges)):
        raise ValueError(
            f"{name}: {', '.join(cells)[:60]!r} must be numbers that ascend, such as '512, 1024'"
        )
    return replace(usual, edges=edges)


def _named(name: str, usual: Histogram, cells: Sequence[str]) -> Histogram:
    known = {each.casefold() for each in cells}
    if (
        len(known) < len(cells)
        or known & {"", OTHER, UNKNOWN}
        or max(map(len, cells)) > LONGEST_NAME
    ):
        raise ValueError(
            f"{name}: {', '.join(cells)[:60]!r} must be names that differ, of at most {LONGEST_NAME} "
            f"characters, without {OTHER!r} and {UNKNOWN!r}, which are added"
        )
    return replace(usual, names=tuple(cells))


def histograms_of(names: Sequence[str], bins: str = "") -> dict[str, Histogram]:
    """The histograms of a run.

    Args:
        names: of them.
        bins: cells that the settings give, see `read_bins`.

    Raises:
        ValueError: as `read_bins`.
    """
    given: Mapping[str, Histogram] = read_bins(bins)
    return {name: given.get(name, HISTOGRAMS[name]) for name in names}
