"""Ranges of numbers in a text of a setting."""

from __future__ import annotations


def ranges(text: str) -> tuple[tuple[float, float], ...]:
    """The ranges in a text of pairs "low,high", one for each column or one for all.

    Args:
        text: of the setting, with ";" between pairs; empty for none.

    Raises:
        ValueError: for another text, or a range without width.

    Example:
        >>> ranges("0,100"), ranges("0,1; -2,2")
        (((0.0, 100.0),), ((0.0, 1.0), (-2.0, 2.0)))
    """
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        try:
            low, high = map(float, part.split(","))
        except ValueError:
            raise ValueError(f"{part[:40]!r} is no pair of numbers 'low,high'") from None
        if not abs(low) + abs(high) <= 1e300 or not low < high:
            raise ValueError(f"{part[:40]!r}: the first number must be below the second")
        found.append((low, high))
    return tuple(found)


def check_ranges(text: str) -> str:
    """The text, if `ranges` reads it. Raises ValueError otherwise."""
    ranges(text)
    return text
