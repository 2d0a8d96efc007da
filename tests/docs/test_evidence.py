"""What pages about privacy name exists: code, tests, and a section for each mechanism."""

import ast
import re
from collections.abc import Iterator

import pytest

from fedsurrogate.common.privacy import mechanism
from tests.documents import DOCS, ROOT

PROOFS, EDGES = DOCS / "privacy" / "proofs.md", DOCS / "privacy" / "sharp-edges.md"
THREATS, PAPERS = DOCS / "threat-model.md", ROOT / "benchmarks" / "results" / "papers.md"
MECHANISMS = (
    mechanism.SUMS,
    mechanism.EM,
    mechanism.THEOREM,
    mechanism.SGD,
    mechanism.NOISY_COUNTS,
    mechanism.DISTRIBUTED_SUMS,
)
PLACE = re.compile(r"`((?:[a-z_]+/)+[a-z_0-9]+(?:\.py)?)(::?[A-Za-z_]\w*)?`")


def names_in(path: str) -> set[str]:
    """Functions and classes that a file defines."""
    tree = ast.parse((ROOT / path).read_text())
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name for node in ast.walk(tree) if isinstance(node, kinds)}


def places(text: str) -> Iterator[tuple[str, str]]:
    for path, name in PLACE.findall(text):
        yield path, name.lstrip(":")


@pytest.mark.parametrize(
    "page",
    [PROOFS, EDGES, THREATS, PAPERS],
    ids=["proofs", "sharp-edges", "threat-model", "certificates"],
)
def test_code_and_tests_that_a_page_names_exist(page: object) -> None:
    found = list(places(page.read_text()))  # type: ignore[attr-defined]
    assert len(found) > 15
    for path, name in found:
        assert (ROOT / path).exists(), path
        assert not name or name in names_in(path), f"{path} has no {name}"


def test_each_mechanism_has_a_proof_with_its_code_and_its_tests() -> None:
    parts = re.split(r"(?m)^## `(.+)`$", PROOFS.read_text())
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(sections) == set(MECHANISMS)
    for name, section in sections.items():
        roots = {path.partition("/")[0] for path, _ in places(section)}
        assert {"client_app", "tests"} <= roots, name


def test_each_attack_that_is_stopped_has_a_test_or_a_benchmark_that_shows_it() -> None:
    tables = re.findall(r"(?m)^\| attack .*\n\|[-|]+\n((?:\|.*\n)+)", THREATS.read_text())
    rows = [row for table in tables for row in table.splitlines()]
    assert len(rows) > 50
    for row in rows:
        shown = row.strip("|").split("|")[2]
        assert any(place.startswith(("tests/", "benchmarks/")) for place, _ in places(shown)), row


def test_each_pitfall_has_a_severity_and_a_test_that_holds_it() -> None:
    rows = [line for line in EDGES.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1] in ("high", "middle", "low"), row
        (place,) = places(cells[3])
        assert place[0].startswith("tests/"), row
        assert place[1].startswith("test_"), row
