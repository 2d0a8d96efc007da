"""Features are computed once for the files of a folder, whichever records a run leaves out: otherwise
a coordinator makes a site compute for days, by columns with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from fedsurrogate.client_app.features.site_features import SiteFeatures, load_site
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.run import parse_run
from tests import dicom_files
from tests.grid import Scalar

COUNT, COLUMNS, GREY = 12, ("one", "two", "three"), 20
BASE: dict[str, Scalar] = {"image-size": 4, "device": "cpu"}
PRIVATE: dict[str, Scalar] = {"epsilon": 1.0, "delta": 1e-5}
KINDS = ("table", "parquet", "dicom", "volumes")


def write(kind: str, folder: Path, gaps: Sequence[Sequence[bool]]) -> dict[str, Scalar]:
    """Images of which each has a grey level of its own but the last, a copy of the first; a table of
    their labels and numbers, which say which image they are of. Every other label is missing.
    """
    folder.mkdir()
    greys = [*(GREY * (at + 1) for at in range(COUNT - 1)), GREY]
    rows: list[dict[str, Any]] = []
    for at, grey in enumerate(greys):
        name = f"{at}.{'dcm' if kind in ('dicom', 'volumes') else 'png'}"
        pixels = np.full((4, 4), grey, np.uint8)
        if kind in ("dicom", "volumes"):
            several = np.stack([pixels, pixels]) if kind == "volumes" and at % 3 == 0 else pixels
            # Copies within a patient count once.
            dicom_files.save(folder / name, dicom_files.image(several, PatientID=f"p{grey}"))
        else:
            Image.fromarray(pixels).save(folder / name)
        numbers = {
            column: None if gap[at] else greys.index(grey)
            for column, gap in zip(COLUMNS, gaps, strict=True)
        }
        label = f"c{greys.index(grey) % 2}" if at % 4 else None
        rows.append({"path": name, "label": label, "who": f"p{grey}"} | numbers)
    node: dict[str, Scalar] = {"data": "imagefolder" if kind == "table" else kind}
    if kind == "volumes":
        node |= {"data": "dicom", "dicom-frames": "all"}
    if kind == "parquet":
        for row in rows:
            row["image"] = (folder / str(row.pop("path"))).read_bytes()
        pq.write_table(pa.Table.from_pylist(rows), folder / "all.parquet")
    else:
        keys = list(rows[0])
        lines = [
            ",".join("" if row[key] is None else str(row[key]) for key in keys) for row in rows
        ]
        (folder / "table.csv").write_text("\n".join([",".join(keys), *lines]) + "\n")
    return node | {"data-dir": str(folder), "patient-column": "who"}


def computed(cache: Path) -> int:
    """How often features were computed."""
    return sum(each.is_dir() for each in (cache / "features").iterdir())


RUNS: dict[str, dict[str, Scalar]] = {
    **{
        column: PRIVATE
        | {"task": "regression", "value-columns": column, "target-range": f"0,{COUNT}", "classes": ""}
        for column in COLUMNS
    },
    "classes": PRIVATE | {"classes": "c0,c1"},
    "a class": PRIVATE | {"classes": "c1"},
    "an exact sum": {"classes": "c0,c1", "secure-aggregation": True, "fedpft.covariance": "gram"},
    "an exact sum of a number": {
        "task": "regression", "value-columns": "one", "target-range": f"0,{COUNT}", "classes": "",
        "secure-aggregation": True, "test-fraction": 0.4,
    },
}  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    names=st.permutations(sorted(RUNS)),
    gaps=st.lists(
        st.lists(st.booleans(), min_size=COUNT, max_size=COUNT),
        min_size=len(COLUMNS), max_size=len(COLUMNS),
    ),
)  # fmt: skip
def test_features_are_computed_once_whatever_records_runs_leave_out(
    kind: str, names: list[str], gaps: list[list[bool]]
) -> None:
    with TemporaryDirectory() as home:
        # Some records of each stay.
        kept = [[gap and 0 < at < 7 for at, gap in enumerate(own)] for own in gaps]
        node = write(kind, Path(home) / "data", kept)
        node |= {"cache-dir": f"{home}/cache", "target-columns": ",".join(COLUMNS)}
        bags: dict[str, Scalar] = {"features.bag": "mean"} if kind == "volumes" else {}
        for name in names:
            run = parse_run(BASE | bags | RUNS[name])
            site = load_site(run, parse_node_config(node), 1000.0)
            assert len(site.train.labels)
            _check(site, name)
        assert computed(Path(home) / "cache") == 1


def _check(site: SiteFeatures, name: str) -> None:
    """Each record has its own image's features: its grey level says which one it is."""
    which = (site.train.features.mean(1) * 255 / GREY).round().long() - 1
    if site.train.values is not None:
        assert torch.equal(which, site.train.values[:, 0].long()), name
    else:
        wanted = [int(site.classes[label][1:]) for label in site.train.labels.tolist()]
        assert (which % 2).tolist() == wanted, name


def test_images_without_a_row_are_not_computed(tmp_path: Path) -> None:
    """A hospital may have many more than its table names."""
    node = write("dicom", tmp_path / "data", [[False] * COUNT] * len(COLUMNS))
    table = (tmp_path / "data" / "table.csv").read_text().splitlines()
    (tmp_path / "data" / "table.csv").write_text("\n".join(table[:6]) + "\n")
    own = node | {"cache-dir": str(tmp_path / "cache"), "target-columns": ",".join(COLUMNS)}
    load_site(parse_run(BASE | RUNS["one"]), parse_node_config(own), 1000.0)
    (entry,) = (each for each in (tmp_path / "cache" / "features").iterdir() if each.is_dir())
    assert len(np.load(entry / "ok.npy")) == 5
