"""The methods of the product, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fedsurrogate._frames import data_frame
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.method import Kind

WORDS: dict[Kind, str] = {
    "one-shot": "once",
    "chain": "site to site",
    "rounds": "in rounds",
    "alone": "nothing",
}


@dataclass(frozen=True, repr=False)
class MethodTable:
    """A table of methods.

    Attributes:
        rows: of each its name, its title, when sites send, whether it has a mechanism of privacy,
            and its source.

    Example:
        >>> table = methods()
        >>> len(table), sorted(table.rows[0])
        (25, ['method', 'paper', 'privacy', 'sends', 'title'])
    """

    rows: tuple[dict[str, Any], ...]

    def to_frame(self) -> Any:
        """A pandas data frame, with the names as its index.

        Raises:
            PackageError: without pandas.
        """
        return data_frame(self.rows).set_index("method")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        lines = [tuple(self.rows[0]), *(tuple(map(_cell, row.values())) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )


def methods() -> MethodTable:
    """All methods that `method` may name.

    Example:
        >>> [row["method"] for row in methods()][:2]
        ['fedpft', 'fedlap']
    """
    return MethodTable(
        tuple(
            {
                "method": each.name,
                "title": each.title,
                "sends": WORDS[each.usual.kind],
                "privacy": each.private,
                "paper": each.paper,
            }
            for each in METHODS.values()
        )
    )


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)
