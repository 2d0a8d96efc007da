"""The suite itself: the same on every machine, with nothing beside the checkout, and no test that
hangs for ever.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest

from tests import conftest
from tests.children import ran
from tests.documents import ROOT
from tests.samples import VARIABLE, sample

FILES = sorted((ROOT / "tests").rglob("*.py"))
# These may name the folder of sample data: the one that finds it, and benchmarks' own tests, which
# hide it.
MAY = {
    "tests/samples.py",
    "tests/benchmarks/test_scripts.py",
    "tests/test_suite.py",
}


def outside(tree: ast.AST) -> list[str]:
    """Pieces of source that reach for files beside the checkout: the folder of samples, by its name
    or its variable.
    """
    found = []
    for node in ast.walk(tree):
        # A path is joined from strings: folder / "shared" / "features".
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            found += [
                part.value
                for part in (node.left, node.right)
                if isinstance(part, ast.Constant) and part.value == "shared"
            ]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += re.findall(rf"{VARIABLE}|(?:^|/)\.\./shared\b", node.value)
    return found


def test_no_test_looks_for_sample_data_except_by_the_fixture() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): outside(ast.parse(text))
        for path in FILES
        if re.search(f"shared|{VARIABLE}", text := path.read_text())
    }
    assert {path for path, pieces in found.items() if pieces} <= MAY


def test_the_fixture_marks_its_tests_and_without_the_folder_they_are_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(
        pytest.skip.Exception, match=f"needs a/b of the sample data; {VARIABLE} names no folder"
    ):
        sample("a/b")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(
        pytest.skip.Exception, match="needs a/b of the sample data, which is not in the folder"
    ):
        sample("a/b")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(pytest.fail.Exception, match="is no folder"):
        sample("a/b")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "a").mkdir()
    assert sample("a") == tmp_path / "a"


def collected(*words: str, **variables: str) -> set[str]:
    """Names of the tests that pytest collects with these words."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *words]
    done = ran(command, cwd=ROOT, env=os.environ | variables)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.slow
def test_the_quick_part_has_no_test_of_samples_even_where_the_folder_is_there(
    tmp_path: Path,
) -> None:
    file = "tests/client_app/features/test_extraction.py"
    name = f"{file}::test_real_images_give_the_published_features"
    quick = collected(file, **{VARIABLE: str(tmp_path)})
    assert len(quick) > 10
    assert name not in quick
    assert collected(file, "-m", "samples", **{VARIABLE: str(tmp_path)}) == {name}


def test_tests_have_a_home_of_their_own() -> None:
    assert Path(os.environ["HOME"]).parent == Path(tempfile.gettempdir())
    assert Path.home().name.startswith("fedsurrogate-tests-")


def test_every_slow_place_exists() -> None:
    """A slow file under a new name would join the quick part."""
    assert [name for name in conftest.SLOW if not (conftest.TESTS / name).exists()] == []


def test_a_test_that_hangs_is_ended(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    assert float(pytestconfig.getini("timeout")) == 120
    (tmp_path / "test_x.py").write_text(
        "import threading\ndef test_hang():\n    threading.Event().wait()\n"
    )
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "-o",
        "timeout=1",
        "-p",
        "no:cacheprovider",
    ]
    done = ran([*command, str(tmp_path)], cwd=tmp_path, timeout=60)
    assert done.returncode == 1
    assert "Timeout" in done.stdout
