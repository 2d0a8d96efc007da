"""The `coordinator sample-data` command."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console


class Sample(StrEnum):
    """What can be made."""

    xrays = "xrays"


def sample_data(
    kind: Annotated[Sample, typer.Argument(help="What to make.")],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder that is made.", show_default="the name of what is made"),
    ] = None,
    hospitals: Annotated[int, typer.Option(min=1, max=50, help="Number of hospitals.")] = 4,
    images: Annotated[
        int, typer.Option(min=10, max=100_000, help="Number of pictures of each hospital.")
    ] = 400,
    size: Annotated[int, typer.Option(min=16, max=512, help="Height and width in pixels.")] = 64,
    seed: Annotated[int, typer.Option(min=0, help="Another number gives other pictures.")] = 0,
) -> None:
    """Draw small data sets for tutorials and first steps, without internet. No patient is in them.

    xrays: chest X-rays of several hospitals, with a class, fourteen findings of which each hospital
    annotated some, a number, and the time to an event.

    Example: coordinator sample-data xrays --out xrays
    """
    from fedsurrogate.server_app.sample_data.xrays import write_xrays

    folder = out or Path(kind.value)
    names = write_xrays(folder, hospitals, images, seed, size)
    console.print(f"drawn: {hospitals * images} pictures of {', '.join(names)}", soft_wrap=True)
    console.print(f"all hospitals   {folder / 'hospitals'}", soft_wrap=True)
    console.print(f"one hospital    {folder / 'hospitals' / names[0]}", soft_wrap=True)
    console.print(f"new patients    {folder / 'new'}", soft_wrap=True)
