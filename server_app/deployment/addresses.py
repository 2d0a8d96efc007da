"""Where a SuperLink's APIs are that ask for no key: on Unix sockets, which its account alone opens."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import UNIX, is_loopback
from fedsurrogate.common.flower.interface import CONTROL_OPTION, RUNTIME_OPTION
from fedsurrogate.common.machine.user_folders import STATE, user_folder

VARIABLE = "FEDSURROGATE_CONTROL"
"""Of the environment: address of the Control API, for its SuperLink and for commands. The API for apps is
next to it where no other address is given."""
LONGEST_PATH = 107
"""Bytes of the path of a Unix socket."""


def usual_control(environment: Mapping[str, str] = os.environ) -> str:
    """Address of the Control API of this account's SuperLink, where no other is named."""
    # Flower wants a number at the end.
    own = user_folder(STATE, environment) / "superlink" / "control:9093"
    return environment.get(VARIABLE) or f"{UNIX}{own}"


def usual_runtime(environment: Mapping[str, str] = os.environ) -> str:
    """Address of the API for the apps of this account's SuperLink, where no other is named."""
    return f"{usual_control(environment).rpartition('/')[0]}/app:9091"


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
            f"{address!r}: the SuperLink asks for no key there, and every user of this machine may "
            f"open a port; {CONTROL_OPTION} and {RUNTIME_OPTION} must be {UNIX}/path:NUMBER, or left "
            "out for sockets of this account"
        )
    path = Path(address.removeprefix(UNIX)).absolute()
    if len(os.fsencode(path)) > LONGEST_PATH:
        raise ConfigError(
            f"{address!r}: a socket has a path of at most {LONGEST_PATH} bytes; name another in "
            f"{VARIABLE}, also for the commands"
        )
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder = path.parent.stat()
    if folder.st_uid != os.getuid() or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            f"{path.parent}: the folder of the SuperLink's socket must belong to this account, and "
            "no other may write there; name a folder that does not exist, and it is made"
        )
    with suppress(OSError):
        connect(address, seconds=5)
        raise ConfigError(f"{address!r} is in use by another SuperLink; end it, or name another")
