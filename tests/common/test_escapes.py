"""Escapes for CSV, Markdown, HTML and terminals: nothing of a text acts, all of it can be read."""

from __future__ import annotations

import io

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.table import Table
from rich.text import Text

from fedsurrogate.common.command_line import SafeConsole
from fedsurrogate.common.escapes import (
    as_utf8,
    csv_rows,
    csv_text,
    for_csv,
    for_html,
    for_markdown,
    for_terminal,
    from_csv,
)
from fedsurrogate.common.pages.svg import render_page, trusted
from tests.hostile_names import Seen, formulas, hostile_texts, is_formula, unsafe

MARKDOWN = MarkdownIt("commonmark").enable(["table", "strikethrough"])


@given(hostile_texts())
@example("'=1")
@example("''")
@example("-1")
@example("x;=1")
@example("\t\t=1")
@settings(max_examples=300)
def test_a_cell_is_no_formula_and_gives_its_text_back(text: str) -> None:
    assert not is_formula(for_csv(text))
    assert from_csv(for_csv(text)) == text


@given(st.lists(st.lists(hostile_texts(), min_size=2, max_size=4), min_size=1, max_size=4))
@settings(max_examples=150)
def test_rows_are_read_back_and_no_delimiter_makes_a_formula(rows: list[list[str]]) -> None:
    text = csv_text(rows)
    assert formulas(text) == []
    assert list(csv_rows(io.StringIO(text, newline=""))) == rows


def test_numbers_stay_numbers_and_nothing_is_empty() -> None:
    assert csv_text([(1, -2, -0.5, None, 1e-12, "-3.5", "+1")]) == "1,-2,-0.5,,1e-12,'-3.5,'+1\n"


@pytest.mark.parametrize("template", ["{}", "# {}", "- {}", "a {} b", "1. {}", "> {}"])
@given(text=hostile_texts())
@settings(max_examples=60)
def test_markdown_shows_a_text_and_nothing_else(template: str, text: str) -> None:
    shown = for_markdown(text)
    assert "\n" not in shown
    tokens = MARKDOWN.parse(template.format(f"x{shown}"))
    (inline,) = (token for token in tokens if token.type == "inline")
    kinds = {child.type for child in inline.children or []}
    assert kinds <= {"text"} | {"text_special"}, kinds
    read = "".join(child.content for child in inline.children or [])
    assert read.replace("a x", "x").removesuffix(" b") == f"x{for_terminal(text).strip()}"


@given(text=hostile_texts())
@settings(max_examples=100)
def test_a_text_at_the_beginning_of_a_line_is_a_paragraph_in_markdown(text: str) -> None:
    tokens = MARKDOWN.parse(f"before\n\n{for_markdown(text)}\n\nafter")
    kinds = [token.type for token in tokens if token.nesting >= 0]
    assert set(kinds) == {"paragraph_open", "inline"}


@given(text=hostile_texts())
@settings(max_examples=100)
def test_a_text_in_a_table_of_markdown_stays_in_its_cell(text: str) -> None:
    tokens = MARKDOWN.parse(f"| a | b |\n|---|---|\n| {for_markdown(text)} | end |\n")
    cells = [token.content for token in tokens if token.type == "inline"]
    assert len(cells) == 4
    assert cells[3] == "end"


@given(text=hostile_texts())
@settings(max_examples=100)
def test_html_has_the_text_in_element_and_attribute_and_no_tag_of_it(text: str) -> None:
    value, wanted = for_html(text), for_terminal(text)
    seen = Seen(f"<p title=\"{value}\" lang='{value}'>{value}</p>")
    assert seen.tags == ["p"]
    assert seen.attributes == [("title", wanted), ("lang", wanted)]
    assert seen.text == wanted


@given(text=hostile_texts())
@settings(max_examples=60)
def test_a_page_shows_every_value_as_text_except_pictures(text: str) -> None:
    template = (
        "{% macro m(x) %}<i>{{ x }}</i>{% endmacro %}"
        '<p title="{{ t }}">{{ [t] | join(", ") }}{{ m(t) }}{{ t ~ "!" }}{{ p }}</p>'
    )
    page = render_page(template, {"t": text, "p": trusted("<svg></svg>")})
    wanted = for_terminal(text)
    seen = Seen(page)
    assert seen.tags == ["p", "i", "svg"]
    assert seen.attributes == [("title", wanted)]
    assert seen.text == f"{wanted}{wanted}{wanted}!"
    assert not unsafe(page)


@given(text=hostile_texts())
@settings(max_examples=100)
def test_a_terminal_gets_one_line_of_the_same_length(text: str) -> None:
    shown = for_terminal(text)
    assert shown.isprintable()
    assert len(shown) == len(text)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a.isprintable())


@given(text=hostile_texts().filter(lambda text: len(text) < 300))
@settings(max_examples=60)
def test_a_console_shows_no_character_that_controls_the_terminal(text: str) -> None:
    out, table = io.StringIO(), Table("a")
    shown = SafeConsole()
    shown.file, shown.width = out, 200
    table.add_row(text)
    for what in (text, Text(text), table, Text.assemble((text, "red"))):
        shown.print(what, soft_wrap=True)
    assert not unsafe(out.getvalue())


def test_the_lines_of_a_message_stay_lines() -> None:
    shown, out = SafeConsole(), io.StringIO()
    shown.file = out
    shown.print("one\ntwo [a-z]", soft_wrap=True)
    assert out.getvalue() == "one\ntwo [a-z]\n"


@given(
    st.text(st.sampled_from("a\\ud9e8\udce9\udc80"), max_size=8),
    st.text(st.sampled_from("a\\ud9e8\udce9\udc80"), max_size=8),
)
def test_no_name_of_a_file_is_taken_for_the_escape_of_another(one: str, other: str) -> None:
    assert as_utf8(one).encode().decode() == as_utf8(one)
    assert (as_utf8(one) == as_utf8(other)) == (one == other)
    if "\\" not in one and one.isascii():
        assert as_utf8(one) == one
