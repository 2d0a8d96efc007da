"""Imports between the project's own modules, at any place in a file."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The package under whose name all rooms are imported.
OWN = "fedsurrogate"
ROOMS = ("common", "client_app", "strategies", "server_app", "fedsurrogate")


def holds_for(each: Iterable[str]) -> Callable[[Callable[[str], None]], Callable[[], None]]:
    """Make one test of a rule about files or folders; it fails with all that break the rule.

    A test for each of them takes longer to collect, in every process, than the rules take to read.
    """
    names = list(each)

    def decorate(rule: Callable[[str], None]) -> Callable[[], None]:
        def test() -> None:
            assert names
            broken: dict[str, str] = {}
            for name in names:
                try:
                    rule(name)
                except AssertionError as error:
                    broken[name] = str(error)
            assert not broken, "\n".join(f"{name}: {why}" for name, why in broken.items())

        test.__name__, test.__doc__, test.__module__ = rule.__name__, rule.__doc__, rule.__module__
        return test

    return decorate


@cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, in which every import is absolute."""
    return absolute(ast.parse(path.read_text(), str(path)), path)


def absolute(tree: ast.Module, path: Path) -> ast.Module:
    """The tree with its relative imports written out."""
    room = next((at for at, part in enumerate(path.parts) if part in ROOMS and at), None)
    if path.is_relative_to(ROOT):
        room = len(ROOT.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert room is not None, f"{path} line {node.lineno}: a relative import outside a room"
            package = path.parts[room : -node.level]
            assert package, f"{path} line {node.lineno}: a relative import that leaves its room"
            names = (*package, *filter(None, [node.module]))
            node.module = ".".join(names if names[0] == OWN else (OWN, *names))
            node.level = 0
    return tree


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """What is in the syntax tree of a file."""
    return tuple(ast.walk(parsed(path)))


@cache
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All imports of a file, at any place."""
    return tuple(node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom))


def called(call: ast.Call) -> str:
    """The last part of the name of what a call calls; empty where it has no name."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def modules(root: Path = ROOT) -> dict[str, Path]:
    """All modules by dotted name; a package by the name of its folder."""
    files = [path for room in ROOMS for path in sorted((root / room).rglob("*.py"))]
    return {module_name(path.relative_to(root)): path for path in files}


def module_name(path: Path) -> str:
    """The dotted name by which a file, as a path from the root, is imported."""
    name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return name if within(name, (OWN,)) else f"{OWN}.{name}"


def names_imported(path: Path) -> Iterator[str]:
    """Dotted names that a file imports anywhere: in functions and for types too. With `from a
    import b`, that is a.b.
    """
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def within(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of these packages or modules, or in one."""
    return any(name == each or name.startswith(f"{each}.") for each in packages)


def arrows(root: Path = ROOT) -> dict[str, set[str]]:
    """By module, the modules that it imports. Imports of a package by its own modules, for its
    names, are left out.
    """
    known = modules(root)
    found: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = {
            name if name in known else name.rpartition(".")[0] for name in names_imported(path)
        }
        found[module] = {
            each
            for each in targets & set(known)
            if each != module and known[each].name != "__init__.py"
        }
    return found


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other, sorted. Each module is followed as far as its
    imports lead.
    """
    reached = {module: _reached(module, graph) for module in graph}
    groups = {
        tuple(sorted({module, *(each for each in reached[module] if module in reached[each])}))
        for module in graph
        if module in reached[module]
    }
    return sorted(map(list, groups))


def _reached(module: str, graph: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = list(graph[module])
    while left:
        if (each := left.pop()) not in found:
            found.add(each)
            left += graph[each]
    return found
