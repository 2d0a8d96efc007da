from __future__ import annotations

import hashlib
import json
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from fedsurrogate.client_app.audit import disclosure
from fedsurrogate.client_app.audit.disclosure import disclose
from fedsurrogate.client_app.audit.output import check_attacks, limit_broken
from fedsurrogate.client_app.audit.release_audit import ReleaseAudit, audit_release
from fedsurrogate.client_app.features.site_features import site_name
from fedsurrogate.client_app.governance.gate import open_gate, open_ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import disclosure_of, prepare
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.common.errors import ConfigError, DataError, PolicyError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.run import parse_run
from tests import commands
from tests.examples import class_sums_run

OPEN = "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 1000\nepsilon-total = 10000\n"


def hospital(
    folder: Path, counts: list[int], d: int = 16, policy: str = OPEN, seed: int = 0
) -> NodeConfig:
    """A site with features of its own: unit Gaussians around a mean for each class."""
    drawn = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x = (
        torch.randn(len(labels), d, generator=drawn)
        + 3 * torch.randn(len(counts), d, generator=drawn)[labels]
    )
    save_file({"x": x, "y": labels}, folder / "own-train.safetensors")
    save_file(
        {"x": x[:4].contiguous(), "y": labels[:4].contiguous()}, folder / "own-test.safetensors"
    )
    (folder / "policy.toml").write_text(policy)
    own = {"site": "north", "data": "safetensors", "data-dir": str(folder), "dataset": "own"}
    files = {"policy": "policy.toml", "state-dir": "state", "cache-dir": "cache"}
    return parse_node_config(own | {key: str(folder / name) for key, name in files.items()})


def attacked(node: NodeConfig, releases: int = 8, **settings: Any) -> ReleaseAudit:
    """An audit of so many releases, from the same halves each time. Without privacy it is
    repeatable.
    """
    run = {"backbone": "none", "data": "safetensors", "fedpft.covariance": "spherical"} | settings
    return audit_release(parse_run(run), node, seconds=1e9, most=releases, seed=1)


def test_a_class_of_one_record_is_found_for_certain(tmp_path: Path) -> None:
    found = attacked(hospital(tmp_path, [60, 60, 1]))
    assert found.per_class["2"] == (1, 1.0)
    assert found.standing_out[0].class_name == "2"
    assert found.standing_out[0].where
    assert found.per_class["0"][1] < 0.9


def test_thirty_components_of_fifty_records_give_them_away(tmp_path: Path) -> None:
    found = attacked(hospital(tmp_path, [50]), 32, **{"fedpft.components": 30})
    assert found.attack.low > 0.7
    assert found.proven > 0
    assert found.nearest is not None
    assert found.nearest.smallest < 0.9


def test_a_class_of_copies_of_one_record_is_named(tmp_path: Path) -> None:
    node = hospital(tmp_path, [60, 60, 20])
    x = load_file(tmp_path / "own-train.safetensors")
    x["x"][120:] = x["x"][120] + 0.05 * torch.randn(
        20, 16, generator=torch.Generator().manual_seed(1)
    )
    save_file(x, tmp_path / "own-train.safetensors")
    found = attacked(node)
    assert found.nearest is not None
    assert found.nearest.classes == ("2",)


@pytest.mark.slow
def test_a_low_rank_surrogate_of_a_thousand_records_gives_little_away(tmp_path: Path) -> None:
    # Halves, so each release is made from a thousand.
    found = attacked(
        hospital(tmp_path, [1000, 1000]), **{"fedpft.covariance": "lowrank", "fedpft.rank": 4}
    )
    assert 0.5 < found.attack.auc < 0.62
    assert found.nearest is not None
    assert found.nearest.ratio > 0.95
    assert not found.nearest.copies


@pytest.mark.parametrize("settings", [{}, {"fedpft.components": 2}, {"fedpft.covariance": "diag"}])
def test_no_attack_beats_epsilon_one(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The noise differs each time. `proven` exceeds a true claim with a probability of at most
    1e-5, and the AUC is at 0.55, five of its standard deviations below what is allowed.
    """
    private = {"epsilon": 1.0, "delta": 1e-5, "classes": "0,1,2"} | settings
    found = attacked(hospital(tmp_path, [60, 60, 1]), **private)
    assert found.proven <= 1.0
    assert found.attack.low <= found.allowed
    assert not limit_broken(found, Policy(largest_attack_auc=0.99, smallest_nearest_ratio=0.01))


def test_a_release_with_too_little_noise_is_named_an_error_of_the_software(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def little(variance: int, count: int) -> np.ndarray:
        return np.zeros(count, dtype=np.int64)

    monkeypatch.setattr(gaussian_mechanism, "discrete_gaussian", little)
    settings = {"epsilon": 1.0, "delta": 1e-5, "classes": ",".join(map(str, range(60)))}
    found = attacked(hospital(tmp_path, [1] * 60), 16, **settings)
    assert found.proven > 1.0
    assert "error of the software" in limit_broken(found, Policy())


def test_limits_of_the_policy_refuse_a_release_without_privacy(tmp_path: Path) -> None:
    node = hospital(tmp_path, [50])
    settings = {
        "backbone": "none",
        "data": "safetensors",
        "fedpft.covariance": "spherical",
        "fedpft.components": 30,
    }
    run = parse_run(settings)
    check_attacks(run, node, Policy())
    with pytest.raises(PolicyError, match=r"AUC of .*largest-attack-auc = 0\.6"):
        check_attacks(run, node, Policy(largest_attack_auc=0.6))
    small = hospital(tmp_path / "small", [2] * 20)
    plain = parse_run(settings | {"fedpft.components": 1})
    with pytest.raises(PolicyError, match=r"smallest-nearest-ratio = 0\.5"):
        check_attacks(plain, small, Policy(smallest_nearest_ratio=0.5))
    private = parse_run(settings | {"epsilon": 1.0, "delta": 1e-5, "classes": "0"})
    check_attacks(private, node, Policy(largest_attack_auc=0.5))
    with pytest.raises(PolicyError, match="cannot be attacked before it leaves"):
        check_attacks(parse_run({"method": "fedavg"}), node, Policy(largest_attack_auc=0.6))


PLAIN: dict[str, Any] = {"backbone": "none", "data": "safetensors"}


def test_means_in_class_sums_are_held_against_the_nearest_records(tmp_path: Path) -> None:
    """Classes of two records: half of them has one, which is its mean."""
    run = class_sums_run(**PLAIN)
    check_attacks(run, hospital(tmp_path / "large", [60, 60]), Policy(smallest_nearest_ratio=0.5))
    with pytest.raises(PolicyError, match=r"smallest-nearest-ratio = 0\.5"):
        check_attacks(
            run, hospital(tmp_path / "small", [2] * 20), Policy(smallest_nearest_ratio=0.5)
        )


def test_a_class_of_one_record_has_a_mean_that_is_a_record(tmp_path: Path) -> None:
    found = attacked(hospital(tmp_path, [60, 60, 1]))
    assert found.nearest is not None
    assert found.nearest.classes == ("2",)
    assert found.nearest.smallest < 0.01


def test_repeating_a_request_or_changing_its_seed_does_not_change_the_answer(
    tmp_path: Path,
) -> None:
    """Halves were drawn anew for each request, so that one of several requests passed a limit near
    the attack's AUC.
    """
    node = hospital(tmp_path, [40, 40])
    seen: list[str] = []
    for seed in (0, 0, 1, 2):
        run = parse_run(PLAIN | {"fedpft.covariance": "spherical", "seed": seed})
        with pytest.raises(PolicyError) as refused:
            check_attacks(run, node, Policy(largest_attack_auc=0.5))
        seen.append(str(refused.value))
    assert len(set(seen)) == 1
    key = node.state / "audit.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert len(key.read_bytes()) == 32
    key.write_bytes(bytes(32))
    with pytest.raises(PolicyError) as refused:
        check_attacks(run, node, Policy(largest_attack_auc=0.5))
    assert str(refused.value) not in seen, "halves that anybody can compute"
    key.write_bytes(b"")
    with pytest.raises(PolicyError, match=r"audit\.key' is damaged"):
        check_attacks(run, node, Policy(largest_attack_auc=0.5))


def test_the_command_writes_a_page_and_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    node = hospital(tmp_path, [40, 40, 1], policy=OPEN + "largest-attack-auc = 0.52\n")
    text = " ".join(f"{key}={value!r}" for key, value in {
        "site": node.site, "data": node.data, "data-dir": node.data_dir, "dataset": "own", "policy": node.policy,
        "state-dir": node.state_dir, "cache-dir": node.cache_dir,
    }.items())  # fmt: skip
    run = 'backbone="none" data="safetensors" fedpft.covariance="spherical" fedpft.components=8'
    arguments = (
        "check",
        "--attack",
        "--node-config",
        text,
        "-c",
        run,
        "--seconds",
        "0",
        "--out",
        tmp_path / "out",
    )
    assert commands.site(monkeypatch, *arguments) == 1
    assert "largest-attack-auc = 0.52" in capsys.readouterr().err
    facts = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert facts["standing_out"][0]["class_name"] == "2"
    page = tmp_path / "out" / "audit.html"
    assert "record 81" in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert not (Path(node.state_dir) / "ledger.jsonl").exists(), "nothing is charged"


def test_what_cannot_be_attacked_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one-shot methods"):
        attacked(hospital(tmp_path / "a", [20]), method="fedavg")
    with pytest.raises(DataError, match="an audit needs four"):
        attacked(hospital(tmp_path / "b", [3]))


RUN: dict[str, Any] = {"backbone": "none", "data": "safetensors", "fedpft.covariance": "spherical"}


@pytest.mark.parametrize("earlier", [0, 1, 3])
def test_the_sheet_has_the_hash_of_what_leaves_and_the_ledger_has_the_sheets_address(
    earlier: int, tmp_path: Path
) -> None:
    node, run = hospital(tmp_path, [30, 30]), parse_run(RUN)
    open_ledger(node)
    for number in range(earlier):
        before = open_gate(node, run.settings.data, f"before {number}")
        other = SiteRequest(run, node, site_name(node, 0), flower_run=f"before {number}")
        before.let_out(prepare(other, before).release)
    (tmp_path / "coordinator.pub").write_text("ab" * 64 + "\n")
    named = node.model_copy(update={"coordinator_key": str(tmp_path / "coordinator.pub")})
    content, facts, page = disclose(run, named)
    assert content["people"]["key of the coordinator"] == "ab" * 64
    gate = open_gate(node, run.settings.data, "1")
    prepared = prepare(
        SiteRequest(run, node, site_name(node, 0), flower_run="1", info={"lineage": "one"}), gate
    )
    gate.let_out(prepared.release)
    entry = gate.ledger.entries()[-1]
    assert (
        content["outputs"]["sha256 of the payload"]
        == entry["sha256"]
        == hashlib.sha256(prepared.made.payload).hexdigest()
    )
    assert content["outputs"]["bytes"] == entry["bytes"] == len(prepared.made.payload)
    assert (node.state / f"{entry['disclosure']}.json").read_bytes() == facts.read_bytes()
    assert content["schema"] == 1
    assert facts.stem == f"{run.digest}-{hashlib.sha256(facts.read_bytes()).hexdigest()[:16]}"
    assert content["outputs"]["ledger after"]["entries"] == len(gate.ledger.entries())
    assert entry["disclosure"] in page.read_text()
    assert stat.S_IMODE(page.stat().st_mode) == 0o600


@pytest.mark.parametrize("written", [0, 1, 2])
def test_an_address_in_the_ledger_has_a_page_wherever_a_process_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    """A release takes the address of the JSON file, so the page must be there before it."""
    node, run, done = hospital(tmp_path, [30, 30]), parse_run(RUN), list[Path]()

    def killed(file: Path, content: bytes) -> None:
        if len(done) == written:
            raise KeyboardInterrupt
        done.append(file)
        replace_file(file, content)

    with monkeypatch.context() as patch:
        for name in ("check_run", "audit_release"):
            patch.setattr(disclosure, name, lambda *_, **__: None)
        patch.setattr(disclosure, "sheet", lambda *_: {"schema": 1})
        patch.setattr(disclosure, "page_of", lambda *_: "page")
        patch.setattr(disclosure, "replace_file", killed)
        with suppress(KeyboardInterrupt):
            disclose(run, node)
    address = disclosure_of(node, run.digest)
    assert bool(address) == (written == 2)
    assert not address or (node.state / f"{address}.html").is_file()


def test_a_release_without_a_sheet_has_no_address(tmp_path: Path) -> None:
    node, run = hospital(tmp_path, [30, 30]), parse_run(RUN)
    open_ledger(node)
    disclose(parse_run(RUN | {"seed": 5}), node)
    request = SiteRequest(run, node, site_name(node, 0), flower_run="1", info={"lineage": "one"})
    prepared = prepare(request, open_gate(node, run.settings.data, "1"))
    assert prepared.release.disclosure == ""


def test_a_private_sheet_has_the_claim_and_what_it_does_not_cover_but_no_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    node = hospital(tmp_path, [30, 30], policy=OPEN)
    open_ledger(node)
    text = " ".join(f"{key}={value!r}" for key, value in {
        "site": node.site, "data": node.data, "data-dir": node.data_dir, "dataset": "own", "policy": node.policy,
        "state-dir": node.state_dir, "cache-dir": node.cache_dir,
    }.items())  # fmt: skip
    run = (
        'backbone="none" data="safetensors" fedpft.covariance="spherical" epsilon=1.0 '
        'delta=1e-5 classes="0,1"'
    )
    assert (
        commands.site(monkeypatch, "check", "--sheet", "--node-config", text, "-c", run, "--json")
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    outputs = found["outputs"]
    assert outputs["claim"]["epsilon"] == 1.0
    assert outputs["claim"]["sigmas"]["sums"] > 1
    assert any("takes part" in each for each in outputs["not covered"])
    assert "the ledger's entry has the hash" in outputs["sha256 of the payload"]
    (attack,) = outputs["attacks"].values()
    assert attack["low"] <= attack["auc"] <= attack["high"]
    assert outputs["ledger after"]["epsilon spent"] > outputs["ledger before"]["epsilon spent"]
    assert {"projects", "people", "data", "settings", "outputs"} <= found.keys()
    assert str(tmp_path) not in json.dumps(
        {key: value for key, value in found.items() if key not in ("file", "page")}
    )
