"""Python environments in odd places, made from the environment of the tests without copying its
gigabytes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.children import ran
from tests.documents import ROOT
from tests.e2e.test_wheel import not_needed

SCRIPTS = ("coordinator", "site", "flwr", "flower-superlink", "flower-superexec", "flwr-simulation")
# As pip does it, with the interpreter of the new environment.
MAKE_SCRIPTS = """
import sys
from importlib.metadata import entry_points
from pip._vendor.distlib.scripts import ScriptMaker
maker = ScriptMaker(None, sys.argv[1])
maker.variants, maker.set_mode = {""}, True
for entry in entry_points(group="console_scripts"):
    if entry.name in sys.argv[2:]:
        maker.make(f"{entry.name} = {entry.value}")
"""


def environment_at(folder: Path) -> Path:
    """An environment in `folder`/.venv; returns its `bin`.

    Its libraries are links, so that their paths begin with `folder`; Flower is a copy, because it
    resolves links.
    """
    home = folder / ".venv"
    venv.create(home, with_pip=False)
    (own,) = home.glob("lib/python*/site-packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if entry.name == "flwr":
            shutil.copytree(entry, own / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.suffix != ".pth" and not entry.name.startswith(("__editable__", "__pycache__")):
            (own / entry.name).symlink_to(entry)
    command = [str(home / "bin" / "python"), "-c", MAKE_SCRIPTS, str(home / "bin"), *SCRIPTS]
    subprocess.run(command, check=True, env=variables(), cwd=folder)
    return home / "bin"


def checkout_at(folder: Path) -> Path:
    """A copy of the packages of the checkout in `folder`."""
    return Path(shutil.copytree(ROOT, folder, symlinks=True, ignore=not_needed, dirs_exist_ok=True))


def variables(checkout: Path = ROOT, **more: str) -> dict[str, str]:
    """Variables of a process that uses the packages of this checkout."""
    return os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"} | more


def simulate(
    *options: str,
    cwd: Path,
    env: dict[str, str],
    before: Sequence[str] = (),
    command: Sequence[str | Path] = (sys.executable, "-m", "fedsurrogate.server_app.cli.main"),
) -> subprocess.CompletedProcess[str]:
    """Run `coordinator simulate` with these options. before: a program that starts it, such as
    setpriv.
    """
    words = [*before, *map(str, command), "simulate", *options]
    return ran(words, cwd=cwd, env=env, timeout=300)
