"""Every command line that the product shows as advice is one that its program takes: in errors, remedies and
help. Tests that type whole printed lines: tests/e2e/test_minimal_path.py (what `init` and `enrol` show),
server_app/deployment/test_enrolment.py (what lets a site in), server_app/lifecycle (what continues a run),
tests/faults/test_days_at_work.py (the same, after an upgrade), tests/deploy/test_guides.py (containers).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
from typer.main import get_command

from tests.documents import ROOT
from tests.test_command_lines import APPS

FOLDERS = ("client_app", "common", "fedsurrogate", "server_app", "strategies")
# In backticks, after "Example:", or in a message after a colon or "&&", as people read a command.
QUOTED = re.compile(r"`((?:site|coordinator) [^`]+)`")
EXAMPLE = re.compile(r"Example: ((?:site|coordinator) [^\n]*)")
SAID = re.compile(r"(?:: |&& )((?:site|coordinator) [a-z][^\n;`,]*)")
# Values that cannot hold a blank or a sign of a shell: names of sites and of models; and quoted ones.
PLAIN = {"site", "latest", "place"}
VALUE = "\0"
COMMANDS = {name: get_command(app) for name, app in APPS.items()}


def texts(file: Path) -> Iterator[tuple[int, str, list[str], bool]]:
    """Line, text and the source of each value of every text of a file; whether it is no docstring."""
    nodes = [*ast.walk(ast.parse(file.read_text()))]
    docstrings = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            parts = [
                each.value if isinstance(each, ast.Constant) else VALUE for each in node.values
            ]
            values = [
                ast.unparse(each.value)
                for each in node.values
                if isinstance(each, ast.FormattedValue)
            ]
            yield node.lineno, "".join(map(str, parts)), values, True
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in inside
        ):
            yield node.lineno, node.value, [], id(node) not in docstrings


@cache
def advice() -> tuple[tuple[str, str, list[str]], ...]:
    """Place, command line, and the sources of its values."""
    return tuple(_advice())


def _advice() -> Iterator[tuple[str, str, list[str]]]:
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file.name == "renamed.py":
                continue  # Names that are no more.
            for line, text, values, printed in texts(file):
                for form in (QUOTED, EXAMPLE, *([SAID] if printed else [])):
                    for found in form.finditer(text):
                        before = text[: found.start(1)].count(VALUE)
                        own = values[before : before + found[1].count(VALUE)]
                        shown = " ".join(found[1].split())
                        yield f"{file.relative_to(ROOT)}:{line}", shown, own


def why_not(line: str) -> str:
    """Why its program does not take a command line; empty if it does. Words that stand for a value are
    no matter.
    """
    try:
        program, *words = shlex.split(line.replace(VALUE, "VALUE"))
    except ValueError:
        program, *words = line.split()
    found: click.Command = COMMANDS[program]
    while isinstance(found, click.Group) and words:
        if words[0] not in found.commands:
            return f"there is no command {words[0]!r}"
        found, words = found.commands[words[0]], words[1:]
    known = {
        each for parameter in found.params for each in (*parameter.opts, *parameter.secondary_opts)
    }
    known |= {"--help", "--version"}
    if found.context_settings.get("ignore_unknown_options"):
        return ""  # The rest is Flower's.
    unknown = [word for word in words if word.startswith("-") and word.strip(".,:)") not in known]
    return f"there is no {unknown[0]} of it" if unknown else ""


def test_each_line_is_a_command_with_its_options() -> None:
    wrong = {}
    for place, line, _ in advice():
        if why := why_not(line):
            wrong[f"{place}: {line}"] = why
    assert wrong == {}


def test_values_in_a_line_are_quoted_for_a_shell() -> None:
    """A folder with a blank would be two words."""
    bare = [
        f"{place}: {line}: {value}"
        for place, line, values in advice()
        for value in values
        if value not in PLAIN and not value.startswith("shlex.")
    ]
    assert bare == []
