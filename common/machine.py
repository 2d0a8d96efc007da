"""The machine on which a process runs: its cores, its memory, its folders, and whether Flower's own
commands work where the Python environment lies (`python -m fedsurrogate.common.machine`).
"""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .errors import RunError

CONTAINER_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = CONTAINER_QUOTA) -> int:
    """Cores that this process is bound to, at most the quota of its container; at least one.

    Args:
        quota: file with the quota and its period, in microseconds.

    Example:
        >>> usable_cores() >= 1
        True
    """
    bound = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        allowed, period = quota.read_text().split()
        return max(1, min(bound, int(allowed) // int(period)))
    except (OSError, ValueError):
        # No container, or "max": no quota.
        return bound


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
    # Feature extraction counts cores on machines without this package.
    import psutil

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


VARIABLE = "RAY_TMPDIR"
# Unix sockets have paths of at most 107 characters, of which Ray's names below its folder take
# about 70.
LONGEST = 36
# Ray passes paths on as ASCII, and some of them unquoted.
PLAIN = re.compile(r"[A-Za-z0-9_@+=:./-]+")
OTHERS = ("/tmp", "/var/tmp", "/dev/shm")


def ray_folder(environment: Mapping[str, str], others: Sequence[str] = OTHERS) -> dict[str, str]:
    """Variables for a simulation by which Ray finds a folder that it can use.

    Args:
        environment: Variables of this process.
        others: Folders to take where that for temporary files does not serve.

    Returns:
        No variable if Ray's own choice, RAY_TMPDIR, TMPDIR or /tmp, serves.

    Raises:
        RunError: No folder serves.
    """
    own = environment.get(VARIABLE) or environment.get("TMPDIR") or "/tmp"
    if _serves(own):
        return {}
    found = next((folder for folder in others if _serves(folder)), None)
    if found is None:
        raise RunError(
            "Ray, which runs the simulated sites, needs a folder for temporary files that user "
            f"{os.getuid()} may write, with a path of at most {LONGEST} letters, digits and -_./, "
            f"and {', '.join((own, *others))} do not serve; set {VARIABLE} to one, or use --engine "
            "local"
        )
    return {VARIABLE: found}


def warnings_on(environment: Mapping[str, str], chosen: Mapping[str, str]) -> list[str]:
    """What a person should know who named a folder for Ray that does not serve.

    Args:
        environment: Variables of this process.
        chosen: The result of `ray_folder`.
    """
    if not environment.get(VARIABLE) or VARIABLE not in chosen:
        return []
    return [
        f"{VARIABLE} = {environment[VARIABLE]!r} is no folder that Ray can use: it must be there and "
        f"writable, with a path of at most {LONGEST} letters, digits and -_./; Ray uses "
        f"{chosen[VARIABLE]} in this run"
    ]


def _serves(folder: str) -> bool:
    """Whether Ray can use this folder. It makes one called `ray` in it, which another user may own."""
    if not PLAIN.fullmatch(folder) or len(folder) > LONGEST:
        return False
    inner = Path(folder) / "ray"
    try:
        with tempfile.TemporaryFile(dir=inner if inner.exists() else folder):
            return True
    except OSError:
        return False


NAME = "fedsurrogate"
STATE, CACHE = "XDG_STATE_HOME", "XDG_CACHE_HOME"
# Below the home folder, without the variables.
PLACES = {STATE: ".local/state", CACHE: ".cache"}


def home_folder() -> Path:
    """The user's home folder; one that does not exist for a user without any, as in some
    containers.
    """
    try:
        return Path.home()
    except RuntimeError:
        return Path("/nonexistent")


def user_folder(variable: str, environment: Mapping[str, str] = os.environ) -> Path:
    """The folder for state or cache.

    Args:
        variable: `STATE` or `CACHE`; its value counts if it is an absolute path.
        environment: The variables of this process.

    Returns:
        A folder, which may not exist. One in the home folder that an earlier version has filled
        stays in use until there is one where the variable says: a site must not lose its ledger to
        a variable.
    """
    usual = home_folder() / PLACES[variable] / NAME
    named = Path(environment.get(variable, ""))
    if not named.is_absolute() or (_exists(usual) and not _exists(named / NAME)):
        return usual
    return named / NAME


def why_not_writable(folder: Path) -> str:
    """Why no file can be made in a folder, which is created if there is none; empty if one can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return ""
    except OSError as error:
        return error.strerror or type(error).__name__


def _exists(folder: Path) -> bool:
    try:
        return folder.exists()
    except OSError:
        return False


# Ray writes the path of Python into a line for bash, and Flower that of its migrations into a list
# that is split.
UNFIT = re.compile(r"[^\w@+=:./-]")


def environment_warning(prefix: str) -> str:
    """What does not work for an environment in this folder, and what to do.

    Args:
        prefix: The folder of the environment, as in `sys.prefix`.

    Returns:
        One line; empty if everything works there.
    """
    if not (unfit := UNFIT.search(prefix)):
        return ""
    return (
        f"the path of the Python environment, {prefix!r}, contains {unfit.group()!r}: Flower's own "
        "commands, such as `flwr run .` for a simulation and `flower-superlink --database`, fail "
        "there. `coordinator simulate` and `coordinator superlink` work; for the others make the "
        "environment in a folder whose path has letters, digits and -_.@+= only"
    )


if __name__ == "__main__" and (text := environment_warning(sys.prefix)):
    print(f"warning: {text}", file=sys.stderr)
