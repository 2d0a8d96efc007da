"""Sites whose images are in bags, written as data of every kind."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from tests import dicom_files

KINDS = ("imagefolder", "dicom", "parquet", "safetensors")
SIDE, DIMENSION = 4, 16


@dataclass(frozen=True)
class Picture:
    """An image of one grey level, in a bag, of a patient, with a class; broken: it cannot be read."""

    level: int
    bag: str
    patient: str
    label: str
    broken: bool = False

    @property
    def pixels(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return np.full((SIDE, SIDE), self.level, np.uint8)


def pictures(most: int = 8) -> st.SearchStrategy[list[Picture]]:
    """Images in bags; what a bag says of its target and patient is the same in each image."""
    shuffled = st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.booleans()), min_size=1, max_size=most
    )

    def made(found: Sequence[tuple[int, int, bool]]) -> list[Picture]:
        # Levels differ, so no image is a copy of another.
        return [
            Picture(3 * at + 5, str(bag), str(patient), "ab"[(bag + patient) % 2], broken)
            for at, (patient, bag, broken) in enumerate(found)
        ]

    return shuffled.map(made)


def write(folder: Path, kind: str, images: Sequence[Picture]) -> dict[str, Any]:
    """Write them, and return keys of the node-config."""
    folder.mkdir(parents=True, exist_ok=True)
    node = {"data": kind, "data-dir": str(folder), "patient-column": "who", "bag-column": "part"}
    who, part = [int(each.patient) for each in images], [int(each.bag) for each in images]
    if kind == "safetensors":
        rows = [[float("nan") if each.broken else each.level / 255] * DIMENSION for each in images]
        content = {
            "x": torch.tensor(rows).reshape(-1, DIMENSION),
            "y": torch.tensor(["ab".index(each.label) for each in images], dtype=torch.int64),
            "who": torch.tensor(who, dtype=torch.int64),
            "part": torch.tensor(part, dtype=torch.int64),
        }
        save_file(content, folder / "f.safetensors", {"classes": "a,b"})
        return node
    if kind == "parquet":
        table = {
            "image": pa.array([_png(each) for each in images], pa.binary()),
            "label": pa.array([each.label for each in images], pa.string()),
            "who": pa.array(list(map(str, who)), pa.string()),
            "part": pa.array(list(map(str, part)), pa.string()),
        }
        pq.write_table(pa.table(table), folder / "all.parquet")
        return node
    lines = ["path,label,who,part"]
    for at, each in enumerate(images):
        name = f"{at:03}.{'dcm' if kind == 'dicom' else 'png'}"
        if kind == "dicom":
            image = dicom_files.image(each.pixels, PatientID=each.patient)
            if each.broken:
                image.PixelData = b"\0\0"
            dicom_files.save(folder / name, image)
        else:
            (folder / name).write_bytes(_png(each))
        lines.append(f"{name},{each.label},{each.patient},{each.bag}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return node


def _png(each: Picture) -> bytes:
    file = io.BytesIO()
    Image.fromarray(each.pixels).save(file, "PNG")
    return file.getvalue()[: 40 if each.broken else None]
