"""The `coordinator public-map` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console


def public_map(
    public: Annotated[
        Path,
        typer.Argument(help="Features of public images: what site features wrote for a folder."),
    ],
    out: Annotated[Path, typer.Option(help="File of the map.")] = Path("map.safetensors"),
    backbone: Annotated[str, typer.Option(help="Backbone that made the features.")] = "pixels",
    weights_path: Annotated[
        str, typer.Option(help="File of its weights; empty for those that its library has stored.")
    ] = "",
    power: Annotated[
        float, typer.Option(min=0, max=2, help="features.power of the run; 0 for the backbone's.")
    ] = 0.0,
) -> None:
    """Make a public map for secure sums, once for many runs. No hospital's data may be in it.

    Example: coordinator public-map public.safetensors --backbone torchvision:mobilenet_v2
    """
    from fedsurrogate.server_app.public_map import write_public_map

    made = write_public_map(str(public), out, backbone, weights_path, power)
    console.print(f"map             {out}: {made}", soft_wrap=True)
    console.print(f"use it with     -c 'features.projection=\"{out}\"'", soft_wrap=True)
