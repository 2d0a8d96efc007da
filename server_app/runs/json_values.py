"""Values out of JSON that others have written: whatever they are, reading them never fails and showing them does no harm."""

from __future__ import annotations

import re
from typing import Any

Json = dict[str, Any]


def clean(value: Any) -> Any:
    """Replace what cannot be shown (control characters, text direction marks, lone surrogates) in all strings."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in value)
    if isinstance(value, list):
        return [clean(item) for item in value]
    return {clean(key): clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def at(value: Any, *keys: str) -> Any:
    """Return what lies at `keys` in nested tables, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_table(value: Any) -> Json:
    """Return a table as it is, anything else as an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, anything else as an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def as_numbers(value: Any) -> dict[str, float]:
    """Return the entries of a table that are finite numbers."""
    return {str(key): number for key, item in as_table(value).items() if (number := as_number(item)) is not None}


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which "site 10" follows "site 9"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
