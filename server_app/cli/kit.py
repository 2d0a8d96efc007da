"""The `coordinator kit` command: what a hospital receives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from common.command_line import console


def kit(
    folder: Annotated[Path, typer.Argument(help="The folder that `coordinator certs` has made.")],
    site: Annotated[str, typer.Argument(help="The site it is for; it has a key in the folder.")],
    coordinator: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the site reaches the coordinator.")],
    image: Annotated[str, typer.Option(help="The image's name at the site.")] = "fedsurrogate",
    out: Annotated[Path | None, typer.Option(help="The archive to write; SITE.tar.gz without it.")] = None,
) -> None:
    """Pack what a hospital needs into one archive: certificates, key, compose file, settings, policy template, a guide.

    It holds the site's private key: hand it over by a way that you trust.
    """
    from server_app.deployment.kit import pack_kit

    file = out or Path(f"{site}.tar.gz")
    for name in pack_kit(folder, site, coordinator, image, file):
        console.print(f"  {name}", soft_wrap=True)
    console.print(f"{file}; it holds the private key of {site}, so hand it over by a way that you trust", soft_wrap=True)
