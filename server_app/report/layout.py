"""The order of the pictures on the page: in pairs, so that no row is half empty."""

from __future__ import annotations

from collections.abc import Collection

TITLES = {
    "curves": "Compared with other runs",
    "outcomes": "Accuracy against traffic",
    "progress": "Step by step",
    "accuracy": "Accuracy at each site",
    "counts": "Which classes each site has",
    "evaluation": "How good the model is at the sites",
    "survey": "What records the sites have",
    "effects": "What each site changes",
    "radii": "How far the landscapes were trusted",
    "map": "Map of the hospitals",
    "sheets": "What the sites sent",
    "features": "Real against synthetic features",
}
# These have a row of their own, before or after the others.
FIRST, LAST = ("curves",), ("sheets", "features")


def layout(pictures: Collection[str]) -> list[tuple[str, str, str]]:
    """Key, title and place of every picture, in order.

    Args:
        pictures: keys of `TITLES`.

    Returns:
        For each picture its key, its title and its place: "" for half a row, "wide" for a row of
        several plots, or "wide alone" for a plot next to its caption.

    Example:
        >>> layout(["survey", "effects", "outcomes"])[1:]
        [('survey', 'What records the sites have', ''), ('effects', 'What each site changes', '')]
    """
    keys = [key for key in TITLES if key in pictures]
    halves = [key for key in keys if key not in FIRST + LAST]
    # The first of an odd number has its row alone.
    alone = halves[: len(halves) % 2]
    places = {
        key: "wide alone" if key in alone else "" if key in halves else "wide" for key in keys
    }
    return [(key, TITLES[key], place) for key, place in places.items()]
