"""Names that somebody else chose: what they try in a spreadsheet, a page, Markdown, a log, or a
terminal; and what each of these sees of a file.
"""

from __future__ import annotations

import csv
import io
import re
from html.parser import HTMLParser

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

ELEMENT = "x-evil"
ESC, BELL = "\x1b", "\x07"
PIECES = (
    "=", "+", "-", "@", "\t", "\r", "\n", ";", ",", "'", '"', "=1+1", '=HYPERLINK("http://evil.example")',
    "@SUM(1)", "+cmd|' /C x'!A0", "-1", "1.5", "\uff1d1", f"{ESC}[31m", f"{ESC}]8;;http://evil.example{BELL}",
    f"{ESC}[2J", "\x9b31m", BELL, "\b", "\x00", "\x85", "\u2028", "\u202e", "\u2066", "\u200b", "\ufeff", "\u05e9\u05dc",
    f"<{ELEMENT} onload=1>", f"</title><{ELEMENT}>", f"'><{ELEMENT}>", f'" onmouseover="{ELEMENT}" "', "<!--", "]]>",
    "&lt;", "&#60;", "<script>", f"</svg><{ELEMENT}>", "[a](http://evil.example)", "![a](javascript:1)", "|", "||", "`",
    "```", "# ", "## ", "- ", "1. ", "1) ", "> ", "***", "_", "__a__", "~~a~~", "---", "===", "\\", "http://evil.example",
    "www.evil.example", "<http://evil.example>", "a@evil.example", "[^1]", "<u>", "{{ 'ran-' ~ 7*7 }}", "{% raw %}",
    "{# x #}", "$x$", "%s", "%(message)s", "x", "north", "\xe9", "\U0001f600", " ",
)  # fmt: skip
LONG = ("a" * 10_000, "=" * 10_000, f"<{ELEMENT}>" * 1000, "`" * 9_999)


def hostile_texts(printable: bool = False) -> SearchStrategy[str]:
    """Any text, and texts of dangerous pieces, up to 10 kB.

    printable: only what may be the name of a class in a message: it prints, and is not long.
    """
    pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
    if printable:
        made = st.one_of(pieces, st.text(min_size=1, max_size=60))
        return made.map(lambda text: text[:100]).filter(lambda text: text.isprintable())
    return st.one_of(pieces, pieces, st.text(min_size=1), st.sampled_from(LONG))


def is_formula(cell: str) -> bool:
    """Whether a spreadsheet computes a cell, as OWASP's page on CSV injection says; not a number."""
    number = re.fullmatch(r"-?[0-9.]+(e[+-]?[0-9]+)?", cell)
    return cell.startswith(tuple("=+-@\t\r\uff1d\uff0b\uff0d\uff20")) and number is None


def formulas(text: str) -> list[str]:
    """Cells that a spreadsheet computes, whichever delimiter it takes."""
    whole = text.lstrip("\ufeff")
    return [
        cell
        for delimiter in ",;\t"
        for row in csv.reader(io.StringIO(whole, newline=""), delimiter=delimiter)
        for cell in row
        if is_formula(cell)
    ]


def unsafe(text: str, allowed: str = "\n") -> set[str]:
    """Characters that control a terminal or the direction of writing, or are invisible."""
    return {c for c in text if not c.isprintable() and c not in allowed}


class Seen(HTMLParser):
    """What a browser sees."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def faults_of_page(page: str) -> list[str]:
    """What a hostile name has reached in a page."""
    seen = Seen(page)
    found = [tag for tag in seen.tags if tag in (ELEMENT, "script", "u")]
    found += [name for name, _ in seen.attributes if name.startswith("on")]
    found += [
        value
        for name, value in seen.attributes
        if name in ("href", "src") and not re.match(r"data:(text/csv|image/png);|#", value)
    ]
    if "ran-49" in seen.text:
        found.append("a template was run")
    return found + [f"{ord(each):x}" for each in sorted(unsafe(page))]
