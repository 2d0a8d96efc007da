"""The `site backup` and `site restore` commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsurrogate.common.command_line import console
from fedsurrogate.common.errors import ConfigError

from .options import KitFolder, MaybeNode

Passphrase = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File with a passphrase that only you can read; it encrypts the backup.",
    ),
]


def backup(
    file: Annotated[Path, typer.Argument(help="The file to write; only you can read it.")],
    kit: KitFolder = None,
    node_config: MaybeNode = None,
    passphrase_file: Passphrase = None,
) -> None:
    """Write ledger, keys, models and settings of this site into a file.

    No image and no features are in it, and no check log of the ledger: that stays on its own disk, and
    shows later whether this backup is older than what has left.

    Example: site backup north-2026-11-29.backup north/
    """
    from fedsurrogate.common.settings.base import parse_overrides

    from ..backup import write_backup
    from ..kit import read_kit

    if kit is not None:
        node_config = [read_kit(kit).node_config()]
    if not node_config:
        raise ConfigError(
            "name the folder of this site's kit: site backup FILE north/; or give --node-config"
        )
    count = write_backup(file, kit, parse_overrides(node_config), _passphrase(passphrase_file))
    secret = "" if passphrase_file else "; it holds this site's keys, in clear"
    console.print(f"{file}: {count} files{secret}", soft_wrap=True)


def restore(
    file: Annotated[Path, typer.Argument(help="A file of `site backup`.")],
    kit: KitFolder = None,
    passphrase_file: Passphrase = None,
) -> None:
    """Restore a backup, and hold its ledger against the check log.

    It goes to where the site was, or into the folder of a kit, which is made if it is missing. Settings
    and policy that are there stay. If the check log knows of more releases than the backup, or is lost,
    nothing leaves until a person states what is missing. Exits with 1 then.

    Example: site restore north-2026-11-29.backup north/
    """
    from ..backup import restore_backup

    found = restore_backup(file, kit, _passphrase(passphrase_file))
    console.print(
        f"restored {len(found.files)} files; the state is in {found.node.state}", soft_wrap=True
    )
    if found.kept:
        console.print(
            f"{len(found.kept)} files of settings were there and stay as they are: "
            f"{', '.join(sorted(each.name for each in found.kept))}",
            soft_wrap=True,
        )
    if not found.refusals:
        console.print(
            "the ledger agrees with its check log: nothing has left since", soft_wrap=True
        )
        return
    raise ConfigError(
        f"{'; '.join(found.refusals)}\nThe releases since this backup are missing. Look up what they cost, at "
        "the coordinator or in old logs, and type `site ledger reopen --keep` with this site's --node-config"
    )


def _passphrase(file: Path | None) -> bytes:
    if file is None:
        return b""
    if file.stat().st_mode & 0o077:
        raise ConfigError(f"'{file}' can be read by others; type chmod 600 '{file}'")
    if not (passphrase := file.read_bytes().strip()):
        raise ConfigError(f"'{file}' is empty; write a passphrase into it")
    return passphrase
