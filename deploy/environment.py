"""Make a Python environment that has exactly the packages of the lock, or check one that exists: `make setup`.

    python3 deploy/environment.py .venv                    # for development: all extras and tools
    python3 deploy/environment.py .venv --torch cpu        # without libraries for GPUs: 1.5 GB in place of 7
    python3 deploy/environment.py /opt/env --extras core simulation

Needs Python 3.11 or newer with venv, and pip's index of packages, or files that `PIP_FIND_LINKS` names. It prints what it
does. An environment that already has these versions is left as it is, and nothing is printed.
"""

# An older Python must be able to read this file, so that it can name the version that is needed.
from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (3, 11)
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
MARGIN = 1.3
"""Free disk that is asked for, per MB that stays: pip unpacks each package beside its archive."""
REASONS = (
    (r"No space left", "The disk is full. Name an environment on another one: make setup VENV=/path"),
    (r"DO NOT MATCH THE HASHES", "A file is not the one that the lock names. Use another index, or find out who changed it"),
    (
        r"Could not find a version|No matching distribution|Connection|timed out|Temporary failure|CERTIFICATE|ProxyError",
        "pip has no such file. It reads PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT and HTTPS_PROXY; "
        "without a network, collect the files elsewhere: pip download -d DIR --no-deps -r requirements.lock",
    ),
)


def main() -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the environment; it is made if it is not there")
    parser.add_argument("--extras", nargs="+", default=["dev"], metavar="EXTRA", help="of pyproject.toml; core: none")
    parser.add_argument(
        "--torch",
        choices=("auto", "gpu", "cpu"),
        default="auto",
        help="cpu: torch from --torch-index, without libraries for GPUs. auto: as it is in the environment, else gpu",
    )
    parser.add_argument("--torch-index", default=TORCH_INDEX, metavar="URL", help="an index that has torch's build for CPUs")
    parser.add_argument("--lock", type=Path, default=ROOT / "requirements.lock", metavar="FILE", help="another lock")
    asked = parser.parse_args()
    if sys.version_info < NEEDED:
        shown = ".".join(map(str, NEEDED))
        sys.exit(f"Python {shown} or newer is needed, this is {_python()}: make PYTHON=/path/to/python{shown}")
    sys.path[:0] = [str(ROOT / "deploy"), str(ROOT)]
    python = asked.folder.absolute() / "bin" / "python"
    if not python.exists() or _differences(python, asked):
        if asked.torch == "auto":
            asked.torch = "cpu" if python.exists() and _has_cpu_build(python) else "gpu"
        _install(python, asked)


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _has_cpu_build(python: Path) -> bool:
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip().endswith("+cpu")


def _install(python: Path, asked: argparse.Namespace) -> None:
    import lock

    locked, began = lock.read(asked.lock), time.monotonic()
    names = locked.names(asked.extras)
    installed = lock.without_gpu(names) | set(lock.TORCH) & names if asked.torch == "cpu" else names
    download, disk = locked.sizes[asked.torch]
    folder = python.parents[1]
    print(f"Setting up {folder}: {len(installed)} packages at the versions of {asked.lock.name}.")
    if not python.exists():
        print(f"At most {download:,} MB to download, {disk:,} MB on disk; 2 to 15 minutes, as fast as the network.")
        if asked.torch == "gpu":
            print("Most of it is torch with its libraries for GPUs. Without a GPU: make setup TORCH=cpu")
        _check_disk(folder, disk)
        _make(folder)
    from common.machine.environment_path import environment_remark

    if remark := environment_remark(str(folder)):
        print(remark[0].upper() + remark[1:])
    pip = [str(python), "-m", "pip", "install", "--no-deps", "--progress-bar", "off", "--disable-pip-version-check"]
    parts = [(["--require-hashes"], locked.part(names if asked.torch == "gpu" else lock.without_gpu(names)))]
    if asked.torch == "cpu":
        parts.append((["--extra-index-url", asked.torch_index], "\n".join(lock.torch_pins(locked, names))))
    for options, lines in parts:
        wanted = folder / "requirements.txt"
        wanted.write_text(lines)
        _run([*pip, *options, "-r", str(wanted)], len(installed))
        wanted.unlink()
    # Nothing but the command lines and the path of this checkout: all that it needs is there.
    _run([*pip, "--no-build-isolation", "--editable", str(ROOT)], 0)
    if wrong := _differences(python, asked):
        sys.exit("After the installation these packages are wrong: {}".format("; ".join(wrong)))
    for words in (["-m", "pip", "check"], ["-c", IMPORTS]):
        done = subprocess.run([str(python), *words], capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            sys.exit(f"The packages are installed, but they do not work together:\n{done.stdout}{done.stderr}")
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) / 1e6
    print(f"Done in {(time.monotonic() - began) / 60:.1f} minutes: {size:,.0f} MB, every version and import checked.")


def _check_disk(folder: Path, needed: float) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free / 1e6
    if free < needed * MARGIN:
        sys.exit(
            f"{there} has {free:,.0f} MB free, and {needed * MARGIN:,.0f} MB are needed. "
            "Name an environment on another disk: make setup VENV=/path"
        )


def _make(folder: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        hint = "Debian and Ubuntu: apt install python3-venv. " if "ensurepip" in said else ""
        sys.exit(f"No environment could be made in {folder}. {hint}Python's own words:\n{said}")


def _run(command: list[str], packages: int) -> None:
    """Run pip, count the packages that it has collected, and name the reason when it fails."""
    said: list[str] = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PIP_QUIET": "0"}
    ) as process:
        collected, shown = 0, 0
        for line in process.stdout or ():
            said.append(line)
            collected += line.startswith(("Collecting ", "Processing ", "Requirement already satisfied: "))
            if packages and collected * 4 // packages > shown:
                shown = collected * 4 // packages
                print(f"  {collected} of {packages} packages are here", flush=True)
            if line.startswith("Installing collected packages") and packages:
                print("  unpacking", flush=True)
    if process.returncode:
        text = "".join(said)
        hints = [hint for pattern, hint in REASONS if re.search(pattern, text)]
        sys.exit("pip failed:\n{}{}".format("".join(said[-15:]), "".join(f"\n{hint}." for hint in hints[:1])))


def _differences(python: Path, asked: argparse.Namespace) -> list[str]:
    """What this environment lacks, or has at another version than the lock; empty if it is as the lock says."""
    command = [str(python), "-c", CHECK, str(ROOT), str(asked.lock.absolute()), asked.torch, *asked.extras]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=python.parents[1])
    if done.returncode:
        return [(done.stderr.strip().splitlines() or ["its Python does not start"])[-1]]
    return done.stdout.splitlines()


IMPORTS = "import torch, flwr, fedsurrogate, server_app.cli.main, client_app.cli.main"
# Runs in the environment, which may have another Python.
CHECK = """
import sys, tomllib
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

root, file, torch, *extras = sys.argv[1:]
sys.path.append(root + "/deploy")
sys.dont_write_bytecode = True
import lock

def holds(marker):
    from packaging.markers import Marker
    return not marker or Marker(marker).evaluate()

locked = lock.read(Path(file))
names = locked.names(extras)
if torch == "auto":
    torch = "cpu" if version("torch").endswith("+cpu") else "gpu"
if torch == "cpu":
    names = lock.without_gpu(names) | set(lock.TORCH) & names
for name in sorted(names):
    wanted = [number for number, marker in lock.versions_of(locked.entries[name]) if holds(marker)]
    try:
        if wanted and version(name).partition("+")[0] not in wanted:
            print(f"{name} {version(name)} in place of {wanted[0]}")
    except PackageNotFoundError:
        print(f"{name} is not installed")
project = tomllib.loads(Path(root, "pyproject.toml").read_text())["project"]
try:
    own = distribution("fedsurrogate")
    if {each.name: each.value for each in own.entry_points} != project["scripts"] or own.version != project["version"]:
        print(f"fedsurrogate {own.version} was installed from another version of this project")
except PackageNotFoundError:
    print("fedsurrogate is not installed")
"""


if __name__ == "__main__":
    main()
