"""The `coordinator` and `site` commands, run in this process."""

import sys
from functools import cache
from types import ModuleType

import pytest
import typer.main

from fedsurrogate.client_app.cli import main as site_cli
from fedsurrogate.common import command_line
from fedsurrogate.server_app.cli import main as coordinator_cli

# A process of a user builds its commands once; this one runs thousands of lines.
build_once = cache(typer.main.get_command)


def coordinator(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command, and return its exit code."""
    return _run(coordinator_cli, monkeypatch, "coordinator", *map(str, arguments))


def site(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Run the command, and return its exit code."""
    return _run(site_cli, monkeypatch, "site", *map(str, arguments))


def _run(cli: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", list(words))
    monkeypatch.setattr(typer.main, "get_command", build_once)
    # How long a command takes here says nothing, and tests read what it prints.
    monkeypatch.setattr(command_line, "SILENT_SECONDS", 3600.0)
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
