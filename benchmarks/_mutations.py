"""Draw small faults (mutants) of Python source anew from a seed, and plant them in its syntax tree.

What no test can see is left out: annotations, docstrings, messages of errors, logs, `__all__`,
options of dataclasses and caches, how much is computed at a time, the look of a figure (what it
shows stays), the `strict` of a zip that the linter demands, statements that cannot be reached,
defaults that every call overrides, what compiles to the same bytecode, and a value that serves as
well as the one that is there (`_as_good`).
"""

from __future__ import annotations

import ast
import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import CodeType

from benchmarks._operators import Facts, Scope, changes

LOGS = {"log", "LOG", "logger", "logging", "warnings"}
SKIPPED_CALLS = {"cast", "TypeVar", "print", "echo", "lru_cache", "cache", "dataclass"}
# The look of a figure: calls, among them those for its size in inches, and options.
LOOK_CALLS = {
    "make_axes",
    "_figure",
    "_plain",
    "grid",
    "tick_params",
    "set_visible",
    "set_fontweight",
}
LOOK = {
    "alpha", "color", "fontsize", "frameon", "labelsize", "length", "linestyle", "linewidth", "ls", "lw", "medianprops",
    "ms", "pad", "rotation", "widths",
}  # fmt: skip
UNSEEN_CALLS = SKIPPED_CALLS | LOOK_CALLS
ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
PAST_NAMES = ("annotation", "returns", "decorator_list", "type_params", "ctx", "names")


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        id: its name, from the file, the function, the operator and the text; it stays when code
            above changes.
        number: its place among all faults of the file, as it stands.
    """

    id: str
    file: str
    function: str
    lineno: int
    operator: str
    what: str
    text: str
    number: int


def mutants(file: str, source: str, facts: Facts) -> list[Mutant]:
    """All faults of a file, in the order of its source."""
    seen, found = Counter[str](), []
    lines = source.splitlines()
    for number, fault in enumerate(_faults(ast.parse(source), facts)):
        if not fault.function and _at_a_time(lines, fault.node.lineno):
            continue
        text = " ".join(fault.text.split())
        line = lines[fault.node.lineno - 1].strip()
        key = "\n".join((file, fault.function, fault.operator, fault.what, text, line))
        digest = hashlib.sha256(f"{key}\n{seen[key]}".encode()).hexdigest()[:12]
        seen[key] += 1
        place = (file, fault.function, fault.node.lineno)
        found.append(Mutant(digest, *place, fault.operator, fault.what, line, number))
    return found


def _at_a_time(lines: Sequence[str], number: int) -> bool:
    """Whether the comment above a line says that it is about how much is computed at a time. No
    result depends on that.
    """
    comment = ""
    for line in reversed(lines[: number - 1]):
        if not line.startswith("#"):
            break
        comment = f"{line} {comment}"
    return "at a time" in comment


def planted(source: str, number: int, facts: Facts) -> ast.Module:
    """The syntax tree with one fault in it; lines keep their numbers."""
    tree = ast.parse(source)
    for at, fault in enumerate(_faults(tree, facts)):
        if at == number:
            fault.plant()
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


def draw(
    sources: Mapping[str, Mapping[str, str]],
    facts: Facts,
    count: int,
    seed: int,
    known: Sequence[str] = (),
) -> list[Mutant]:
    """A sample of faults.

    Each package has a part in proportion to its lines, and at least one. In a package an operator
    is drawn in proportion to the square root of the number of its faults, because constants and
    comparisons are many and faults of order few.

    Args:
        sources: text of each file, by package and file.
        facts: about the packages.
        count: of faults, at least the number of packages.
        seed: decides the draw, together with the source.
        known: ids that are left out: they change nothing.
    """
    sizes = {
        name: sum(text.count("\n") for text in files.values()) for name, files in sources.items()
    }
    shares = {name: count * size / sum(sizes.values()) for name, size in sizes.items()}
    parts = {name: max(1, int(share)) for name, share in shares.items()}
    for name in sorted(shares, key=lambda name: parts[name] - shares[name]):
        if sum(parts.values()) < count:
            parts[name] += 1
    drawn = []
    for package, files in sources.items():
        found = [each for file, text in files.items() for each in mutants(file, text, facts)]
        many = Counter(each.operator for each in found)

        def order(each: Mutant, many: Counter[str] = many) -> float:
            # Weighted sampling without replacement (Efraimidis and Spirakis 2006).
            return -(random.Random(f"{seed} {each.id}").random() ** (many[each.operator] ** 0.5))

        chosen: list[Mutant] = []
        for each in sorted(found, key=order):
            if len(chosen) == parts[package]:
                break
            if each.id not in known and not same_code(files[each.file], each.number, facts):
                chosen.append(each)
        drawn += chosen
    return sorted(drawn, key=lambda each: (each.file, each.lineno))


def every(
    sources: Mapping[str, Mapping[str, str]], facts: Facts, known: Sequence[str] = ()
) -> list[Mutant]:
    """All faults that can be drawn."""
    return [
        each
        for files in sources.values()
        for file, text in files.items()
        for each in mutants(file, text, facts)
        if each.id not in known and not same_code(text, each.number, facts)
    ]


def same_code(source: str, number: int, facts: Facts) -> bool:
    """Whether the fault compiles to what the source compiles to. A fault that does not compile
    counts as the same.
    """
    try:
        after = compile(planted(source, number, facts), "", "exec")
    except (SyntaxError, ValueError):
        return True
    return _code(after) == _code(compile(source, "", "exec"))


def _code(code: CodeType) -> tuple[object, ...]:
    """All of a code object that runs: not its lines. Equal constants of other types differ."""
    constants = [
        _code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, code.co_exceptiontable, constants, names


@dataclass(frozen=True)
class Fault:
    function: str
    node: ast.stmt | ast.expr | ast.ExceptHandler
    operator: str
    what: str
    text: str
    plant: Callable[[], None]


def _faults(tree: ast.Module, facts: Facts) -> Iterator[Fault]:
    attributes = {ast.unparse(each) for each in ast.walk(tree) if isinstance(each, ast.Attribute)}
    names = _bound(tree)
    yield from _inside(tree, "", Scope(frozenset(names), frozenset(attributes)), facts)


def _bound(tree: ast.AST) -> set[str]:
    """Names that are bound anywhere below a node."""
    names = {
        each.id
        for each in ast.walk(tree)
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    names |= {each.arg for each in ast.walk(tree) if isinstance(each, ast.arg)}
    imports = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    return names | {each.asname or each.name for line in imports for each in line.names}


def _inside(node: ast.AST, function: str, scope: Scope, facts: Facts) -> Iterator[Fault]:
    """Faults below a node, except where nobody can see them."""
    for name, value in ast.iter_fields(node):
        if name in PAST_NAMES or (name == "type" and isinstance(node, ast.ExceptHandler)):
            continue
        for at, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST) or _unseen(child):
                continue
            if isinstance(node, ast.Dict) and name == "values" and _is_look(node.keys[at]):
                continue
            block: list[ast.stmt] = value[at + 1 :] if isinstance(child, ast.stmt) else []
            if default := _default_of(node, name, at, function):
                scope = replace(scope, default_of=default)
            yield from _of(node, (name, at), block, function, scope, facts)
            yield from _inside(child, *_entered(child, function, scope), facts)
            if isinstance(child, ENDS):
                break


def _of(
    node: ast.AST,
    place: tuple[str, int],
    block: list[ast.stmt],
    function: str,
    scope: Scope,
    facts: Facts,
) -> Iterator[Fault]:
    """Faults of one child of a node."""
    name, at = place
    value = getattr(node, name)
    child = value[at] if isinstance(value, list) else value
    for operator, what, new, width in changes(child, block, scope, facts):
        if _as_good(node, child, (operator, what), scope):
            continue

        def plant(new: list[ast.AST] = new, width: int = width) -> None:
            if isinstance(value, list):
                value[at : at + width] = new
            else:
                setattr(node, name, new[0])

        if hasattr(child, "lineno"):
            text = ast.unparse(child) if isinstance(child, ast.expr) else ""
            yield Fault(function, child, operator, what, text, plant)


def _as_good(node: ast.AST, child: ast.AST, fault: tuple[str, str], scope: Scope) -> bool:
    """Whether the fault leaves a value that serves as well: the length of another tensor of one
    table, the size of a difference the other way round, a limit on the length of a text that is
    larger or smaller by one, or a limit with a tolerance, which no number meets exactly.
    """
    operator, what = fault
    if operator == "boundary":
        return "_TOLERANCE" in ast.unparse(child)
    if operator == "constant" and isinstance(node, ast.keyword):
        return node.arg == "max_length"
    if what == "sides swapped" and isinstance(child, ast.BinOp) and isinstance(child.op, ast.Sub):
        match node:
            case ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)):
                return name in ("square", "abs", "norm")
            case ast.BinOp(op=ast.Pow(), right=ast.Constant(value=2)):
                return True
    match node, child:
        case ast.Call(func=ast.Name(id="len")), ast.Name(id=name) if operator == "unit":
            return dict(scope.parameters).get(name) == "Tensor"
    return False


def _entered(child: ast.AST, function: str, scope: Scope) -> tuple[str, Scope]:
    """The function and the scope inside a child."""
    if isinstance(child, ast.ClassDef | ast.FunctionDef):
        function = f"{function}.{child.name}".strip(".")
    if isinstance(child, ast.FunctionDef):
        arguments = [*child.args.posonlyargs, *child.args.args, *child.args.kwonlyargs]
        types = [(each.arg, ast.unparse(each.annotation)) for each in arguments if each.annotation]
        return function, Scope(frozenset(_bound(child)), scope.attributes, tuple(types))
    return function, scope


def _default_of(node: ast.AST, name: str, at: int, function: str) -> tuple[str, str] | None:
    """Function and parameter, if the child is a default."""
    if not isinstance(node, ast.arguments) or name not in ("defaults", "kw_defaults"):
        return None
    places = [*node.posonlyargs, *node.args][-len(node.defaults) or None :]
    parameter = (places if name == "defaults" else node.kwonlyargs)[at]
    return function.rpartition(".")[2], parameter.arg


def _unseen(node: ast.AST) -> bool:
    """Whether what the node says is for readers, or for the type checker, only."""
    match node:
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr() | ast.Raise() | ast.Assert():
            return True
        case ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
            return True
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))) if name in LOGS:
            return True
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in UNSEEN_CALLS:
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name))):
            return name in UNSEEN_CALLS
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
            return True
        case ast.If(test=ast.Compare(left=ast.Name(id="__name__"))) | ast.If(test=ast.Constant()):
            return True
        case ast.keyword(arg=name):
            return name == "strict" or name in LOOK
    return False


def _is_look(key: ast.expr | None) -> bool:
    return isinstance(key, ast.Constant) and key.value in LOOK
