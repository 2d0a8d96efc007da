"""Hospitals with a model of a private run and held-out records of their own, and runs that count."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.client_app.governance.policy import IN_FORCE
from fedsurrogate.server_app.counting import counting_budget, evaluation_settings, survey_settings
from tests.client_app.model_use.hospitals import CLASSES, federation, rows_of_classes, write_images
from tests.grid import Fault, InProcessGrid, NodeConfig, run_federation

Json = dict[str, Any]
POLICY = "epsilon-per-run = 8.0\nepsilon-total = 80.0\n"
NUMBERS = iter(range(100_000, 200_000))


def learned(home: Path, count: int = 3) -> tuple[list[NodeConfig], Path]:
    """Hospitals after a private run, each with 60 held-out records and a policy without exact
    numbers; the run folder.
    """
    nodes, folder = federation(home, count)
    rows = rows_of_classes()[120 * count :]
    for number, node in enumerate(nodes):
        held = write_images(home / f"held-{number}", rows[number * 60 : number * 60 + 60])
        (home / f"policy-{number}.toml").write_text(POLICY)
        node |= {"held-out-dir": str(held), "policy": str(home / f"policy-{number}.toml")}
    return nodes, folder


def allow(home: Path, number: int, text: str) -> None:
    """Add lines to the policy of one hospital, which is in force as one of a new site."""
    (home / f"policy-{number}.toml").write_text(POLICY + text)
    for file in home.rglob(IN_FORCE):
        file.unlink()


def renewed(home: Path, nodes: list[NodeConfig], text: str) -> list[NodeConfig]:
    """The same hospitals with fresh ledgers, and policies with these lines."""
    own = {"state-dir": "state", "policy": "policy", "check-log-dir": "check-log"}
    fresh = [
        node
        | {key: str(home / f"{name}-{k}{'.toml' * (key == 'policy')}") for key, name in own.items()}
        for k, node in enumerate(nodes)
    ]
    for k in range(len(fresh)):
        allow(home, k, text)
    return fresh


def evaluated(
    home: Path,
    nodes: list[NodeConfig],
    run: Path,
    epsilon: float = 4.0,
    faults: dict[int, Fault] | None = None,
    **more: Any,
) -> tuple[Path, Json]:
    """An evaluation of a run's model at these hospitals: run folder and result."""
    settings, simulated = evaluation_settings(run, counting_budget(epsilon, 1e-5))
    assert not simulated
    folder = counted(home, nodes, settings | more, faults)
    return folder, json.loads((folder / "evaluation.json").read_text())


def surveyed(
    home: Path, nodes: list[NodeConfig], epsilon: float = 4.0, **more: Any
) -> tuple[Path, Json]:
    """A survey of these hospitals: run folder and result."""
    folder = counted(home, nodes, survey_settings(CLASSES, counting_budget(epsilon, 1e-5)) | more)
    return folder, json.loads((folder / "survey.json").read_text())


def counted(
    home: Path,
    nodes: list[NodeConfig],
    settings: dict[str, Any],
    faults: dict[int, Fault] | None = None,
) -> Path:
    grid = InProcessGrid(nodes, faults, run_id=next(NUMBERS))
    return run_federation(home, grid, report=False, **settings)


def entries(node: NodeConfig) -> list[Json]:
    """The releases in a hospital's ledger."""
    ledger = Ledger(
        Path(str(node["state-dir"])) / "ledgers",
        dataset_id(str(node["data"]), str(node["data-dir"])),
    )
    return [entry for entry in ledger.entries() if entry["kind"] == "release"]
