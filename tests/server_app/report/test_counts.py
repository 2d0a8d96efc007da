"""Noisy counts in a report: every number with its interval, hidden ones named, and nothing of a
file is trusted.
"""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.server_app.report.build import write_report
from tests.server_app.report.test_build import flat, make_run


def interval(value: float | None, low: float = 0.0, high: float = 1.0) -> dict[str, float | None]:
    return {
        "value": value,
        "low": None if value is None else low,
        "high": None if value is None else high,
    }


EVALUATION: dict[str, Any] = {
    "schema": 1,
    "kind": "evaluation",
    "sites": 3,
    "records": interval(401, 380, 422),
    "accuracy": interval(0.84, 0.8, 0.88),
    "classes": {
        "<b>no</b>": {
            "records": interval(201, 190, 212),
            "sensitivity": interval(0.81, 0.75, 0.87),
            "specificity": interval(0.9, 0.84, 0.96),
            "auroc": interval(0.93, 0.9, 0.96),
        },
        "yes": {
            "records": interval(-3, -12, 6),
            "sensitivity": interval(None),
            "specificity": interval(0.7, 0.6, 0.8),
            "auroc": interval(None),
        },
    },
    "privacy": {"epsilon": 1.0, "delta": 1e-5},
    "per_site": {"clinic": interval(0.7, 0.5, 0.9)},
    "exact": {"accuracy": interval(0.85, 0.82, 0.88)},
}
SURVEY: dict[str, Any] = {
    "schema": 1,
    "kind": "survey",
    "sites": 2,
    "records": interval(300, 290, 310),
    "classes": {"no": interval(180, 174, 186), "yes": interval(120, 114, 126)},
    "per_site": {"a": [100, 60], "b": [80, 60]},
    "privacy": {"epsilon": 0.5, "delta": 1e-5},
    "estimate": {"accuracy": {"1": 0.8, "2": 0.85}, "how": "simulated"},
}


def folder(home: Path, kind: str = "", **files: Any) -> Path:
    """A run's folder with files of counts, of a run that counts if `kind` names one."""
    run = make_run(home, ["a", "b"])
    for name, content in files.items():
        (run / f"{name}.json").write_text(
            content if isinstance(content, str) else json.dumps(content)
        )
    if kind:
        manifest = json.loads((run / "manifest.json").read_text())
        manifest["config"] |= {"counting.kind": kind}
        (run / "manifest.json").write_text(json.dumps(manifest))
    return run


def page(run: Path) -> tuple[str, str]:
    html = write_report(run).read_text()
    # Cells of a table stay apart.
    return html, flat(unescape(re.sub(r"<[^>]+>", " ", html[html.index("<body") :])))


def test_an_evaluation_is_shown_with_its_intervals_and_what_the_noise_hides(tmp_path: Path) -> None:
    html, text = page(folder(tmp_path, evaluation=EVALUATION))
    for words in (
        "right for 84.0% (80.0% to 88.0%) of 401 held-out records of its classes at 3 sites",
        "201 (190 to 212) 81.0% (75.0% to 87.0%) 90.0% (84.0% to 96.0%) 93.0% (90.0% to 96.0%)",
        "yes -3 (-12 to 6) hidden by the noise 70.0% (60.0% to 80.0%) hidden by the noise",
        "epsilon 1, delta 1e-05 at each site",
        "Majority baseline: hidden by the noise",
        "No record of another class is counted, and the model is wrong for each",
        "At site clinic alone: accuracy 70.0% (50.0% to 90.0%)",
        "Exact accuracy, known because the run was a simulation: 85.0%",
        "How good the model is at the sites",
    ):
        assert words in text
    assert "<b>no</b>" not in html
    assert 'class="evaluation"' in html
    assert "Balanced accuracy 70.0%" not in text
    share = {"value": 0.7, "low": 0.6, "high": 0.8}
    (tmp_path / "more").mkdir()
    _, text = page(folder(tmp_path / "more", evaluation=EVALUATION | {"balanced_accuracy": share}))
    assert "Balanced accuracy 70.0% (60.0% to 80.0%). The model is right for 84.0%" in text


def test_errors_and_numbers_of_records_have_no_exponents(tmp_path: Path) -> None:
    volume = {"records": interval(12345, 12300, 12400), "mae": interval(31415.9, 2718.28, 99999)}
    content = {"schema": 1, "kind": "evaluation", "sites": 3, "task": "regression"}
    _, text = page(folder(tmp_path, evaluation=content | {"outputs": {"volume": volume}}))
    assert "12,345 (12,300 to 12,400) 31,416 (2718 to 99,999)" in text


def test_a_survey_is_shown_with_each_site_and_what_a_run_could_reach(tmp_path: Path) -> None:
    html, text = page(folder(tmp_path, survey=SURVEY))
    for words in (
        "2 sites have 300 (290 to 310) records",
        "no 180 (174 to 186) 100 80",
        "yes 120 (114 to 126) 60 60",
        "A run at epsilon 2 could reach an accuracy of about 85.0%",
    ):
        assert words in text
    assert 'class="survey"' in html


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[]",
        {"kind": "evaluation", "classes": {"a": 3, "b": {"auroc": {"value": "x"}}}},
        EVALUATION | {"accuracy": [], "sites": "many", "per_site": 3, "privacy": {"epsilon": "1"}, "exact": 4},
        {"kind": "survey", "classes": {"a": None}, "per_site": {"s": 3}, "estimate": {"accuracy": [], "how": 2}},
    ],
)  # fmt: skip
def test_broken_counts_never_stop_the_report(tmp_path: Path, broken: Any) -> None:
    _, text = page(folder(tmp_path, "evaluation", evaluation=broken, survey=broken))
    assert "Accuracy" in text
