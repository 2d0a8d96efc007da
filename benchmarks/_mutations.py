"""Find small faults (mutants) that can be planted in Python source, and plant them in its syntax
tree.
"""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# Replacements of operators and names.
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.LtE: ast.GtE,
    ast.Gt: ast.Lt,
    ast.GtE: ast.LtE,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
    ast.Pow: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd,
}  # fmt: skip
NAMES = {
    "min": "max",
    "max": "min",
    "all": "any",
    "any": "all",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
}
# Functions of one argument; the mutant leaves out the call.
LEFT_OUT = {
    "sqrt",
    "abs",
    "square",
    "log",
    "exp",
    "sorted",
    "norm",
    "double",
    "trunc_",
    "nan_to_num",
}


@dataclass(frozen=True)
class Mutant:
    """One fault. line: its source line; nth: its index among equal faults in the file; number: its
    index in the file.
    """

    file: str
    function: str
    lineno: int
    line: str
    mutation: str
    nth: int
    number: int

    @property
    def key(self) -> str:
        """Its name, which does not depend on the code above it in the file."""
        return f"{self.file} | {self.line} | {self.mutation} | {self.nth}"

    def order(self, seed: int) -> str:
        """Sort key in a sample; it does not depend on other mutants."""
        return hashlib.sha256(f"{seed} {self.key}".encode()).hexdigest()


def mutants(file: str, source: str, functions: tuple[str, ...]) -> list[Mutant]:
    """All faults of a file, in the given functions or classes; without any, in the whole file."""
    lines, seen, found = source.splitlines(), dict[tuple[str, str], int](), []
    for number, (function, node, mutation, _) in enumerate(_faults(ast.parse(source))):
        line = lines[node.lineno - 1].strip()
        nth = seen[line, mutation] = seen.get((line, mutation), -1) + 1
        if not functions or set(function.split(".")) & set(functions):
            found.append(Mutant(file, function, node.lineno, line, mutation, nth, number))
    return found


def planted(source: str, number: int) -> ast.Module:
    """The syntax tree with one fault in it; lines keep their numbers."""
    tree = ast.parse(source)
    for place, (*_, plant) in enumerate(_faults(tree)):
        if place == number:
            plant()
            return ast.fix_missing_locations(tree)
    raise IndexError(number)


Fault = tuple[str, ast.expr | ast.stmt, str, Callable[[], None]]


def _faults(tree: ast.Module) -> Iterator[Fault]:
    yield from _inside(tree, "")


def _inside(node: ast.AST, function: str) -> Iterator[Fault]:
    """Faults below a node, except in text: annotations, messages and docstrings."""
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list"):
            continue
        for place, child in enumerate(value if isinstance(value, list) else [value]):
            if not isinstance(child, ast.AST):
                continue

            def put(
                new: ast.AST, value: object = value, place: int = place, field: str = field
            ) -> None:
                if isinstance(value, list):
                    value[place] = new
                else:
                    setattr(node, field, new)

            inner = function
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                inner = f"{function}.{child.name}".strip(".")
            for mutation, new in _changed(child):
                yield inner, child, mutation, lambda new=new, put=put: put(new)  # type: ignore[misc]
            if not isinstance(child, ast.JoinedStr | ast.Raise):
                yield from _inside(child, inner)


def _changed(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:  # noqa: C901 - a table of cases
    """Replacements for a node, each with its name."""

    def other(**fields: object) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for table in (COMPARISONS, FLIPPED):
                    if new := table.get(type(op)):
                        changed = [*ops[:place], new(), *ops[place + 1 :]]
                        yield (
                            f"{type(op).__name__} to {new.__name__} at {place}",
                            other(ops=changed),
                        )
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in ARITHMETIC:
            swapped = ARITHMETIC[type(op)]
            yield f"{type(op).__name__} to {swapped.__name__}", other(op=swapped())
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
            yield f"without {type(op).__name__}", operand
        case ast.BoolOp(op=op, values=values):
            yield (
                "and to or" if isinstance(op, ast.And) else "or to and",
                other(op=ast.Or() if isinstance(op, ast.And) else ast.And()),
            )
            for place in range(len(values)):
                rest = [*values[:place], *values[place + 1 :]]
                yield f"without operand {place}", rest[0] if len(rest) == 1 else other(values=rest)
        case ast.Constant(value=bool() as value):
            yield f"{value} to {not value}", ast.copy_location(ast.Constant(not value), node)
        case ast.Constant(value=int() | float() as value):
            for new_value in {0: (1,), 1: (0, 2)}.get(value, (2 * value, 0)):
                yield f"{value} to {new_value}", ast.copy_location(ast.Constant(new_value), node)
        case ast.IfExp(body=body, orelse=orelse):
            yield "always the first", body
            yield "always the second", orelse
        case ast.Call(func=ast.Name(id=name), args=[only], keywords=[]) if name in LEFT_OUT:
            yield f"without {name}", only
        case ast.Call(func=ast.Attribute(value=of, attr=name), args=args) if name in LEFT_OUT:
            yield (
                f"without {name}",
                args[0] if isinstance(of, ast.Name) and of.id in ("math", "torch") and args else of,
            )
        case ast.Name(id=name) if name in NAMES:
            yield f"{name} to {NAMES[name]}", other(id=NAMES[name])
        case ast.Attribute(attr=name) if name in NAMES:
            yield f"{name} to {NAMES[name]}", other(attr=NAMES[name])
        case ast.Raise():
            yield "without raise", ast.copy_location(ast.Pass(), node)
        case ast.Expr(value=ast.Call()):
            yield "without the call", ast.copy_location(ast.Pass(), node)
        case ast.AugAssign() | ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "without the assignment", ast.copy_location(ast.Pass(), node)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield "returns None", other(value=ast.copy_location(ast.Constant(None), node))
        case _:
            return
