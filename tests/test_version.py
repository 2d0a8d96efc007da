"""The number of the version stands in pyproject.toml, and whatever repeats it agrees."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import fedsurrogate
import fedsurrogate.common.version as version
from tests import commands
from tests.documents import ROOT

NUMBER = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.fixture(autouse=True)
def _asked_again() -> Iterator[None]:
    """Before, and after: other tests of this process must not see a number that one of these made."""
    version.own_version.cache_clear()
    yield
    version.own_version.cache_clear()


def test_the_package_and_the_commands_have_the_number_of_pyproject(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fedsurrogate.__version__ == NUMBER == version.own_version()
    for command in (commands.coordinator, commands.site):
        assert command(monkeypatch, "--version") == 0
        assert capsys.readouterr().out.startswith(f"fedsurrogate {NUMBER} (")


def test_the_chart_and_the_citation_have_the_same_number() -> None:
    chart = yaml.safe_load((ROOT / "deploy" / "helm" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == NUMBER
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == NUMBER


def test_the_changelog_dates_the_version_and_begins_with_what_comes_after_it() -> None:
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    dated = [title for title in titles if title != "Unreleased"]
    assert re.fullmatch(rf"{re.escape(NUMBER)}, \d{{4}}-\d\d-\d\d", dated[0])
    assert titles[0] in ("Unreleased", dated[0])


def test_code_of_a_checkout_has_its_own_number_whatever_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "CHECKOUT", tmp_path)
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "fedsurrogate"\nversion = "9.8.7"\n'
    )
    assert version.own_version() == "9.8.7"


@pytest.mark.parametrize(
    "content", [None, "not toml [", '[project]\nname = "other"\nversion = "1"\n', "[tool.x]\n"]
)
def test_code_of_a_wheel_has_the_number_of_the_wheel(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(version, "CHECKOUT", tmp_path)
    if content is not None:
        (tmp_path / "pyproject.toml").write_text(content)
    monkeypatch.setattr(version, "version", lambda name: f"of {name}")
    assert version.own_version() == "of fedsurrogate"
