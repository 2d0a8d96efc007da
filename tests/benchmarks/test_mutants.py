"""The generator of faults: each is a fault, seeds decide, ids stay, and the score is right."""

import ast
import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _executed, _mutations, _operators, _planting
from benchmarks.mutants import PACKAGES, ROOMS, Tree
from tests.children import ran
from tests.grid import ROOT

TREE = Tree(ROOT, PACKAGES, ROOMS)


ALONE = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def drawn(source: str, seed: int = 0) -> list[_mutations.Mutant]:
    """Up to fifty faults of a file."""
    return _mutations.draw({"one": {"a.py": source}}, facts_of(source), 50, seed)


def in_folder(root: Path, *words: str) -> tuple[int, str, Any]:
    """What the command finds in a folder: its exit code, what it prints, and its results."""
    output = root / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "mutants.py"), "--root", str(root)]
    done = ran([*command, *words, "--jobs", "1", "--output", str(output)], env=ALONE)
    assert output.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(output.read_text())


def facts_of(*sources: str) -> _operators.Facts:
    return _operators.facts_of([ast.parse(source) for source in sources])


@pytest.mark.parametrize(
    "source",
    [
        '"""Three 3."""\n',
        'def f(x: "int | 3") -> "int | 3":\n    """Three 3."""\n    return x\n',
        'def f(x):\n    raise ValueError(f"{x + 3} of", 3 * x)\n',
        'def f(x):\n    LOG.warning("%d of", x + 3)\n    return x\n',
        "__all__ = [3, 4]\n",
        "def f(x):\n    return x\n    x.send(3)\n",
        "def f(x=3):\n    return x\n\n\nf(x)\nf(x=x)\n".replace("f(x)\nf(x=x)", "y = f(a), f(x=b)"),
        "def f(x):\n    assert x > 3\n    return x\n",
        "@lru_cache(maxsize=3)\n@dataclass(frozen=True)\ndef f(x):\n    return x\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    X = 3\n",
        "def f(x):\n    return list(zip(x, x, strict=True))\n",
        "def f(x):\n    if False:\n        x.send(3)\n    return x\n",
        "X = frozenset({A, B})\n",
        "X = Field(max_length=200)\n",
        "# Number of rows in memory\n# at a time.\nROWS = 2**13\n",
        "y = make_axes(figure, left=3, right=4)\n",
        "y = f(x, lw=3, **{'fontsize': 8})\n",
        "def f(axes):\n    _plain(axes)\n    axes.grid(lw=3)\n    return axes\n",
        "X = f(1e-30)\n",
        "def f(x: Tensor, y: Tensor):\n    return len(x)\n",
    ],
)
def test_what_changes_nothing_is_left_out(source: str) -> None:
    assert drawn(source) == []


def test_marks_and_faults_get_into_the_modules_that_tests_import() -> None:
    for package in PACKAGES:
        for file in TREE.sources(package):
            name = _executed.module_of(ROOT, file)
            spec = importlib.util.find_spec(name)
            assert spec is not None
            assert Path(str(spec.origin)).resolve() == ROOT / file
            assert name.startswith("fedsurrogate.")
    file = "common/secure_aggregation/rules.py"
    text = (ROOT / file).read_text()
    fault = next(
        each
        for each in _mutations.mutants(file, text, facts_of(text))
        if (each.function, each.operator) == ("dimensions_of", "constant")
    )
    of_run = importlib.import_module("fedsurrogate.common.secure_aggregation.rules")
    before = of_run.dimensions_of.__code__
    try:
        _planting.plant_in_function(ROOT, fault, facts_of(text))
        assert of_run.dimensions_of.__code__ != before
    finally:
        of_run.dimensions_of.__code__ = before


# Two functions with the same faults; the tests look at the result of one only.
TOY = """
LIMIT = 3


def watched(x):
    return x < 7


def executed(x):
    return x < 7


def never(x):
    return x < 7
"""
TOY_TESTS = """
from toy import one


def test_watched():
    assert [one.watched(x) for x in (5, 6, 7, 8)] == [True, True, False, False]
    assert one.LIMIT == 3


def test_executed():
    one.executed(6)
"""


def test_the_score_of_a_toy_package(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "tests" / "toy").mkdir(parents=True)
    (tmp_path / "toy" / "__init__.py").write_text("")
    (tmp_path / "toy" / "one.py").write_text(TOY)
    (tmp_path / "tests" / "toy" / "test_one.py").write_text(TOY_TESTS)
    code, printed, results = in_folder(tmp_path, "--count", "50")
    assert code == 1
    result = results["0"]
    # Of each function: boundary, negation, 8 and 6. Of the constant: 4 and 2.
    assert result["packages"] == {"toy": {"killed": 6, "survived": 8}}
    functions = {each["function"] for each in result["survivors"]}
    assert functions == {"executed", "never"}
    assert "6 of 14 mutants were killed (42.9 %)" in printed
    assert (tmp_path / "toy" / "one.py").read_text() == TOY, "no fault touches a file"
