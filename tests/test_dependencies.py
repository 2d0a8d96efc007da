"""Every import of the packages is of a declared dependency, or of an extra whose absence is reported."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement

from tests.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("common", "client_app", "server_app", "strategies", "fedsurrogate", "deploy")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def closure(*lines: str) -> frozenset[str]:
    """Names of all distributions that these requirements install, by the metadata of what is installed here."""
    seen: set[tuple[str, str]] = set()

    def walk(line: str, extra: str) -> None:
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": extra}):
            return
        for each in ("", *wanted.extras):
            if (key := (normal(wanted.name), each)) not in seen:
                seen.add(key)
                try:
                    needed = requires(wanted.name) or []
                except PackageNotFoundError:
                    needed = []
                for further in needed:
                    walk(further, each)

    for line in lines:
        walk(line, "")
    return frozenset(name for name, _ in seen)


@cache
def origins() -> Mapping[str, list[str]]:
    """Distributions by the top-level names that they install."""
    return packages_distributions()


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of what a piece of source imports from other projects."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        for name in (each.partition(".")[0] for each in names):
            if name not in PACKAGES and name not in sys.stdlib_module_names:
                yield name


def guarded(tree: ast.AST) -> set[str]:
    """Names that are imported in a `try` that handles their absence."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any("ImportError" in ast.unparse(each.type or node) for each in node.handlers):
            found |= {name for statement in node.body for name in imported(statement)}
    return found


def undeclared(source: str) -> set[str]:
    """Imported names that neither a dependency installs, nor an extra that the file can do without."""
    tree = ast.parse(source)
    optional = closure(*(line for lines in PROJECT["optional-dependencies"].values() for line in lines))

    def declared(name: str) -> bool:
        found = {normal(each) for each in origins().get(name, ())}
        return bool(found & closure(*PROJECT["dependencies"]) or (found & optional and name in guarded(tree)))

    return {name for name in imported(tree) if not declared(name)}


def test_every_import_is_of_a_dependency_or_of_an_extra_whose_absence_is_handled() -> None:
    assert len(FILES) > 200
    found = {path.relative_to(ROOT).as_posix(): undeclared(path.read_text()) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import json, numpy.linalg\nfrom common.errors import ConfigError\nfrom . import here", set()),
        ("import pandas", {"pandas"}),
        ("def f():\n    from pandas import DataFrame", {"pandas"}),
        ("try:\n    import pandas\nexcept ImportError:\n    raise", set()),
        ("try:\n    import nowhere\nexcept ImportError:\n    raise", {"nowhere"}),
    ],
)
def test_an_undeclared_import_is_found(source: str, names: set[str]) -> None:
    assert undeclared(source) == names


def test_the_closure_follows_extras_of_dependencies_but_installs_no_other_extra() -> None:
    assert "ray" in closure("flwr[simulation]")
    assert "ray" not in closure("flwr")
    assert "numpy" in closure("scikit-learn")
    assert "pytest" not in closure("scikit-learn")
