"""Record for each passing test its time and the lines that it executes in some files.

The files are imported with a mark before each statement in a function. A mark sets one byte, which
costs nothing beside the statement, so that a test takes as long as it does without marks.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from benchmarks._forks import in_forks, pytest_exit

# A test: its name, its CPU seconds, and the lines that it executes, by file.
Test = tuple[str, float, dict[str, list[int]]]
# Wall-clock seconds. A test that runs longer waits for other processes, and those run without the
# fault. And for all tests of a file.
LONGEST_WAIT, LONGEST_FILE = 60.0, 400
MARK, HOME = "_executed_", "fedsurrogate"


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports some modules from changed syntax trees instead of their files."""

    def __init__(self, root: Path, changes: Mapping[str, Callable[[str], ast.Module]]) -> None:
        self._root = root
        self._files = {module_of(root, file): file for file in changes}
        self._changes = changes

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._files:
            return None
        package = self._files[name].endswith("__init__.py")
        return importlib.util.spec_from_loader(
            name, self, origin=self._files[name], is_package=package
        )

    def get_filename(self, name: str) -> str:
        return str(self._root / self._files[name])

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def get_code(self, name: str) -> CodeType:
        file = self._files[name]
        tree = self._changes[file]((self._root / file).read_text())
        return compile(tree, self.get_filename(name), "exec")


def module_of(root: Path, file: str) -> str:
    """Dotted name by which code and tests import a file. Where the tree has a package of its own name
    (`fedsurrogate`), the folders next to it are its parts.
    """
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    inside = not (root / HOME / "__init__.py").is_file() or name.split(".")[0] == HOME
    return name if inside else f"{HOME}.{name}"


class Marks:
    """The places of the marks in some files, and which were passed since the last `clear`."""

    def __init__(self) -> None:
        self._places: dict[str, list[tuple[int, int]]] = {}
        self._passed: dict[str, bytearray] = {}

    def tree(self, source: str, file: str) -> ast.Module:
        """The syntax tree of a file with its marks."""
        places = self._places[file] = []
        name = f"{MARK}{len(self._places)}"
        tree = ast.parse(source)
        for node in list(ast.walk(tree)):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
                    marked = [each for line in block for each in _with_mark(line, name, places)]
                    setattr(node, field, marked)
        self._passed[file] = bytearray(len(places))
        setattr(builtins, name, self._passed[file])
        return ast.fix_missing_locations(tree)

    def clear(self) -> None:
        for passed in self._passed.values():
            passed[:] = bytes(len(passed))

    def lines(self) -> dict[str, list[int]]:
        """Lines of the passed statements, by file."""
        found: dict[str, set[int]] = {}
        for file, passed in self._passed.items():
            for at, (first, last) in enumerate(self._places[file]):
                if passed[at]:
                    found.setdefault(file, set()).update(range(first, last + 1))
        return {file: sorted(lines) for file, lines in found.items()}


def _with_mark(
    statement: ast.stmt, name: str, places: list[tuple[int, int]]
) -> tuple[ast.stmt, ...]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return (statement,)
    last = statement.end_lineno or statement.lineno
    if isinstance(body := getattr(statement, "body", None), list):
        last = max(statement.lineno, body[0].lineno - 1)
    target = ast.Subscript(ast.Name(name, ast.Load()), ast.Constant(len(places)), ast.Store())
    places.append((statement.lineno, last))
    return ast.copy_location(ast.Assign([target], ast.Constant(1)), statement), statement


class Watch:
    """A pytest plugin that writes the lines that each passing test executes to a file."""

    def __init__(self, marks: Marks, output: Path) -> None:
        self._marks, self._output, self._tests = marks, output, list[Test]()

    def pytest_runtest_logstart(self) -> None:
        self._marks.clear()
        self._began, self._clock = time.process_time(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        long = time.monotonic() - self._clock > LONGEST_WAIT
        if report.when == "call" and report.passed and not long:
            took = round(time.process_time() - self._began, 2)
            self._tests.append((report.nodeid, took, self._marks.lines()))
            self._output.write_text(json.dumps(self._tests))


def recorded(
    root: Path, files: Sequence[str], tests: Sequence[str], jobs: int, until: float
) -> dict[str, list[Test]]:
    """Passing tests with their executed lines, by test file.

    They are kept in a file from run to run, until a test file changes. Of a file that has changed
    since, a test that executed any line counts as executing all. Where a test failed, or the time
    was over, the next run records the file of tests again.

    Args:
        root: of the tree.
        files: to watch.
        tests: files of tests, in the order in which they are recorded.
        jobs: processes at a time.
        until: `time.monotonic()` after which no file is begun; those that are left are left out.
    """
    store = root / ".mutants-coverage.json"
    # As they are now, before they are imported.
    digests = {name: digest(root / name) for name in (*files, *tests)}

    def stored() -> dict[str, Any]:
        return json.loads(store.read_text()) if store.is_file() else {}

    def fresh() -> dict[str, Any]:
        known = stored()
        return {
            name: known[name]
            for name in tests
            if name in known and known[name].get("digest") == digests[name]
        }

    def since(before: Mapping[str, str], lines: Mapping[str, list[int]]) -> dict[str, list[int]]:
        """Lines by file, of files that are as they were; all lines of the others."""
        return {
            file: own
            if before.get(file) == digests[file]
            else list(range(1, 1 + (root / file).read_text().count("\n")))
            for file, own in lines.items()
            if file in digests
        }

    before = fresh()
    left = [name for name in tests if name not in before or not before[name]["whole"]]

    def all_files(_: None, __: Path) -> int:
        # One import of everything serves all files of tests. It happens in a fork, because modules
        # with marks must not stay in the process that plants faults.
        marks = Marks()
        changes = {name: lambda source, name=name: marks.tree(source, name) for name in files}
        sys.meta_path.insert(0, Changed(root, changes))  # type: ignore[arg-type]
        pytest_exit(["--maxfail=1000", "--collect-only", "-qq", *left])
        known = stored()

        def work(name: str, output: Path) -> int:
            return pytest_exit(["--maxfail=1000", name], Watch(marks, output))

        def done(name: str, how: str, content: str) -> None:
            found = json.loads(content) if content else []
            used = sorted({file for test in found for file in test[2]})
            known[name] = {
                "digest": digests[name],
                "files": {file: digests[file] for file in used},
                "tests": found,
                "whole": how == "survived",
            }
            # A run that is stopped here leaves the file as it was.
            temporary = store.with_suffix(".new")
            temporary.write_text(json.dumps(known))
            temporary.replace(store)

        in_forks(left, jobs, work, done, until, LONGEST_FILE)
        return 0

    if left:
        in_forks([None], 1, all_files, lambda *_: None)
    after = fresh()
    for name in (name for name, each in after.items() if not each["whole"]):
        print(f"{name}: a test failed or took too long without a fault, and is not tried")
    return {
        name: [(test, took, since(each["files"], lines)) for test, took, lines in each["tests"]]
        for name, each in after.items()
    }


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
