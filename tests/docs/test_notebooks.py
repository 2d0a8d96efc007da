"""Every notebook runs from its first cell to its last, without the internet, and its stored form is
small.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.documents import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# These take a quarter of a minute each.
LONG = ("landscape", "privacy")
RUN = [
    pytest.param(path, marks=[pytest.mark.slow] if path.stem in LONG else [], id=path.stem)
    for path in NOTEBOOKS
]


def code_of(notebook: Path) -> list[str]:
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def execute(cells: list[str], name: str) -> dict[str, Any]:
    """Run the cells in one namespace, as a kernel does; the value of a cell's last line must have a
    text.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, source in enumerate(cells):
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"{name}, code cell {number}", "exec"), namespace)
        if last is not None:
            repr(
                eval(
                    compile(ast.Expression(last.value), f"{name}, code cell {number}", "eval"),
                    namespace,
                )
            )
    return namespace


@pytest.mark.parametrize("notebook", RUN)
def test_a_notebook_runs(notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    shown: list[Any] = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    try:
        execute(code_of(notebook), notebook.name)
        assert shown
        assert all(
            axes.get_xlabel() or axes.get_xticks().size == 0 or axes.images
            for axes in shown[-1].axes
        )
    finally:
        plt.close("all")
