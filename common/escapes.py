"""Text that others chose, made safe where it is shown: in CSV, Markdown, HTML, and on a terminal; numbers
for people, ranges of numbers in the text of a setting, and what a docstring says of each name.
"""

from __future__ import annotations

import csv
import html
import re
import textwrap
from collections.abc import Iterable, Iterator

# A spreadsheet computes a cell that begins with one of these. The last four are their wide forms.
FORMULA = "=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20"
# Characters that are seen as blanks, or not at all, and count as letters or signs.
BLANK_LETTERS = dict.fromkeys(map(ord, "\u115f\u1160\u3164\uffa0\u17b4\u17b5\u034f\u2800"), " ")
# A spreadsheet may divide a line at these, too; what follows then begins a cell.
_BEGIN = r"(^|[;\t\r\n])"
_RISKY = re.compile(rf"{_BEGIN}(?=['{FORMULA}])")
_ESCAPED = re.compile(rf"{_BEGIN}'")
_QUOTED = frozenset(',;"\t\r\n')
# ASCII punctuation; a hyphen inside a word, a comma and an apostrophe mean nothing in Markdown.
_MARKDOWN = re.compile(r"(?<![0-9A-Za-z])-|-(?![0-9A-Za-z])|[!-&(-+./:-@\[-`{-~]")


def for_terminal(text: str) -> str:
    """A text in one line, without characters that control a terminal, change the direction of
    writing, or are invisible.

    Each such character becomes one other, so that the length stays. Also for logs and tables.

    Example:
        >>> for_terminal("two\\nlines, \\x1b[31mred")
        'two lines, �[31mred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)


def for_rows(label: str, text: str, width: int) -> str:
    """A text of others below a label: only its first row begins like one of ours.

    Args:
        label: of ours, with its blanks.
        text: of others; several blanks become one, and so do characters that look like them.
        width: columns of the terminal. It wraps no row itself, also where characters are wide.

    Example:
        >>> print(for_rows("purpose   ", "a test        digest 0f", 24))
        purpose   a test digest
                | 0f
    """
    plain = " ".join(for_terminal(text).translate(BLANK_LETTERS).split())
    begin, room = " " * max(0, len(label) - 2) + "| ", width if plain.isascii() else width // 2
    rows = textwrap.wrap(
        plain, max(room, len(label) + 10), initial_indent=label, subsequent_indent=begin
    )
    return "\n".join(rows) or label


def for_csv(text: str) -> str:
    """A text as the content of a CSV cell that no spreadsheet computes; `from_csv` gives it back.

    An apostrophe stands before whatever would begin a formula, and before an apostrophe in that
    place.

    Example:
        >>> for_csv("=1+1"), for_csv("a;-1"), for_csv("'tis"), for_csv("a-b")
        ("'=1+1", "a;'-1", "''tis", 'a-b')
    """
    return _RISKY.sub(r"\1'", text)


def from_csv(cell: str) -> str:
    """The text of a cell that `for_csv` made."""
    return _ESCAPED.sub(r"\1", cell)


def csv_text(rows: Iterable[Iterable[object]], ending: str = "\n") -> str:
    """Rows as CSV: texts are escaped, numbers are not; floats have ten digits, None is empty.

    Args:
        rows: each with its cells.
        ending: of a line.

    Example:
        >>> csv_text([("class", "records"), ("=1+1", 2.5)])
        "class,records\\n'=1+1,2.5\\n"
    """
    # Not the writer of Python's csv, which leaves a lone carriage return without quotes.
    return "".join(",".join(map(_cell, row)) + ending for row in rows)


def csv_rows(lines: Iterable[str]) -> Iterator[list[str]]:
    """The rows of CSV that `csv_text` made, as texts. Lines must keep their ends (newline="")."""
    return ([from_csv(cell) for cell in row] for row in csv.reader(lines))


def as_utf8(text: str) -> str:
    """A text in UTF-8: bytes of a file name that are not are escaped. Different texts stay
    different.

    Args:
        text: perhaps with such bytes, as Python reads names of files.

    Example:
        >>> as_utf8("caf\\udce9.png"), as_utf8("C:\\\\x.png")
        ('caf\\\\udce9.png', 'C:\\\\x.png')
    """
    escaped = text.encode(errors="backslashreplace").decode()
    if escaped == text and "\\ud" not in text:
        return text
    return text.replace("\\", "\\\\").encode(errors="backslashreplace").decode()


def for_markdown(text: str) -> str:
    """A text that is only text in Markdown, in one line: also in a heading, a table or a list.

    Example:
        >>> for_markdown("[a](http://b) | x-ray")
        '\\\\[a\\\\]\\\\(http\\\\:\\\\/\\\\/b\\\\) \\\\| x-ray'
    """
    return _MARKDOWN.sub(r"\\\g<0>", for_terminal(text).strip())


def for_html(text: str) -> str:
    """A text that is only text in HTML, in an element or in a quoted attribute.

    Example:
        >>> for_html("<b>'")
        '&lt;b&gt;&#x27;'
    """
    return html.escape(for_terminal(text))


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int | float):
        return f"{value:.10g}" if isinstance(value, float) else str(value)
    text = for_csv(str(value))
    return '"' + text.replace('"', '""') + '"' if _QUOTED & set(text) else text


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


def documented(docstring: str, heading: str) -> tuple[str, dict[str, str]]:
    """The part of a docstring before a list of names, and what the list says of each.

    Args:
        docstring: without the indentation of all its lines.
        heading: of the list, such as "Args".

    Example:
        >>> documented("Print.\\n\\nArgs:\\n    wide: Columns\\n        of a row.\\n    all: Of them.", "Args")
        ('Print.', {'wide': 'Columns of a row.', 'all': 'Of them.'})
    """
    before, _, listed = docstring.partition(f"\n\n{heading}:\n")
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", listed, re.MULTILINE)
    return before, {name: " ".join(text.split()) for name, text in found}


def ranges(text: str) -> tuple[tuple[float, float], ...]:
    """The ranges in a text of pairs "low,high", one for each column or one for all.

    Args:
        text: of the setting, with ";" between pairs; empty for none.

    Raises:
        ValueError: for another text, or a range without width.

    Example:
        >>> ranges("0,100"), ranges("0,1; -2,2")
        (((0.0, 100.0),), ((0.0, 1.0), (-2.0, 2.0)))
    """
    found = []
    for part in filter(None, map(str.strip, text.split(";"))):
        try:
            low, high = map(float, part.split(","))
        except ValueError:
            raise ValueError(f"{part[:40]!r} is no pair of numbers 'low,high'") from None
        if not abs(low) + abs(high) <= 1e300 or not low < high:
            raise ValueError(f"{part[:40]!r}: the first number must be below the second")
        found.append((low, high))
    return tuple(found)


def check_ranges(text: str) -> str:
    """The text, if `ranges` reads it. Raises ValueError otherwise."""
    ranges(text)
    return text
