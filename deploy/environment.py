"""Make a Python environment that has exactly the packages of the lock, or check one that exists:
`make setup`.

    python3 deploy/environment.py .venv                    # for development: all extras and tools
    python3 deploy/environment.py .venv --torch cpu        # without libraries for GPUs
    python3 deploy/environment.py /opt/env --extras core simulation

Needs Python 3.11 or newer with venv, and pip's index of packages, or files that `PIP_FIND_LINKS`
names. It prints what it does. An environment that already has these versions is left as it is, and
nothing is printed.
"""

# An older Python must be able to read this file, so that it can name the version that is needed.
from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (3, 11)
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP, REQUIREMENTS = "fedsurrogate-setup.json", "fedsurrogate-requirements.txt"
VENV_HINT = "Debian and Ubuntu: apt install python3-venv. "
MARGIN = 1.3
"""Free disk that is asked for, per MB that stays: pip unpacks each package beside its archive."""
REASONS = (
    (
        r"No space left",
        "The disk is full. Name an environment on another one: make setup VENV=/path",
    ),
    (
        r"DO NOT MATCH THE HASHES",
        "A file is not the one that the lock names. Use another index, or find out who changed it",
    ),
    (
        r"Could not find a version|No matching distribution|Connection|timed out|Temporary failure|CERTIFICATE|ProxyError",
        "pip has no such file. With TORCH=cpu, TORCH_INDEX must have builds with +cpu in their "
        "version. pip reads PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, PIP_CERT and "
        "HTTPS_PROXY; without a network, collect the files elsewhere: pip download -d DIR "
        "--no-deps -r requirements.lock",
    ),
)


def main() -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the environment; it is made if it is not there")
    option = parser.add_argument
    option(
        "--extras",
        nargs="+",
        default=["dev"],
        metavar="EXTRA",
        help="of pyproject.toml; core: none",
    )
    kinds = (
        "cpu: torch from --torch-index, without libraries for GPUs. auto: as it is there, else cpu "
        "without a GPU where that index has the build"
    )
    option("--torch", choices=("auto", "gpu", "cpu"), default="auto", help=kinds)
    index = "an index that has torch's build for CPUs"
    option("--torch-index", default=TORCH_INDEX, metavar="URL", help=index)
    lock = ROOT / "requirements.lock"
    option("--lock", type=Path, default=lock, metavar="FILE", help="another lock")
    asked = parser.parse_args()
    if sys.version_info < NEEDED:
        shown = ".".join(map(str, NEEDED))
        sys.exit(
            f"Python {shown} or newer is needed, this is {'.'.join(map(str, sys.version_info[:3]))}: make "
            f"PYTHON=/path/to/python{shown}"
        )
    sys.path[:0] = [str(ROOT / "deploy"), str(ROOT)]
    asked.folder = folder = asked.folder.expanduser().resolve()
    _check_folder(folder)
    try:
        if not (folder / "pyvenv.cfg").exists() or _differences(folder, asked):
            if asked.torch == "auto":
                asked.torch = _chosen(folder, asked)
            _install(folder, asked)
    except ValueError as error:
        # Of the lock, or of the names of extras.
        sys.exit(str(error))


def _check_folder(folder: Path) -> None:
    """End the program if the folder is something else than an environment with a Python that
    serves.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not (folder / "pyvenv.cfg").exists():
        sys.exit(
            f"{folder} is not empty, and no Python environment; name another folder: make setup "
            "VENV=/path"
        )
    try:
        done = _said(_python_of(folder), "-c", f"import sys; sys.exit(sys.version_info < {NEEDED})")
    except OSError:
        done = None
    if done is None or done.returncode:
        sys.exit(
            f"the Python of the environment in {folder} does not start, or is older than "
            f"{'.'.join(map(str, NEEDED))}; remove that folder, or name another: make setup "
            "VENV=/path"
        )


def _python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def _said(python: Path | str, *words: str, **named: Any) -> subprocess.CompletedProcess[str]:
    """What a Python says when it is started so."""
    return subprocess.run(
        [str(python), *words], capture_output=True, text=True, check=False, **named
    )


def _kind(folder: Path) -> str:
    """The build of torch that this environment has, or was begun with; empty in a new one."""
    found = _read_stamp(folder).get("torch", "")
    code = "import importlib.metadata; print(importlib.metadata.version('torch'))"
    if (python := _python_of(folder)).exists() and (torch := _said(python, "-c", code).stdout):
        found = "cpu" if torch.strip().endswith("+cpu") else "gpu"
    return str(found)


def has_gpu() -> bool:
    """Whether this machine shows a GPU that torch's build of the lock can use."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def has_builds(index: str, pins: list[str]) -> bool:
    """Whether an index of packages has these builds, such as torch==2.13.0+cpu."""
    for name, version in (pin.split("==") for pin in pins):
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=10) as page:
                if f"{name}-{version}-" not in urllib.parse.unquote(page.read().decode()):
                    return False
        except (OSError, ValueError):
            return False
    return True


def _chosen(folder: Path, asked: argparse.Namespace) -> str:
    """The build of torch where nobody named one: as it is there; else without libraries for GPUs where
    there is no GPU, and the index has that build. Says why in one line.
    """
    import lock

    if found := _kind(folder):
        return found
    if has_gpu():
        return "gpu"
    locked = lock.read(asked.lock)
    pins = lock.torch_pins(locked, locked.names(asked.extras))
    if not pins or not has_builds(asked.torch_index, pins):
        print(f"No GPU here, but {asked.torch_index} has no {' '.join(pins)}: the usual torch.")
        return "gpu"
    print("No GPU here: torch without libraries for GPUs (with them: make setup TORCH=gpu).")
    return "cpu"


def _read_stamp(folder: Path) -> dict[str, object]:
    """The stamp of an environment; empty if it has none, or half of one."""
    try:
        return dict(json.loads((folder / STAMP).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def stamp_of(lock: Path, extras: list[str], torch: str) -> dict[str, object]:
    """What the last step of an installation writes into the environment; without it the
    installation is not complete.
    """
    digest = hashlib.sha256(lock.read_bytes()).hexdigest()
    facts = {"lock": digest, "extras": sorted(extras), "torch": torch, "checkout": str(ROOT)}
    return facts | {"complete": True}


def _install(folder: Path, asked: argparse.Namespace) -> None:
    import lock

    from fedsurrogate.common.machine import environment_warning

    locked, began, python = lock.read(asked.lock), time.monotonic(), _python_of(folder)
    names = locked.names(asked.extras)
    installed = lock.with_build(names, asked.torch)
    download, disk = locked.sizes[asked.torch]
    print(f"Setting up {folder}: {len(installed)} packages at the versions of {asked.lock.name}.")
    if not list(folder.glob("lib/python*/site-packages/torch/__init__.py")):
        print(
            f"About {download:,} MB to download, {disk:,} MB on disk; 2 to 15 minutes, as fast as "
            "the network."
        )
        if asked.torch == "gpu":
            print("Most of it is torch with its libraries for GPUs.")
        _check_disk(folder, disk)
    if not (folder / "pyvenv.cfg").exists():
        _make(folder)
    if warning := environment_warning(str(folder)):
        print(warning[0].upper() + warning[1:])
    _check_pip(python, folder)
    stamp = stamp_of(asked.lock, asked.extras, asked.torch)
    (folder / STAMP).write_text(json.dumps(stamp | {"complete": False}))
    hashed, other = ["--require-hashes"], _kind(folder) not in ("", asked.torch)
    if asked.torch == "cpu":
        pins = "\n".join(lock.torch_pins(locked, names))
        index = ["--extra-index-url", asked.torch_index]
        _install_lines(folder, index, pins, len(lock.TORCH), force=other)
    elif other:
        lines = locked.part(set(lock.TORCH) & names)
        _install_lines(folder, hashed, lines, len(lock.TORCH), force=True)
    lines = locked.part(names if asked.torch == "gpu" else lock.without_gpu(names))
    _install_lines(folder, hashed, lines, len(installed))
    # Nothing but the command lines and the path of this checkout: all that it needs is there.
    own = ["--no-build-isolation", "--editable", str(ROOT)]
    _install_lines(folder, own, "", 0, force=True)
    for words in (["-m", "pip", "check"], ["-c", IMPORTS]):
        done = _said(python, *words, cwd=ROOT)
        if done.returncode:
            sys.exit(
                "The packages are installed, but they do not work "
                f"together:\n{done.stdout}{done.stderr}"
            )
    (folder / STAMP).write_text(json.dumps(stamp))
    if wrong := _differences(folder, asked):
        (folder / STAMP).unlink()
        sys.exit("After the installation these packages are wrong: {}".format("; ".join(wrong)))
    size = sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_dir()) / 1e6
    print(
        f"Done in {(time.monotonic() - began) / 60:.1f} minutes: {size:,.0f} MB, every version and "
        "import checked."
    )


def _check_pip(python: Path, folder: Path) -> None:
    """An environment of uv, or one whose making was interrupted, has no pip."""
    if not _said(python, "-m", "pip", "--version").returncode:
        return
    if _said(python, "-m", "ensurepip", "--upgrade").returncode:
        sys.exit(
            f"The environment in {folder} has no pip; remove that folder, and set up again. "
            f"{VENV_HINT}"
        )


def _check_disk(folder: Path, needed: float) -> None:
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free / 1e6
    if free < needed * MARGIN:
        sys.exit(
            f"{there} has {free:,.0f} MB free, and {needed * MARGIN:,.0f} MB are needed. "
            "Name an environment on another disk: make setup VENV=/path"
        )


def _make(folder: Path) -> None:
    done = _said(sys.executable, "-m", "venv", str(folder))
    if done.returncode:
        said = (done.stdout + done.stderr).strip()
        # Otherwise a part of it stays, which looks like an environment.
        shutil.rmtree(folder, ignore_errors=True)
        hint = VENV_HINT if "ensurepip" in said else ""
        sys.exit(f"No environment could be made in {folder}. {hint}Python's own words:\n{said}")


def _install_lines(
    folder: Path, options: list[str], lines: str, packages: int, force: bool = False
) -> None:
    """Run pip with these requirements, count the packages that it has collected, and name the
    reason when it fails.
    """
    said: list[str] = []
    # Of two that set up one environment at once, neither takes away what the other reads.
    wanted = folder / f"{os.getpid()}-{REQUIREMENTS}"
    wanted.write_text(lines)
    command = [
        str(_python_of(folder)),
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--progress-bar",
        "off",
    ]
    command += ["--disable-pip-version-check", *options, *(["--force-reinstall"] if force else [])]
    command += ["-r", str(wanted)] if lines else []
    variables = os.environ | {"PIP_QUIET": "0", "PIP_USER": "0"}
    variables.pop("PYTHONPATH", None)
    try:
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=variables
        ) as process:
            collected, shown = 0, 0
            for line in process.stdout or ():
                said.append(line)
                collected += line.startswith(
                    ("Collecting ", "Processing ", "Requirement already satisfied: ")
                )
                if packages and min(collected, packages) * 4 // packages > shown:
                    shown = min(collected, packages) * 4 // packages
                    print(
                        f"  {min(collected, packages)} of {packages} packages are here", flush=True
                    )
                if line.startswith("Installing collected packages") and packages:
                    print("  unpacking", flush=True)
    finally:
        wanted.unlink()
    if process.returncode:
        text = "".join(said)
        hints = [hint for pattern, hint in REASONS if re.search(pattern, text)]
        sys.exit(
            "pip failed:\n{}{}".format(
                "".join(said[-15:]), "".join(f"\n{hint}." for hint in hints[:1])
            )
        )


def _differences(folder: Path, asked: argparse.Namespace) -> list[str]:
    """What this environment lacks, or has at another version than the lock; empty if it is as the
    lock says.
    """
    torch = _kind(folder) if asked.torch == "auto" else asked.torch
    stamp, wanted = _read_stamp(folder), stamp_of(asked.lock, asked.extras, torch)
    if stamp and not os.access(folder, os.W_OK):
        # Of another user: make gives this checkout's path, whatever the commands in the environment
        # have.
        stamp["checkout"] = str(ROOT)
    if stamp != wanted:
        return ["it was not set up to the end, or for another lock, checkout or build of torch"]
    return _wrong_versions(_python_of(folder), asked, torch)


def _wrong_versions(python: Path, asked: argparse.Namespace, torch: str) -> list[str]:
    """The packages of an environment that are not there, or at another version than in the lock."""
    given = (str(ROOT), str(asked.lock.absolute()), torch, *asked.extras)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = _said(python, "-c", CHECK, *given, cwd=python.parent, env=variables)
    if done.returncode:
        return [(done.stderr.strip().splitlines() or ["its Python does not start"])[-1]]
    return done.stdout.splitlines()


IMPORTS = "import torch, flwr, fedsurrogate, fedsurrogate.server_app.cli.main, fedsurrogate.client_app.cli.main"
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
    if not marker:
        return True
    from packaging.markers import Marker
    return Marker(marker).evaluate()

locked = lock.read(Path(file))
names = locked.names(extras)
if "torch" in names and version("torch").endswith("+cpu") != (torch == "cpu"):
    print("torch is a build for " + ("GPUs" if torch == "cpu" else "CPUs"))
for name in sorted(lock.with_build(names, torch)):
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
