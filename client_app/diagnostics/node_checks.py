"""Check whether a SuperNode or SuperExec on this machine would start code that arrives with a run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from fedsurrogate.client_app.diagnostics.findings import Finding

PROGRAM, STARTER = "flower-supernode", "flower-superexec"
# Names by which the text after `python -m` or `python -c` starts each program.
MODULES = {
    PROGRAM: ("flwr.supernode", "flower_supernode"),
    STARTER: ("flwr.supercore.cli", "flower_superexec"),
}
# Linux keeps the first 15 characters of a program's name.
SHOWN = (PROGRAM[:15], STARTER[:15])
# Options of the interpreter that take a value, which may be the next argument.
WITH_VALUE, ENDS = "WX", "mc"
REMEDY = (
    "stop it, and start the site with `site join`, which runs only the code that is installed here"
)


def check_isolation() -> Finding:
    """Check the command lines of all processes that this user can see."""
    import psutil

    try:
        bare, starters, hidden, isolated = _look()
    except (psutil.Error, OSError, RuntimeError) as error:
        return Finding(
            "isolation",
            "WARN",
            f"the processes of this machine cannot be listed ({type(error).__name__})",
            "make sure that no flower-supernode runs without --isolation process; `site join` "
            "starts none",
        )
    if bare:
        facts = (
            f"{PROGRAM} runs without --isolation process (process {_listed(bare)}): it starts "
            "code that a run brings"
        )
        return Finding("isolation", "FAIL", facts, REMEDY)
    if starters:
        facts = (
            f"{STARTER} --plugin-type clientapp runs (process {_listed(starters)}): it starts "
            "code that a run brings"
        )
        return Finding("isolation", "FAIL", facts, REMEDY)
    if hidden:
        facts = (
            f"the command line of {PROGRAM} or {STARTER} (process {_listed(hidden)}) cannot be read"
        )
        return Finding(
            "isolation",
            "WARN",
            facts,
            "ask its user whether it runs with --isolation process, and starts no apps itself",
        )
    if isolated:
        return Finding("isolation", "PASS", f"every {PROGRAM} here runs with --isolation process")
    return Finding("isolation", "PASS", f"no {PROGRAM} runs here, and no {STARTER} for client apps")


def _look() -> tuple[list[int], list[int], list[int], list[int]]:
    """Process IDs: SuperNodes that start foreign code, SuperExecs that do, processes that may, and
    isolated SuperNodes.
    """
    import psutil

    bare, starters, hidden, isolated = list[int](), list[int](), list[int](), list[int]()
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
        elif starts_client_apps(command):
            starters.append(process.pid)
    return bare, starters, hidden, isolated


def is_supernode(command: Sequence[str]) -> bool:
    """Whether a command line starts a SuperNode, as a program or through a Python interpreter
    (script, module or code).
    """
    return _starts(command, PROGRAM)


def starts_client_apps(command: Sequence[str]) -> bool:
    """Whether a command line starts a SuperExec that runs client apps, with the code that they
    bring.
    """
    # An option may be shortened as long as it stays unique.
    chosen = [part.partition("=")[2] for part in command if part.startswith("--pl") and "=" in part]
    chosen += [
        value for part, value in pairwise(command) if part.startswith("--pl") and "=" not in part
    ]
    return _starts(command, STARTER) and "clientapp" in chosen


def _starts(command: Sequence[str], program: str) -> bool:
    # Only the first three: an editor or a shell may have the program's name in a later argument.
    if any(
        PurePath(part).stem == program or part.split(".")[-1] == MODULES[program][1]
        for part in command[:3]
    ):
        return True
    what, kind = _interpreted(command)
    return (
        PurePath(what).stem == program
        if kind == "script"
        else any(name in what for name in MODULES[program])
    )


def _interpreted(command: Sequence[str]) -> tuple[str, str]:
    """What a Python interpreter runs, and its kind, "script" or "module" (also for code); empty for
    other programs.
    """
    if not command or not PurePath(command[0]).name.startswith(("python", "pypy")):
        return "", ""
    rest = iter(command[1:])
    for part in rest:
        if not part.startswith("-"):
            return part, "script"
        if part.startswith("--"):
            if part == "--check-hash-based-pycs":
                next(rest, "")
            continue
        # Letters may stand together, the last with its value: -Im flwr.supernode, -Wignore.
        for at, letter in enumerate(part[1:], 2):
            if letter in WITH_VALUE + ENDS:
                value = part[at:] or next(rest, "")
                if letter in ENDS:
                    return value, "module"
                break
    return "", ""


def is_isolated(command: Sequence[str]) -> bool:
    """Whether the SuperNode starts no apps itself: every `--isolation` on its command line is
    `process`.
    """
    modes = [part.partition("=")[2] for part in command if part.startswith("--isolation=")]
    modes += [value for part, value in pairwise(command) if part == "--isolation"]
    return bool(modes) and set(modes) == {"process"}


def _listed(processes: Sequence[int]) -> str:
    return ", ".join(map(str, processes))
