"""The commands `coordinator evaluate`, `value` and `survey`, on a simulated run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsurrogate.server_app.deployment.local_engine import simulate_here
from tests.commands import coordinator


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    settings = {
        "output-dir": str(home),
        "device": "cpu",
        "classes": "0,1,2",
        "image-size": 8,
        "alpha": 5.0,
    }
    return simulate_here(
        3, settings | {"epsilon": 8.0, "delta": 1e-5}, lambda event: None, report=False
    )


def test_evaluate_prints_noisy_and_exact_values(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("-c", f'output-dir="{tmp_path}"', "--epsilon", "8")
    assert coordinator(monkeypatch, "evaluate", run, *more) == 0
    shown = capsys.readouterr().out
    assert "exact accuracy" in shown
    assert "at site 0: accuracy" in shown, "simulated sites show their share"
    assert coordinator(monkeypatch, "evaluate", run, *more, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["accuracy"]["low"] <= result["accuracy"]["value"] <= result["accuracy"]["high"]
    assert list(result["classes"]) == ["0", "1", "2"]


def test_secure_sums_show_no_site(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("-c", f'output-dir="{tmp_path}"', "--epsilon", "8", "--secure-sum")
    assert coordinator(monkeypatch, "evaluate", run, *more) == 0
    shown = capsys.readouterr().out
    assert "at 3 sites" in shown
    assert "exact accuracy" not in shown
    assert "at site" not in shown
    assert coordinator(monkeypatch, "survey", "--classes", "0,1,2", "--simulate", "3", *more) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the records are divided evenly, because a secure sum shows no site's" in shown
    assert "site 0" not in shown


def test_value_prints_and_writes_values(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert coordinator(monkeypatch, "value", run) == 0
    assert "Shapley" in capsys.readouterr().out
    assert len(json.loads((run / "values.json").read_text())["sites"]) == 3


def test_survey_prints_counts_and_an_estimate(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--classes", "0,1,2", "--simulate", "3", "-c", f'output-dir="{tmp_path}"')
    assert coordinator(monkeypatch, "survey", *more) == 0
    shown = capsys.readouterr().out
    assert "a run at epsilon 4 could reach an accuracy of about" in shown
    assert "without noise" in shown
    assert coordinator(monkeypatch, "survey", *more, "--like", run, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert "drawn from the surrogates" in result["estimate"]["how"]
    assert result["estimate"]["accuracy"].keys() == {"1", "2", "4"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("evaluate", "nowhere"), "neither a run folder nor a model file"),
        (("survey", "--classes", ","), "--classes"),
        (("value", ".", "--secure-sum"), "--secure-sum sums the counts of --epsilon"),
        (("survey", "--classes", "0,1", "--like", "nowhere", "--simulate", "2"), "nowhere"),
    ],
)
def test_what_cannot_work_is_named(
    words: tuple[str, ...],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert coordinator(monkeypatch, *words) != 0
    assert named in capsys.readouterr().err
