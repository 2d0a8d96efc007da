"""Commands in the documentation exist, take the options they are shown with, and their settings are
accepted.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from typer.main import get_command

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main
from fedsurrogate.client_app.governance.policy import load_policy
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import parse_overrides
from fedsurrogate.server_app.deployment.submit import APP_FOLDER
from fedsurrogate.server_app.runs.presets import typed_settings
from tests.commands import coordinator
from tests.documents import DOCS, PAGES, blocks, commands, name_of, words

TESTS = Path(__file__).parents[1]
COMMANDS = {
    "coordinator": get_command(fedsurrogate.server_app.cli.main.app),
    "site": get_command(fedsurrogate.client_app.cli.main.app),
}
QUICK = ("plan", "settings")


def ours() -> Iterator[tuple[str, list[str]]]:
    """Every line of a shell block that calls one of our commands, by page; containers' words before
    it are left out.
    """
    for page in PAGES:
        for line in (line for block in commands(page) for line in block):
            if line.startswith(("coordinator ", "site ")):
                yield name_of(page), words(line)


def leaf(found: click.Command, arguments: list[str]) -> tuple[click.Command, list[str]]:
    """The subcommand of these words, and its own words."""
    while isinstance(found, click.Group):
        assert arguments, "no command"
        assert arguments[0] in found.commands, f"there is no command {arguments[0]!r}"
        found, arguments = found.commands[arguments[0]], arguments[1:]
    return found, arguments


def parted(shown: tuple[str, list[str]]) -> tuple[list[str], list[str]]:
    """A line, and the words of it that are its command's own."""
    line = shown[1]
    return line, leaf(COMMANDS[line[0]], line[1:])[1]


def complete(text: str) -> bool:
    """Whether settings are shown in full: "..." stands for what a reader fills in, and one page adds
    its method before it runs it.
    """
    return "..." not in text and "nearest-mean" not in text


@pytest.mark.parametrize(
    ("page", "line"), ours(), ids=[f"{page}-{' '.join(line[:3])}" for page, line in ours()]
)
def test_a_command_exists_with_its_options_and_accepts_its_settings(
    page: str, line: list[str]
) -> None:
    command, arguments = leaf(COMMANDS[line[0]], line[1:])
    context = click.Context(command, **command.context_settings)
    given, rest, _ = command.make_parser(context).parse_args(arguments)
    assert not rest or context.allow_extra_args, f"{page}: {rest}"
    for parameter in command.params:
        if isinstance(parameter, click.Argument) and parameter.required:
            assert given.get(parameter.name or ""), f"{page}: {parameter.name} is missing"
    texts = [text for text in given.get("run_config") or [] if complete(text)]
    if texts:
        parse_run(typed_settings(texts) if line[0] == "coordinator" else parse_overrides(texts))
    if texts := [text for text in given.get("node_config") or [] if complete(text)]:
        parse_node_config(parse_overrides(texts))


def test_every_command_of_the_documentation_is_run_by_a_test() -> None:
    """Its words stand in one test as those of a command line."""
    shown = {" ".join(line[: len(line) - len(own)]) for line, own in map(parted, ours())}
    assert len(shown) > 50
    texts = [file.read_text() for file in TESTS.rglob("test_*.py")]
    given = [
        (set(re.findall(r"(?:coordinator|site)(?=\b|_)", text)), set(arguments_in(text)))
        for text in texts
    ]

    def is_run(command: str) -> bool:
        program, *own = command.split()
        return any(
            command in words or (program in named and {*own} <= words) for named, words in given
        )

    assert not [each for each in shown if not is_run(each)]


def arguments_in(source: str) -> Iterator[str]:
    """Texts that stand as arguments of calls, as entries of lists and tuples, or as keys of tables
    of commands.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call():
                found: list[ast.expr | None] = [*node.args, *(each.value for each in node.keywords)]
            case ast.List() | ast.Tuple():
                found = [*node.elts]
            case ast.Dict():
                found = [*node.keys]
            case _:
                continue
        yield from (
            each.value
            for each in found
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        )


@pytest.mark.parametrize(
    "line",
    [line for _, line in ours() if line[0] == "coordinator" and line[1] in QUICK],
    ids=" ".join,
)
def test_quick_commands_of_the_coordinator_run(
    line: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert coordinator(monkeypatch, *line[1:]) == 0


@pytest.mark.parametrize("text", blocks(DOCS / "tutorials" / "privacy-budget.md", "toml"))
def test_policies_of_the_documentation_are_accepted(text: str, tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(text)
    load_policy(str(tmp_path / "policy.toml"))


def test_settings_of_flwr_run_are_accepted() -> None:
    found = [
        line
        for page in PAGES
        for block in commands(page)
        for line in block
        if line.startswith("flwr run .")
    ]
    assert found
    for line in found:
        flags = words(line)
        parse_run(parse_overrides([flags[flags.index("--run-config") + 1]]))


def test_the_app_that_the_documentation_shows_exists() -> None:
    assert (APP_FOLDER / "examples" / "own_server_app" / "pyproject.toml").exists()
