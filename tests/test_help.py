"""The help of both commands describes every command, argument and option."""

import pytest
from click import Command, Context, Group
from typer.main import get_command
from typer.testing import CliRunner

import fedsurrogate.client_app.cli.main
import fedsurrogate.server_app.cli.main

APPS = {
    "site": fedsurrogate.client_app.cli.main.app,
    "coordinator": fedsurrogate.server_app.cli.main.app,
}


def commands(found: Command, *path: str) -> list[tuple[str, ...]]:
    """The words of every command."""
    if not isinstance(found, Group):
        return [path]
    return [
        each for name, command in found.commands.items() for each in commands(command, *path, name)
    ]


@pytest.mark.parametrize(
    ("app", "path"),
    [(name, path) for name, app in APPS.items() for path in commands(get_command(app))],
)
def test_every_command_explains_itself_and_all_it_takes(app: str, path: tuple[str, ...]) -> None:
    shown = CliRunner().invoke(
        APPS[app], [*path, "--help"], env={"COLUMNS": "400", "TERMINAL_WIDTH": "400"}
    )
    assert shown.exit_code == 0
    command: Command = get_command(APPS[app])
    for name in path:
        assert isinstance(command, Group)
        command = command.commands[name]
    assert command.help
    for parameter in command.get_params(Context(command)):
        message = getattr(parameter, "help", None)
        assert message, parameter.name
        assert " ".join(message.split())[:40] in " ".join(shown.output.split()), parameter.name
