"""What a site's process is to its machine: the account that alone may talk to it, its name and end in
the kernel, and the software that is installed.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import stat
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import UNIX

# Variables of the environment: arguments of a program, and the site's settings.
ARGUMENTS = "FEDSURROGATE_ARGUMENTS"
SETTINGS = "FEDSURROGATE_NODE_CONFIG"
# The name of a process that works on one task.
TASK_NAME = "site-task"
# Bytes of a path below which a folder with a socket is made; kernels take 103 for the socket's.
LONGEST_PLACE = 60


def end_after(work: Callable[[], None]) -> NoReturn:
    """End this process after the work, whatever it raises, and remove none of its modules: that would
    copy memory it shares with its parent, and a channel of gRPC that nobody closed may wait for ever
    for its thread, which has ended.
    """
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


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


_DEATH_SIGNAL, _NAME = 1, 15
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def end_with_parent(number: int, parent: int = 0) -> None:
    """Let the kernel send this process a signal when its parent ends.

    Args:
        number: The signal; 0: none.
        parent: Process id of the parent; if another process is the parent by now, this one ends.
    """
    if _libc is None:
        return
    _libc.prctl(_DEATH_SIGNAL, number)
    if number and parent and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show; its first 15 characters."""
    if _libc is not None:
        _libc.prctl(_NAME, name.encode())


PACKAGE = Path(__file__).parents[2]


def installed() -> tuple[int, ...]:
    """Numbers that change when packages are installed, and when a file of this one changes.

    Installing or removing a package changes the folder of all packages.
    """
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    own = [
        each.stat() for room in ("common", "client_app") for each in (PACKAGE / room).rglob("*.py")
    ]
    return (
        *(folder.stat().st_mtime_ns for folder in folders if folder.is_dir()),
        len(own),
        max(each.st_mtime_ns for each in own),
        sum(each.st_size for each in own),
    )
