"""Record for each passing test its time and the lines that it executes in some files."""

from __future__ import annotations

import ast
import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

# A test: its name, its CPU seconds, and the lines that it executes, by file.
Test = tuple[str, float, dict[str, list[int]]]
# Wall-clock seconds. A test that runs longer waits for other processes, and those run without the
# fault.
LONGEST_WAIT = 60.0
MARK = "_executed_here"


class Changed(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports some modules from changed syntax trees instead of their files."""

    def __init__(self, root: Path, changes: Mapping[str, Callable[[str], ast.Module]]) -> None:
        self._root = root
        self._files = {file.removesuffix(".py").replace("/", "."): file for file in changes}
        self._changes = changes

    def find_spec(
        self, name: str, path: object, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.util.spec_from_loader(name, self, origin=self._files[name])
            if name in self._files
            else None
        )

    def get_filename(self, name: str) -> str:
        return str(self._root / self._files[name])

    def get_data(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def get_code(self, name: str) -> CodeType:
        file = self._files[name]
        return compile(
            self._changes[file]((self._root / file).read_text()), self.get_filename(name), "exec"
        )


class Watch:
    """A pytest plugin that writes the lines executed by the tests to a file. Create it before
    importing a watched file.
    """

    def __init__(self, root: Path, files: list[str], output: Path) -> None:
        self._output, self._tests, self._seen = output, list[Test](), set[tuple[str, int, int]]()
        setattr(builtins, MARK, lambda *place: self._seen.add(place))
        sys.meta_path.insert(
            0,
            Changed(root, {file: lambda source, file=file: marked(source, file) for file in files}),
        )  # type: ignore[misc]

    def pytest_runtest_logstart(self) -> None:
        self._seen.clear()
        self._began, self._clock = time.process_time(), time.monotonic()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if (
            report.when != "call"
            or not report.passed
            or time.monotonic() - self._clock > LONGEST_WAIT
        ):
            return
        lines: dict[str, set[int]] = {}
        for file, first, last in self._seen:
            lines.setdefault(file, set()).update(range(first, last + 1))
        took = round(time.process_time() - self._began, 2)
        self._tests.append(
            (report.nodeid, took, {file: sorted(found) for file, found in lines.items()})
        )
        self._output.write_text(json.dumps(self._tests))


def marked(source: str, file: str) -> ast.Module:
    """The syntax tree with a call before every statement in a function; the call records that the
    statement runs.
    """
    tree = ast.parse(source)
    for node in list(ast.walk(tree)):
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.Module | ast.ClassDef):
                setattr(
                    node,
                    field,
                    [each for statement in block for each in _with_mark(statement, file)],
                )
    return ast.fix_missing_locations(tree)


def _with_mark(statement: ast.stmt, file: str) -> list[ast.stmt]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return [statement]
    last = statement.end_lineno or statement.lineno
    if isinstance(body := getattr(statement, "body", None), list):
        last = max(statement.lineno, body[0].lineno - 1)
    place: list[ast.expr] = [ast.Constant(value) for value in (file, statement.lineno, last)]
    mark = ast.Expr(ast.Call(ast.Name(MARK, ast.Load()), place, []))
    return [ast.copy_location(mark, statement), statement]
