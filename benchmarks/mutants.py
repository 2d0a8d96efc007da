"""Mutation testing of the code behind the guarantees: plant small faults one at a time, and check
that a test fails.

First, every test runs once, to record its time and the lines that it executes. Then each mutant
gets the tests that execute its line, fastest first, until one fails; they run in a fork of a
process that has the libraries loaded. The sample depends on a seed and the source only: a change in
one file keeps the mutants of other files, and earlier results are reused (`--fresh` starts again).
Other tools run every test for every mutant of a file, or keep no sample. Prints a table; exits with
1 when fewer than 95 % of the mutants outside mutants_equivalent.toml are killed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _executed import Test, Watch
from _mutations import Mutant, mutants
from _planting import in_a_function, plant_in_function, plant_in_import

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS, EQUIVALENT = HERE / "results" / "mutants.json", HERE / "mutants_equivalent.toml"
COVERED = ROOT / ".mutants-coverage.json"
PRIVACY = ("accounting", "exact_sums", "gaussian_mechanism", "mechanism", "privacy_filter")
# Files; for some, only the functions or classes on which the guarantees depend.
FILES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(f"common/privacy/{name}.py" for name in PRIVACY),
    **dict.fromkeys(f"common/wire/{name}.py" for name in ("bundles", "float16", "records", "validation")),
    **dict.fromkeys(f"common/{name}.py" for name in ("safe_parsing", "security/sealing", "surrogates/class_sums")),
    **{f"{file.relative_to(ROOT)}": () for file in sorted(ROOT.glob("c*/secure_sum/[!_]*.py"))},
    **dict.fromkeys(f"client_app/governance/{name}.py" for name in (
        "budget", "entries", "gate", "ledger", "release", "witness")),
    **dict.fromkeys(f"client_app/methods/{name}.py" for name in (
        "dp/dp_sgd", "dp/linear_clipping", "dp/record_chunks", "dp/record_gradients", "fedpft/private_surrogate")),
    "common/files.py": (),
    "client_app/methods/dpcvae/training.py": ("train_generator", "_opening", "_train_privately", "_restore", "_kept"),
    "client_app/methods/dpcvae/training_steps.py": ("CVAETrainer", "private_gradient", "trainer_of"),
    "strategies/fedpft/private_head.py": (),
}  # fmt: skip
TESTS = (
    *(f"tests/common/{name}.py" for name in (
        "privacy/test_accounting", "privacy/test_exact_sums", "privacy/test_gaussian_mechanism", "privacy/test_mechanism",
        "privacy/test_privacy_filter", "wire/test_bundles", "wire/test_float16", "wire/test_records", "wire/test_validation",
        "test_safe_parsing", "security/test_sealing", "surrogates/test_class_sums", "secure_sum/test_protocol",
    )),
    *(f"tests/client_app/governance/test_{name}.py" for name in ("budget", "gate", "ledger", "ledger_power_cut", "witness")),
    *(f"tests/{name}.py" for name in (
        "client_app/methods/dp/test_linear_clipping", "client_app/methods/fedpft/test_private_surrogate",
        "client_app/methods/fedavg/test_update", "client_app/methods/fedlap/test_approximation",
        "client_app/methods/dpcvae/test_training", "strategies/fedpft/test_private_head",
        "strategies/base/test_tampered_replies", "server_app/test_offline", "attacks/ledger/test_ledger_rollback",
        "attacks/coordinator/test_require_seal", "attacks/sites/test_senders", "common/privacy/test_discrete_gaussian",
        "attacks/coordinator/test_solved_sums", "strategies/secure_sum/test_strategy",
    )),
)  # fmt: skip
# CPU seconds for one test, and for all tests of a mutant.
SLOWEST_TEST, MOST_SECONDS = 10.0, 20.0
# Wall-clock seconds for all tests of a file, while their executed lines are recorded.
LONGEST_FILE = 400
GOAL = 0.95
NOT_RUN = 99  # Exit code of a fork that could not do its work.
LIBRARIES = (
    "torch", "torch.func", "opacus", "pytest", "hypothesis", "hypothesis.strategies", "sklearn.discriminant_analysis",
    "scipy.stats", "scipy.special", "dp_accounting.pld", "dp_accounting.rdp", "pydantic", "google.protobuf.message",
    "cryptography.hazmat.primitives.ciphers.aead", "safetensors.torch", "filelock", "PIL.Image", "typer.testing",
    "flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.superlink.federation.noop_federation_manager", "pydicom", "grpc",
)  # fmt: skip


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--number", type=int, default=240, help="mutants in the sample")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--jobs", type=int, default=2)
    arguments.add_argument("--only", default="", help="one file, or a folder")
    arguments.add_argument("--fresh", action="store_true", help="ignore earlier results")
    chosen = arguments.parse_args()
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path[:0] = [str(ROOT)]
    for name in LIBRARIES:
        importlib.import_module(name)
    # The same examples for every mutant: a failing example is not stored for the next one.
    hypothesis = importlib.import_module("hypothesis")
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutants")
    files = {name: functions or () for name, functions in FILES.items() if (ROOT / name).is_file()}
    sample = [
        mutant
        for mutant in draw(files, chosen.number, chosen.seed)
        if mutant.file.startswith(chosen.only)
    ]
    reasons = {
        entry["mutant"]: entry["reason"]
        for entry in tomllib.loads(EQUIVALENT.read_text()).get("equivalent", [])
    }
    tests = covered(list(files), chosen.jobs, chosen.fresh)
    known = (
        {} if chosen.fresh or not RESULTS.is_file() else json.loads(RESULTS.read_text())["mutants"]
    )
    found: dict[str, dict[str, Any]] = {}
    waiting = []
    for mutant in sample:
        before, digest = known.get(mutant.key, {}), digest_of(mutant.file)
        if mutant.key in reasons:
            found[mutant.key] = {"status": "equivalent", "reason": reasons[mutant.key]}
        elif before.get("source") == digest and before.get("status") in ("killed", "timeout"):
            found[mutant.key] = before
        else:
            waiting.append(mutant)

    def record(mutant: Mutant, status: str, by: str) -> None:
        found[mutant.key] = {
            "status": status,
            "by": by.partition("\n")[0],
            "source": digest_of(mutant.file),
        }
        print(
            f"{status:9} {mutant.file}:{mutant.lineno} {mutant.mutation}: {mutant.line[:90]}   "
            f"{by[-90:]}",
            flush=True,
        )
        RESULTS.write_text(json.dumps({"mutants": known | found}, indent=1, sort_keys=True) + "\n")

    # Constants and defaults first, because their modules must not be imported yet. Then one import
    # serves all others.
    warm = [mutant for mutant in waiting if in_a_function(ROOT, mutant)]
    cold = [mutant for mutant in waiting if mutant not in warm]
    in_forks(
        cold,
        chosen.jobs,
        lambda mutant, file: try_one(mutant, plant_in_import, tests, file),
        record,
    )
    if warm:
        pytest_exit(["--collect-only", "-qq", *sorted({name.split("::")[0] for name, *_ in tests})])
    in_forks(
        warm,
        chosen.jobs,
        lambda mutant, file: try_one(mutant, plant_in_function, tests, file),
        record,
    )
    distrust(found, chosen.jobs)
    counts = table(sample, found)
    if chosen.only:
        return 0
    content = {"seed": chosen.seed, "counts": counts, "mutants": found}
    RESULTS.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return int(counts["all"]["killed"] < GOAL * counts["all"]["judged"])


def distrust(found: dict[str, dict[str, Any]], jobs: int) -> None:
    """Run every test that has killed a mutant again without a fault. If it fails, its mutants count
    as survived.
    """
    names = {each["by"] for each in found.values() if each.get("by", "").startswith("tests/")}
    files = sorted({name.split("::")[0] for name in names})

    def work(file: str, output: Path) -> None:
        chosen = sorted(name for name in names if name.startswith(f"{file}::"))
        os._exit(pytest_exit(["--maxfail=1000", *chosen], Killer(output)))

    def done(file: str, status: str, by: str) -> None:
        for each in found.values():
            if each.get("by") and each["by"] in by.splitlines():
                print(f"{each['by']} fails without a fault", flush=True)
                each["status"] = "survived"

    in_forks(files, jobs, work, done)


def draw(files: dict[str, tuple[str, ...]], number: int, seed: int) -> list[Mutant]:
    """A sample of mutants; the number from each file is proportional to the square root of the
    file's mutants.
    """
    every = {
        file: mutants(file, (ROOT / file).read_text(), functions)
        for file, functions in files.items()
    }
    roots = {file: len(found) ** 0.5 for file, found in every.items()}
    sample = []
    for file, found in every.items():
        part = round(number * roots[file] / sum(roots.values()))
        sample += sorted(
            sorted(found, key=lambda mutant: mutant.order(seed))[:part],
            key=lambda mutant: mutant.lineno,
        )
    return sample


def digest_of(file: str) -> str:
    return hashlib.sha256((ROOT / file).read_bytes()).hexdigest()[:12]


def in_forks(
    jobs: Sequence[Any],
    most: int,
    work: Callable[[Any, Path], None],
    done: Callable[[Any, str, str], None],
) -> None:
    """Run jobs in forks of this process, `most` at a time; pass the content of each job's file to
    `done`.
    """
    running: dict[int, tuple[Any, Path]] = {}
    waiting = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < most:
                job, file = waiting.pop(0), Path(folder, str(len(waiting)))
                if not (child := os.fork()):
                    quiet = os.open(os.devnull, os.O_RDWR)
                    for descriptor in (0, 1, 2):
                        os.dup2(quiet, descriptor)
                    try:
                        work(job, file)
                    finally:
                        os._exit(NOT_RUN)
                running[child] = (job, file)
            child, status = os.wait()
            job, file = running.pop(child)
            done(job, outcome(status), file.read_text().strip() if file.is_file() else "")


def outcome(status: int) -> str:
    if os.WIFSIGNALED(status):
        return (
            "timeout"
            if os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL, signal.SIGALRM)
            else "killed"
        )
    # Exit codes of pytest: 0, all tests passed; 5, no test was selected.
    return {0: "survived", 5: "survived", NOT_RUN: "error"}.get(os.WEXITSTATUS(status), "killed")


class Killer:
    """A pytest plugin that writes the names of failing tests to a file, one per line."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._write(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._write(f"collection of {report.nodeid}")

    def _write(self, name: str) -> None:
        with self._file.open("a") as file:
            print(name, file=file)


def pytest_exit(arguments: Sequence[str], *plugins: object) -> int:
    import pytest

    return int(
        pytest.main(
            ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments], plugins=plugins
        )
    )


def covered(files: list[str], jobs: int, fresh: bool) -> list[Test]:
    """All passing tests with their executed lines. They are cached until a file or a test changes."""
    places = [ROOT / name for name in TESTS]
    every = [
        file
        for place in places
        for file in (place.rglob("test_*.py") if place.is_dir() else [place])
    ]
    chosen = [str(file.relative_to(ROOT)) for file in every if file.is_file()]
    # The cache depends on the watched files too.
    state = {"files": " ".join(sorted(files))} | {
        name: digest_of(name) for name in (*files, *chosen)
    }
    before = (
        json.loads(COVERED.read_text())
        if COVERED.is_file() and not fresh
        else {"state": {}, "tests": {}}
    )

    def stands(name: str, found: list[Test]) -> bool:
        """Whether the tests and the code that they execute are unchanged."""
        used = {name}.union(*(each[2] for each in found))
        watched = set(files) <= set(before["state"].get("files", "").split())
        return watched and all(before["state"].get(each) == state.get(each) for each in used)

    tests: dict[str, list[Test]] = {
        name: found for name, found in before["tests"].items() if stands(name, found)
    }

    def work(name: str, file: Path) -> None:
        # Tests that finish later are left out: they are too slow to run for every mutant.
        signal.alarm(LONGEST_FILE)
        pytest_exit(["--maxfail=1000", name], Watch(ROOT, files, file))
        os._exit(0)

    def done(name: str, status: str, content: str) -> None:
        tests[name] = json.loads(content) if content else []
        print(
            f"{name}: {len(tests[name])} tests, {sum(each[1] for each in tests[name]):.0f} s",
            flush=True,
        )
        COVERED.write_text(json.dumps({"state": state, "tests": tests}))

    in_forks([name for name in chosen if name not in tests], jobs, work, done)
    return sorted(
        (each for found in tests.values() for each in found if each[1] <= SLOWEST_TEST),
        key=lambda each: each[1],
    )


def try_one(
    mutant: Mutant, plant: Callable[[Path, Mutant], None], tests: Sequence[Test], file: Path
) -> None:
    plant(ROOT, mutant)
    resource.setrlimit(resource.RLIMIT_CPU, (int(10 + 2 * MOST_SECONDS),) * 2)
    signal.alarm(int(30 * MOST_SECONDS))
    within = [each for each in tests if mutant.lineno in each[2].get(mutant.file, ())]
    # Code outside functions runs at import, before a test begins, so no test has its lines.
    within = within or [each for each in tests if mutant.file in each[2]]
    # Tests named after the file first, then the fastest.
    within.sort(key=lambda each: (f"/test_{Path(mutant.file).stem}.py" not in each[0], each[1]))
    chosen, seconds = [], 0.0
    for name, took, _ in within:
        seconds += took
        if seconds <= MOST_SECONDS:
            chosen.append(name)
    # A few tests first: these kill most mutants, and every test file takes a second to import.
    for part in (chosen[:8], chosen[8:]):
        if part and (status := pytest_exit(part, Killer(file))):
            os._exit(status)
    os._exit(0)


def table(sample: Sequence[Mutant], found: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Print and return the number of mutants by file and outcome. killed: by a test, or by its time
    limit.
    """
    found_in: dict[str, Counter[str]] = {}
    for mutant in sample:
        found_in.setdefault(mutant.file, Counter())[found[mutant.key]["status"]] += 1
    found_in["all"] = sum(found_in.values(), Counter())
    counts = {}
    print(f"\n{'file':38} {'killed':>7} {'survived':>9} {'equivalent':>11}")
    for file, each in found_in.items():
        killed, survived = each["killed"] + each["timeout"], each["survived"]
        counts[file] = {
            "killed": killed, "survived": survived, "judged": killed + survived, "equivalent": each["equivalent"]
        }  # fmt: skip
        print(f"{file:38} {killed:7} {survived:9} {each['equivalent']:11}")
    for mutant in sample:
        if found[mutant.key]["status"] == "survived":
            print(f"survived: {mutant.file}:{mutant.lineno}: {mutant.key}")
    killed, judged = counts["all"]["killed"], counts["all"]["judged"]
    print(
        f"{killed} of {judged} non-equivalent mutants were killed "
        f"({100 * killed / max(1, judged):.1f} %)"
    )
    return counts


if __name__ == "__main__":
    sys.exit(main())
