"""Hospitals with images of digits, and a run over them in one process, which leaves each its model."""

from __future__ import annotations

from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedsurrogate.client_app.model_use.store import read_index, use_model
from fedsurrogate.client_app.node_config import parse_node_config
from tests import commands
from tests.grid import FAST, InProcessGrid, NodeConfig, run_federation

CLASSES = ("1", "2", "7")
PRIVATE: dict[str, Any] = {
    "classes": ",".join(CLASSES),
    "epsilon": 8.0,
    "delta": 1e-5,
    "fedpft.covariance": "spherical",
    "backbone": "pixels",
    "image-size": 8,
}


def rows_of_classes() -> Any:
    """Rows of the digits of the classes, in the order of the files."""
    return np.flatnonzero(np.isin(load_digits().target.astype(str), CLASSES))


def write_images(root: Path, rows: Any, labelled: bool = True) -> Path:
    """Digits as PNG files, in folders of classes or in one folder."""
    digits = load_digits()
    for row in rows:
        file = root / (str(digits.target[row]) if labelled else "") / f"{row:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[row] * 15.9).astype(np.uint8)).save(file)
    return root


def hospital(home: Path, name: str, rows: Any, **more: Any) -> NodeConfig:
    """A hospital's node-config, with its images in `home`."""
    folder = write_images(home / f"{name}-images", rows)
    (home / "policy.toml").write_text(
        "without-dp = true\nsmallest-class = 1\nepsilon-per-run = 8.0\nepsilon-total = 80.0\n"
        "exact-sums-at-models = true\nexact-runs-may-differ = true\n"
    )
    found: NodeConfig = {
        "site": name,
        "data": "imagefolder",
        "data-dir": str(folder),
        "policy": str(home / "policy.toml"),
    }
    return (
        found
        | {"state-dir": str(home / f"{name}-state"), "cache-dir": str(home / f"{name}-cache")}
        | more
    )


@dataclass(frozen=True)
class Done:
    """A command's exit code and output."""

    code: int
    stdout: str
    stderr: str


def site(*words: object) -> Done:
    """Type the `site` command, and return what it printed."""
    out, errors = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(errors):
        code = commands.site(patch, *words)
    return Done(code, out.getvalue(), errors.getvalue())


def text(node: NodeConfig) -> str:
    """A node-config as a person types it."""
    return " ".join(f'{key}="{value}"' for key, value in node.items())


def federation(
    home: Path, count: int = 2, decided: bool = True, **settings: Any
) -> tuple[list[NodeConfig], Path]:
    """Hospitals after one private run, and the run folder. decided: a person at each has put the
    model in use.
    """
    rows = rows_of_classes()
    nodes = [hospital(home, f"clinic-{k}", rows[k : 120 * count : count]) for k in range(count)]
    folder = run_federation(home, InProcessGrid(nodes), **(FAST | PRIVATE | settings))
    for node in map(parse_node_config, nodes if decided else ()):
        for name in read_index(node).models:
            use_model(node, name)
    return nodes, folder
