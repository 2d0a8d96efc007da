"""Small faults of a piece of Python source: what a tired programmer, or an attacker who may propose
a change, would write in its place.

Each function yields replacements for a node: the operator's name, what it does, and the new nodes.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

# The name of the operator, what it does, the new nodes, and how many nodes they replace.
Change = tuple[str, str, list[ast.AST], int]

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
}  # fmt: skip
NEGATION: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
# Calls that a fault leaves out: `abs(x)` becomes `x`, `x.abs()` becomes `x`, `max(a, b)` becomes `a`.
WRAPPING = {
    "abs", "all", "amax", "amin", "any", "ceil", "clamp", "clamp_", "clamp_max", "clamp_min", "clip", "clone", "copy",
    "cumsum", "deepcopy", "detach", "diff", "double", "exp", "expm1", "float", "floor", "frozenset", "int", "isfinite",
    "log", "log1p", "lower", "max", "maximum", "mean", "median", "min", "minimum", "nan_to_num", "norm", "normalize",
    "resolve", "reversed", "round", "set", "softmax", "sorted", "sqrt", "square", "strip", "trunc", "unique",
}  # fmt: skip
# Pairs of names for quantities that are easily taken for each other.
UNITS = (
    ("record", "patient"), ("records", "patients"), ("bits", "bytes"), ("std", "var"), ("epsilon", "delta"),
    ("rows", "columns"), ("classes", "sites"), ("seconds", "rounds"), ("mean", "total"),
)  # fmt: skip
SAME = dict(UNITS) | {b: a for a, b in UNITS}
FACTORS = {8: 1, 1000: 1, 1024: 1000, 60: 1, 3600: 60, 86400: 3600}
LEAST = 1e-20
NARROWER = {
    "BaseException": "Exception", "Exception": "ValueError", "OSError": "FileNotFoundError", "ValueError": "UnicodeError",
    "LookupError": "KeyError", "ArithmeticError": "ZeroDivisionError", "FedSurrogateError": "ConfigError",
}  # fmt: skip


@dataclass
class Facts:
    """What one reading of the packages tells about their functions.

    Attributes:
        types: annotations of parameters in order, by the name of a function or a dataclass; None
            where two differ.
        passed: names of parameters that a call left out, by function.
        called: functions that are called.
        loose: functions that are named without a call, or called with `*` or `**`.
    """

    types: dict[str, list[tuple[str, str]] | None] = field(default_factory=dict)
    left_out: dict[str, set[str]] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    loose: set[str] = field(default_factory=set)

    def dead_default(self, function: str, parameter: str) -> bool:
        """Whether every call in the packages passes the parameter."""
        return (
            self.types.get(function) is not None
            and function in self.called - self.loose
            and parameter not in self.left_out.get(function, ())
        )


def facts_of(trees: list[ast.Module]) -> Facts:
    """Read all files of the packages."""
    facts = Facts()
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            found = [
                (each.arg, ast.unparse(each.annotation) if each.annotation else each.arg)
                for each in arguments
                if each.arg not in ("self", "cls")
            ]
        elif isinstance(node, ast.ClassDef) and "dataclass" in map(_name, node.decorator_list):
            found = [
                (each.target.id, ast.unparse(each.annotation))
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            ]
        else:
            continue
        facts.types[node.name] = (
            None
            if facts.types.get(node.name, found) != found
            else facts.types.get(node.name, found)
        )
    functions = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and id(node) not in functions:
            facts.loose.add(_name(node))
        if not isinstance(node, ast.Call) or not (parameters := facts.types.get(_name(node.func))):
            continue
        name = _name(node.func)
        facts.called.add(name)
        words = {each.arg for each in node.keywords}
        if None in words or any(isinstance(each, ast.Starred) for each in node.args):
            facts.loose.add(name)
        given = words | {each for each, _ in parameters[: len(node.args)]}
        facts.left_out.setdefault(name, set()).update(
            each for each, _ in parameters if each not in given
        )
    return facts


def _name(node: ast.AST) -> str:
    """The last part of a dotted name, also of what is called."""
    if isinstance(node, ast.Call):
        return _name(node.func)
    return getattr(node, "attr", getattr(node, "id", ""))


def changes(
    node: ast.AST, following: list[ast.stmt], scope: Scope, facts: Facts
) -> Iterator[Change]:
    """All faults of a node.

    Args:
        node: of the syntax tree.
        following: statements after it, if it is one.
        scope: what its function and its file know.
        facts: about the packages.
    """
    for name, what, new in _expressions(node, scope, facts):
        yield name, what, [ast.copy_location(new, node)], 1
    if isinstance(node, ast.stmt):
        yield from _statements(node, following)
    if isinstance(node, ast.ExceptHandler) and node.type:
        names = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        for at, each in enumerate(names):
            if any(_inherits(each, other) for other in names):
                continue
            if len(names) > 1:
                rest = ast.Tuple([*names[:at], *names[at + 1 :]], ast.Load())
                new = _with(node, type=rest)
                yield "exception narrowed", f"without {ast.unparse(each)}", [new], 1
            elif ast.unparse(each) in NARROWER:
                name = NARROWER[ast.unparse(each)]
                new = _with(node, type=ast.Name(name, ast.Load()))
                if name != "ConfigError" or "ConfigError" in scope.names:
                    yield "exception narrowed", f"{ast.unparse(each)} to {name}", [new], 1


def _inherits(one: ast.expr, other: ast.expr) -> bool:
    """Whether an exception is caught by the name of another one as well."""
    kinds = [getattr(builtins, ast.unparse(each), None) for each in (one, other)]
    own, more = (each if isinstance(each, type) else None for each in kinds)
    return own is not None and more is not None and own is not more and issubclass(own, more)


@dataclass(frozen=True)
class Scope:
    """What is known at a place.

    Attributes:
        names: that its function or its file binds.
        attributes: dotted names that occur in its file.
        parameters: annotations of its function's parameters.
        default_of: function and parameter whose default the place is part of.
    """

    names: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    parameters: tuple[tuple[str, str], ...] = ()
    default_of: tuple[str, str] | None = None


def _with(node: ast.AST, **fields: object) -> ast.AST:
    new = copy.copy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def _expressions(  # noqa: C901 - a table of cases
    node: ast.AST, scope: Scope, facts: Facts
) -> Iterator[tuple[str, str, ast.AST]]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for name, table in (("boundary", BOUNDARY), ("negation", NEGATION)):
                    if new := table.get(type(op)):
                        other = _with(node, ops=[*ops[:at], new(), *ops[at + 1 :]])
                        yield name, f"{type(op).__name__} to {new.__name__}", other
        case ast.UnaryOp(op=ast.Not() | ast.USub() as op, operand=operand):
            yield "negation", f"without {type(op).__name__}", operand
        case ast.If(test=test) | ast.IfExp(test=test):
            if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
                yield (
                    "negation",
                    "not the condition",
                    _with(node, test=ast.UnaryOp(ast.Not(), test)),
                )
        case ast.BoolOp(values=values):
            for at, each in enumerate(values):
                rest = [*values[:at], *values[at + 1 :]]
                new = rest[0] if len(rest) == 1 else _with(node, values=rest)
                yield "condition dropped", f"without {ast.unparse(each)[:40]}", new
        case ast.BinOp(left=left, op=op, right=right) if not _text(left) and not _text(right):
            yield from _arithmetic(node, left, op, right)
        case ast.Constant() | ast.Dict() | ast.Name() | ast.Attribute():
            yield from _values(node, scope, facts)
        case ast.Call():
            yield from _calls(node, facts)
        case ast.Slice(lower=lower, upper=upper):
            if lower is not None:
                yield "slice", "begins one later", _with(node, lower=_plus_one(lower))
            if upper is not None:
                yield "slice", "ends one later", _with(node, upper=_plus_one(upper))
            elif lower is not None and node.step is None:
                yield "slice", "without the last", _with(node, upper=ast.Constant(-1))


def _plus_one(node: ast.expr) -> ast.expr:
    return ast.BinOp(node, ast.Add(), ast.Constant(1))


def _text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str | bytes)
    )


def _arithmetic(
    node: ast.AST, left: ast.expr, op: ast.operator, right: ast.expr
) -> Iterator[tuple[str, str, ast.AST]]:
    kind = "factor" if isinstance(op, ast.Mult | ast.Div | ast.MatMult | ast.FloorDiv) else "term"
    match op:
        case ast.Pow():
            squared = isinstance(right, ast.Constant) and right.value in (2, 0.5)
            yield ("unit" if squared else "factor"), "without the power", left
        case ast.LShift() | ast.RShift():
            yield "factor", "without the shift", left
        case _:
            yield f"{kind} dropped", f"without {ast.unparse(right)[:40]}", left
            if isinstance(op, ast.Mult | ast.Add | ast.Sub | ast.BitAnd):
                yield f"{kind} dropped", f"without {ast.unparse(left)[:40]}", right
            if isinstance(op, ast.Sub | ast.Div):
                yield "arguments swapped", "sides swapped", _with(node, left=right, right=left)
    known = FACTORS.get(right.value) if isinstance(right, ast.Constant) else None
    if known and isinstance(op, ast.Mult | ast.Div | ast.FloorDiv):
        yield "unit", f"{ast.unparse(right)} to {known}", _with(node, right=ast.Constant(known))


def _values(  # noqa: C901 - a table of cases
    node: ast.AST, scope: Scope, facts: Facts
) -> Iterator[tuple[str, str, ast.AST]]:
    match node:
        case ast.Constant(value=bool() | int() | float() as value):
            kind = "constant"
            if scope.default_of:
                kind = "default"
                if facts.dead_default(*scope.default_of):
                    return
            if isinstance(value, bool):
                others: tuple[float, ...] = (not value,)
            elif isinstance(value, int):
                others = (value + 1, value - 1)
            else:
                # A tolerance times two, or half of it, is no fault. What is far below all rounding
                # only keeps a divisor from zero, and any other number that small does so too.
                factor = 2 if value >= 1e-3 else 1000
                others = (factor * value, value / factor) if value else (1.0,)
                if 0 < value <= LEAST:
                    return
            for other in others:
                yield kind, f"{value} to {other}", ast.Constant(other)
        case ast.Name(id=name, ctx=ast.Load()):
            if SAME.get(name) in scope.names:
                yield "unit", f"{name} to {SAME[name]}", _with(node, id=SAME[name])
            kind = dict(scope.parameters).get(name)
            for other, each in scope.parameters:
                if kind and each == kind and other != name:
                    yield "unit", f"{name} to {other}", _with(node, id=other)
        case ast.Attribute(value=of, attr=name, ctx=ast.Load()) if name in SAME:
            if f"{ast.unparse(of)}.{SAME[name]}" in scope.attributes:
                yield "unit", f"{name} to {SAME[name]}", _with(node, attr=SAME[name])


def _calls(node: ast.Call, facts: Facts) -> Iterator[tuple[str, str, ast.AST]]:
    name, of = _name(node.func), getattr(node.func, "value", None)
    plain = not any(isinstance(each, ast.Starred) for each in node.args)
    if name in ("min", "max", "minimum", "maximum") and len(node.args) == 2 and plain:
        for each in node.args:
            yield "call dropped", f"only {ast.unparse(each)[:40]}", each
        other = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}[name]
        function = _with(node.func, **{"attr" if of is not None else "id": other})
        yield "call dropped", f"{name} to {other}", _with(node, func=function)
    elif name in WRAPPING and plain and not _frozen(node):
        library = of is None or (
            isinstance(of, ast.Name) and of.id in ("math", "torch", "np", "copy")
        )
        if library and node.args and not isinstance(node.args[0], ast.GeneratorExp):
            yield "call dropped", f"without {name}", node.args[0]
        elif not library and (of is not None):
            yield "call dropped", f"without {name}", of
    types = facts.types.get(name) if plain else None
    for at, (a, b) in enumerate(pairwise(node.args)):
        same = types and len(types) > at + 1 and types[at][1] == types[at + 1][1]
        if same and ast.dump(a) != ast.dump(b):
            args = [*node.args[:at], b, a, *node.args[at + 2 :]]
            yield "arguments swapped", f"{at} and {at + 1}", _with(node, args=args)
    for at, (one, two) in enumerate(pairwise(node.keywords)):
        of_types = dict(types or ())
        known = of_types.get(one.arg or "") if one.arg and two.arg else None
        if (
            known
            and known == of_types.get(two.arg or "")
            and ast.dump(one.value) != ast.dump(two.value)
        ):
            words = list(node.keywords)
            words[at], words[at + 1] = _with(one, value=two.value), _with(two, value=one.value)  # type: ignore[call-overload]
            yield "arguments swapped", f"{one.arg} and {two.arg}", _with(node, keywords=words)


def _frozen(node: ast.Call) -> bool:
    """Whether the call only makes the literal that it wraps immutable."""
    literal = any(isinstance(each, ast.Set) for each in node.args)
    return _name(node.func) == "frozenset" and literal


def _statements(node: ast.stmt, following: list[ast.stmt]) -> Iterator[Change]:
    nothing = [ast.copy_location(ast.Pass(), node)]
    match node:
        case ast.If(body=[*_, ast.Raise() | ast.Return() | ast.Continue()], orelse=orelse):
            yield "check removed", "without the check", list(orelse or nothing), 1
        case ast.Expr(value=ast.Call()):
            yield "call removed", "without the call", list(nothing), 1
        case ast.AugAssign() | ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "call removed", "without the assignment", list(nothing), 1
        case ast.For(body=body):
            stop = ast.copy_location(ast.Break(), node)
            yield "early return", "stops after one", [_with(node, body=[*body, stop])], 1
        case ast.Break():
            yield "early return", "goes on", [ast.copy_location(ast.Continue(), node)], 1
        case ast.Continue():
            yield "early return", "stops", [ast.copy_location(ast.Break(), node)], 1
        case ast.FunctionDef(body=[*first, last], returns=ast.Constant(value=None)) if first:
            stop = ast.copy_location(ast.Return(), last)
            yield "early return", "without the last step", [_with(node, body=[*first, stop])], 1
    if following and _effect(node) and _effect(following[0]):
        bound = {each.id for each in _names(node) if isinstance(each.ctx, ast.Store)}
        plain = isinstance(node, ast.Expr) or isinstance(following[0], ast.Expr)
        # Settings of a panel of a figure have no order.
        plain = plain and not (_of_a_panel(node) and _of_a_panel(following[0]))
        if plain and not bound & {each.id for each in _names(following[0])}:
            yield "order", "after the next statement", [following[0], node], 2


def _of_a_panel(node: ast.stmt) -> bool:
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id="axes" | "table")))):
            return True
        case ast.Expr(value=ast.Call(func=ast.Name(id="_plain"))):
            return True
    return False


def _names(node: ast.AST) -> list[ast.Name]:
    return [each for each in ast.walk(node) if isinstance(each, ast.Name)]


def _effect(node: ast.stmt) -> bool:
    """Whether a statement has an effect beyond a new name, as far as its form says."""
    return isinstance(node, ast.Expr | ast.Assign | ast.AugAssign) and any(
        isinstance(each, ast.Call) for each in ast.walk(node)
    )
