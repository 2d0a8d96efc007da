"""The `coordinator settings` and `sample-data` commands: what a run can be set to, and
what it can begin with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedsurrogate.common.command_line import Json, console

from .options import complete_keys, complete_methods, complete_presets

# In place of a preset's name.
ALL = "all"


def settings(
    key: Annotated[str, typer.Argument(metavar="[KEY]", autocompletion=complete_keys)] = "",
    method: Annotated[str, typer.Option(metavar="NAME", autocompletion=complete_methods)] = "",
    preset: Annotated[str, typer.Option(metavar="NAME", autocompletion=complete_presets)] = "",
    as_json: Json = False,
) -> None:
    """Explain the settings of a run, or list its presets.

    Shows meaning, default, range, unit and the methods that use a setting.

    Example: coordinator settings --method fedlap

    Args:
        key: A setting, such as fedpft.rank; or a section, such as fedpft.
        method: Only the settings that this method uses.
        preset: Print the settings of a preset, as `-c` and `flwr run` take them, and how it differs
            from its paper; all: list the presets.
    """
    if preset:
        _show_preset(preset)
        return
    from dataclasses import asdict

    from fedsurrogate.common.help import descriptions, setting_tables

    rows = descriptions(key, method)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
        return
    for table in setting_tables(rows, key, bool(method)):
        console.print(table)


def _show_preset(name: str) -> None:
    from ..runs.presets import preset_notes, preset_settings, presets

    if name == ALL:
        for each in presets():
            typer.echo(f"{each}: {preset_notes(each)[0]}")
        return
    settings = preset_settings(name)
    for line in preset_notes(name):
        typer.echo(line, err=True)
    typer.echo(" ".join(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def sample_data(
    kind: Literal["xrays"],
    out: Annotated[Path | None, typer.Option(show_default="the name of what is made")] = None,
    hospitals: Annotated[int, typer.Option(min=1, max=50)] = 4,
    images: Annotated[int, typer.Option(min=10, max=100_000)] = 400,
    size: Annotated[int, typer.Option(min=16, max=512)] = 64,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Draw small data sets for tutorials and first steps.

    Needs no internet; no patient is in them.

    xrays: chest X-rays of several hospitals, with a class, fourteen findings of which each hospital
    annotated some, a number, and the time to an event.

    Example: coordinator sample-data xrays --out xrays

    Args:
        kind: What to make.
        out: Folder that is made.
        hospitals: Number of hospitals.
        images: Number of pictures of each hospital.
        size: Height and width in pixels.
        seed: Another number gives other pictures.
    """
    from ..sample_data import write_xrays

    folder = out or Path(kind)
    names = write_xrays(folder, hospitals, images, seed, size)
    console.print(f"drawn: {hospitals * images} pictures of {', '.join(names)}")
    console.print(f"all hospitals   {folder / 'hospitals'}")
    console.print(f"one hospital    {folder / 'hospitals' / names[0]}")
    console.print(f"new patients    {folder / 'new'}")
