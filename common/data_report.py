"""The data report: what a source holds, what of it is used, and what is left out, and warnings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter

# Its name among the values of a message.
DATA = "data-report"
# Of reasons and warnings in a line on a terminal.
MOST_SHOWN = 6
# Of a report in a message: the most reasons, and characters of a text.
MOST, LONGEST = 200, 1000


def _shortened(text: object) -> object:
    return text[:LONGEST].encode(errors="replace").decode() if isinstance(text, str) else text


Text = Annotated[str, BeforeValidator(_shortened)]
Number = Annotated[int, Field(strict=True, ge=0, lt=2**53)]


@dataclass(frozen=True)
class Loss:
    """Records or files that are left out for one reason.

    Attributes:
        why: with their number and an example, such as the place of a file.
        count: their number.
    """

    why: Text
    count: Number


@dataclass(frozen=True)
class DataReport:
    """What became of the records of one source.

    Attributes:
        source: its name.
        used: number of records that are used.
        left_out: by reason.
        warnings: what a person should look at, although it is used.
        bags: how many images are in how many bags, where records are bags; empty otherwise.
    """

    source: Text
    used: Number
    left_out: Annotated[tuple[Loss, ...], Field(max_length=MOST)] = ()
    warnings: Annotated[tuple[Text, ...], Field(max_length=MOST)] = ()
    bags: Text = ""

    @property
    def lost(self) -> int:
        """Number of records and files that are left out."""
        return sum(each.count for each in self.left_out)

    @property
    def read(self) -> int:
        """Number of records and files that were found."""
        return self.used + self.lost

    def lines(self, unopened: bool = False) -> list[str]:
        """The report in at most three lines: numbers, losses, warnings.

        Args:
            unopened: whether images are still to be opened, so that nobody knows how many are used.

        Example:
            >>> DataReport("x-rays", 8, (Loss("2 labels are blank, such as row 3", 2),)).lines()
            ['data x-rays: 10 read, 8 used, 2 left out', 'left out: 2 labels are blank, such as row 3']
        """
        numbers = f"{self.lost} left out" if self.lost else "none left out"
        numbers += f"; {self.bags}" if self.bags else ""
        kept = f"{self.used} {'to open' if unopened and self.used else 'used'}"
        found = "found" if unopened else "read"
        lines = [f"data {self.source}: {self.read} {found}, {kept}, {numbers}"]
        if self.left_out:
            lines.append("left out: " + _some([each.why for each in self.left_out]))
        if self.warnings:
            lines.append("warning: " + _some(self.warnings))
        return lines

    def facts(self) -> dict[str, Any]:
        """The report as JSON has it."""
        short = replace(self, left_out=self.left_out[:MOST], warnings=self.warnings[:MOST])
        found = asdict(short) | {"read": self.read, "lost": self.lost}
        return {key: value for key, value in found.items() if key != "bags" or value}


def merged(reports: Sequence[DataReport]) -> DataReport:
    """One report of several sources, such as those of the sites of a simulation.

    Args:
        reports: at least one.
    """
    first = reports[0].source
    return DataReport(
        first if len(reports) == 1 else f"{first} and {len(reports) - 1} more",
        sum(each.used for each in reports),
        tuple(loss for each in reports for loss in each.left_out),
        tuple(dict.fromkeys(warning for each in reports for warning in each.warnings)),
        _some([each.bags for each in reports if each.bags]),
    )


def reports_from(text: str) -> list[DataReport]:
    """The reports in the JSON text of a message; none from a text that is not such a list."""
    try:
        facts = json.loads(text)
        return [report_from(each) for each in facts[:MOST]] if isinstance(facts, list) else []
    except (ValueError, RecursionError):
        return []


def _some(texts: Sequence[str]) -> str:
    more = f"; and {len(texts) - MOST_SHOWN} more" if len(texts) > MOST_SHOWN else ""
    return "; ".join(texts[:MOST_SHOWN]) + more


def report_from(facts: object) -> DataReport:
    """A report from JSON that another program wrote.

    Args:
        facts: as `DataReport.facts` gives them.

    Raises:
        ValueError: for anything else.
    """
    return _REPORT.validate_python(facts)


_REPORT = TypeAdapter(DataReport)
