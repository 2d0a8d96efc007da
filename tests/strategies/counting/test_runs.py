"""Evaluations and surveys of hospitals: what leaves is charged, what the policy allows is exact,
and nothing else shows.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sklearn.datasets import load_digits

from fedsurrogate.client_app.model_use.held_out import Source, held_out
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.server_app.counting import counting_budget, evaluation_settings
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from tests.client_app.model_use.hospitals import CLASSES, rows_of_classes, write_images
from tests.grid import Fault, NodeConfig, events_of, metrics_of
from tests.strategies.counting.hospitals import (
    allow,
    entries,
    evaluated,
    learned,
    renewed,
    surveyed,
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("fedsurrogate.strategies.base.collection.POLL_SECONDS", 0.02)
    return tmp_path


@pytest.fixture(scope="module")
def learned_once(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp("hospitals")
    return home, *learned(home)


@pytest.fixture
def hospitals(
    learned_once: tuple[Path, list[NodeConfig], Path], home: Path
) -> tuple[list[NodeConfig], Path]:
    """Fresh ledgers and policies in `home`; data and run of all tests together."""
    _, nodes, run = learned_once
    return renewed(home, nodes, ""), run


def exact_accuracy(nodes: list[NodeConfig], run: Path) -> float:
    """Of the model on all held-out records, computed as `site evaluate` does."""
    model, right, tested = read_signed_model(run / "model.fedsurrogate"), 0, 0
    for node in nodes:
        found = held_out(
            model, parse_node_config(node), Source(str(node["held-out-dir"]), "imagefolder")
        )
        decided = model.classifier.predict(found.features)
        right, tested = right + int((decided == found.labels).sum()), tested + len(found.labels)
    return right / tested


def test_a_noisy_evaluation_is_charged_at_each_hospital_and_holds_the_exact_value(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    folder, result = evaluated(home, nodes, run)
    low, high = result["accuracy"]["low"], result["accuracy"]["high"]
    # The interval with five times its width: this one draw must not fail by chance.
    assert low - 2 * (high - low) <= exact_accuracy(nodes, run) <= high + 2 * (high - low)
    multiplier = gaussian_noise_multiplier(4.0, 1e-5)
    for node in nodes:
        (entry,) = entries(node)
        assert (entry["method"], entry["mechanism"], entry["epsilon"]) == (
            "evaluation",
            "counts",
            4.0,
        )
        assert [event["noise_multiplier"] for event in entry["events"]] == [
            pytest.approx(multiplier)
        ]
        assert entry["sensitivities"] == {"decisions": 1.0, "scores": pytest.approx(3**0.5)}
    card = metrics_of(folder)["privacy"]
    assert (card["mechanism"], card["epsilon"]) == ("counts", 4.0)


def test_a_hospital_that_does_not_allow_it_is_nowhere_shown_alone(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    allow(home, 1, "show-evaluation = true\n")
    folder, result = evaluated(home, nodes, run)
    assert list(result["per_site"]) == ["clinic-1"]
    assert [file.name for file in (folder / "surrogates").iterdir()] == ["clinic-1.pb"]
    assert list(metrics_of(folder)["card"]["records"]) == ["clinic-1"]
    assert result["sites"] == 3


@pytest.mark.parametrize("others", [1, 25])
def test_records_of_other_classes_are_in_no_number_and_the_result_says_so(
    others: int, home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    for k in range(3):
        allow(home, k, 'exact-counts = ["evaluation"]\n')
    wanted = exact_accuracy(nodes, run)
    digits = load_digits().target.tolist()
    unknown = [row for row in range(600) if str(digits[row]) not in CLASSES]
    rows = rows_of_classes()[360:]
    for number, node in enumerate(nodes):
        mixed = [*rows[number * 60 : number * 60 + 60], *unknown[number : 3 * others : 3]]
        node["held-out-dir"] = str(write_images(home / f"mixed-{number}", mixed))
    _, result = evaluated(home, nodes, run, epsilon=0.0)
    assert result["records"]["value"] == len(rows[:180])
    assert result["records_of"] == "the model's classes"
    assert result["accuracy"]["value"] == pytest.approx(wanted)


def test_the_held_out_records_are_counted_and_no_others(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    for k in range(3):
        allow(home, k, 'exact-counts = ["evaluation"]\nshow-evaluation = true\n')
    _, result = evaluated(home, nodes, run, epsilon=0.0)
    assert result["records"]["value"] == len(rows_of_classes()[360:540])
    assert result["accuracy"]["value"] == pytest.approx(exact_accuracy(nodes, run))
    rows, digits = rows_of_classes()[360:540], load_digits()
    wanted = [sum(str(digits.target[row]) == name for row in rows) for name in CLASSES]
    assert [row["records"]["value"] for row in result["classes"].values()] == wanted


def test_exact_counts_leave_only_where_the_policy_names_them_and_later_runs_stay_private(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    allow(home, 0, 'exact-counts = ["evaluation"]\n')
    allow(home, 1, 'exact-counts = ["survey"]\n')
    folder, result = evaluated(home, nodes, run, epsilon=0.0, quorum=0.1)
    assert (result["sites"], result["records"]["value"]) == (1, 60)
    assert [entry["mechanism"] for entry in entries(nodes[0])] == ["exact-counts"]
    assert [entries(node) for node in nodes[1:]] == [[], []]
    reasons = {e["site"]: e["reason"] for e in events_of(folder) if e["event"] == "rejected"}
    assert reasons.keys() == {"clinic-1", "clinic-2"}
    assert all("policy" in reason for reason in reasons.values())
    # The total goes on to hold for everything else.
    evaluated(home, nodes, run, epsilon=1.0)
    assert [entry["mechanism"] for entry in entries(nodes[0])] == ["exact-counts", "counts"]


def test_a_survey_counts_training_records_and_small_cells_do_not_leave(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, _ = hospitals
    digits = load_digits()
    mine, other = ([str(digits.target[row]) for row in rows_of_classes()[k:360:3]] for k in (0, 1))
    cell = max(other.count(name) for name in CLASSES)
    for k in range(3):
        allow(home, k, f'exact-counts = ["survey"]\nsmallest-cell = {(1, cell, 500)[k]}\n')
    folder, result = surveyed(home, nodes, epsilon=0.0, quorum=0.5)
    assert result["per_site"]["clinic-0"] == [mine.count(name) for name in CLASSES]
    kept = [count if (count := other.count(name)) >= cell else 0 for name in CLASSES]
    assert 0 in kept
    assert result["per_site"]["clinic-1"] == kept
    (refused,) = (e for e in events_of(folder) if e["event"] == "rejected")
    assert refused["site"] == "clinic-2"
    assert entries(nodes[2]) == []


def test_a_hospital_without_held_out_records_a_silent_one_and_a_liar_do_not_stop_the_others(
    home: Path, hospitals: tuple[list[NodeConfig], Path]
) -> None:
    nodes, run = hospitals
    nodes[0] = {key: value for key, value in nodes[0].items() if key != "held-out-dir"}
    folder, result = evaluated(
        home, nodes, run, faults={1: Fault(offline=True)}, deadline=2.0, quorum=0.1
    )
    assert result["sites"] == 1
    assert {
        e["event"]: e["site"] for e in events_of(folder) if e["event"] in ("rejected", "dropped")
    } == {
        "rejected": "clinic-0",
        "dropped": "node 1002",
    }
    assert entries(nodes[0]) == []


def test_a_simulated_evaluation_shows_the_exact_values_next_to_the_noisy_ones(
    tmp_path: Path,
) -> None:
    settings = {
        "output-dir": str(tmp_path),
        "device": "cpu",
        "classes": "0,1,2",
        "image-size": 8,
        "seed": 4,
    }
    run = simulate_here(
        3, settings | {"epsilon": 8.0, "delta": 1e-5}, lambda event: None, report=False
    )
    asked, sites = evaluation_settings(run, counting_budget(8.0, 1e-5))
    folder = simulate_here(
        sites,
        asked | {"output-dir": str(tmp_path), "device": "cpu"},
        lambda event: None,
        report=False,
    )
    result = json.loads((folder / "evaluation.json").read_text())
    assert sites == 3
    assert result["exact"]["accuracy"]["value"] == pytest.approx(
        metrics_of(run)["accuracy"]["model"]
    )
    assert result["exact"]["noise"] == {"decisions": 0.0, "scores": 0.0}
    exact, noisy = (result[at]["accuracy"] if at else result["accuracy"] for at in ("exact", ""))
    assert noisy["high"] - noisy["low"] > exact["high"] - exact["low"]
