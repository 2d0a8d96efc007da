"""The list of what the papers print is complete, and names figures and scripts that exist."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import pages
from benchmarks.harness.results import stored
from tests.documents import ROOT

LISTED = pages.papers()
ROWS = [(name, row) for name, each in LISTED.items() for row in each["rows"]]
PARTS = [part for _, row in ROWS for part in row.get("measured", ())]


def things(text: str) -> Iterator[tuple[str, str]]:
    """Each thing that an id names: "tables 1, 4-5; figure 2" are four."""
    for group in text.split("; "):
        kind, numbers = group.split(" ", 1)
        for each in numbers.split(", "):
            first, _, last = each.partition("-")
            several = map(str, range(int(first), int(last) + 1)) if last else [first]
            yield from ((kind.rstrip("s"), number) for number in several)


@pytest.mark.parametrize("name", LISTED)
def test_everything_that_a_paper_numbers_is_listed_once(name: str) -> None:
    expected = [
        (kind, str(number))
        for kind, count in LISTED[name]["numbered"].items()
        for number in (range(1, count + 1) if isinstance(count, int) else count)
    ]
    found = [each for row in LISTED[name]["rows"] for each in things(row["id"])]
    assert sorted(found) == sorted(expected)


def test_every_script_that_reproduces_a_paper_is_named() -> None:
    scripts = {*(ROOT / "benchmarks" / "reproduce").glob("[a-z]*.py")}
    assert scripts <= {pages.script_of(part["result"]) for part in PARTS}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: f"{part['result']}-{part['column']}")
def test_figures_are_in_the_results_and_the_papers_are_those_that_the_scripts_print(
    part: dict[str, Any],
) -> None:
    assert pages.measured(part)
    columns = [each for each in stored(part["result"])["columns"] if each.startswith("paper")]
    for name, printed in part["figures"].items():
        row = pages.row_named(part["result"], name)
        theirs = [str(row[each]).partition(" ±")[0] for each in columns]
        known = [float(each) for each in theirs if re.fullmatch(r"[\d.]+", each)]
        assert printed == "" or not known or printed in known, name
