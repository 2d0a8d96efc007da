"""The order of the pictures on the page: in pairs of similar height, so that no row is half empty."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

TITLES = {
    "curves": "Compared with other runs",
    "outcomes": "Accuracy against traffic",
    "progress": "Step by step",
    "accuracy": "Accuracy at each site",
    "counts": "Which classes each site has",
    "evaluation": "How good the model is at the sites",
    "survey": "What records the sites have",
    "map": "Map of the hospitals",
    "downstream": "How well the synthetic embeddings work at each site",
    "effects": "What each site changes",
    "radii": "How far the landscapes were trusted",
    "epsilons": "Privacy spent, round by round",
    "time": "Where the time went",
    "sheets": "What the sites sent",
    "features": "Real against synthetic features",
}
# Smallest ratio of the heights of two pictures in a row.
SIMILAR = 0.6
# These have a row of their own, before or after the others.
FIRST, LAST = ("curves",), ("sheets", "features")


def layout(pictures: Mapping[str, Sequence[str]]) -> list[tuple[str, str, str]]:
    """Key, title and place of every picture, in order.

    Args:
        pictures: SVG strings by key of `TITLES`.

    Returns:
        For each picture its key, its title and its place: "" for half a row, "wide" for a row of
        several plots, or "wide alone" for a plot next to its caption.

    Example:
        >>> layout({"time": ['<svg viewBox="0 0 6 4"/>'], "survey": ['<svg viewBox="0 0 6 3"/>']})
        [('survey', 'What records the sites have', ''), ('time', 'Where the time went', '')]
    """
    narrow = [key for key in TITLES if key in pictures and key not in FIRST + LAST]
    places = [(key, "wide") for key in FIRST if key in pictures]
    for pair in _pairs(narrow, {key: _height(pictures[key][0]) for key in narrow}):
        places += [(key, "" if len(pair) == 2 else "wide alone") for key in pair]
    places += [(key, "wide") for key in LAST if key in pictures]
    return [(key, TITLES[key], place) for key, place in places]


def _pairs(keys: Iterable[str], heights: Mapping[str, float]) -> list[list[str]]:
    """Each picture with the one of the most similar height that is left; alone if none is similar."""
    rest, pairs = list(keys), list[list[str]]()
    while rest:
        first = rest.pop(0)
        closest = min(rest, key=lambda key: abs(heights[key] - heights[first]), default="")
        low, high = sorted((heights[first], heights.get(closest, 0.0)))
        if closest and low >= SIMILAR * high:
            rest.remove(closest)
            pairs.append([first, closest])
        else:
            pairs.append([first])
    return pairs


def _height(svg: str) -> float:
    box = re.search(r'viewBox="[\d.-]+ [\d.-]+ [\d.-]+ ([\d.]+)"', svg)
    return float(box[1]) if box else 0.0
