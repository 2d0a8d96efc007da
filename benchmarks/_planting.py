"""Plant a fault in a process: in a module before its import, or in a function of an imported
module.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

from benchmarks._executed import Changed, module_of
from benchmarks._mutations import Mutant, planted
from benchmarks._operators import Facts


def plant_in_import(root: Path, mutant: Mutant, facts: Facts) -> None:
    """Plant the fault in a module that is not imported yet."""
    sys.meta_path.insert(
        0, Changed(root, {mutant.file: lambda source: planted(source, mutant.number, facts)})
    )


def in_a_function(root: Path, mutant: Mutant, facts: Facts) -> bool:
    """Whether the fault is in the body of a function. Such a fault can be planted after the import
    of its module.
    """
    return _new_code(root, mutant, facts) is not None


def plant_in_function(root: Path, mutant: Mutant, facts: Facts) -> None:
    """Replace the code of a function, also for modules that have imported it. Raises LookupError if
    it does not exist.
    """
    found = _new_code(root, mutant, facts)
    if found is None:
        raise LookupError(mutant.id)
    name, code = found
    at: object = importlib.import_module(module_of(root, mutant.file))
    for part in name.split("."):
        at = vars(at)[part]
    while not isinstance(at, FunctionType):
        if hasattr(at, "cache_clear"):
            at.cache_clear()
        match at:
            case property():
                at = at.fget
            case classmethod() | staticmethod():
                at = at.__func__
            case functools.cached_property():
                at = at.func
            case _:
                at = at.__wrapped__  # type: ignore[attr-defined]
    at = inspect.unwrap(at)
    if not isinstance(at, FunctionType) or at.__code__.co_freevars != code.co_freevars:
        raise LookupError(mutant.id)
    at.__code__ = code


def _new_code(root: Path, mutant: Mutant, facts: Facts) -> tuple[str, CodeType] | None:
    """The outermost function around a fault, and its code with the fault; None if the code does not
    change.
    """
    source, name = (root / mutant.file).read_text(), str(root / mutant.file)
    before = {code.co_qualname: code for code in _functions(compile(source, name, "exec"))}
    parts = mutant.function.split(".")
    for end in range(1, len(parts) + 1):
        if (outer := ".".join(parts[:end])) in before:
            break
    else:
        return None
    after = next(
        code
        for code in _functions(compile(planted(source, mutant.number, facts), name, "exec"))
        if code.co_qualname == outer
    )
    return None if after == before[outer] else (outer, after)


def _functions(code: CodeType) -> Iterator[CodeType]:
    """Code of a module's top-level functions, and of the methods of its classes."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if each.co_flags & inspect.CO_OPTIMIZED:
                yield each
            else:
                yield from _functions(each)
