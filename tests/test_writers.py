"""CSV, Markdown, HTML and terminal output are written by one function each, which escapes; read from
the syntax trees.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.imports import called, holds_for
from tests.test_architecture import ROOMS, sources, tree

CODE = sources(*ROOMS)
PAGES, ESCAPES, CONSOLE = "common/pages/svg.py", "common/escapes.py", "common/command_line.py"
# Modules that insert markup of their own, such as pictures.
TRUST = {
    "client_app/audit/disclosure.py",
    "client_app/audit/output.py",
    "client_app/model_use/evaluation.py",
    "client_app/model_use/target_report.py",
    "common/pages/svg.py",
    "server_app/export/model_card.py",
    "server_app/report/build.py",
    "server_app/report/quality_view.py",
}
HTML = re.compile(r"<(p|td|tr|div|table|section|h[1-6]|html)\b|<!doctype")
ESCAPING = {"for_markdown", "_quoted", "_shown"}


def texts(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Every string, also the parts of f-strings, but no docstring."""
    documented = {
        id(node.body[0].value)
        for node in nodes
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in nodes:
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and id(node) not in documented:
            yield text


def faults(path: str, module: ast.Module) -> list[str]:
    """What a module writes past the functions that escape."""
    nodes, found = list(ast.walk(module)), list[str]()
    names = {called(node) for node in nodes if isinstance(node, ast.Call)}
    if names & {"writer", "DictWriter", "to_csv", "write_csv_file"}:
        found.append("CSV")
    packages = {name.partition(".")[0] for name in imported_of(nodes)}
    if packages & {"jinja2", "markupsafe"} and path != PAGES:
        found.append("HTML by Jinja")
    if "html" in packages and path != ESCAPES:
        found.append("HTML by the standard library")
    if "Console" in names and path != CONSOLE:
        found.append("a console that does not escape")
    if "trusted" in names and path not in TRUST:
        found.append("markup that is trusted")
    written = list(texts(nodes))
    pages = any(HTML.search(text) for text in written)
    if pages and path != "common/pages/svg.py" and "render_page" not in names:
        found.append("HTML without render_page")
    if any(re.match(r"## |\|-{3}", text) for text in written):
        found += markdown_faults(nodes)
    return found


def imported_of(nodes: Sequence[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "" if node.level else node.module or ""


def parts(value: ast.expr) -> list[ast.expr]:
    """What an expression may be, or is joined from."""
    if isinstance(value, ast.IfExp):
        return parts(value.body) + parts(value.orelse)
    return parts(value.left) + parts(value.right) if isinstance(value, ast.BinOp) else [value]


def markdown_faults(nodes: Sequence[ast.AST]) -> list[str]:
    """Values in Markdown that are neither escaped nor numbers."""
    found = []
    for node in nodes:
        if not isinstance(node, ast.FormattedValue):
            continue
        for value in parts(node.value):
            name = getattr(value.func, "id", "") if isinstance(value, ast.Call) else ""
            fine = isinstance(value, ast.Constant) or node.format_spec is not None
            if not (fine or name in ESCAPING):
                found.append(f"Markdown with {ast.unparse(value)}")
    return found


@holds_for(CODE)
def test_nothing_is_written_past_the_functions_that_escape(path: str) -> None:
    assert faults(path, tree(path)) == []


@pytest.mark.parametrize(
    "source",
    [
        "import csv\ncsv.writer(stream).writerow(row)",
        "from csv import DictWriter\nDictWriter(stream, names)",
        "frame.to_csv(file)",
        "from jinja2 import Environment",
        "from markupsafe import Markup",
        "from html import escape",
        "from rich.console import Console\nConsole().print(name)",
        "from fedsurrogate.common.pages.svg import trusted\ntrusted(name)",
        "page = f'<table><td>{name}</td>'",
        "page = '<!doctype html>' + name",
        "lines = ['## Title', f'The class {name}']",
        "lines = ['|---|', f'| {name} | {row.get(1)} |']",
        "lines = ['## Title', f'The class{str() if x else str() + name}']",
    ],
)
def test_a_writer_of_its_own_is_found(source: str) -> None:
    assert faults("server_app/x.py", ast.parse(source))


def test_what_is_allowed_exists() -> None:
    """An exception for a file that is gone would hide the next one of this name."""
    assert {PAGES, ESCAPES, CONSOLE, *TRUST} <= set(CODE)
