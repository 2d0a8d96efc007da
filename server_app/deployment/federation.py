"""The folder of a federation at the coordinator: certificates and keys, what hospitals get, settings,
and the compose file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.files import create_file
from fedsurrogate.common.setting_lines import OF_COMPOSE, read_setting_lines

from .certificates import PUBLIC, issue
from .kit import ADDRESS, DEPLOY, TEMPLATES

CERTIFICATES, SETTINGS, FLEET_PORT = "certificates", ".env", 9092
KNOWN = {"COORDINATOR", "FLEET_PORT", *OF_COMPOSE}
# Docker would make those that are missing, and root would own them.
FOLDERS = ("state", "app", "runs", "registered", "runtime", "control")
ENV = """\
# Settings of this federation, for `coordinator` and for compose.
# Where hospitals reach this machine, and the port on which it listens.
COORDINATOR={address}
FLEET_PORT={port}
# The image, and the user of its containers; never 0.
IMAGE=fedsurrogate
RUN_AS={user}
"""


def make_federation(folder: Path, hosts: Sequence[str], port: int) -> list[Path]:
    """Make the folder of a federation. What is there stays as it is.

    Args:
        folder: to make.
        hosts: names and addresses of this machine, as hospitals reach it; the first goes into kits.
        port: on which the SuperLink listens.

    Returns:
        The files that are new, without certificates and keys.

    Raises:
        ConfigError: no host is named, or a file cannot be written.
    """
    address = f"[{hosts[0]}]:{port}" if ":" in hosts[0] else f"{hosts[0]}:{port}"
    settings = ENV.format(address=address, port=port, user=f"{os.getuid()}:{os.getgid()}")
    files = {SETTINGS: settings.encode()}
    for name, source in {"compose.yml": "compose.coordinator.yml", **TEMPLATES}.items():
        files[name] = (DEPLOY / source).read_bytes()
    issue(folder / CERTIFICATES, hosts, ())
    for name in FOLDERS:
        (folder / name).mkdir(mode=0o700, exist_ok=True)
    return [
        folder / name
        for name, content in files.items()
        if create_file(folder / name, content, mode=PUBLIC)
    ]


def certificates_of(folder: Path) -> Path:
    """The certificates and keys of a federation, from its folder or their own."""
    return folder / CERTIFICATES if (folder / CERTIFICATES / "ca.crt").is_file() else folder


def settings_of(folder: Path) -> dict[str, str]:
    """The settings of the federation in a folder; empty if there is none.

    Raises:
        ConfigError: a line is no setting, or COORDINATOR no address.
    """
    file = folder / SETTINGS
    if not (folder / CERTIFICATES / "ca.crt").is_file() or not file.is_file():
        return {}
    values = read_setting_lines(file, KNOWN)
    if not ADDRESS.fullmatch(values.get("COORDINATOR", "")):
        raise ConfigError(f"{file}: COORDINATOR must be host:port, as hospitals reach this machine")
    return values


def certificates_here() -> Path | None:
    """The certificates and keys, if a command is typed in the folder of a federation."""
    return Path(CERTIFICATES).absolute() if settings_of(Path()) else None


def superlink_here() -> list[str]:
    """Arguments of `coordinator superlink` in the folder of a federation; none elsewhere."""
    if not (settings := settings_of(Path())):
        return []
    credentials = Path(CERTIFICATES).absolute()
    return [
        *("--enable-supernode-auth", "--database", str(Path("state", "superlink.db").absolute())),
        *("--fleet-api-address", f"0.0.0.0:{settings.get('FLEET_PORT') or FLEET_PORT}"),
        *("--ssl-ca-certfile", str(credentials / "ca.crt")),
        *("--ssl-certfile", str(credentials / "server.crt")),
        *("--ssl-keyfile", str(credentials / "server.key")),
    ]
