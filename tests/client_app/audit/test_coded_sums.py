"""Attacks on releases of labels, numbers and times: what they must find, and what noise hides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedsurrogate.client_app.audit.disclosure import disclose
from fedsurrogate.client_app.audit.membership import CODED, MOMENT
from fedsurrogate.client_app.audit.output import check_attacks, limit_broken, page_of
from fedsurrogate.client_app.audit.release_audit import ReleaseAudit, audit_release
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import PolicyError
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.run import Run, parse_run
from tests.grid import open_new
from tests.strategies.counting.targets import COLUMNS, KINDS, records, write

OPEN = "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 1000\nepsilon-total = 10000\n"
PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}


def hospital(home: Path, count: int, policy: str = OPEN, **changes: Any) -> NodeConfig:
    home.mkdir(parents=True, exist_ok=True)
    (home / "policy.toml").write_text(policy)
    folder = write(home / "data", records(count, 3) | changes)
    own = {"site": "north", "data": "safetensors", "data-dir": str(folder)}
    own |= {"policy": str(home / "policy.toml"), "state-dir": str(home / "state")}
    open_new(own)
    own |= {"cache-dir": str(home / "cache"), "target-columns": ",".join(COLUMNS)}
    return parse_node_config(own)


def run_of(kind: str, **more: Any) -> Run:
    # One bin, so that each cell of half of the records has two.
    fewer = {"bins": 1, "time-head": "cells"} if kind == "time" else {}
    own = {"test-fraction": 0.01, "data": "safetensors", "backbone": "none"}
    return parse_run(KINDS[kind] | fewer | own | more)


def attacked(node: NodeConfig, kind: str, releases: int = 16, **more: Any) -> ReleaseAudit:
    run = run_of(kind, **more)
    return audit_release(run, node, seconds=1e9, most=releases, seed=1)


@pytest.mark.parametrize("kind", KINDS)
def test_exact_sums_of_few_records_give_them_away(kind: str, tmp_path: Path) -> None:
    count = 100 if kind == "time" else 40
    found = attacked(hospital(tmp_path, count), kind)
    assert set(found.attacks) == {CODED, MOMENT}
    assert max(each.auc for each in found.attacks.values()) > 0.55
    assert found.records == pytest.approx(count, abs=2)
    ((name, (number, _)),) = found.per_class.items()
    assert name == run_of(kind).target.title  # type: ignore[union-attr]
    assert number == found.records


def test_a_record_far_from_all_others_is_found_in_the_moment(tmp_path: Path) -> None:
    x = records(200, 3)["x"]
    x[17] *= 40
    found = attacked(hospital(tmp_path, 200, x=x), "number", releases=24)
    near = attacked(hospital(tmp_path / "near", 200), "number", releases=24)
    assert found.standing_out[0].row == 17
    assert found.standing_out[0].distance > 2 * max(
        (each.distance for each in near.standing_out), default=3.1
    )


@pytest.mark.parametrize("kind", KINDS)
def test_no_attack_beats_epsilon_one(kind: str, tmp_path: Path) -> None:
    found = attacked(hospital(tmp_path, 60), kind, **PRIVATE)
    assert found.epsilon == 1.0
    assert set(found.attacks) == {CODED}
    assert found.proven <= 1.0
    assert found.attack.low <= found.allowed
    assert not limit_broken(found, Policy(largest_attack_auc=0.99))


@pytest.mark.parametrize("kind", KINDS)
def test_a_release_without_its_noise_is_named_an_error_of_the_software(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(variance: int, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.int64)

    monkeypatch.setattr(gaussian_mechanism, "discrete_gaussian", none)
    found = attacked(hospital(tmp_path, 24), kind, 24, **PRIVATE)
    assert found.proven > 1.0
    assert "error of the software" in limit_broken(found, Policy())


@pytest.mark.parametrize("kind", ["labels", "number"])
def test_a_policy_that_limits_attacks_decides_about_targets_too(kind: str, tmp_path: Path) -> None:
    limits = OPEN + "largest-attack-auc = {}\n"
    # Of fewer, some draws have a label that all or no records of a half have.
    few = hospital(tmp_path / "few", 40, limits.format(0.55))
    with pytest.raises(PolicyError, match="largest-attack-auc"):
        check_attacks(run_of(kind), few, Policy(without_dp=True, largest_attack_auc=0.55))
    many = hospital(tmp_path / "many", 600, limits.format(0.8))
    check_attacks(run_of(kind), many, Policy(without_dp=True, largest_attack_auc=0.8))


def test_under_limits_on_attacks_no_second_range_is_released(tmp_path: Path) -> None:
    """The difference of two sums shows the records beyond the narrower range."""
    node = hospital(tmp_path, 600, OPEN + "largest-attack-auc = 0.9\n")
    policy = Policy(without_dp=True, largest_attack_auc=0.9)
    check_attacks(run_of("number"), node, policy)
    check_attacks(run_of("number"), node, policy)
    with pytest.raises(PolicyError, match="selects other records"):
        check_attacks(run_of("number", **{"target-range": "0,60"}), node, policy)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sheet_of_a_target_says_what_leaves(kind: str, tmp_path: Path) -> None:
    node = hospital(tmp_path, 150)
    run = run_of(kind)
    content, facts, page = disclose(run, node)
    text = page.read_text()
    assert json.loads(facts.read_text()) == content
    for field in run.plan.messages.sends:
        assert field.name in text
    assert "LiRA on the sums of the code" in text
    audit = attacked(node, kind, 8)
    assert "second moment" in page_of(audit)
    assert torch.isfinite(torch.tensor(audit.attack.auc))
