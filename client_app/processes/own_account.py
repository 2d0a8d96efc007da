"""What a site's own account alone gives its programs, and the socket between them.

Every user of a machine may read the arguments of all processes in `/proc`, open a port, and bind one
that is free. So a site's arguments are in the environment of its programs, which only its account may
read, and its SuperNode and app talk through a socket in a folder in which only that account may make
files.
"""

from __future__ import annotations

import json
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import UNIX

ARGUMENTS = "FEDSURROGATE_ARGUMENTS"
SETTINGS = "FEDSURROGATE_NODE_CONFIG"
"""Variables of the environment: arguments of a program, and the site's settings."""
LONGEST_PLACE = 60
"""Bytes of a path below which a folder with a socket is made; kernels take 103 for the socket's."""


def unseen(arguments: Sequence[str]) -> dict[str, str]:
    """The variable with which a program of a site gets arguments that no other account sees."""
    return {ARGUMENTS: json.dumps(list(arguments))}


def take_arguments(shown: int) -> None:
    """Take this process's arguments from its environment into `sys.argv`. It starts again if they are
    on its command line, as a person types them.

    Args:
        shown: How many words of `sys.argv` stay on the command line: the program, and its command.
    """
    given = sys.argv[shown:]
    if ARGUMENTS in os.environ:
        sys.argv[shown:] = json.loads(os.environ.pop(ARGUMENTS))
    elif given and sys.orig_argv[-len(given) :] == given:
        command = [sys.executable, *sys.orig_argv[1 : -len(given)]]
        os.execve(sys.executable, command, os.environ | unseen(given))


@contextmanager
def own_folder() -> Iterator[str]:
    """A new folder for a socket, meanwhile, which no other account may open."""
    place = tempfile.gettempdir()
    place = place if len(os.fsencode(place)) <= LONGEST_PLACE else "/tmp"
    with tempfile.TemporaryDirectory(
        prefix="site-", dir=place, ignore_cleanup_errors=True
    ) as folder:
        yield folder


def own_socket(runtime: str) -> str:
    """The address of a socket that only this account, and root, can bind or replace. Its folder is made
    if it does not exist.

    Args:
        runtime: unix:/path.

    Returns:
        The same without links.

    Raises:
        ConfigError: It is a port, or in a folder in which another account may make files, or that it may
            replace. What is above the place where a disk is mounted is not looked at.
    """
    if not runtime.startswith(UNIX):
        raise ConfigError(
            f"runtime {runtime!r}: must be {UNIX}/path; every user of this machine may open a port, "
            "and bind it once it is free"
        )
    path = Path(runtime.removeprefix(UNIX))
    folder = path.parent.resolve()
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (folder, *folder.parents):
        status, above = each.stat(), each != folder
        if above and each.is_mount():
            # Such as a volume of Kubernetes, which anybody in its pod may write.
            break
        others = status.st_mode & stat.S_IWOTH
        if above and status.st_mode & stat.S_ISVTX:
            # There nobody replaces a file of another account.
            others = 0
        if not above and status.st_gid != os.getgid():
            others |= status.st_mode & stat.S_IWGRP
        if others or status.st_uid not in (0, os.getuid()):
            raise ConfigError(
                f"runtime {runtime!r}: others than user {os.getuid()} may replace files in {each}; use a "
                "folder of this user's with mode 0700"
            )
    return f"{UNIX}{folder / path.name}"
