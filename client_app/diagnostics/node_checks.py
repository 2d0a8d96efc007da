"""Check whether a SuperNode or SuperExec on this machine would start code that arrives with a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath

from fedsurrogate.client_app.diagnostics.findings import Finding

PROGRAM, STARTER = "flower-supernode", "flower-superexec"
# Names by which the text after `python -m` or `python -c` starts each program.
MODULES = {
    PROGRAM: r"flwr\.supernode\b|\bflower_supernode\b",
    STARTER: r"flwr\.supercore\.cli\b|\bflower_superexec\b",
}
# Linux keeps the first 15 characters of a program's name.
SHOWN = (PROGRAM[:15], STARTER[:15])
REMEDY = (
    "stop it, and start the site with `site join`, which runs only the code that is installed here"
)


def check_isolation() -> Finding:
    """Check the command lines of all processes that this user can see."""
    import psutil

    seen: dict[str, list[int]] = {}
    try:
        for process in psutil.process_iter():
            try:
                command = process.cmdline()
            except psutil.AccessDenied:
                hidden = process.name().startswith(SHOWN)
                seen.setdefault("hidden" if hidden else "", []).append(process.pid)
            except psutil.NoSuchProcess:
                continue
            else:
                seen.setdefault(_kind(command), []).append(process.pid)
    except (psutil.Error, OSError, RuntimeError) as error:
        facts = f"the processes of this machine cannot be listed ({type(error).__name__})"
        remedy = (
            f"make sure that no {PROGRAM} runs without --isolation process; `site join` starts none"
        )
        return Finding("isolation", "WARN", facts, remedy)
    listed = {kind: ", ".join(map(str, processes)) for kind, processes in seen.items()}
    foreign = (
        ("bare", f"{PROGRAM} runs without --isolation process"),
        ("starter", f"{STARTER} --plugin-type clientapp runs"),
    )
    if found := [f"{runs} (process {listed[kind]})" for kind, runs in foreign if kind in listed]:
        facts = f"{', '.join(found)}: it starts code that a run brings"
        return Finding("isolation", "FAIL", facts, REMEDY)
    if "hidden" in listed:
        which = f"{PROGRAM} or {STARTER} (process {listed['hidden']})"
        remedy = "ask its user whether it runs with --isolation process, and starts no apps itself"
        facts = f"the command line of {which} cannot be read"
        return Finding("isolation", "WARN", facts, remedy)
    if "isolated" in listed:
        facts = f"every {PROGRAM} here runs with --isolation process"
    else:
        facts = f"no {PROGRAM} runs here, and no {STARTER} for client apps"
    return Finding("isolation", "PASS", facts)


def _kind(command: Sequence[str]) -> str:
    if is_supernode(command):
        return "isolated" if is_isolated(command) else "bare"
    return "starter" if starts_client_apps(command) else ""


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
    chosen = [value for option, value in _options(command) if option.startswith("--pl")]
    return _starts(command, STARTER) and "clientapp" in chosen


def is_isolated(command: Sequence[str]) -> bool:
    """Whether the SuperNode starts no apps itself: every `--isolation` on its command line is
    `process`.
    """
    return {value for option, value in _options(command) if option == "--isolation"} == {"process"}


def _options(command: Sequence[str]) -> list[tuple[str, str]]:
    """Options and their values, in both of the forms in which they may be written."""
    joined = [each.partition("=")[::2] for each in command if each.startswith("--") and "=" in each]
    return [*joined, *pairwise(command)]


def _starts(command: Sequence[str], program: str) -> bool:
    """An editor or a shell may have the program's name in a later argument than a program has."""
    if command and PurePath(command[0]).name.startswith(("python", "pypy")):
        # Options of the interpreter come first; what it runs is the first that is none of them, or
        # follows -m or -c.
        line = " ".join(".".join(part.split()) for part in command[1:])
        letters = r"-[^\sWXmc-]*"
        before = rf"(?:{letters}[WX](?:\s+\S+|\S+)\s+|--\S+\s+(?:default|always|never)?\s*|{letters}\s+)*"
        found = re.match(rf"{before}(?:{letters}[mc]\s*(\S+)|([^\s-]\S*))", line)
        run, script = (found[1] or "", found[2] or "") if found else ("", "")
        return PurePath(script).stem == program or bool(re.search(MODULES[program], run))
    return any(PurePath(part).stem == program for part in command[:3])
