"""The front page is short, and its links lead somewhere."""

import ast
import re
from pathlib import Path

import pytest

from fedsurrogate.common.methods import METHODS
from tests.documents import DOCS, PAGES, README, ROOT, blocks, name_of


def test_the_readme_has_at_most_110_lines() -> None:
    assert len(README.read_text().splitlines()) <= 110


def test_the_readme_has_python_at_its_marked_place() -> None:
    (code,) = blocks(README, "python")
    assert "<!-- python -->\n```python\n" in README.read_text()
    tree = ast.dump(ast.parse(code))
    assert len(code.strip().splitlines()) <= 15
    assert all(name in tree for name in ("simulate", "epsilon", "torch", "backbone"))


def test_the_python_of_the_readme_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(README, "python")
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    accuracy, predicted = capsys.readouterr().out.strip().split("\n", 1)
    assert float(accuracy) > 0.5
    assert predicted
    quick = DOCS / "quickstart.md"
    (estimator,) = blocks(quick, "py")
    assert f"<!-- estimator -->\n```py\n{estimator}```" in quick.read_text()
    (code,) = blocks(quick, "python")
    exec(compile(code + estimator, quick.name, "exec"), names)
    _, scores, best = capsys.readouterr().out.strip().split("\n")
    assert all(float(each) > 0.85 for each in scores.strip("[]").split())
    assert "epsilon" in best


@pytest.mark.parametrize("page", PAGES, ids=map(name_of, PAGES))
def test_links_to_files_of_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        if not re.match(r"[a-z]+:", target):
            found = (page.parent / target).resolve()
            assert found.exists(), f"{name_of(page)}: {target}"


@pytest.mark.parametrize("name", METHODS)
def test_the_pages_of_methods_name_every_method(name: str) -> None:
    text = "".join(
        page.read_text()
        for page in (ROOT / "docs" / "methods").glob("*.md")
        if page.name != "index.md"
    )
    assert f"`{name}`" in text or f"method={name}" in text, (
        f"method {name}: docs/methods needs a page that describes it"
    )
    assert f"`{name}`" in (ROOT / "docs" / "methods" / "index.md").read_text(), (
        f"method {name}: docs/methods/index.md needs it in its list"
    )
