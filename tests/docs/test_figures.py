"""The figures in the tables of the documents are those that the benchmarks wrote last."""

import re
from collections.abc import Iterator

from benchmarks.pages import pages
from tests.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results"


def test_pages_are_those_that_the_results_give() -> None:
    """Measured tables, and tables between marks in the documentation."""
    made = dict(pages())
    old = [
        file.name for file, text in made.items() if not file.exists() or file.read_text() != text
    ]
    assert not old, "run: PYTHONPATH=. python benchmarks/pages.py"
    assert {*RESULTS.glob("*.md")} <= made.keys(), "a page without a result"


def tables(page: str, begins: str) -> Iterator[list[list[str]]]:
    """The tables of a page whose header begins so: rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    for block in blocks:
        if block.startswith(begins):
            yield [
                [cell.strip() for cell in line.strip("|\n").split("|")]
                for line in block.splitlines()
            ]
