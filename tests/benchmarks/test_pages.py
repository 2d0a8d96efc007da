"""Pages of results hold all that the files hold, and tables of the documentation their largest values."""

from pathlib import Path

import pytest

from benchmarks import pages
from benchmarks.harness import results

MARK = "<!-- largest {loss} of some by {hostile} of {sites} and epsilon {epsilon} -->"
COLUMNS = ("hostile", "sites", "epsilon", "loss")
ROWS = [(1, 10, "none", 2.5), (1, 4, "none", 1.0), (1, 4, "none", 7.25), (1, 4, "8", -1.0)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of benchmarks/results, with one result."""
    for module in (results, pages):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setitem(pages.SCRIPTS, "some", "bags.py")
    results.report("some", "Losses | of some", COLUMNS, ROWS)
    return tmp_path


def test_a_table_of_a_page_has_the_largest_values_and_is_written_again_as_it_was(
    folder: Path,
) -> None:
    text = f"Before.\n\n{MARK}\n\n<!-- end -->\n\nAfter.\n"
    once = pages.filled(text)
    assert once.splitlines()[4:8] == [
        "| hostile of sites | epsilon 8 | epsilon none |",
        "|---|---|---|",
        "| 1 of 4 | -1 | 7.25 |",
        "| 1 of 10 |  | 2.5 |",
    ]
    assert pages.filled(once) == once
    assert once.startswith(f"Before.\n\n{MARK}\n\n")
    assert once.endswith("\n\n<!-- end -->\n\nAfter.\n")
