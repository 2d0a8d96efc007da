"""Every notebook runs from its first cell to its last, without the internet, and its stored form is
small.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from tests.documents import ROOT

FOLDER = ROOT / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 300_000  # bytes, with its plots
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


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_what_its_last_run_showed(notebook: Path) -> None:
    text = notebook.read_text()
    content = json.loads(text)
    assert len(text) < LARGEST
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    assert content["cells"][0]["cell_type"] == "markdown"
    titles = [
        "".join(cell["source"]) for cell in content["cells"] if cell["cell_type"] == "markdown"
    ]
    assert titles[0].startswith("# ")
    assert all(title.startswith("## ") for title in titles[1:])
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    # `jupyter nbconvert --to notebook --execute --inplace` runs the cells in order, and stores what
    # they show.
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "display_data",
        "execute_result",
    }, "no error"
    assert {output["name"] for output in outputs if output["output_type"] == "stream"} <= {
        "stdout"
    }, "no warning"
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    shown = "".join(
        "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
        for output in outputs
    )
    assert not re.search(r"/(home|tmp|root|Users)/", shown), "no path of the machine"


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
