"""Human-readable numbers."""

from __future__ import annotations


def percent(share: float) -> str:
    """Return a share in [0, 1] as "68.4%"."""
    return f"{100 * share:.1f}%"


def human_bytes(count: float) -> str:
    """Return bytes in decimal units: "182 kB", "1.82 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= 0.9995 * size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 999.5 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count:.0f} B"


def human_seconds(seconds: float) -> str:
    """Return a duration as "20 ms", "3.2 s", "2 min 5 s" or "1 h 12 min"."""
    if seconds < 0.0995:
        return f"{1000 * seconds:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60:,} h"


def shorten(text: str, length: int) -> str:
    """Return `text` in at most `length` characters; an ellipsis marks the cut."""
    return text if len(text) <= length else text[: length - 1].rstrip() + "…"
