"""Every import of the packages is of a declared dependency, or of an extra through the helper that
reports its absence.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

import pytest
from packaging.requirements import Requirement

from fedsurrogate.common.extras import DECODERS, DISTRIBUTIONS, EXTRAS
from tests.children import imported_by
from tests.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("common", "client_app", "server_app", "strategies", "fedsurrogate", "deploy")
# Scripts of deploy/ import each other by name, because an image is built with two files of it.
SCRIPTS = {path.stem for path in (ROOT / "deploy").glob("*.py")}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@cache
def closure(*lines: str) -> frozenset[str]:
    """Names of all distributions that these requirements install, by the metadata of what is
    installed here.
    """
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


@dataclass(frozen=True)
class Import:
    """A top-level name that source imports from another project; by a helper: inside `with
    needed_for(...)`.
    """

    name: str
    in_function: bool
    by_helper: bool


def imported(node: ast.AST, in_function: bool = False, by_helper: bool = False) -> Iterator[Import]:
    """All imports of a piece of source, those by name among them, but for those that only type
    checkers read.
    """
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    if isinstance(node, ast.ImportFrom) and not node.level:
        names = [node.module or ""]
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in (
        "import_module",
        "__import__",
    ):
        names = [
            each.value
            for each in node.args[:1]
            if isinstance(each, ast.Constant) and isinstance(each.value, str)
        ]
    for name in (each.partition(".")[0] for each in names):
        if name not in (*PACKAGES, *SCRIPTS) and name not in sys.stdlib_module_names:
            yield Import(name, in_function, by_helper)
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    in_function |= isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    inside = by_helper or (
        isinstance(node, ast.With)
        and any(ast.unparse(each.context_expr).startswith("needed_for(") for each in node.items)
    )
    for child in ast.iter_child_nodes(node):
        yield from imported(child, in_function, inside)


def undeclared(source: str) -> set[str]:
    """Imported names that no dependency installs, and no extra whose absence the helper reports
    where it is used.
    """

    def declared(each: Import) -> bool:
        found = {normal(name) for name in origins().get(each.name, ())}
        return bool(found & closure(*PROJECT["dependencies"])) or (
            each.name in EXTRAS and each.in_function and each.by_helper
        )

    return {each.name for each in imported(ast.parse(source)) if not declared(each)}


def test_every_import_is_of_a_dependency_or_of_an_extra_through_the_helper() -> None:
    assert len(FILES) > 200
    found = {path.relative_to(ROOT).as_posix(): undeclared(path.read_text()) for path in FILES}
    assert {path: names for path, names in found.items() if names} == {}


def parts(extra: str) -> list[str]:
    """The requirements of an extra and of those that it names."""
    found: list[str] = []
    for line in PROJECT["optional-dependencies"][extra]:
        wanted = Requirement(line)
        found += (
            [line]
            if wanted.name != PROJECT["name"]
            else [each for name in wanted.extras for each in parts(name)]
        )
    return found


# Extras that no import of the packages needs, apart from `all`.
OTHER_EXTRAS = {"all", "dev", "docs", "image", DECODERS}


def test_the_table_of_extras_is_that_of_the_project() -> None:
    assert set(EXTRAS.values()) == set(PROJECT["optional-dependencies"]) - OTHER_EXTRAS
    for extra in set(EXTRAS.values()):
        lines = parts(extra)
        wanted = {
            normal(DISTRIBUTIONS.get(name, name)) for name, of in EXTRAS.items() if of == extra
        }
        named = {normal(Requirement(line).name) for line in lines}
        # Ray is named by an extra of Flower.
        assert wanted - named <= {"ray"}
        assert named - wanted <= {"flwr"}
        assert wanted <= closure(*lines)
        assert not wanted & closure(*PROJECT["dependencies"]), "a dependency installs it anyway"


def test_the_documentation_lists_every_extra() -> None:
    page = (ROOT / "docs" / "quickstart.md").read_text()
    rows = re.findall(
        r"(?m)^\| `([a-z-]+)` \|", page.partition("## What to install")[2].partition("\n## ")[0]
    )
    assert rows
    assert len(set(rows)) == len(rows)
    assert set(rows) == set(PROJECT["optional-dependencies"])


def test_names_of_packages_are_those_under_which_they_are_installed() -> None:
    for name in EXTRAS:
        if found := origins().get(name):
            assert normal(DISTRIBUTIONS.get(name, name)) in map(normal, found)


def test_all_has_every_extra_of_a_run_and_neither_tools_nor_decoders_under_the_gpl() -> None:
    assert set(parts("all")) == {line for extra in set(EXTRAS.values()) for line in parts(extra)}
    assert set(parts("all")) | set(parts("docs")) < set(parts("dev"))
    assert not set(parts(DECODERS)) & set(parts("dev"))


def test_packages_that_a_method_needs_are_in_the_table() -> None:
    """Names that the helper gets as text; a wrong one would end in a KeyError, and only where the
    package is missing.
    """
    named = {
        call.args[0].value
        for path in FILES
        if re.search("check_installed|is_installed|missing", text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call)
        and ast.unparse(call.func) in ("check_installed", "is_installed", "missing")
        if call.args and isinstance(call.args[0], ast.Constant)
    }
    assert {"ray", "matplotlib"} <= named <= set(EXTRAS)


HEAVY = (
    "ray", "torchvision", "timm", "open-clip-torch", "pyarrow", "pydicom", "matplotlib",
    "pot", "pandas",
)  # fmt: skip


@pytest.mark.parametrize("name", HEAVY)
def test_the_library_alone_installs_no_heavy_package(name: str) -> None:
    assert name not in closure(*PROJECT["dependencies"])
    assert name in closure(*parts("all"))


def test_the_library_is_imported_without_flower_and_heavy_packages() -> None:
    names = [*EXTRAS, "flwr", "sklearn", "scipy", "dp_accounting"]
    assert imported_by("import fedsurrogate", names) == []
