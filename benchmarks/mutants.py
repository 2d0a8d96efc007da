"""Mutation testing of the code behind the guarantees: plant small faults that nobody has seen, one
at a time, and check that a test fails.

A seed draws the faults from all that the operators find in the packages. First, quick tests run
once, to record the time and the lines of each. Then each mutant gets the tests that execute its
line, those near to its file first, until one fails; they run in a fork of a process that has the
libraries loaded, and the fault is planted in its memory: no file changes. A fork that takes too
long or too much memory is stopped, and counts as killed, unless the same tests do so without the
fault. What became of each mutant is written at once; `--resume` goes on where a run was stopped.
Prints a score for each package and the survivors; exits with 1 when fewer than 90 % of the mutants
are killed.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import os
import resource
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from benchmarks._executed import Test, recorded
from benchmarks._forks import Killer, end_forks_when_ended, in_forks, pytest_exit
from benchmarks._mutations import Mutant, draw, every
from benchmarks._operators import Facts, facts_of
from benchmarks._planting import in_a_function, plant_in_function, plant_in_import

HERE = Path(__file__).resolve().parent
RESULTS, EQUIVALENT = HERE / "results" / "mutants.json", HERE / "mutants_equivalent.toml"
PACKAGES = (
    *(f"common/{name}" for name in ("privacy", "secure_aggregation", "wire", "security", "signed_models", "targets")),
    *(f"client_app/{name}" for name in ("governance", "secure_aggregation.py", "methods", "model_use", "datasets", "audit")),
    "strategies",
    # What else reads foreign bytes, keeps files, or decides what leaves.
    *(f"common/{name}" for name in ("backbones", "message_files.py", "escapes.py", "files.py")),
    *(f"common/{name}" for name in ("identity.py", "safe_parsing.py")),
    *(f"client_app/{name}" for name in ("features", "offline", "node_config.py", "requests.py")),
    "server_app/exchange.py",
)  # fmt: skip
ROOMS = ("common", "client_app", "strategies", "server_app", "fedsurrogate")
# Tests of other things, and those that start processes, which run without the fault.
OTHER_TESTS = ("benchmarks", "deploy", "docs", "e2e", "faults", "fresh")
# CPU seconds for one test, and for all tests of a mutant; and wall-clock seconds for these.
SLOWEST_TEST, MOST_SECONDS, LONGEST = 20.0, 60.0, 900
# CPU seconds of a fork beyond twice those of its tests: their files are imported first.
IMPORTS = 30.0
# Of a file of tests that has nothing to do with a file but to execute it.
FAR = 3
JOURNAL = ".mutants-tried.jsonl"
GOAL = 0.9
LIBRARIES = (
    "torch", "torch.func", "opacus", "pytest", "hypothesis.strategies", "sklearn.discriminant_analysis", "scipy.stats",
    "scipy.special", "dp_accounting.pld", "dp_accounting.rdp", "pydantic", "google.protobuf.message",
    "cryptography.hazmat.primitives.ciphers.aead", "safetensors.torch", "filelock", "PIL.Image", "typer.testing", "flwr.app",
    "flwr.clientapp", "flwr.serverapp", "pydicom", "grpc",
)  # fmt: skip


@dataclass(frozen=True)
class Tried:
    """What became of a mutant.

    Attributes:
        status: killed, timeout (killed by its limit), survived, or error.
        by: the test that failed; of a survivor, how many tests were too slow to try.
        seconds: wall clock.
    """

    mutant: Mutant
    status: str
    by: str
    seconds: float


@dataclass(frozen=True)
class Tree:
    """A tree of packages and their tests."""

    root: Path
    packages: tuple[str, ...]
    rooms: tuple[str, ...]

    def sources(self, folder: str) -> dict[str, str]:
        """Text of each Python file of a folder, or of one file, by its path from the root."""
        place = self.root / folder
        files = [place] if place.is_file() else sorted(place.rglob("*.py"))
        return {str(file.relative_to(self.root)): file.read_text() for file in files}

    def tests(self) -> list[str]:
        return [
            name
            for name in self.sources("tests")
            if Path(name).name.startswith("test_") and Path(name).parts[1] not in OTHER_TESTS
        ]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--count", type=int, default=200, help="mutants to draw, for each seed")
    arguments.add_argument("--seed", type=int, nargs="+", default=[0], help="draws other mutants")
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--packages", nargs="+", help="to draw from", metavar="FOLDER")
    arguments.add_argument("--seconds", type=float, default=float("inf"), help="of the whole run")
    arguments.add_argument("--output", type=Path, default=RESULTS, help="file of results")
    arguments.add_argument("--root", type=Path, help="another tree: each folder in it, and tests")
    arguments.add_argument("--list", nargs="*", help="print all mutants and stop", metavar="FILE")
    arguments.add_argument("--resume", action="store_true", help="keep what was tried before")
    arguments.add_argument("--only", nargs="+", help="try these instead of a draw", metavar="ID")
    arguments.add_argument("--tests", nargs="+", help="files of tests, not all", metavar="FILE")
    chosen = arguments.parse_args()
    end_forks_when_ended()
    began = time.monotonic()
    tree = Tree(HERE.parent, PACKAGES, ROOMS)
    if chosen.root:
        folders = tuple(each.parent.name for each in sorted(chosen.root.glob("*/__init__.py")))
        tree = Tree(chosen.root.resolve(), folders, folders)
    os.chdir(tree.root)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(tree.root))
    for name in ("pytest",) if chosen.root else LIBRARIES:
        importlib.import_module(name)
    facts = facts_of(
        [ast.parse(text) for room in tree.rooms for text in tree.sources(room).values()]
    )
    packages = tuple(chosen.packages or tree.packages)
    if other := set(packages) - set(tree.packages):
        arguments.error(f"--packages: {', '.join(other)} of {', '.join(tree.packages)}")
    sources = {package: tree.sources(package) for package in packages}
    reviewed = tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    known = [name for each in reviewed for name in each["id"].split()]
    if chosen.list is not None:
        return show(every(sources, facts, known), chosen.list)
    draws = {seed: draw(sources, facts, chosen.count, seed, known) for seed in chosen.seed}
    sample = list(dict.fromkeys(each for drawn in draws.values() for each in drawn))
    if chosen.only:
        sample = [each for each in every(sources, facts) if each.id in chosen.only]
    near = Nearness(tree)
    tests = sorted(
        chosen.tests or tree.tests(),
        key=lambda test: min((near(test, each.file) for each in sample), default=FAR),
    )
    # The files of all packages, because a run that draws from others takes what is recorded now.
    files = [file for package in tree.packages for file in tree.sources(package)]
    lines = recorded(tree.root, files, tests, chosen.jobs, began + chosen.seconds / 2)
    # Where the time was too short for all tests, a mutant without a test yet says nothing.
    judged = [each for each in sample if len(lines) == len(tests) or executing(each, lines)]
    journal = Journal(tree.root / JOURNAL, chosen.resume)
    tried = try_all(tree, facts, judged, lines, chosen.jobs, began + chosen.seconds, journal)
    for seed, drawn in draws.items() if not chosen.only else ():
        own = [each for each in tried if each.mutant in drawn]
        write(chosen.output, seed, len(drawn), own, packages)
    if left := len(tests) - len(lines):
        print(f"{left} of {len(tests)} files of tests had no time: the score is a lower bound")
    return int(table(tried, len(sample), packages) < GOAL)


def show(found: Sequence[Mutant], files: Sequence[str]) -> int:
    """Print mutants of some files, or of all: what a draw can give, for a reader."""
    for each in found:
        if not files or each.file in files:
            print(f"{each.id} {each.file}:{each.lineno} {each.operator}, {each.what}: {each.text}")
    return 0


class Journal:
    """A file of what became of each mutant, one a line, written as it is known."""

    def __init__(self, file: Path, resume: bool) -> None:
        self._file = file
        if not resume:
            file.unlink(missing_ok=True)

    def add(self, tried: Tried) -> None:
        with self._file.open("a") as file:
            print(json.dumps(asdict(tried)), file=file)

    def known(self, sample: Sequence[Mutant]) -> list[Tried]:
        """What became of those that were tried before."""
        text = self._file.read_text() if self._file.is_file() else ""
        # A stopped run can leave half a line at the end.
        whole = text[: text.rfind("\n") + 1].splitlines()
        found = {each["mutant"]["id"]: each for each in map(json.loads, whole)}
        return [
            Tried(each, *(found[each.id][name] for name in ("status", "by", "seconds")))
            for each in sample
            if each.id in found
        ]


class Nearness:
    """How near a file of tests is to a file: named after it, importing it, in its folder."""

    def __init__(self, tree: Tree) -> None:
        self._texts = tree.sources("tests")

    @cache  # noqa: B019 - one object a run
    def __call__(self, test: str, file: str) -> int:
        path = Path(file)
        if Path(test).stem == f"test_{path.stem}":
            return 0
        module = file.removesuffix(".py").replace("/", ".")
        package, _, name = module.rpartition(".")
        text = self._texts[test]
        if module in text or f"{package} import {name}" in text:
            return 1
        return 2 if str(path.parent) in test else FAR


def executing(mutant: Mutant, lines: dict[str, list[Test]], inside: bool = True) -> list[Test]:
    """Tests that execute the mutant's line.

    Args:
        mutant: to be tried.
        lines: of each test.
        inside: whether the fault is in the body of a function. Other code runs at import, before a
            test begins, so no test has its lines, but for those whose lines are not known: then all
            that execute the file.
    """
    tests = [each for found in lines.values() for each in found if mutant.file in each[2]]
    if not inside:
        return tests
    return [each for each in tests if mutant.lineno in each[2][mutant.file]] or tests


def try_all(
    tree: Tree,
    facts: Facts,
    sample: Sequence[Mutant],
    lines: dict[str, list[Test]],
    jobs: int,
    until: float,
    journal: Journal,
) -> list[Tried]:
    """Try mutants until the time is over, but for those in the journal."""
    tried = journal.known(sample)
    known = {each.mutant for each in tried}
    # In an order that has nothing to do with files, so that a run without the time for all of them
    # has tried a fair part.
    sample = sorted((each for each in sample if each not in known), key=lambda each: each.id)
    near = Nearness(tree)
    inner = [mutant for mutant in sample if in_a_function(tree.root, mutant, facts)]

    def attempt(mutant: Mutant, file: Path) -> int:
        return try_one(mutant, executing(mutant, lines, mutant in inner), lines, near, file)

    def try_some(some: Sequence[Mutant], plant: Callable[[Path, Mutant, Facts], None]) -> None:
        def work(mutant: Mutant, file: Path) -> int:
            plant(tree.root, mutant, facts)
            return attempt(mutant, file)

        def done(mutant: Mutant, status: str, content: str) -> None:
            seconds = time.monotonic() - before[0]
            before[0] = time.monotonic()
            by = content.partition("\n")[0]
            tried.append(Tried(mutant, status, by, round(seconds, 1)))
            journal.add(tried[-1])
            print(
                f"{status:9} {mutant.id} {mutant.file}:{mutant.lineno} {mutant.operator}, "
                f"{mutant.what}: {mutant.text[:90]}   {by[-90:]}",
                flush=True,
            )

        before = [time.monotonic()]
        in_forks(some, jobs, work, done, until, LONGEST)

    # Constants and defaults first, because their modules must not be imported yet. Then one import
    # serves all others.
    try_some([mutant for mutant in sample if mutant not in inner], plant_in_import)
    if inner:
        pytest_exit(["--maxfail=1000", "--collect-only", "-qq", *lines])
    try_some(inner, plant_in_function)
    return trusted(tried, attempt, jobs)


def try_one(
    mutant: Mutant,
    within: Sequence[Test],
    lines: dict[str, list[Test]],
    near: Nearness,
    file: Path,
) -> int:
    """Exit code of the tests of a mutant, which is planted already."""
    resource.setrlimit(resource.RLIMIT_CPU, (int(IMPORTS + 2 * MOST_SECONDS),) * 2)
    chosen, seconds = [], 0.0
    for name, took, _ in in_order(mutant, within, lines, near):
        if took <= SLOWEST_TEST and seconds + took <= MOST_SECONDS:
            seconds += took
            chosen.append(name)
    # A few tests first: these kill most mutants, and every test file takes a second to import.
    for part in (chosen[:8], chosen[8:40], chosen[40:]):
        if part and (status := pytest_exit(part, Killer(file))):
            return status
    if slow := sum(name not in chosen for name, *_ in within):
        file.write_text(f"{slow} of {len(within)} tests not tried")
    return 0


def in_order(
    mutant: Mutant, executed: Sequence[Test], lines: dict[str, list[Test]], near: Nearness
) -> list[Test]:
    """Tests in the order in which they are tried.

    Those near to the mutant's file first, of these the fastest. Of the others one of each file, the
    fastest, then a second one, because tests of one file notice the same. Last the neighbours of
    all: what a shared fixture or a cache executes for the first test of a file is not recorded for
    the others.

    Args:
        mutant: that they may kill.
        executed: tests that execute its line.
        lines: all tests, by file.
        near: how near a file of tests is.
    """
    places = {each[0].partition("::")[0] for each in executed}
    before, rank = Counter[str](), dict[str, int]()
    for name, *_ in sorted(executed, key=lambda each: each[1]):
        place = name.partition("::")[0]
        rank[name] = before[place] if near(place, mutant.file) == FAR else 0
        before[place] += 1
    first = sorted(
        executed,
        key=lambda each: (near(each[0].partition("::")[0], mutant.file), rank[each[0]], each[1]),
    )
    beside = [each for place in places for each in lines[place] if each[0] not in rank]
    return [*first, *sorted(beside, key=lambda each: each[1])]


def trusted(
    tried: Sequence[Tried], attempt: Callable[[Mutant, Path], int], jobs: int
) -> list[Tried]:
    """Run what killed mutants without a fault: each test that failed, and the tests of each mutant
    that reached its limit. Where the same happens, the mutants survived.
    """
    names = {each.by for each in tried if each.by.startswith("tests/")}
    wrong: set[str] = set()

    def work(file: str, output: Path) -> int:
        chosen = sorted(name for name in names if name.startswith(f"{file}::"))
        return pytest_exit(["--maxfail=1000", *chosen], Killer(output))

    files = sorted({name.split("::")[0] for name in names})
    in_forks(files, jobs, work, lambda _, __, content: wrong.update(content.splitlines()))
    for name in sorted(wrong & names):
        print(f"{name} fails without a fault")
    late: set[str] = set()

    def ended(mutant: Mutant, how: str, _: str) -> None:
        if how == "timeout":
            late.add(mutant.id)
            print(f"the tests of {mutant.id} take too long without a fault")

    limited = [each.mutant for each in tried if each.status == "timeout"]
    in_forks(limited, jobs, attempt, ended, longest=LONGEST)
    same = "the same happens without the fault, and no other test was tried:"
    return [
        Tried(each.mutant, "survived", f"{same} {each.by}".strip(), each.seconds)
        if each.by in wrong or each.mutant.id in late
        else each
        for each in tried
    ]


def counted(tried: Sequence[Tried], packages: Sequence[str]) -> dict[str, Counter[str]]:
    """How many mutants of each package were killed, by a test or by its time limit, and survived."""
    counts = {package: Counter[str]() for package in packages}
    for each in tried:
        package = next(name for name in packages if f"{each.mutant.file}/".startswith(f"{name}/"))
        status = "killed" if each.status == "timeout" else each.status
        counts[package][status] += 1
    return counts


def table(tried: Sequence[Tried], drawn: int, packages: Sequence[str]) -> float:
    """Print the score of each package and the survivors; return the whole score."""
    counts = counted(tried, packages)
    print(f"\n{'package':28} {'killed':>7} {'survived':>9}")
    for package, count in counts.items():
        print(f"{package:28} {count['killed']:7} {count['survived']:9}")
    for each in tried:
        if each.status in ("survived", "error"):
            mutant = each.mutant
            print(
                f"{each.status} {mutant.id} {mutant.file}:{mutant.lineno} {mutant.function}: "
                f"{mutant.operator}, {mutant.what}: {mutant.text}   {each.by}"
            )
    whole = sum(counts.values(), Counter[str]())
    judged = whole["killed"] + whole["survived"]
    score = whole["killed"] / max(1, judged)
    print(f"{whole['killed']} of {judged} mutants were killed ({100 * score:.1f} %)")
    if len(tried) < drawn:
        print(f"{drawn - len(tried)} were not tried: the time was over")
    return score


def write(
    output: Path, seed: int, drawn: int, tried: Sequence[Tried], packages: Sequence[str]
) -> None:
    """Add the run to the file of results, under its seed."""
    results = json.loads(output.read_text()) if output.is_file() else {}
    results[str(seed)] = {
        "drawn": drawn,
        "tried": len(tried),
        "seconds": round(sum(each.seconds for each in tried)),
        "packages": {
            name: {"killed": each["killed"], "survived": each["survived"]}
            for name, each in counted(tried, packages).items()
        },
        "survivors": [
            {name: value for name, value in asdict(each.mutant).items() if name != "number"}
            for each in tried
            if each.status == "survived"
        ],
    }
    output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
