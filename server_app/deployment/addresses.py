"""Where a SuperLink's APIs are that ask for no key: on Unix sockets, which its account alone opens."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import UNIX, is_loopback
from fedsurrogate.common.machine import STATE, user_folder

# Of the environment: address of the Control API, for its SuperLink and for commands. The API for
# apps is next to it where no other address is given.
VARIABLE = "FEDSURROGATE_CONTROL"
# Bytes of the path of a Unix socket.
LONGEST_PATH = 107


def usual_control() -> str:
    """Address of the Control API of this account's SuperLink, where no other is named."""
    # Flower wants a number at the end.
    return os.environ.get(VARIABLE) or f"{UNIX}{user_folder(STATE)}/superlink/control:9093"


def usual_runtime() -> str:
    """Address of the API for the apps of this account's SuperLink, where no other is named."""
    return f"{usual_control().rpartition('/')[0]}/app:9091"


def is_here(address: str) -> bool:
    """Whether an address, host:port or unix:/path, is of this machine."""
    return address.startswith(UNIX) or is_loopback(address)


def connect(address: str, seconds: float) -> None:
    """Connect to an address, host:port or unix:/path, and hang up. Raises OSError."""
    if address.startswith(UNIX):
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(seconds)
            probe.connect(address.removeprefix(UNIX))
        return
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def check_socket(address: str) -> None:
    """Check that no other account reaches an API of a SuperLink, or takes its place. The folder of
    its socket is made if there is none.

    Args:
        address: of the API.

    Raises:
        ConfigError: others may reach it or replace it, it is in use, or its path is too long.
    """
    if not address.startswith(UNIX):
        raise ConfigError(
            f"{address!r}: no key is asked for there, and every user of this machine may open a port; "
            f"give {UNIX}/path:NUMBER, or leave the option out for a socket of this account"
        )
    path = Path(address.removeprefix(UNIX)).absolute()
    if len(os.fsencode(path)) > LONGEST_PATH:
        most = f"a socket has a path of at most {LONGEST_PATH} bytes; set {VARIABLE} to another"
        raise ConfigError(f"{address!r}: {most}")
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & 0o022:
        rule = "it must belong to this account, and no other may write there; name a new folder"
        raise ConfigError(f"{path.parent}, for the SuperLink's socket: {rule}")
    with suppress(OSError):
        connect(address, seconds=5)
        raise ConfigError(f"{address!r} is in use by another SuperLink; end it, or name another")
