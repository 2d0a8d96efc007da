"""The README's commands in clones on machines unlike the developer's: `make test-fresh`.

    python tests/fresh/places.py                      # every place, with the tests that depend on
    the machine python tests/fresh/places.py --only blank busy    # some of them python
    tests/fresh/places.py --whole              # all of `make test` in each place

Each place has a clone of its own in an empty folder, and an environment of its own that borrows the
packages of this one. In it, `make demo` and `make test` run as the README says. Uncommitted changes
are not part of a clone. Places that need root or another Python are skipped, by name, where that is
missing. Prints a table; exits with 1 if a place fails.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy import environment
from tests.children import ran

ROOT = Path(__file__).resolve().parents[2]
# Tests that see the machine: files and their modes, processes, signals, commands, text, packages.
SENSITIVE = (
    "tests/benchmarks/test_scripts.py", "tests/client_app/cli", "tests/client_app/datasets",
    "tests/client_app/diagnostics", "tests/client_app/features", "tests/client_app/governance",
    "tests/common/logs", "tests/common/test_help.py", "tests/common/test_run.py", "tests/deploy",
    "tests/docs/test_readme.py", "tests/fedsurrogate", "tests/server_app/cli",
    "tests/server_app/deployment", "tests/server_app/lifecycle", "tests/server_app/runs",
    "tests/test_dependencies.py", "tests/test_command_lines.py", "tests/test_version.py",
)  # fmt: skip
# Tests that compare rounded numbers.
NUMERIC = (
    "tests/attacks/privacy", "tests/client_app/audit", "tests/client_app/features",
    "tests/client_app/methods", "tests/client_app/model_use", "tests/common/backbones",
    "tests/common/models", "tests/common/privacy", "tests/common/secure_aggregation",
    "tests/common/signed_models", "tests/common/surrogates", "tests/common/targets",
    "tests/common/wire", "tests/data_kinds/scales", "tests/fedsurrogate", "tests/pins",
    "tests/server_app/export", "tests/strategies",
)  # fmt: skip
NOBODY = 65534
# Beginnings of variables of the one who starts this, which would reach into the places.
OWN = ("PYTEST", "FEDSURROGATE", "MAKE", "XDG_", "FLWR_", "MPLCONFIGDIR", "PYTHONPATH", "VENV")
BUSY = 4
PASSED, FAILED, SKIPPED = "passed", "FAILED", "skipped"
NAMESPACE = ("unshare", "--mount", "--propagation", "private")


@dataclass(frozen=True)
class Place:
    """A machine to play.

    Attributes:
        name: one word.
        what: what is unusual there.
        prefix: words before every command.
        folder: of the checkout, below an empty folder.
        environment: variables that differ; None removes one.
        user: whether an ordinary user runs it, who owns the checkout.
        read_only: whether the checkout cannot be written.
        busy: loops that use the processors meanwhile.
        python: of the environment; empty for that of this script.
        tests: whether the tests run, and not the demo alone.
        rooms: the tests that depend on what is unusual.
        kernels: variables that choose other kernels of a processor, and the threads of each
            process, by name; the tests run with each of them.
    """

    name: str
    what: str
    prefix: tuple[str, ...] = ()
    folder: str = "checkout"
    environment: dict[str, str | None] = field(default_factory=dict)
    user: bool = False
    read_only: bool = False
    busy: int = 0
    python: str = ""
    tests: bool = True
    rooms: tuple[str, ...] = SENSITIVE
    kernels: dict[str, tuple[dict[str, str | None], int]] = field(
        default_factory=lambda: {"own": ({}, 1)}
    )


NO_LANGUAGE: dict[str, str | None] = {
    "LANG": None,
    "LC_ALL": None,
    "LC_CTYPE": None,
    "PYTHONUTF8": None,
}
UMASK = ("sh", "-c", 'umask 077; exec "$@"', "sh")
BACKGROUND = ("sh", "-c", 'trap "" INT QUIT HUP; exec "$@"', "sh")
OFFLINE = ("unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh")
# Other kernels of torch, of its two libraries for products and convolutions, and of numpy's. What a
# processor does not have, it does not take.
KERNELS: dict[str, tuple[dict[str, str | None], int]] = {
    "oldest": (
        {
            "ATEN_CPU_CAPABILITY": "default",
            "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
            "ONEDNN_MAX_CPU_ISA": "SSE41",
            "OPENBLAS_CORETYPE": "Nehalem",
        },
        1,
    ),
    "avx2": (
        {
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "OPENBLAS_CORETYPE": "Haswell",
        },
        1,
    ),
    "avx512": (
        {
            "MKL_CBWR": "AVX512",
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "OPENBLAS_CORETYPE": "SkylakeX",
        },
        1,
    ),
    "of any processor": ({"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default"}, 2),
    "two threads": ({}, 2),
    # tests/fresh/kernels.py
    "other order": ({"PYTEST_ADDOPTS": "-p tests.fresh.kernels"}, 1),
}
PLACES = (
    Place("alone", "nothing beside the clone"),
    Place(
        "blank",
        "a blank and an umlaut in the path of checkout and environment",
        folder="mein projekt ä/checkout",
    ),
    Place("user", "an ordinary user", user=True),
    Place("umask", "umask 077", prefix=UMASK),
    Place("homeless", "HOME cannot be written", environment={"HOME": "/nonexistent"}, user=True),
    Place("plain-text", "no LANG, no LC_ALL", environment=NO_LANGUAGE),
    Place("background", "started by a shell without job control, which ignores Ctrl-C", prefix=BACKGROUND),
    Place("one-core", "one core", prefix=("taskset", "--cpu-list", "0")),
    Place("read-only", "a checkout that cannot be written, as an ordinary user", user=True, read_only=True),
    Place("offline", "no network but loopback", prefix=OFFLINE),
    Place("debian", "the Python of the distribution", python="/usr/bin/python3"),
    Place("processors", f"other kernels and threads: {', '.join(KERNELS)}", rooms=NUMERIC, kernels=KERNELS),
    Place(
        "busy",
        f"an ordinary user with umask 077, a blank in the path, {BUSY} busy loops beside the demo",
        prefix=UMASK,
        folder="mein projekt ä/checkout",
        user=True,
        busy=BUSY,
        tests=False,
    ),
)  # fmt: skip


def borrow(folder: Path, python: str, checkout: Path) -> Path:
    """An environment in `folder` with the packages of this one: no copy of gigabytes, but its own
    Python and commands.

    Args:
        folder: of the new environment.
        python: its Python, of the same minor version as this one.
        checkout: whose packages its commands import.

    Returns:
        `folder`.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    (own,) = folder.glob("lib/python*/site-packages")
    paths = sorted({sysconfig.get_paths()[name] for name in ("purelib", "platlib")})
    (own / "borrowed.pth").write_text("\n".join([str(checkout), *paths]) + "\n")
    new, old = folder / "bin" / "python", Path(sysconfig.get_paths()["scripts"])
    for script in old.iterdir():
        if (folder / "bin" / script.name).exists() or script.name.startswith(
            ("python", "pip", "activate", "Activate")
        ):
            continue
        content = script.read_bytes()
        if content.startswith(b"#!") and b"python" in content.partition(b"\n")[0]:
            # As pip writes it where the path has a blank.
            head = f"#!/bin/sh\n'''exec' \"{new}\" \"$0\" \"$@\"\n' '''\n".encode()
            (folder / "bin" / script.name).write_bytes(head + content.partition(b"\n")[2])
            (folder / "bin" / script.name).chmod(0o755)
        elif script.is_file():
            (folder / "bin" / script.name).symlink_to(script)
    # As after `make setup` there.
    stamp = environment.stamp_of(checkout / "requirements.lock", ["dev"], "gpu") | {
        "checkout": str(checkout)
    }
    (folder / environment.STAMP).write_text(json.dumps(stamp))
    return folder


def played(place: Place, whole: bool, seconds: float) -> tuple[str, str]:
    """Play a place, with all tests or those of its rooms: its result, and a line about it."""
    if reason := missing(place):
        return SKIPPED, reason
    with tempfile.TemporaryDirectory(prefix="fresh-", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        checkout, log = home / place.folder, home / "log"
        checkout.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
        borrowed = borrow(checkout.parent / "environment", place.python or sys.executable, checkout)
        (home / "tmp").mkdir()
        log.touch()
        if place.user:
            home.chmod(0o755)
            subprocess.run(["chown", "-hR", f"{NOBODY}:{NOBODY}", folder], check=True)
        rooms = "" if whole else " ".join(place.rooms)
        commands: list[tuple[str, tuple[str, ...]]] = [
            ("own", ("demo", "SITES=2", f"OUT={home}/runs"))
        ]
        if place.tests:
            commands += [
                (name, ("test", f"TESTS={rooms}", f"THREADS={threads}"))
                for name, (_, threads) in place.kernels.items()
            ]
        with busy(place.busy):
            for kernels, words in commands:
                make = ["make", "-C", str(checkout), *words, f"VENV={borrowed}"]
                command = [*before(place, checkout, borrowed), *make]
                changed, _ = place.kernels.get(kernels, ({}, 1))
                if code := logged(command, variables(place, home, changed), log, seconds):
                    kept = Path(tempfile.gettempdir()) / f"fresh-{place.name}.log"
                    shutil.copy(log, kept)
                    where = "" if kernels == "own" else f" with the kernels {kernels!r}"
                    return FAILED, f"make {words[0]}{where} ended with {code}; see {kept}"
        lines = log.read_text(errors="replace").splitlines()
        return PASSED, next((line for line in reversed(lines) if " passed" in line), "demo only")


def logged(command: Sequence[str], environment: dict[str, str], log: Path, seconds: float) -> int:
    """Run a command with its output at the end of `log`; return its exit code, 124 if it takes too
    long.
    """
    with log.open("ab") as stream:
        stream.write(f"$ {' '.join(command)}\n".encode())
        stream.flush()
        process = subprocess.Popen(
            command,
            cwd=log.parent,
            env=environment,
            stdout=stream,
            stderr=stream,
            stdin=subprocess.DEVNULL,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            stream.write(f"still running after {seconds:.0f} s\n".encode())
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait()
            return 124


def before(place: Place, checkout: Path, environment: Path) -> list[str]:
    """Words before each command: the mounts, the user, and what the place itself adds."""
    found: list[str] = []
    if place.read_only:
        found += [*NAMESPACE, "sh", "-c", READ_ONLY, "sh", str(checkout)]
    if place.user:
        base = Path(os.path.realpath(environment / "bin" / "python")).parents[1]
        if closed := [each for each in base.parents if not each.stat().st_mode & 0o001]:
            found += [
                *NAMESPACE,
                "sh",
                "-c",
                OPEN,
                "sh",
                str(base),
                str(closed[-1]),
                str(base.relative_to(closed[-1])),
            ]
        found += ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    return [*found, *place.prefix]


READ_ONLY = 'mount --bind "$1" "$1" && mount -o remount,ro,bind "$1" && shift && exec "$@"'
# The Python may lie in a folder that only root can enter: an open one with nothing but this Python
# stands in its place.
OPEN = """
open=$(mktemp -d) && chmod 755 "$open" && mkdir -p "$open/$3" && mount --bind "$1" "$open/$3" \\
    && mount --rbind "$open" "$2" && shift 3 && exec "$@"
"""


def variables(place: Place, home: Path, kernels: Mapping[str, str | None]) -> dict[str, str]:
    """Environment of the commands in a place."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(OWN)}
    found |= {"HOME": str(home), "TMPDIR": str(home / "tmp")}
    for name, value in (place.environment | kernels).items():
        found.pop(name, None)
        if value is not None:
            found[name] = value
    return found


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Loops that use the processors meanwhile."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def missing(place: Place) -> str:
    """Why a place cannot be played here; empty if it can."""
    words = " ".join(place.prefix).split() + ["setpriv", "unshare"] * (
        place.user or place.read_only
    )
    if lacking := [
        tool
        for tool in ("unshare", "setpriv", "taskset", "ip")
        if tool in words and shutil.which(tool) is None
    ]:
        return f"needs {lacking[0]}"
    if (place.user or place.read_only or "unshare" in place.prefix) and os.geteuid() != 0:
        return "needs root"
    if place.python:
        code = "import sys, venv; print(*sys.version_info[:2])"
        done = ran([place.python, "-c", code])
        if done.returncode or done.stdout.split() != [str(each) for each in sys.version_info[:2]]:
            return (
                f"{place.python} is no Python {sys.version_info[0]}.{sys.version_info[1]} with venv"
            )
    return ""


def main() -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [place.name for place in PLACES]
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="PLACE", help=", ".join(names)
    )
    parser.add_argument("--whole", action="store_true", help="all of `make test`")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="after which a command counts as hanging"
    )
    asked = parser.parse_args()
    failed = 0
    for place in PLACES:
        if place.name not in asked.only:
            continue
        began = time.monotonic()
        result, line = played(place, asked.whole, 60 * asked.minutes)
        failed += result == FAILED
        print(
            f"{result:8} {place.name:12} {time.monotonic() - began:5.0f} s  {place.what}: {line}",
            flush=True,
        )
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()
