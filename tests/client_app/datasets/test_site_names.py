"""Simulated sites have the names that the data give them, whatever the order of the rows."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsurrogate.client_app.datasets.partition import share
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.client_app.requests import identify_site, named_site
from fedsurrogate.common.run import parse_run

RUNS = itertools.count()
HOSPITALS = st.text("abcdefgh 0123456789éß-", min_size=1, max_size=8).map(str.strip)


def written(folder: Path, rows: list[tuple[str, str]]) -> dict[str, Any]:
    """The settings of a run over images of these hospitals and labels."""
    lines = ["path,hospital,label"]
    for at, (hospital, label) in enumerate(rows):
        Image.new("L", (4, 4), at % 256).save(folder / f"{at}.png")
        lines.append(f"{at}.png,{hospital},{label}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return {
        "data": "imagefolder",
        "data-dir": str(folder),
        "partition": "column",
        "site-column": "hospital",
        "backbone": "pixels",
        "image-size": 4,
    }


@settings(max_examples=20, deadline=None)
@given(names=st.lists(HOSPITALS.filter(bool), min_size=2, max_size=4, unique=True), data=st.data())
def test_a_simulated_site_has_the_name_of_its_records(
    names: list[str], data: st.DataObject
) -> None:
    rows = [(name, label) for name in names for label in ("no", "yes") for _ in range(6)]
    rows = data.draw(st.permutations(rows))
    with tempfile.TemporaryDirectory() as place:
        flat = written(Path(place), rows)
        run, number = parse_run(flat), str(next(RUNS))
        for at in range(len(names)):
            node = NodeConfig(partition_id=at, num_partitions=len(names))
            part = share(run, node, in_simulation=True)
            assert part.dataset.origin is not None
            found = {part.dataset.origin[row] for row in part.train.tolist()}
            assert found == {named_site(node, flat, number)}


@pytest.mark.parametrize(
    ("node", "changed"),
    [
        ({"site": "north"}, {}),
        ({"data": "digits"}, {}),
        ({}, {"partition": "iid"}),
        ({}, {"site-column": "no such column"}),
        ({"num_partitions": 3}, {}),
        ({"num_partitions": 1, "partition_id": 0}, {}),
    ],
)
def test_other_sites_keep_the_name_that_they_have(
    node: dict[str, Any], changed: dict[str, Any], tmp_path: Path
) -> None:
    flat = written(tmp_path, [("a", "no"), ("b", "yes"), ("a", "yes"), ("b", "no")] * 3)
    own = NodeConfig(**{"partition_id": 1, "num_partitions": 2} | node)
    assert named_site(own, flat | changed, str(next(RUNS))) == ""


def test_no_coordinator_reads_a_folder_by_the_name_of_a_site(tmp_path: Path) -> None:
    """Of a site that is not simulated, also where its app was started without settings of its own."""
    flat = written(tmp_path, [("a", "no"), ("b", "yes")] * 3)
    stated = {"partition-id": 1, "num-partitions": 2}
    assert identify_site(stated, 7, (flat, str(next(RUNS))))[1] == "1"
