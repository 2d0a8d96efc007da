"""The folder for Ray's temporary files: Ray needs a short path of plain characters, and to write
there.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedsurrogate.common.errors import RunError

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


def remark_on(environment: Mapping[str, str], chosen: Mapping[str, str]) -> list[str]:
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
