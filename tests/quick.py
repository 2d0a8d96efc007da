"""What `make test` leaves to `make test-all`: `pytest --quick`.

* Of a test that runs every method, one method of each family runs. A family is the methods whose
  coordinator runs the same strategy: they differ by their plan.
* Of another test whose cases run federations, ask hospitals or draw reports, a tenth of the cases
  runs, and two at least. Of the rest, which take less time each, a tenth and four at least.
* Of the tests of a file that run federations in one way, a fifth runs, and two at least.
* Of the examples that a test generates, a tenth is tried: the first of those that all are. Of the
  settings of a subject that are pinned, a fifth.

The name of the test chooses methods and cases, so that other tests run others. pytest without
`--quick` runs all of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import CodeType, FunctionType
from zlib import crc32

import pytest
from hypothesis import settings

# Of the cases of a test, and of the examples of a test; and how many at least where there are as
# many: of cases that run federations, and of others.
CASES, FEWEST_RUNS, FEWEST_CASES = 1 / 10, 2, 4
EXAMPLES, FEWEST_EXAMPLES = 1 / 10, 4
# Of the tests of a file that run federations, and how many at least.
TESTS, FEWEST_TESTS = 1 / 5, 2
# What runs a federation, the steps of one at the hospitals of a test, or draws its report.
RUNS = {"run_federation", "simulate", "Hospitals", "write_report"}
# Where Hypothesis keeps what `@settings` says; a profile changes only what that leaves open.
SETTINGS = "_hypothesis_internal_use_settings"


def examples(count: int) -> int:
    """How many of the examples of a test are tried."""
    return min(count, max(FEWEST_EXAMPLES, int(count * EXAMPLES)))


def chosen(test: str, cases: Sequence[str], number: int) -> set[str]:
    """So many cases of a test, the same ones each time."""
    return set(sorted(cases, key=lambda case: crc32(f"{test} {case}".encode()))[:number])


def _names(code: CodeType) -> Iterator[str]:
    """What code names, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


@cache
def _reached(function: FunctionType) -> frozenset[str]:
    """What a function of the tests names, and what functions of the tests that it calls name."""
    found, seen, waiting = set[str](), {function}, [function]
    while waiting:
        current = waiting.pop()
        for name in _names(current.__code__):
            found.add(name)
            called = current.__globals__.get(name)
            called = called.func if isinstance(called, partial) else called
            if (
                isinstance(called, FunctionType)
                and called.__module__.startswith("tests.")
                and called not in seen
            ):
                found.add(called.__name__)
                seen.add(called)
                waiting.append(called)
    return frozenset(found)


def runs(test: pytest.Item) -> bool:
    """Whether a test, or a fixture that it takes, runs federations."""
    if not isinstance(test, pytest.Function):
        return False
    fixtures = [each[-1].func for each in test._fixtureinfo.name2fixturedefs.values()]
    functions = [each for each in (test.function, *fixtures) if isinstance(each, FunctionType)]
    return any(RUNS & _reached(each) for each in functions)


def left_out(items: Sequence[pytest.Item]) -> set[str]:
    """Ids of the methods and cases that are left to `make test-all`."""
    families: dict[tuple[str, ...], list[str]] = defaultdict(list)
    cases: dict[str, list[str]] = defaultdict(list)
    fewest = dict[str, int]()
    files: dict[str, set[str]] = defaultdict(set)
    of_member: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for item in items:
        test, case, _ = item.nodeid.partition("[")
        if item.get_closest_marker("slow"):
            continue
        if not item.get_closest_marker("family") and runs(item):
            files[test.partition("::")[0]].add(test)
        if not case:
            continue
        if family := item.get_closest_marker("family"):
            families[test, family.args[0]].append(family.args[1])
            of_member[test, *family.args].append(item.nodeid)
        else:
            fewest[test] = FEWEST_RUNS if runs(item) else FEWEST_CASES
            cases[test].append(item.nodeid)
    found = set[str]()
    for (test, family), members in families.items():
        for member in set(members) - chosen(test, sorted(set(members)), 1):
            found.update(of_member[test, family, member])
    for test, all_cases in cases.items():
        number = max(fewest[test], math.ceil(len(all_cases) * CASES))
        found.update(set(all_cases) - chosen(test, all_cases, number))
    left = set[str]()
    for file, tests in files.items():
        number = max(FEWEST_TESTS, math.ceil(len(tests) * TESTS))
        left |= tests - chosen(file, sorted(tests), number)
    return found | {item.nodeid for item in items if item.nodeid.partition("[")[0] in left}


def try_fewer(test: Callable[..., None]) -> None:
    """Let a test try a share of its examples, if it generates any."""
    if own := getattr(test, SETTINGS, None):
        setattr(test, SETTINGS, settings(own, max_examples=examples(own.max_examples)))


# Before `-m` selects.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out methods, cases and examples."""
    left = left_out(items)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]
    for function in {item.function for item in items if isinstance(item, pytest.Function)}:
        try_fewer(function)
