"""The figures in the tables of the documents are those that the benchmarks wrote last."""

import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from benchmarks.pages import pages
from tests.documents import ROOT

RESULTS = ROOT / "benchmarks" / "results"
NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
# As written, as a percentage of a fraction, and in units a thousand times larger or smaller.
SCALES = (1, 100, 1e-3, 1e3)
# A page, how the header of a table begins, and the results with its figures. Rows and columns named
# "paper" are the paper's.
TABLES = [
    (
        "README.md",
        "| released | non-private",
        "xrays-four-hospitals-lite0 defaults-families-lite0 defaults-private-lite0"
        # Bytes do not depend on the backbone.
        " statistics-frontier private-cifar10",
    ),
    ("docs/results.md", "| epsilon of every site", "private-cifar10"),
    ("docs/results.md", "| epsilon | majority baseline", "xrays-four-hospitals-lite0"),
    (
        "docs/results.md",
        "| | MobileNetV2 | EfficientNet-Lite0",
        "xrays-four-hospitals xrays-four-hospitals-lite0 defaults-families defaults-families-lite0"
        " defaults-private defaults-private-lite0",
    ),
    ("docs/results.md", "| on an H100", "gpu"),
    ("docs/methods/fedpft.md", "| released | accuracy | uplink, all sites", "statistics-runs"),
    ("docs/methods/fedpft.md", "| nothing set |", "defaults-families"),
    (
        "docs/methods/fedlap.md",
        "| accuracy, % after round | 1",
        "fedlap-digits fedlap-digits-epsilon8 fedlap-cifar10 fedlap-cifar10-epsilon8",
    ),
    ("docs/methods/dpcvae.md", "| epsilon | own head", "dpcvae-pneumonia"),
    ("docs/privacy/audit.md", "| release | epsilon | attack", "membership"),
    ("docs/privacy/audit.md", "| mechanism | epsilon 1", "audit"),
    ("docs/privacy/index.md", "| method, images of a patient", "patients-cost"),
    ("docs/tasks/index.md", "| target | score | `fedpft`", "targets-fedavg"),
    ("docs/tasks/multilabel.md", "| code, noise | epsilon 1", "targets-labels-runs"),
    ("docs/tasks/survival.md", "| set: records", "targets-times-runs"),
    ("docs/privacy/secure-aggregation.md", "| head, 10 sites | ε", "private-heads"),
    (
        "docs/deployment/connections.md",
        "| run | sites | seconds",
        "rounds-seconds-2 rounds-seconds-5",
    ),
    ("docs/scale.md", "| surrogate | seconds", "large_site"),
    ("docs/scale.md", "| hospitals | processor s", "many_sites"),
    ("docs/scale.md", "| engine | processor seconds", "simulation-start"),
]


def test_pages_are_those_that_the_results_give() -> None:
    """Measured tables, and tables between marks in the documentation."""
    made = dict(pages())
    old = [
        file.name for file, text in made.items() if not file.exists() or file.read_text() != text
    ]
    assert not old, "run: PYTHONPATH=. python benchmarks/pages.py"
    assert {*RESULTS.glob("*.md")} <= made.keys(), "a page without a result"


def numbers(value: Any) -> Iterator[float]:
    """All numbers in a result, also those within texts such as "71.8 ± 0.1"."""
    if isinstance(value, str):
        yield from (float(each.replace(",", "")) for each in NUMBER.findall(value))
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield float(value)


@cache
def written(names: str) -> list[float]:
    """The numbers in the rows of these results, and the sizes beside them, sorted."""
    found = [json.loads((RESULTS / f"{name}.json").read_text()) for name in names.split()]
    return sorted(
        {
            number
            for each in found
            for key in ("rows", "megabytes")
            for number in numbers(each.get(key, []))
        }
    )


def is_written(text: str, names: str) -> bool:
    """Whether a number of the results becomes `text` when it is rounded to as many digits."""
    whole, _, exponent = text.replace(",", "").partition("e")
    digits = len(whole.partition(".")[2]) - int(exponent or 0)
    value, within = float(f"{whole}e{exponent or 0}"), 0.501 * 10.0**-digits
    known = written(names)
    for scale in SCALES:
        at = bisect_left(known, (value - within) / scale)
        if at < len(known) and known[at] <= (value + within) / scale:
            return True
    return False


def tables(page: str, begins: str) -> Iterator[list[list[str]]]:
    """The tables of a page whose header begins so: rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", (ROOT / page).read_text(), re.MULTILINE)
    for block in blocks:
        if block.startswith(begins):
            yield [
                [cell.strip() for cell in line.strip("|\n").split("|")]
                for line in block.splitlines()
            ]


@pytest.mark.parametrize(("page", "begins", "names"), TABLES)
def test_figures_in_tables_are_those_of_the_results(page: str, begins: str, names: str) -> None:
    found = list(tables(page, begins))
    assert found, f"{page} has no table that begins with {begins!r}"
    wrong = []
    for header, _, *rows in found:
        for label, *cells in (
            row for row in rows if "paper" not in row[0] or "paper's width" in row[0]
        ):
            for name, cell in zip(header[1:], cells, strict=True):
                plain = re.sub(r"`[^`]*`|<[^>]*>", "", cell)
                if not name.startswith("paper"):
                    wrong += [
                        (label, name, each)
                        for each in NUMBER.findall(plain)
                        if not is_written(each, names)
                    ]
    assert not wrong, f"{page}: not in {names}"


def test_a_figure_is_found_when_it_is_the_rounded_result_and_only_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        globals(), "written", lambda names: sorted(numbers([0.7177, "62.3 ± 0.4", 1490, 1.05e-4]))
    )
    assert all(
        is_written(text, "") for text in ("71.8", "72", "62.3", "0.4", "1.49", "1.0e-4", "1.1e-4")
    )
    assert not any(is_written(text, "") for text in ("71.7", "62.4", "1.4", "1.2e-4"))
