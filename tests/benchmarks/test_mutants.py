"""The generator of faults: each is a fault, seeds decide, ids stay, and the score is right."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.children import ran
from tests.grid import ROOT

ALONE = os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def in_folder(root: Path, *words: str) -> tuple[int, str, Any]:
    """What the command finds in a folder: its exit code, what it prints, and its results."""
    output = root / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "mutants.py"), "--root", str(root)]
    done = ran([*command, *words, "--jobs", "1", "--output", str(output)], env=ALONE)
    assert output.exists(), done.stderr
    return done.returncode, done.stdout, json.loads(output.read_text())


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
