"""Hospitals whose records have labels, numbers, or times of events, for runs that count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from tests.grid import FAST, InProcessGrid, NodeConfig, run_federation
from tests.strategies.counting.hospitals import POLICY

KINDS: dict[str, dict[str, Any]] = {
    "labels": {"task": "multilabel", "label-columns": "edema,mass"},
    "number": {"task": "regression", "value-columns": "fraction", "target-range": "0,100"},
    "time": {
        "task": "survival",
        "time-column": "months",
        "event-column": "died",
        "time-unit": "months",
        "horizon": 12.0,
        "bins": 4,
    },
}
COLUMNS = ("edema", "mass", "fraction", "months", "died")
LEARNED: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
Tables = dict[str, np.ndarray]


def records(count: int, seed: int) -> Tables:
    """Features, and the values of all targets, which follow from the first two features."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 6))
    signal = x[:, 0] - x[:, 1]
    there = (signal[:, None] + draw.normal(size=(count, 2)) > [0.0, 1.0]).astype(float)
    there[draw.random((count, 2)) < [0.0, 0.3]] = np.nan
    death = draw.exponential(12 * np.exp(-signal))
    last = draw.uniform(2, 20, count)
    columns = {
        "edema": there[:, 0],
        "mass": there[:, 1],
        "fraction": 50 + 12 * signal + 4 * draw.normal(size=count),
        "months": np.minimum(death, last),
        "died": (death <= last).astype(float),
    }
    return {"x": x} | columns


def write(folder: Path, tables: Tables) -> Path:
    """The records of one hospital as a file."""
    folder.mkdir(parents=True)
    save_file(
        {
            name: torch.from_numpy(each if name != "x" else each.astype(np.float32)).contiguous()
            for name, each in tables.items()
        },
        folder / "records.safetensors",
    )
    return folder


def hospitals(home: Path, sizes: tuple[int, ...] = (400, 300, 200)) -> list[NodeConfig]:
    """Hospitals, each with half as many held-out records."""
    nodes: list[NodeConfig] = []
    for number, size in enumerate(sizes):
        name = f"clinic-{number}"
        (home / f"policy-{number}.toml").write_text(POLICY)
        nodes.append(
            {
                "site": name,
                "data": "safetensors",
                "data-dir": str(write(home / name, records(size, number))),
                "held-out-dir": str(
                    write(home / f"held-{number}", records(size // 2, 50 + number))
                ),
                "target-columns": ",".join(COLUMNS),
                "policy": str(home / f"policy-{number}.toml"),
                "state-dir": str(home / f"{name}-state"),
                "cache-dir": str(home / f"{name}-cache"),
            }
        )
    return nodes


def learned(home: Path, nodes: list[NodeConfig], kind: str) -> Path:
    """The folder of a private run that learned the target."""
    return run_federation(home, InProcessGrid(nodes), **(FAST | LEARNED | KINDS[kind]))
