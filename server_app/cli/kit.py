"""The `coordinator kit` command: packs the archive that a hospital receives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console


def kit(
    folder: Annotated[Path, typer.Argument(help="The folder that `coordinator certs` has made.")],
    site: Annotated[
        str, typer.Argument(help="The site that gets the kit; the folder must hold its key.")
    ],
    coordinator: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the site reaches the coordinator.")
    ],
    image: Annotated[
        str, typer.Option(help="Name of the container image at the site.")
    ] = "fedsurrogate",
    out: Annotated[
        Path | None, typer.Option(help="The archive to write; default: SITE.tar.gz.")
    ] = None,
) -> None:
    """Pack the kit of a hospital into one archive: certificates, key, compose file, settings,
    policy template, a guide.

    If `coordinator certs` made the site's private key, the kit holds it: send it only over a
    channel that you trust. The kit of a site that enrolled holds no secret.
    """
    show_kit(folder, site, coordinator, image, out)


def show_kit(folder: Path, site: str, coordinator: str, image: str, out: Path | None) -> None:
    """Pack a kit, and print what it holds. Arguments as for `kit`."""
    from fedsurrogate.server_app.deployment.kit import SITE_KEY, pack_kit

    file = out or Path(f"{site}.tar.gz")
    names = pack_kit(folder, site, coordinator, image, file)
    for name in names:
        console.print(f"  {name}", soft_wrap=True)
    secret = f"papers/{SITE_KEY}" in names
    console.print(
        f"{file}; it holds the private key of {site}: send it only over a channel that you trust"
        if secret
        else f"{file}; it holds no secret",
        soft_wrap=True,
    )
