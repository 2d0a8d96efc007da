"""The `coordinator settings` and `coordinator preset` commands: what a run can be set to."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from fedsurrogate.common.command_line import Json, console
from fedsurrogate.server_app.cli.options import complete_keys, complete_methods, complete_presets


def settings(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]",
            help="A setting, such as fedpft.rank; or a section, such as fedpft.",
            autocompletion=complete_keys,
        ),
    ] = "",
    method: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Only the settings that this method uses.",
            autocompletion=complete_methods,
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Explain the settings of a run: meaning, default, range, unit and the methods that use them.

    Example: coordinator settings --method fedlap
    """
    from dataclasses import asdict

    from fedsurrogate.common.help import descriptions
    from fedsurrogate.common.settings_tables import setting_tables

    rows = descriptions(key, method)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for table in setting_tables(rows, key, bool(method)):
        console.print(table)


def preset(
    name: Annotated[
        str,
        typer.Argument(
            help="The preset to print, for `flwr run --run-config`.",
            autocompletion=complete_presets,
        ),
    ] = "",
) -> None:
    """List the presets, or print the settings of one and how it differs from its paper."""
    from fedsurrogate.server_app.runs.presets import preset_notes, preset_settings, presets

    if name:
        settings = preset_settings(name)
        for line in preset_notes(name):
            typer.echo(line, err=True)
        typer.echo(" ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()))
        return
    for each in presets():
        typer.echo(f"{each}: {preset_notes(each)[0]}")
