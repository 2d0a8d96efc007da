"""Whether a SuperNode on this machine would start code that arrives with a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from client_app.doctor_link import Finding

PROGRAM, MODULE = "flower-supernode", "flower_supernode"
# Linux keeps the first 15 characters of a program's name.
SHOWN = PROGRAM[:15]
REMEDY = "stop it, and start the site with `site join`, which runs only the code that is installed here"


def check_isolation() -> Finding:
    """Look at the command lines of the processes that this user can see."""
    import psutil

    bare, isolated, hidden = list[int](), list[int](), list[int]()
    try:
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
            except psutil.AccessDenied:
                if process.name().startswith(SHOWN):
                    hidden.append(process.pid)
                continue
            except psutil.NoSuchProcess:
                continue
            if is_supernode(command):
                (isolated if is_isolated(command) else bare).append(process.pid)
    except (psutil.Error, OSError, RuntimeError) as error:
        return Finding(
            "isolation",
            "WARN",
            f"the processes of this machine cannot be listed ({type(error).__name__})",
            "make sure that no flower-supernode runs without --isolation process; `site join` starts none",
        )
    if bare:
        found = f"{PROGRAM} runs without --isolation process (process {_listed(bare)}): it starts whatever a run brings"
        return Finding("isolation", "FAIL", found, REMEDY)
    if hidden:
        found = f"the command line of {PROGRAM} (process {_listed(hidden)}) cannot be read"
        return Finding("isolation", "WARN", found, "ask its user whether it runs with --isolation process")
    if isolated:
        return Finding("isolation", "PASS", f"every {PROGRAM} here runs with --isolation process")
    return Finding("isolation", "PASS", f"no {PROGRAM} runs here")


def is_supernode(command: Sequence[str]) -> bool:
    """Whether a command line starts a SuperNode: the program, or an interpreter with the program or its module."""
    # Not further on: an editor or a shell may name the program in an argument.
    return any(PurePath(part).name == PROGRAM or part.split(".")[-1] == MODULE for part in command[:3])


def is_isolated(command: Sequence[str]) -> bool:
    """Whether the SuperNode leaves starting apps to another process; each `--isolation` that is given says so."""
    modes = [part.partition("=")[2] for part in command if part.startswith("--isolation=")]
    modes += [value for part, value in pairwise(command) if part == "--isolation"]
    return bool(modes) and set(modes) == {"process"}


def _listed(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes))
