"""Hospitals with false data are capped or left out, and named; the model is nearly that of the
honest hospitals.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.server_app.refit import refit
from tests.grid import (
    Fault,
    InProcessGrid,
    events_of,
    metrics_of,
    run_federation,
    sites,
    surrogates_of,
)
from tests.hostile_sites import claiming, renamed

QUICK: dict[str, Any] = {"head.min-steps": 200, "head.epochs": 1, "fedpft.covariance": "diag"}
NEXT = {str(digit): str((digit + 1) % 10) for digit in range(10)}
SWAP = {"3": "8", "8": "3"}
Change = Callable[[bytes], bytes]


def federate(folder: Path, count: int, hostile: dict[int, Change], **settings: Any) -> Path:
    grid = InProcessGrid(
        sites(count), {node: Fault(payload=change) for node, change in hostile.items()}
    )
    return run_federation(folder, grid, **QUICK | settings)


def without(folder: Path, count: int, absent: set[int], **settings: Any) -> Path:
    grid = InProcessGrid(sites(count), {node: Fault(offline=True) for node in absent})
    return run_federation(folder, grid, **QUICK | {"deadline": 0.2, "quorum": 0.1} | settings)


def accuracy(folder: Path) -> float:
    return float(metrics_of(folder)["accuracy"]["model"])


def test_a_count_of_a_hundred_million_does_not_own_the_model(tmp_path: Path) -> None:
    lie = {1: lambda payload: claiming(10**8, renamed(NEXT, 1, payload))}
    folder = federate(tmp_path / "among", 5, lie, partition="iid")
    assert accuracy(folder) > accuracy(without(tmp_path / "alone", 5, {1}, partition="iid")) - 0.03
    assert "1" in metrics_of(folder)["card"]["suspects"]


def test_a_count_of_a_hundred_million_is_capped_where_nobody_is_screened(tmp_path: Path) -> None:
    lie = {1: partial(claiming, 10**8)}
    folder = federate(tmp_path, 5, lie, partition="iid", defence="none")
    card = metrics_of(folder)["card"]
    assert card["capped"].keys() == {"1"}
    assert card["capped"]["1"] < 1e-5
    (event,) = (event for event in events_of(folder) if event["event"] == "capped")
    assert (event["site"], event["kept"]) == ("1", card["capped"]["1"])
    assert accuracy(folder) > 0.85


def test_ten_times_its_records_do_not_turn_one_class_into_another(tmp_path: Path) -> None:
    folder = federate(tmp_path / "among", 5, {2: partial(renamed, SWAP, 10)}, partition="iid")
    assert accuracy(folder) > accuracy(without(tmp_path / "alone", 5, {2}, partition="iid")) - 0.03
    (event,) = (event for event in events_of(folder) if event["event"] == "suspect")
    assert event["site"] == "2"
    assert event["score"] >= 1
    assert "points of records that are placed right" in event["reason"]


@pytest.mark.parametrize(
    "lie", [partial(renamed, NEXT, 1), partial(renamed, SWAP, 10)], ids=["shift", "swap x10"]
)
def test_two_hostile_of_ten_cost_at_most_five_points(tmp_path: Path, lie: Change) -> None:
    folder = federate(tmp_path / "among", 10, {0: lie, 5: lie}, partition="iid")
    alone = without(tmp_path / "alone", 10, {0, 5}, partition="iid")
    assert abs(accuracy(folder) - accuracy(alone)) < 0.05
    effects = metrics_of(folder)["card"]["effects"]
    lowered = {site for site, effect in effects.items() if effect["kept"] < 1}
    assert lowered
    assert lowered <= {"0", "5"}


def test_a_suspect_stays_stored_and_refit_leaves_it_out_as_well(tmp_path: Path) -> None:
    folder = federate(tmp_path, 5, {2: partial(renamed, NEXT, 1)}, partition="iid")
    assert "2.pb" in surrogates_of(folder)
    again, _ = refit(folder)
    ours, theirs = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in ours)
    back, _ = refit(folder, defence="none")
    everyone = json.loads((back / "manifest.json").read_text())
    assert everyone["sites"] == ["0", "1", "2", "3", "4"]
    assert "suspects" not in everyone
    with pytest.raises(ConfigError, match="defence = 'all'"):
        refit(folder, defence="all")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_sites_that_hold_few_classes_are_not_suspected(tmp_path: Path, seed: int) -> None:
    settings = {"alpha": 0.1, "seed": seed, "head.min-steps": 20}
    screened = federate(tmp_path / "screen", 10, {}, **settings)
    assert metrics_of(screened)["card"]["suspects"] == {}
    plain = federate(tmp_path / "none", 10, {}, defence="none", **settings)
    ours, theirs = load_file(screened / "model.safetensors"), load_file(plain / "model.safetensors")
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_under_privacy_ten_times_the_records_are_capped_or_refused(tmp_path: Path) -> None:
    private = {"epsilon": 8.0, "delta": 1e-5, "fedpft.covariance": "spherical", "partition": "iid"}
    folder = federate(tmp_path, 5, {1: partial(claiming, 1000)}, **private)
    metrics = metrics_of(folder)
    # The noise of its sums, which is ten times as large as well, may be more than the run's noise
    # allows.
    assert (
        metrics["sites"]["rejected"]
        or "1" in metrics["card"]["capped"]
        or "1" in metrics["card"]["suspects"]
    )
    assert accuracy(folder) > 0.7


@pytest.mark.parametrize("method", ["fedavg", "average"])
def test_updates_and_heads_of_a_site_that_claims_too_much_are_capped(
    tmp_path: Path, method: str
) -> None:
    def lie(payload: bytes) -> bytes:
        from fedsurrogate.common import surrogate_pb2 as pb

        message = pb.Parameters.FromString(payload)
        message.records = 10**8
        return message.SerializeToString(deterministic=True)

    settings = {"method": method, "fedavg.rounds": 1, "fedavg.local-epochs": 1, "partition": "iid"}
    card = metrics_of(federate(tmp_path, 4, {1: lie}, **settings))["card"]
    assert card["capped"].keys() == {"1"}
