"""Runs of FedLAP: they learn, resume, stop when the budget is spent, and no site can stop them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Synthetic
from fedsurrogate.common.wire.model_proto import pack_synthetic, unpack_synthetic
from fedsurrogate.common.wire.records import INFO
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.presets import preset_settings, presets
from tests.grid import (
    FIRST_NODE,
    Fault,
    InProcessGrid,
    events_of,
    metrics_of,
    run_federation,
    sites,
)

SMALL: dict[str, Any] = {
    "method": "fedlap", "image-size": 16, "partition": "classes", "classes-per-site": 5,
    "fedlap.width": 8, "fedlap.images-per-class": 2, "fedlap.image-steps": 40,
    "fedlap.server-steps": 40, "fedlap.rounds": 2,
}  # fmt: skip
# For runs that need not learn.
LITTLE = SMALL | {"fedlap.image-steps": 4, "fedlap.server-steps": 4}
PRIVATE: dict[str, Any] = {"epsilon": 50.0, "delta": 1e-5, "classes": "0,1,2,3,4,5,6,7,8,9"}


def tampered(change: Callable[[Synthetic], Synthetic]) -> Fault:
    return Fault(payload=lambda payload: pack_synthetic(change(unpack_synthetic(payload))))


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    lines = [
        line
        for file in (folder / "site-state").rglob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [entry for entry in map(json.loads, lines) if entry["kind"] == "release"]


@pytest.mark.slow
@pytest.mark.parametrize("private", [False, True])
def test_a_run_learns_and_tells_its_radii_its_budget_and_its_images(
    tmp_path: Path, private: bool
) -> None:
    folder = run_federation(tmp_path, sites(3), **SMALL | (PRIVATE if private else {}))
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["accuracy"]["model"] > 0.25
    first, second = metrics["rounds"]
    assert set(first["radii"]) == {"0", "1", "2"}
    assert 0 < first["moved"] <= first["radius"] * (1 + 1e-5)
    assert (metrics["privacy"] is None) is not private
    if private:
        assert first["epsilon"] < second["epsilon"] <= 50.0
        assert second["epsilon"] == pytest.approx(50.0, rel=1e-3)
        spent = [
            GaussianEvent(**event) for entry in ledger_of(tmp_path)[:2] for event in entry["events"]
        ]
        assert len(ledger_of(tmp_path)) == 6
        assert epsilon_spent(spent, 1e-5) == pytest.approx(50.0, rel=1e-3)
    page = write_report(folder).read_text()
    assert "What the sites sent" in page
    assert "How far the landscapes were trusted" in page
    assert "Not drawn" not in page or "sheets" not in page


@pytest.mark.parametrize("model", ["mlp", "linear"])
def test_features_go_the_same_way_as_images(tmp_path: Path, model: str) -> None:
    folder = run_federation(
        tmp_path, sites(2), **SMALL | {"fedlap.model": model, "fedlap.images-per-class": 4}
    )
    assert metrics_of(folder)["accuracy"]["model"] > 0.3
    assert "What the sites sent" not in write_report(folder).read_text()


def test_a_lie_about_the_radius_does_not_stop_the_run(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(3), {1: tampered(lambda s: replace(s, radius=1e-12))})
    folder = run_federation(
        tmp_path, grid, **SMALL | {"fedlap.rule": "min", "fedlap.image-steps": 4}
    )
    for entry in metrics_of(folder)["rounds"]:
        assert entry["radii"]["1"] == pytest.approx(1e-12)
        assert entry["radius"] == pytest.approx(statistics.median(entry["radii"].values()) / 10)
        assert entry["moved"] > entry["radius"] / 2
    assert [event["sites"] for event in events_of(folder) if event["event"] == "radius-raised"] == [
        ["1"],
        ["1"],
    ]


@pytest.mark.slow
def test_a_given_noise_stops_at_the_last_affordable_round_and_says_so(tmp_path: Path) -> None:
    noise = {"epsilon": 9.0, "fedlap.noise-multiplier": 1.0, "fedlap.rounds": 9}
    folder = run_federation(tmp_path, sites(2), **LITTLE | PRIVATE | noise)
    metrics = metrics_of(folder)
    done = len(metrics["rounds"])
    assert 1 < done < 9
    assert metrics["status"] == "ok"
    assert metrics["rounds"][-1]["epsilon"] <= 9.0
    assert metrics["privacy"]["epsilon"] == pytest.approx(
        metrics["rounds"][-1]["epsilon"], rel=1e-6
    )
    assert f"allows {done} of 9 rounds" in metrics["stopped"]
    assert "stopped early" in write_report(folder).read_text()
    with pytest.raises(ConfigError, match="one round spends"):
        run_federation(tmp_path, sites(2), **LITTLE | PRIVATE | noise | {"epsilon": 0.5})


def test_sites_whose_own_budget_ends_in_the_middle_leave_the_model_of_the_last_round(
    tmp_path: Path,
) -> None:
    policy = tmp_path / "policy.toml"
    # Four rounds with the same noise; a site's own limit allows two.
    noise = {"epsilon": 20.0, "fedlap.noise-multiplier": 1.0, "fedlap.rounds": 3}
    two = epsilon_spent([GaussianEvent(1.0, 1.0, 2)], 1e-5)
    policy.write_text(f"epsilon-per-run = 20.0\nepsilon-total = {two + 0.01}\n")
    folder = run_federation(tmp_path, sites(2, policy=str(policy)), **LITTLE | PRIVATE | noise)
    metrics = metrics_of(folder)
    assert [entry["round"] for entry in metrics["rounds"]] == [1, 2]
    assert metrics["status"] == "ok"
    assert "privacy budgets do not allow more" in metrics["stopped"]
    assert metrics["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert metrics["accuracy"]["model"] == pytest.approx(metrics["rounds"][-1]["accuracy"])
    assert metrics["privacy"]["epsilon"] == pytest.approx(two)
    assert (folder / "model.safetensors").exists()
    assert len(ledger_of(tmp_path)) == 4, "what was refused was never charged"


def test_a_word_about_budgets_does_not_end_a_run_that_has_none(tmp_path: Path) -> None:
    def lies(record: Any) -> None:
        record[INFO]["status"] = "budget"

    def quiet(messages: Any) -> Any:
        chosen = list(messages)
        if any(e["event"] == "round" for f in (tmp_path / "runs").glob("*") for e in events_of(f)):
            grid.faults |= {FIRST_NODE + 1: Fault(reply=lies), FIRST_NODE + 2: Fault(offline=True)}
        return push(chosen)

    grid = InProcessGrid(sites(3))
    push, grid.push_messages = grid.push_messages, quiet  # type: ignore[method-assign]
    with pytest.raises(RunError, match="round 2: quorum missed"):
        run_federation(tmp_path, grid, **LITTLE | {"deadline": 0.5, "quorum": 0.6})


@pytest.mark.slow
def test_a_private_round_that_failed_is_paid_for_when_the_run_goes_on(tmp_path: Path) -> None:
    settings = LITTLE | PRIVATE | {"fedlap.rounds": 3, "deadline": 0.5, "quorum": 1.0}
    grid = InProcessGrid(sites(2))
    push = grid.push_messages

    def quiet(messages: Any) -> Any:
        chosen = list(messages)
        if any(e["event"] == "round" for f in (tmp_path / "runs").glob("*") for e in events_of(f)):
            grid.faults |= {FIRST_NODE + 1: Fault(offline=True)}
        return push(chosen)

    grid.push_messages = quiet  # type: ignore[method-assign]
    with pytest.raises(RunError, match="round 2: quorum missed"):
        run_federation(tmp_path, grid, **settings)
    (half,) = (tmp_path / "runs").iterdir()
    metrics = metrics_of(run_federation(tmp_path, sites(2), **settings, resume=str(half)))
    assert [entry["round"] for entry in metrics["rounds"]] == [1, 2]
    assert "2 are done, 3 are charged" in metrics["stopped"]
    assert metrics["rounds"][-1]["epsilon"] == pytest.approx(50.0, rel=1e-3)
    assert len(ledger_of(tmp_path)) == 5


def test_a_budget_that_affords_no_round_is_a_failure(tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("epsilon-per-run = 20.0\nepsilon-total = 0.1\n")
    with pytest.raises(RunError, match="quorum missed"):
        run_federation(
            tmp_path, sites(2, policy=str(policy)), **LITTLE | PRIVATE | {"epsilon": 20.0}
        )


@pytest.mark.parametrize("name", presets())
def test_presets_are_settings_a_run_accepts(name: str) -> None:
    config = parse_run(preset_settings(name))
    assert name.startswith(config.settings.method)


def test_a_preset_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="fedlap-cifar10"):
        preset_settings("fedlab")
