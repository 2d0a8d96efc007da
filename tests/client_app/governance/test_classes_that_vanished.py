"""A class that the site's own settings name and its folder of data lacks keeps the site out, before
anything is charged.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from fedsurrogate.client_app.diagnostics.first_look import first_look
from fedsurrogate.client_app.governance.ledger import Ledger, dataset_id
from fedsurrogate.client_app.node_config import NodeConfig, parse_node_config
from fedsurrogate.client_app.processes.supervisor import looked_at
from fedsurrogate.common.errors import DataError
from tests.grid import NodeConfig as Flat
from tests.grid import events_of, metrics_of, run_federation

PRIVATE: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "image_size": 4, "classes": "no,yes"}


def images(folder: Path, classes: tuple[str, ...] = ("no", "yes"), count: int = 30) -> None:
    draw = np.random.default_rng(len(str(folder)))
    for at, name in enumerate(classes):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = draw.integers(100 * at, 100 * at + 80, (4, 4, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def hospital(home: Path, name: str) -> Flat:
    """Its node-config, with its classes confirmed; images of both are in its folder."""
    images(home / name / "data")
    policy = home / name / "policy.toml"
    policy.write_text("epsilon-per-run = 8.0\nepsilon-total = 16.0\n")
    return {
        "site": name, "data": "imagefolder", "data-dir": str(home / name / "data"), "policy": str(policy),
        "state-dir": str(home / name / "state"), "classes": "no,yes",
    }  # fmt: skip


def charges(home: Path, name: str) -> int:
    folder = home / name
    ledger = Ledger(folder / "state/ledgers", dataset_id("imagefolder", str(folder / "data")))
    return sum(entry["kind"] == "release" for entry in ledger.entries())


def test_a_renamed_folder_keeps_a_hospital_out_and_uncharged(tmp_path: Path) -> None:
    nodes = [hospital(tmp_path, name) for name in ("north", "south", "west")]
    # After it has joined.
    (tmp_path / "west/data/no").rename(tmp_path / "west/data/nein")
    # A folder without any record is there, as one record more or less may not show.
    for file in (tmp_path / "south/data/no").iterdir():
        file.unlink()
    folder = run_federation(tmp_path, nodes, **PRIVATE)
    assert metrics_of(folder)["sites"] == {"invited": 3, "used": 2, "rejected": 1, "dropped": 0}
    (rejected,) = (each for each in events_of(folder) if each["event"] == "rejected")
    assert rejected["site"] == "west"
    assert "no usable data" in rejected["reason"]
    log = (tmp_path / "west/state/site.log").read_text()
    assert "has no folder of 'no'; it has 'nein', 'yes'" in log
    assert [charges(tmp_path, name) > 0 for name in ("north", "south", "west")] == [
        True, True, False,
    ]  # fmt: skip


def test_a_folder_that_is_gone_is_no_reason_to_pay_for_noise(tmp_path: Path) -> None:
    """An empty one is there, and answers as one with records. No classes are named."""
    nodes = [hospital(tmp_path, name) | {"classes": ""} for name in ("north", "south", "west")]
    shutil.rmtree(tmp_path / "west/data")
    folder = run_federation(tmp_path, nodes, **PRIVATE)
    assert metrics_of(folder)["sites"]["used"] == 2
    assert not charges(tmp_path, "west")
    assert "no such folder" in (tmp_path / "west/state/site.log").read_text()


def table(folder: Path) -> None:
    images(folder)
    rows = [(str(file.relative_to(folder)), file.parent.name) for file in folder.rglob("*.png")]
    pd.DataFrame(rows, columns=["path", "label"]).to_csv(folder / "t.csv", index=False)


@pytest.mark.parametrize("kind", ["folders", "split", "table"])
def test_a_site_that_lacks_a_class_does_not_join(kind: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    if kind == "split":
        images(data / "train")
        images(data / "test", ("yes",))
    else:
        (table if kind == "table" else images)(data)
    flat: Flat = {"data": "imagefolder", "data-dir": str(data)}
    (hint,) = first_look(parse_node_config(flat), 1)
    assert 'add classes="no,yes"' in hint, "what is printed can be typed"
    own = parse_node_config({**flat, "classes": "no,yes"})
    # Once in a process of its own, as `site join` looks.
    look = looked_at if kind == "table" else partial(first_look, smallest_site=1)
    assert look(own) == []
    if kind == "table":
        text = (data / "t.csv").read_text()
        (data / "t.csv").write_text(text.replace(",no", ",nein"))
    else:
        where = data / "train" if kind == "split" else data
        shutil.move(where / "no", where / "nein")
    with pytest.raises(DataError, match=r"has no record of 'no'; it has 'nein', 'yes'") as found:
        look(own)
    assert "correct classes" in str(found.value)


def test_data_without_classes_need_none(tmp_path: Path) -> None:
    assert first_look(NodeConfig(data="digits", classes=("0",)), 1) == []
    columns = NodeConfig(data="imagefolder", data_dir=str(tmp_path), target_columns=("age",))
    images(tmp_path)
    assert first_look(columns.model_copy(update={"target_columns": ()}), 1)
