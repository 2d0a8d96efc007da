"""Runs of DP-CVAE: they learn, compose the budget, resume, keep encoders at the sites, and no site
can stop them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.models.generators import COUNTS
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.wire.generator_files import read_generator, read_manifest
from fedsurrogate.common.wire.records import PAYLOAD
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.plan import plan
from tests.grid import FIRST_NODE, InProcessGrid, events_of, metrics_of, run_federation, sites
from tests.registry import sent_numbers
from tests.strategies.interrupted import interrupted

SMALL: dict[str, Any] = {
    "method": "dpcvae", "dpcvae.rounds": 4, "dpcvae.hidden": 0, "dpcvae.local-epochs": 1,
    "dpcvae.synthetic": 100, "head.min-steps": 100, "head.epochs": 1,
}  # fmt: skip
PRIVATE: dict[str, Any] = {"epsilon": 20.0, "delta": 1e-5, "classes": "0,1,2,3,4,5,6,7,8,9"}


def ledgers(folder: Path) -> list[list[dict[str, Any]]]:
    """The releases of each site, by site."""
    files = sorted((folder / "site-state").rglob("*.jsonl"))
    entries = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
    return [[entry for entry in each if entry["kind"] == "release"] for each in entries]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "private"), [("dpcvae", False), ("dpcvae", True), ("dpcgan", True)]
)
def test_a_run_learns_and_the_sites_ledgers_hold_all_of_it(
    tmp_path: Path, method: str, private: bool
) -> None:
    settings = {"method": method, "dpcvae.local-epochs": 2} | (PRIVATE if private else {})
    folder = run_federation(tmp_path, sites(3), **SMALL | settings)
    metrics = metrics_of(folder)
    assert metrics["accuracy"]["model"] > 0.6
    assert len(metrics["rounds"]) == 4
    assert set(metrics["downstream"]) == {"0", "1", "2"}
    assert 0 < metrics["fidelity"]["sliced"] < metrics["fidelity"]["sinkhorn"] < 2
    for name, row in metrics["downstream"].items():
        assert row["accuracy-mixed"] == pytest.approx(
            metrics["accuracy"]["per_site"][name], abs=1e-6
        )
        assert row["accuracy-local"] > 0.5
    read_generator(folder / "generator.safetensors")
    assert (metrics["privacy"] is None) is not private
    if private:
        assert metrics["rounds"][-1]["epsilon"] == pytest.approx(20.0, rel=1e-3)
        for entries in ledgers(tmp_path):
            assert [entry["round"] for entry in entries] == [1, 2, 3, 4]
            spent = epsilon_spent(
                [GaussianEvent(**event) for entry in entries for event in entry["events"]], 1e-5
            )
            assert spent == pytest.approx(metrics["privacy"]["epsilon"], rel=1e-3)
            assert spent <= 20.0 * (1 + 1e-9)
        assert read_manifest(folder / "generator.safetensors")["privacy"][
            "epsilon"
        ] == pytest.approx(20.0, rel=1e-3)
    page = write_report(folder).read_text()
    assert "Synthetic: a head on synthetic embeddings of all classes" in page
    assert "Real against synthetic features" in page
    assert "Which classes each site has" in page
    reported = [event.get("counts") for event in events_of(folder) if event["event"] == "replied"]
    assert sum(sum(counts.values()) for counts in reported[:3]) == pytest.approx(
        1797 * 0.8, rel=0.2
    )
    assert reported[3:] == [None] * (len(reported) - 3)


def test_bytes_follow_the_formula_and_no_encoder_is_in_any_message(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2))
    settings = SMALL | {"dpcvae.hidden": 16, "dpcvae.latent": 4}
    folder = run_federation(tmp_path, grid, **settings)
    kept = [load_file(file) for file in (tmp_path / "site-state").rglob("kept-4.safetensors")]
    assert len(kept) == 2
    payloads = [
        m.content.array_records[PAYLOAD][PAYLOAD].data
        for m in grid.received
        if PAYLOAD in m.content.array_records
    ]
    config = json.loads((folder / "manifest.json").read_text())["config"]
    assert config["dpcvae.hidden"] == 16
    from fedsurrogate.common.run import parse_run

    size = sent_numbers(parse_run(settings), 64, 10, 0)
    # Each tensor is sent with a name, a scale and a shape.
    for replies in (grid.replies(0), grid.replies(1)):
        lengths = [len(m.content.array_records[PAYLOAD][PAYLOAD].data) for m in replies]
        assert lengths[0] == pytest.approx(2 * 10 * 65, abs=260)
        assert all(length == pytest.approx(2 * size, abs=600) for length in lengths[1:])
    assert metrics_of(folder)["parameters"] == size
    planned = plan(parse_run(settings), 64, 10, 700, 10)[0]
    assert planned.up == pytest.approx(metrics_of(folder)["bytes"]["up"] / 2, rel=0.1)
    for tensors in kept:
        for name, tensor in tensors.items():
            if name == COUNTS:
                continue
            for bits in (tensor.half(), tensor):
                assert not any(bits.numpy().tobytes()[:32] in payload for payload in payloads), name


def test_a_private_run_that_was_interrupted_pays_for_the_round_that_was_lost(
    tmp_path: Path,
) -> None:
    settings = SMALL | PRIVATE
    half = interrupted(tmp_path, settings, after=2)
    resumed = metrics_of(run_federation(tmp_path, sites(2), **settings, resume=str(half)))
    assert "4 are charged" in resumed["stopped"]
    assert len(resumed["rounds"]) == 3
    for entries in ledgers(tmp_path):
        assert epsilon_spent(
            [GaussianEvent(**event) for entry in entries for event in entry["events"]], 1e-5
        ) <= 20.0 * (1 + 1e-9)


def test_a_private_first_round_that_failed_is_not_asked_for_twice(tmp_path: Path) -> None:
    settings = SMALL | PRIVATE
    half = interrupted(tmp_path, settings, after=0)
    with pytest.raises(RunError, match="is charged; start a new run"):
        run_federation(tmp_path, sites(2), **settings, resume=str(half))


def test_a_site_under_privacy_tells_nothing_of_its_own_and_keeps_the_generator(
    tmp_path: Path,
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text("epsilon-per-run = 20\nepsilon-total = 20\n")
    nodes = [
        {**node, "data": "digits", "policy": str(policy), "site": f"h{i}"}
        for i, node in enumerate(sites(2))
    ]
    grid = InProcessGrid(nodes)
    folder = run_federation(tmp_path, grid, **SMALL | PRIVATE)
    metrics = metrics_of(folder)
    assert "downstream" not in metrics
    assert metrics["accuracy"] == {"per_site": {}}
    for index in range(2):
        (reply,) = grid.replies(index, "evaluate")
        assert set(reply.content.config_records["info"]) == {"status", "site", "version"}
    kept = list((tmp_path / "site-state" / "generators").glob("*.safetensors"))
    assert sorted(file.stem for file in kept) == ["77-h0", "77-h1"]
    assert metrics["sites"]["used"] == 2
    assert FIRST_NODE in grid.node_configs


@pytest.mark.slow
def test_a_site_that_comes_back_under_another_number_goes_on_with_its_encoder(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(sites(3))
    push, new = grid.push_messages, FIRST_NODE + 50

    def restarted(messages: Any) -> Any:
        chosen = list(messages)
        done = [
            e for f in (tmp_path / "runs").glob("*") for e in events_of(f) if e["event"] == "round"
        ]
        if len(done) == 2 and FIRST_NODE + 1 in grid.node_configs:
            grid.node_configs[new] = grid.node_configs.pop(FIRST_NODE + 1)
            grid._states[new] = grid._states[FIRST_NODE]
            chosen = [m for m in chosen if m.metadata.dst_node_id != FIRST_NODE + 1]
        return push(chosen)

    grid.push_messages = restarted  # type: ignore[method-assign]
    folder = run_federation(
        tmp_path, grid, **SMALL | PRIVATE | {"dpcvae.rounds": 5, "deadline": 1.0}
    )
    assert [(e["site"], e["round"]) for e in events_of(folder) if e["event"] == "joined"] == [
        ("1", 4)
    ]
    asked = [
        m for m in grid.sent if m.metadata.dst_node_id == new and m.metadata.message_type == "train"
    ]
    # Round two was the last in which it was used: it continues from there, not from the start.
    reported = [m.content.config_records["info"] for m in asked]
    assert [(info["round"], info["confirmed"]) for info in reported] == [(4, 2), (5, 4)]
    assert [
        e["round"] for e in events_of(folder) if e["event"] == "replied" and e["site"] == "1"
    ] == [1, 2, 4, 5]
    assert metrics_of(folder)["sites"] == {"invited": 3, "used": 3, "rejected": 0, "dropped": 0}


def test_nobody_is_dropped_for_quorum_when_a_site_comes_back_under_another_number(
    tmp_path: Path,
) -> None:
    grid = InProcessGrid(sites(2))
    nodes, new = grid.get_node_ids, FIRST_NODE + 50

    def renumbered() -> Any:
        done = [
            e for f in (tmp_path / "runs").glob("*") for e in events_of(f) if e["event"] == "round"
        ]
        if len(done) == 1 and FIRST_NODE + 1 in grid.node_configs:
            grid.node_configs[new] = grid.node_configs.pop(FIRST_NODE + 1)
            grid._states[new] = grid._states[FIRST_NODE]
        return nodes()

    grid.get_node_ids = renumbered  # type: ignore[method-assign]
    metrics = metrics_of(run_federation(tmp_path, grid, **SMALL | {"quorum": 1.0}))
    assert [entry["used"] for entry in metrics["rounds"]] == [2, 2, 2, 2]
    assert metrics["sites"]["invited"] == 2


def test_a_full_disk_costs_a_site_the_round_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, failed = sys.modules["fedsurrogate.client_app.requests"].stage_file, []

    def full(file: Path, content: bytes) -> Path:
        if file.name == "kept-2.safetensors" and file.parent.name.endswith("-1") and not failed:
            failed.append(file)
            raise OSError("no space left on device")
        return stage(file, content)

    monkeypatch.setattr(sys.modules["fedsurrogate.client_app.requests"], "stage_file", full)
    folder = run_federation(tmp_path, sites(2), **SMALL | PRIVATE)
    assert [e["round"] for e in events_of(folder) if e["event"] == "rejected"] == [2]
    assert [
        e["round"] for e in events_of(folder) if e["event"] == "replied" and e["site"] == "1"
    ] == [1, 3, 4]
    rounds = sorted([entry["round"] for entry in entries] for entries in ledgers(tmp_path))
    assert rounds == [[1, 2, 3, 4], [1, 3, 4]]


def test_a_site_that_takes_anothers_name_during_the_run_is_refused_by_name(tmp_path: Path) -> None:
    grid = InProcessGrid(sites(2))
    nodes, new = grid.get_node_ids, FIRST_NODE + 50

    def joined() -> Any:
        done = [
            e for f in (tmp_path / "runs").glob("*") for e in events_of(f) if e["event"] == "round"
        ]
        if len(done) == 1 and new not in grid.node_configs:
            grid.node_configs[new] = dict(grid.node_configs[FIRST_NODE])
            grid._states[new] = grid._states[FIRST_NODE]
        return nodes()

    grid.get_node_ids = joined  # type: ignore[method-assign]
    folder = run_federation(tmp_path, grid, **SMALL)
    refused = [e for e in events_of(folder) if e["event"] == "rejected"]
    assert {e["reason"] for e in refused} == {
        "the site reports the name '0', which is another site's"
    }
    assert metrics_of(folder)["sites"]["used"] == 2
