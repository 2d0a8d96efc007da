"""Pages are short, and so are their sentences."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.documents import DOCS, PAGES, README, ROOT, name_of

LONGEST, MOST, MOST_IN_A_CELL = 35, 45_000, 40
LIMITS = {
    "privacy/hostile-hospitals.md": 1200,
    "methods/fedpft.md": 2000,
    "privacy/secure-aggregation.md": 2000,
}
PAGES_OF_WORDS = [*PAGES, ROOT / "AGENTS.md"]


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page: of its paragraphs, list items and cells; code is one word."""
    plain = re.sub(r"```.*?```|<!--.*?-->|<div.*?</div>", "\n\n", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#]|\d+\. ))", plain):
        block = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", block))
        for part in re.split(r"(?<!\\)\|", block) if block.lstrip().startswith("|") else [block]:
            yield from re.split(r"(?<=[.!?:;])\s+", " ".join(part.split()))


@pytest.mark.parametrize("page", PAGES_OF_WORDS, ids=name_of)
def test_no_sentence_has_more_than_thirty_five_words(page: Path) -> None:
    long = [each for each in sentences(page.read_text()) if len(each.split()) > LONGEST]
    assert not long


@pytest.mark.parametrize("page", PAGES_OF_WORDS, ids=name_of)
def test_no_sentence_has_what_of_what(page: Path) -> None:
    assert not [s for s in sentences(page.read_text()) if re.search(r"\bwhat\b.*\bof what\b", s)]


def test_all_pages_together_have_at_most_forty_five_thousand_words() -> None:
    counted = {
        name_of(page): len(page.read_text().split()) for page in (README, *DOCS.rglob("*.md"))
    }
    assert sum(counted.values()) <= MOST, sorted(counted.items(), key=lambda each: -each[1])[:10]
    for name, most in LIMITS.items():
        assert counted[f"docs/{name}"] <= most
