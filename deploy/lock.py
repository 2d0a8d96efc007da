"""The lock: every package of every extra at one version, and every file of it by its hash.

    python3 deploy/lock.py print core simulation   # what these extras need, for `pip install
    --require-hashes --no-deps -r` python3 deploy/lock.py renew                   # `make lock`:
    resolve again; needs uv and an index of packages python3 deploy/lock.py oldest FILE
    # a lock for `make test-oldest`: the oldest versions that are allowed

`print` needs nothing but Python: images are built with it. The head of the lock has the names of
the packages of each extra, and the size of a whole installation, because pip's format cannot say
either.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "requirements.lock"
PYTHON = "3.11"
"""The oldest Python for which the lock holds."""
CORE = "core"
"""The name of what is needed without any extra."""
TORCH = ("torch", "torchvision")
TORCH_OF_CPU = (200, 750)
"""MB to download and on disk of these two in their builds for processors: those of torch 2.13,
which is not in the index.
"""
GPU_ONLY = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of packages that only torch's build for GPUs needs."""
END = "# end\n"
HEAD = """\
# All packages of all extras, each file by its hash: `make lock` renews this, `deploy/lock.py print` takes a part of it.
# pip install --require-hashes --no-deps -r requirements.lock
"""


@dataclass(frozen=True)
class Lock:
    """A lock that has been read.

    Attributes:
        entries: pip's lines by the package's normal name; several where the version depends on that
            of Python.
        sets: normal names of the packages by extra, and by CORE.
        sizes: MB to download and MB on disk, by "gpu" and "cpu", of an installation for
            development.
    """

    entries: Mapping[str, tuple[str, ...]]
    sets: Mapping[str, frozenset[str]]
    sizes: Mapping[str, tuple[int, int]]

    def names(self, extras: Collection[str]) -> frozenset[str]:
        """Normal names of the packages that these extras need. Raises ValueError for an extra that
        is not there.
        """
        if unknown := sorted(set(extras) - set(self.sets)):
            raise ValueError(
                f"no extra {', '.join(unknown)} in {LOCK.name}; there are "
                f"{', '.join(sorted(self.sets))}"
            )
        return frozenset[str]().union(*(self.sets[each] for each in extras))

    def part(self, names: Collection[str]) -> str:
        """What pip reads to install these packages."""
        return "".join("".join(self.entries[name]) for name in self.entries if name in names)


def read(file: Path = LOCK) -> Lock:
    """Read a lock. Raises ValueError where it has no entry, or an entry without a hash."""
    text = file.read_text()
    entries: dict[str, tuple[str, ...]] = {}
    for found in re.finditer(
        r"^([A-Za-z0-9][\w.-]*)==[^\n]*\n(?:[ ]+[^\n]*\n)*", text, re.MULTILINE
    ):
        if "--hash=sha256:" not in found.group():
            raise ValueError(f"{file.name}: {found.group(1)} has no hash")
        name = normal(found.group(1))
        entries[name] = (*entries.get(name, ()), found.group())
    if not entries:
        raise ValueError(f"{file.name} has no package")
    if not text.endswith(END):
        raise ValueError(f"{file.name} is damaged, its end is missing; take it from the repository")
    sets = {
        name: frozenset(names.split())
        for name, names in re.findall(r"^# extra (\S+): (.*)$", text, re.MULTILINE)
    }
    if lacking := sorted(frozenset[str]().union(*sets.values()) - set(entries)):
        raise ValueError(
            f"{file.name} is damaged, it has no entry for {', '.join(lacking[:5])}; take it from "
            "the repository"
        )
    stated = r"^# size (\S+): (\d+) MB to download, (\d+) MB on disk"
    sizes = {kind: (int(a), int(b)) for kind, a, b in re.findall(stated, text, re.MULTILINE)}
    return Lock(entries, sets, sizes)


def versions_of(lines: Collection[str]) -> Iterator[tuple[str, str]]:
    """Version and marker of each entry of a package; the marker is empty where the version holds
    everywhere.
    """
    for line in lines:
        first = line.splitlines()[0].rstrip(" \\")
        version, _, marker = first.partition("==")[2].partition(";")
        yield version.strip(), marker.strip()


def without_gpu(names: Collection[str]) -> frozenset[str]:
    """The packages that are left where torch comes from an index of builds for processors."""
    return frozenset(name for name in names if name not in TORCH and not name.startswith(GPU_ONLY))


def with_build(names: Collection[str], torch: str) -> frozenset[str]:
    """The packages of an environment with this build of torch, "gpu" or "cpu"."""
    kept = without_gpu(names) | frozenset(TORCH) & frozenset(names)
    return kept if torch == "cpu" else frozenset(names)


def torch_pins(lock: Lock, names: Collection[str]) -> list[str]:
    """Builds for processors of torch and torchvision, at the versions of the lock. They are other
    files, so without hashes.

    With "+cpu", so that no index without such builds can give one for GPUs, which does not start
    without their libraries.
    """
    chosen = {name: next(versions_of(lock.entries[name]))[0] for name in TORCH if name in names}
    return [f"{name}=={version}+cpu" for name, version in chosen.items()]


def normal(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def renew(file: Path = LOCK) -> None:
    """Resolve all extras again, each package at the newest version that is allowed, and write the
    lock.
    """
    from importlib.metadata import version

    if version("torch").endswith("+cpu"):
        sys.exit(
            "the lock says how large an environment for GPUs is: renew it in one that was set up "
            "with TORCH=gpu"
        )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    entries = _compile("--all-extras", "--generate-hashes")
    with_sizes = tomllib.loads(_compile("--all-extras", "--format", "pylock.toml"))
    pins = file.with_suffix(".pins")
    pins.write_text(re.sub(r" \\\n(?: +--hash.*\n)+", "\n", entries))
    try:
        wanted: dict[str, list[str]] = {CORE: []} | {
            name: ["--extra", name] for name in project["optional-dependencies"]
        }
        sets = {
            name: sorted(set(_names(_compile("-c", str(pins), "--no-annotate", *options))))
            for name, options in sorted(wanted.items())
        }
    finally:
        pins.unlink()
    head = HEAD + "".join(f"# extra {name}: {' '.join(names)}\n" for name, names in sets.items())
    download, disk = _downloads(with_sizes, sets["dev"]), _on_disk()
    for kind, names, more in (
        ("gpu", frozenset(sets["dev"]), (0, 0)),
        ("cpu", without_gpu(sets["dev"]), TORCH_OF_CPU),
    ):
        sizes = (
            sum(size.get(name, 0) for name in names) + extra
            for size, extra in zip((download, disk), more, strict=True)
        )
        head += "# size {}: {:.0f} MB to download, {:.0f} MB on disk\n".format(kind, *sizes)
    file.write_text(head + entries + END)


def oldest(file: Path) -> None:
    """Write a lock for development with the oldest allowed version of each package that
    pyproject.toml names.
    """
    entries = _compile("--extra", "dev", "--generate-hashes", "--resolution", "lowest-direct")
    sizes = "".join(re.findall(r"^# size .*\n", LOCK.read_text(), re.MULTILINE))
    names = " ".join(sorted(set(_names(entries))))
    file.write_text(f"# extra dev: {names}\n{sizes}{entries}{END}")


def _compile(*options: str) -> str:
    words = f"-m uv pip compile pyproject.toml --quiet --universal --no-header --python-version {PYTHON}"
    command = [sys.executable, *words.split(), *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit("uv found no set of versions; its reason stands above")
    return done.stdout


def _names(compiled: str) -> Iterator[str]:
    for found in re.finditer(r"^([A-Za-z0-9][\w.-]*)==", compiled, re.MULTILINE):
        yield normal(found.group(1))


def _downloads(lock: Mapping[str, object], wanted: Collection[str]) -> dict[str, float]:
    """MB to download of each of these packages, for this machine and this Python."""
    from packaging.tags import sys_tags
    from packaging.utils import parse_wheel_filename

    here, found = {tag: place for place, tag in enumerate(sys_tags())}, dict[str, float]()
    for package in lock["packages"]:  # type: ignore[attr-defined]
        fitting = []
        for wheel in package.get("wheels", ()) if normal(package["name"]) in wanted else ():
            tags = parse_wheel_filename(wheel["url"].rpartition("/")[2].replace("%2B", "+"))[3]
            places = [here[tag] for tag in tags if tag in here]
            fitting += [(min(places), wheel["size"])] if places else []
        if fitting:
            found[normal(package["name"])] = min(fitting)[1] / 1e6
    return found


def _on_disk() -> dict[str, float]:
    """MB on disk of each package of this environment."""
    from importlib.metadata import distributions

    found = {}
    for each in distributions():
        places = [Path(str(file.locate())) for file in each.files or ()]
        size = sum(place.stat().st_size for place in places if place.is_file())
        found[normal(each.name)] = size / 1e6
    return found


def main(arguments: Collection[str] | None = None) -> None:
    """The command line; see above."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    printing = commands.add_parser("print", help="what some extras need, as pip reads it")
    printing.add_argument(
        "extras", nargs="+", metavar="EXTRA", help=f"an extra of pyproject.toml, or {CORE}"
    )
    torch = printing.add_mutually_exclusive_group()
    without = "leave out torch, torchvision and libraries of GPUs"
    torch.add_argument("--without-torch", action="store_true", help=without)
    only = "only torch and torchvision, with no hashes"
    torch.add_argument("--only-torch", action="store_true", help=only)
    commands.add_parser("renew", help="resolve all extras again")
    old = commands.add_parser("oldest", help="write a lock with the oldest allowed versions")
    old.add_argument("file", type=Path)
    asked = parser.parse_args(None if arguments is None else list(arguments))
    if asked.command == "renew":
        renew()
    elif asked.command == "oldest":
        oldest(asked.file)
    else:
        try:
            lock = read()
            names = lock.names(asked.extras)
        except ValueError as error:
            sys.exit(str(error))
        if asked.only_torch:
            print("\n".join(torch_pins(lock, names)))
        else:
            print(lock.part(without_gpu(names) if asked.without_torch else names), end="")


if __name__ == "__main__":
    main()
