"""Values of a target in every kind of source: read, refused, or left out one by one."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar
from tests import dicom_files

Cells = list[tuple[Any, Any]]
KINDS = ("imagefolder", "dicom", "parquet", "safetensors")
LABELS: dict[str, Scalar] = {"task": "multilabel", "label-columns": "edema,nodule"}
NUMBER: dict[str, Scalar] = {
    "task": "regression",
    "value-columns": "edema,nodule",
    "target-range": "0,10",
}
nan = math.nan


def write(folder: Path, kind: str, cells: Cells, train: int = 0) -> None:
    """Records with two columns, None for an empty cell."""
    pixels = [np.full((4, 4), 20 * (number + 1), np.uint8) for number in range(len(cells))]
    columns = {name: [row[at] for row in cells] for at, name in enumerate(("edema", "nodule"))}
    if kind == "safetensors":
        tensors = {
            name: torch.tensor([nan if cell is None else cell for cell in own]).double()
            for name, own in columns.items()
        }
        x = torch.from_numpy(np.stack([each.flatten() for each in pixels])).float()
        # A list of classes is nothing to a run of other targets.
        save_file({"x": x, **tensors}, folder / "f.safetensors", {"classes": "absent,present"})
        return
    if kind == "parquet":
        files = []
        for each in pixels:
            file = io.BytesIO()
            Image.fromarray(each).save(file, "PNG")
            files.append(file.getvalue())
        pq.write_table(pa.table({"image": files, **columns}), folder / "all.parquet")
        return
    lines = ["path,edema,nodule"]
    for number, (each, row) in enumerate(zip(pixels, cells, strict=True)):
        name = f"{number}.{'dcm' if kind == 'dicom' else 'png'}"
        if kind == "dicom":
            dicom_files.save(folder / name, dicom_files.image(each, PatientID=f"P{number}"))
        else:
            Image.fromarray(each).save(folder / name)
        lines.append(",".join([name, *("" if cell is None else str(cell) for cell in row)]))
    (folder / "table.csv").write_text("\n".join(lines) + "\n")


def read(folder: Path, kind: Any, settings: dict[str, Scalar], one_by_one: bool = False) -> Dataset:
    run = parse_run(settings)
    source = DataSource(
        kind,
        str(folder),
        classes=run.settings.classes,
        target=run.target,
        one_by_one=one_by_one,
        noisy=one_by_one,
        test_fraction=0.2,
    )
    return load(source, seed=0)


def rows_of(dataset: Dataset) -> list[list[float]]:
    assert isinstance(dataset.values, Tensor)
    return sorted(dataset.values.nan_to_num(nan=-1).tolist())


@pytest.mark.parametrize("kind", KINDS)
def test_labels_are_read_with_their_gaps(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, [(1, 0), (0, None), (None, 1), (1, 1)])
    found = read(tmp_path, kind, LABELS)
    assert rows_of(found) == [[-1, 1], [0, -1], [1, 0], [1, 1]]
    assert len(found) == 4
    assert (found.labels == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [(2, 1), (0.5, 0)])
def test_a_value_that_no_label_has_is_refused_and_under_privacy_left_out(
    kind: str, bad: tuple[float, float], tmp_path: Path
) -> None:
    # One type for each column, as parquet has it.
    write(tmp_path, kind, [(1.0, 0.0), (float(bad[0]), float(bad[1])), (0.0, 1.0)])
    with pytest.raises(DataError, match="not 1, 0 or empty"):
        read(tmp_path, kind, LABELS)
    left = read(tmp_path, kind, LABELS, one_by_one=True)
    assert rows_of(left) == [[0, 1], [1, 0]]
    assert left.report.lost == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_number_is_refused_and_under_privacy_left_out(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, [(1.5, 2.0), (None, 3.0), (4.0, 25.0)])
    with pytest.raises(DataError, match="no value"):
        read(tmp_path, kind, NUMBER)
    left = read(tmp_path, kind, NUMBER, one_by_one=True)
    assert rows_of(left) == [[1.5, 2.0], [4.0, 25.0]]


@pytest.mark.parametrize("kind", ["imagefolder", "dicom"])
def test_a_text_is_no_number(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind, [(1, 2), ("mild", 3), (4, 5)])
    with pytest.raises(DataError, match="no number in 'edema', such as line 3"):
        read(tmp_path, kind, NUMBER)
    assert len(read(tmp_path, kind, NUMBER, one_by_one=True)) == 2


def test_values_beyond_the_range_are_warned_of(tmp_path: Path) -> None:
    write(tmp_path, "imagefolder", [(1, 2), (40, 3), (4, 5)])
    found = read(tmp_path, "imagefolder", NUMBER)
    assert any("'edema'" in text and "33.3%" in text for text in found.report.warnings)


def test_a_folder_of_classes_has_no_values(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (4, 4)).save(tmp_path / "a" / "0.png")
    for kind in ("imagefolder", "dicom"):
        with pytest.raises(DataError, match="needs one"):
            read(tmp_path, kind, LABELS)
