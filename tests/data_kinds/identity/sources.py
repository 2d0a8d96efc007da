"""Small sources of labelled images: a table of paths, parquet files, folders of classes, DICOM."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from fedsurrogate.client_app.datasets.dataset import Dataset, DataSource, load

SIDE = 4
PRIVATE: dict[str, Any] = {"one_by_one": True, "noisy": True}


def picture(number: int) -> bytes:
    """A PNG file with a content of its own."""
    file = io.BytesIO()
    pixels = np.full((SIDE, SIDE), number % 251, dtype=np.uint8)
    pixels[0, 0] = number // 251
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def pictures(folder: Path, count: int) -> list[str]:
    """Images in a folder; returns their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.png").write_bytes(picture(number))
    return [f"{number}.png" for number in range(count)]


def csv_source(folder: Path, columns: dict[str, Sequence[Any]], **options: Any) -> None:
    """Images, and a CSV table of them as pandas writes it."""
    count = len(next(iter(columns.values())))
    frame = pd.DataFrame({"path": pictures(folder, count), **columns})
    frame.to_csv(folder / options.pop("file", "labels.csv"), index=False, **options)


def parquet_table(folder: Path, columns: dict[str, Sequence[Any]]) -> None:
    """Images, and a parquet table of them."""
    count = len(next(iter(columns.values())))
    table = pa.table({"path": pictures(folder, count), **columns})
    pq.write_table(table, folder / "labels.parquet")


def parquet_images(folder: Path, columns: dict[str, Sequence[Any]]) -> None:
    """One parquet file with images in it."""
    folder.mkdir(parents=True, exist_ok=True)
    count = len(next(iter(columns.values())))
    table = pa.table({"image": [picture(number) for number in range(count)], **columns})
    pq.write_table(table, folder / "data.parquet")


def dicom_table(folder: Path, columns: dict[str, Sequence[Any]]) -> None:
    """DICOM files, and a CSV table that names them by path."""
    from tests.dicom_files import image, save

    folder.mkdir(parents=True, exist_ok=True)
    count = len(next(iter(columns.values())))
    names = [f"{number}.dcm" for number in range(count)]
    for number, name in enumerate(names):
        pixels = np.full((SIDE, SIDE), number, dtype=np.uint8)
        save(folder / name, image(pixels, PatientID=str(number)))
    pd.DataFrame({"path": names, **columns}).to_csv(folder / "labels.csv", index=False)


WRITERS = {
    "table": ("imagefolder", csv_source),
    "parquet table": ("imagefolder", parquet_table),
    "parquet": ("parquet", parquet_images),
    "dicom": ("dicom", dicom_table),
}


def read(kind: str, folder: Path, **more: Any) -> Dataset:
    """The source of a writer, read."""
    return load(DataSource(kind, str(folder), **more), 0)  # type: ignore[arg-type]


def classes_of(dataset: Dataset) -> list[str]:
    """The class of every record."""
    return [dataset.classes[label] for label in dataset.labels.tolist()]


def folders(root: Path, classes: dict[str, int], first: int = 0) -> None:
    """Class folders with so many images; first: the number of the first."""
    number = first
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (root / name / f"{number}.png").write_bytes(picture(number))
            number += 1
