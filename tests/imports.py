"""Imports between the project's own modules, at any place in a file, and what functions read of a
run's settings.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The package under whose name all rooms are imported.
OWN = "fedsurrogate"
ROOMS = ("common", "client_app", "strategies", "server_app", "fedsurrogate")
# Types of all settings of a run and of what holds them, and where a type has another of these.
WHOLE: dict[str, dict[str, str]] = {
    "Settings": {},
    "Run": {"settings": "Settings"},
    "Job": {"run": "Run"},
    "SiteRequest": {"run": "Run"},
    "Training": {"config": "Run"},
}
# A function that reads no more values of them should take these, and not all.
FEW = 2


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
def import_statements(path: Path) -> tuple[ast.Import | ast.ImportFrom, ...]:
    """All imports of a file, at any place."""
    return tuple(
        node for node in ast.walk(parsed(path)) if isinstance(node, ast.Import | ast.ImportFrom)
    )


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


def takers_of_all_settings(root: Path = ROOT) -> list[str]:
    """Functions that take all settings of a run, or a value that holds them, read at most two
    values, and never pass all of them on: "file:line name(parameter)".

    Of a run or its settings, what `settings` or `plan` hold counts as one attribute too. A method
    that a class and one below it both have is left out: all of its kind are called alike.
    """
    found, related = [], _of_one_kind(root)
    for path in modules(root).values():
        for within_class, node in _functions(parsed(path)):
            if (within_class, node.name) in related:
                continue
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found += [
                f"{path.relative_to(root)}:{node.lineno} {node.name}({each.arg})"
                for each in taken
                if (kind := _type_of(each)) in WHOLE and _reads_few(node, each.arg, kind)
            ]
    return found


Function = ast.FunctionDef | ast.AsyncFunctionDef


def _functions(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """All functions, each with the name of the class whose method it is, or none."""
    methods = {
        each: node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
    }
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield methods.get(node, ""), node


def _of_one_kind(root: Path) -> set[tuple[str, str]]:
    """Class and method where a class above or below has a method of this name too."""
    names: dict[str, set[str]] = {}
    above: dict[str, set[str]] = {}
    for path in modules(root).values():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                names[node.name] = {each.name for each in node.body if isinstance(each, Function)}
                above[node.name] = {ast.unparse(base).partition("[")[0] for base in node.bases}
    pairs = {(name, other) for name in names for other in _reached(name, _closed(above))}
    return {
        (name, method)
        for pair in pairs
        for method in names[pair[0]] & names.get(pair[1], set())
        for name in pair
    }


def _closed(graph: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The graph without arrows to what it does not hold."""
    return {name: {each for each in targets if each in graph} for name, targets in graph.items()}


def _type_of(parameter: ast.arg) -> str:
    """The type of a parameter that may be None instead, as it is written."""
    note = "" if parameter.annotation is None else ast.unparse(parameter.annotation)
    return note.strip("'\"").removesuffix(" | None")


def _reads_few(function: ast.AST, name: str, kind: str) -> bool:
    """Whether a function reads few values of a parameter of a whole type, and does not pass it on."""
    read = _values_read(function, name, kind)
    direct = {path[0] for path in read}
    if "" in direct:
        return False
    return (kind in ("Settings", "Run") and len(direct) <= FEW) or (
        len(read) <= FEW and all(path[-1] for path in read)
    )


# Attributes that lead from a parameter to a value, and its type where it holds all settings.
Value = tuple[tuple[str, ...], str]


def _values_read(function: ast.AST, name: str, kind: str) -> set[tuple[str, ...]]:
    """What a function reads of a parameter: the attributes that lead to each value, with "" at the
    end where that is all settings. Other names for what holds all settings are followed.
    """
    nodes = list(ast.walk(function))
    wholes: dict[str, Value] = {name: ((), kind)}
    renamed = set[ast.AST]()
    for target, value in (pair for node in nodes for pair in _assigned(node)):
        if (found := _value(value, wholes)) and found[1] and isinstance(target, ast.Name):
            wholes[target.id] = found
            renamed.add(value)
    inner = {node.value for node in nodes if isinstance(node, ast.Attribute)}
    read = set[tuple[str, ...]]()
    for node in nodes:
        if (found := _value(node, wholes)) and node not in renamed:
            path, held = found
            if not held:
                read.add(path)
            elif node not in inner and isinstance(getattr(node, "ctx", None), ast.Load):
                read.add((*path, ""))
    return read


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Each target of an assignment with its value, as far as both are written out."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            yield from zip(target.elts, value.elts, strict=False)
        else:
            yield target, value


def _value(node: ast.AST, wholes: Mapping[str, Value]) -> Value | None:
    """What a name or an attribute is, if it begins with a name of what holds all settings."""
    if isinstance(node, ast.Name):
        return wholes.get(node.id)
    if isinstance(node, ast.Attribute) and (found := _value(node.value, wholes)) and found[1]:
        path, kind = found
        return (*path, node.attr), WHOLE[kind].get(node.attr, "")
    return None
