import json
from pathlib import Path
from typing import Any

import pytest

from tests.server_app.report.test_build import flat, make_run, report


def private_site(**more: Any) -> dict[str, Any]:
    noise = {"counts": 5.4, "sums": 1.5, "squares": 1.7}
    signal = {"counts": 9.0, "sums": 0.0, "squares": None}
    facts = {
        "epsilon": 1.0,
        "delta": 1e-05,
        "unit": "patient",
        "mechanism": "sums",
        "noise_multiplier": 3.73,
    }
    return facts | {"noise": noise, "signal_to_noise": signal} | more


def test_the_promise_stands_in_plain_words_with_what_it_leaves_open(tmp_path: Path) -> None:
    privacy = {
        "mechanism": "sums",
        "epsilon": 1.0,
        "delta": 1e-05,
        "relation": "add or remove one patient",
        "covers": "all that is sent",
        "not_covered": ["<i>that a site takes part</i>"],
        "per_site": {"a": private_site(), "b": private_site()},
        "dropped_classes": ["3", "7"],
    }
    html, page = report(make_run(tmp_path, ["a", "b"], metrics={"privacy": privacy}))
    text = flat(page.text)
    assert "Single patients are protected." in text
    assert "add or remove one patient in a site's training data" in text
    assert "(2.72 for ε = 1)" in text
    assert "(1 in 100,000)" in text
    assert "at most 73.1% sure afterwards" in text
    assert "<li>&lt;i&gt;that a site takes part" in html
    assert "Classes 3, 7: not learned" in text
    assert "Patients (noisy)" in text
    assert "Signal/noise, class sizes" in text
    assert html.count('<td class="number">9</td>') == 2


def test_labels_without_a_head_are_named_as_labels(tmp_path: Path) -> None:
    privacy = {"mechanism": "sums", "epsilon": 1.0, "per_site": {"a": private_site()}}
    make_run(tmp_path, ["a"], metrics={"privacy": privacy | {"dropped_classes": ["edema"]}})
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["config"] |= {"task": "multilabel", "label-columns": "edema,mass"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    text = flat(report(tmp_path)[1].text)
    assert "The model has not learned every label" in text
    assert "Label edema: not learned. Either no site has it" in text


@pytest.mark.parametrize(
    "privacy",
    [
        {
            "per_site": {
                "a": 3,
                "b": {"epsilon": "x", "noise": [], "signal_to_noise": {"sums": "y"}},
            }
        },
        {"epsilon": 1e9, "delta": 0.0, "per_site": [], "not_covered": "none", "dropped_classes": 1},
        {"epsilon": -1, "delta": -1},
        {"epsilon": 0.5, "per_site": {"a": {"signal_to_noise": {"sums": 1e200, "counts": 0}}}},
    ],
)
def test_odd_privacy_never_stops_the_report(tmp_path: Path, privacy: Any) -> None:
    assert "</html>" in report(make_run(tmp_path, ["a", "b"], metrics={"privacy": privacy}))[0]


def test_a_run_that_asked_for_privacy_and_used_nothing_promises_nothing(tmp_path: Path) -> None:
    make_run(
        tmp_path, ["a"], metrics={"status": "failed", "failure": "1 of 4 sites, the quorum is 2"}
    )
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["config"] |= {"epsilon": 4.0, "delta": 1e-5}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    text = flat(report(tmp_path)[1].text)
    assert "No surrogate was used, so there is no privacy guarantee to report" in text
    assert "Nothing protects" not in text
