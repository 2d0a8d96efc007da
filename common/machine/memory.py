"""Memory that processes may still use: of the machine, of the container (cgroups v1 and v2), of the
shell (`ulimit -v`).
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import psutil

MIB = 2**20
# A limit above this is none: cgroups v1 write the largest number that they can.
NO_LIMIT = 2**60
# Files of a cgroup, of version 2 and of version 1: the limit, the use, and the part of it that the
# kernel can free.
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
# What libraries say when `ulimit -v` leaves them no room.
NO_ROOM = (
    "failed to map segment",
    "cannot allocate memory",
    "can't allocate memory",
    "not enough memory",
)


def available_memory(swap: bool = False, root: Path = Path("/")) -> int:
    """Bytes that new processes can use, without those of the swap unless `swap`.

    Args:
        swap: Whether the machine's free swap counts. A container's limits count without it.
        root: The root of the file system, for tests.
    """
    free = psutil.virtual_memory().available + (psutil.swap_memory().free if swap else 0)
    return max(0, min([free, *_left_in_cgroups(root)]))


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes left in each cgroup with a limit that this process is in."""
    for folder in _cgroups(root):
        for limit, use, freeable in FILES:
            try:
                most, used = int((folder / limit).read_text()), int((folder / use).read_text())
            except (OSError, ValueError):
                # No such version here, or "max": no limit.
                continue
            if most < NO_LIMIT:
                yield most - used + _stat(folder / "memory.stat", freeable)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of the cgroups of this process and of those above it.

    In a container the path of /proc/self/cgroup may be the host's; then only the mounted folder
    itself exists.
    """
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    folders = {mounted, mounted / "memory"}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = mounted / "memory" if controllers else mounted
        own = top / path.strip("/")
        folders |= {own, *(parent for parent in own.parents if parent.is_relative_to(top))}
    yield from sorted(folders)


def _stat(file: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in file.read_text().splitlines())
        return int(fields.get(name, 0))
    except (OSError, ValueError):
        return 0


def address_limit() -> int | None:
    """Bytes of addresses that a process may use, as `ulimit -v` sets them; None without a limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def no_room(error: BaseException) -> str:
    """The explanation of an error that `ulimit -v` caused, with what to do; empty for any other
    error.
    """
    limit = address_limit()
    if limit is None or not (
        isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_ROOM)
    ):
        return ""
    return (
        f"this shell limits the addresses of a process to {limit // MIB} MiB (`ulimit -v` = "
        f"{limit // 1024}), too few to load torch and the other libraries; lift it with `ulimit -v "
        "unlimited`, or raise it: 5 GiB are enough for `--engine local`"
    )
