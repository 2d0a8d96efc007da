"""Values from untrusted JSON: reading any of them never fails, and showing them is safe."""

from __future__ import annotations

import re
from typing import Any

from fedsurrogate.common.escapes import for_terminal

Json = dict[str, Any]


def clean(value: Any) -> Any:
    """Replace characters that are unsafe to show in all strings: control, text direction, lone
    surrogates.

    Args:
        value: any value from JSON.

    Returns:
        The same value with safe strings, also in keys of tables.

    Example:
        >>> clean({"two\\nlines": [1.5, "a\\tb"]})
        {'two lines': [1.5, 'a b']}
    """
    if isinstance(value, str):
        return for_terminal(value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    return (
        {clean(key): clean(item) for key, item in value.items()}
        if isinstance(value, dict)
        else value
    )


def at(value: Any, *keys: str) -> Any:
    """Return the value at `keys` in nested tables, or None.

    Args:
        value: any value from JSON.
        keys: from the outermost table to the innermost.

    Returns:
        The value; None where a key is missing or a value on the way is not a table.

    Example:
        >>> at({"seconds": {"total": 2.5}}, "seconds", "total")
        2.5
        >>> at({"seconds": 3}, "seconds", "total") is None
        True
    """
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_table(value: Any) -> Json:
    """Return a table unchanged, and an empty table for anything else."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list unchanged, and an empty list for anything else."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else.

    Example:
        >>> as_number(3), as_number(True), as_number("3"), as_number(float("nan"))
        (3.0, None, None, None)
    """
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def as_numbers(value: Any) -> dict[str, float]:
    """Return the entries of a table that are finite numbers."""
    return {
        str(key): number
        for key, item in as_table(value).items()
        if (number := as_number(item)) is not None
    }


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which "site 10" follows "site 9".

    Example:
        >>> sorted(["site 10", "site 9", "north"], key=natural_order)
        ['north', 'site 9', 'site 10']
    """
    return [
        (0, int(part)) if part.isdecimal() else (1, part)
        for part in re.split(r"(\d+)", name)
        if part
    ]
