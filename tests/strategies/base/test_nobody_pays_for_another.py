"""Hospitals that do not fit together learn it before anyone is charged, and of two equal groups
neither is blamed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.common.errors import RunError
from tests.grid import Fault, InProcessGrid, NodeConfig, events_of, metrics_of, run_federation

PRIVATE = {"epsilon": 2.0, "delta": 1e-5, "classes": "cat,dog", "method": "fedpft"}
OURS, THEIRS = "f" * 64, "0" * 64


def hospital(home: Path, name: str, fingerprint: str = OURS, width: int = 8) -> NodeConfig:
    """Its node-config; 200 training records of two classes are in its folder."""
    folder = home / name / "data"
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(len(name))
    labels = torch.arange(240) % 2
    features = torch.randn(240, width, generator=generator) + 3 * labels[:, None]
    for part, rows in (("train", slice(0, 200)), ("test", slice(200, 240))):
        tensors = {"x": features[rows].contiguous(), "y": labels[rows].contiguous()}
        about = {"classes": "cat,dog", "fingerprint": fingerprint}
        save_file(tensors, folder / f"f-{part}.safetensors", about)
    policy = home / name / "policy.toml"
    policy.write_text(
        "mechanisms = '*'\nepsilon-per-run = 8.0\nepsilon-total = 16.0\nwithout-dp = true\nexact-sums-at-models = true\n"
    )
    return {
        "site": name, "data": "safetensors", "data-dir": str(folder), "dataset": "f",
        "state-dir": str(home / name / "state"), "policy": str(policy),
    }  # fmt: skip


def charges(home: Path, name: str) -> int:
    """Number of releases in the ledger of a hospital."""
    folder = home / name
    ledger = Ledger(folder / "state/ledgers", dataset_id("safetensors", str(folder / "data")))
    return sum(entry["kind"] == "release" for entry in ledger.entries())


@pytest.mark.parametrize("run", [{}, {"method": "dp-fedavg"}], ids=["once", "in rounds"])
@pytest.mark.parametrize(
    ("print_", "width"), [(THEIRS, 8), (OURS, 6)], ids=["fingerprint", "dimension"]
)
def test_a_private_run_stops_before_a_charge_where_backbones_differ(
    run: dict[str, Any], print_: str, width: int, tmp_path: Path
) -> None:
    nodes = [hospital(tmp_path, name) for name in ("north", "south")]
    nodes.append(hospital(tmp_path, "west", print_, width))
    with pytest.raises(RunError) as found:
        run_federation(tmp_path, nodes, **PRIVATE | run)
    text = str(found.value)
    assert f"{OURS} of dimension 8 at north, south" in text
    assert f"{print_} of dimension {width} at west" in text
    assert "nothing is charged" in text
    assert [charges(tmp_path, name) for name in ("north", "south", "west")] == [0, 0, 0]


def test_the_fingerprint_that_the_message_names_lets_the_others_run(tmp_path: Path) -> None:
    nodes = [hospital(tmp_path, name) for name in ("north", "south")]
    nodes.append(hospital(tmp_path, "west", THEIRS))
    folder = run_federation(tmp_path, nodes, **PRIVATE, fingerprint=OURS)
    rejected = [each for each in events_of(folder) if each["event"] == "rejected"]
    assert [each["site"] for each in rejected] == ["west"]
    assert THEIRS[:16] in rejected[0]["reason"]
    assert metrics_of(folder)["sites"]["used"] == 2
    assert [charges(tmp_path, name) > 0 for name in ("north", "south", "west")] == [
        True, True, False,
    ]  # fmt: skip


def test_a_site_that_keeps_silent_before_is_recorded_once_and_not_charged(tmp_path: Path) -> None:
    nodes = [hospital(tmp_path, name) for name in ("north", "south", "west")]
    grid = InProcessGrid(nodes, {2: Fault(offline=True, kind="query.hello")})
    folder = run_federation(tmp_path, grid, **PRIVATE, deadline=2.0)
    dropped = [each for each in events_of(folder) if each["event"] == "dropped"]
    assert len(dropped) == 1
    assert metrics_of(folder)["sites"] == {"invited": 3, "used": 2, "rejected": 0, "dropped": 1}
    assert not charges(tmp_path, "west")
    versions = {e["version"] for e in events_of(folder) if e["event"] == "identified"}
    assert len(versions) == 1


@pytest.mark.parametrize("method", ["fedpft", "fedavg"])
def test_in_a_tie_nobody_is_rejected(method: str, tmp_path: Path) -> None:
    """Neither the larger number of records nor the order of digits says who is wrong."""
    nodes = [hospital(tmp_path, "north"), hospital(tmp_path, "west", THEIRS)]
    with pytest.raises(RunError) as found:
        run_federation(tmp_path, nodes, method=method, quorum=0.1)
    text = str(found.value)
    assert f"{OURS} of dimension 8 at north" in text
    assert f"{THEIRS} of dimension 8 at west" in text
    assert "fingerprint" in text
