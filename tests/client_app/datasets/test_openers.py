"""What opens a data set's images goes to other processes, with the paths of its files and nothing
else of its records.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedsurrogate.client_app.datasets import tables
from fedsurrogate.client_app.datasets.dataset import DataSource, load
from tests.dicom_files import image, save

LEVELS = np.random.default_rng(5).integers(0, 256, (6, 8, 8), dtype=np.uint8)


def png(index: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(LEVELS[index]).save(file, "PNG")
    return file.getvalue()


def image_folder(folder: Path) -> DataSource:
    for index in range(6):
        file = folder / "ab"[index % 2] / f"{index}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(png(index))
    return DataSource("imagefolder", str(folder))


def image_table(folder: Path) -> DataSource:
    image_folder(folder)
    rows = [f"{'ab'[index % 2]}/{index}.png,x,MRN-{index}" for index in (0, 1, 1, 2, 4)]
    (folder / "t.csv").write_text("\n".join(["path,label,patient", *rows]) + "\n")
    return DataSource("imagefolder", str(folder), patient_column="patient")


def parquet(folder: Path) -> DataSource:
    table = {
        "image": [png(index) for index in range(6)],
        "label": [0, 1] * 3,
        "patient": [f"MRN-{i}" for i in range(6)],
    }
    pq.write_table(pa.table(table), folder / "x.parquet")
    return DataSource("parquet", str(folder), patient_column="patient")


def dicom(folder: Path) -> DataSource:
    for index in range(6):
        save(folder / f"{index}", image(LEVELS[index], PatientID=f"MRN-{index}"))
    rows = [f"{index},{'ab'[index % 2]}" for index in range(6)]
    (folder / "t.csv").write_text("\n".join(["path,label", *rows]) + "\n")
    return DataSource("dicom", str(folder))


def digits(folder: Path) -> DataSource:
    return DataSource("digits")


@pytest.mark.parametrize("kind", [image_folder, image_table, parquet, dicom, digits])
def test_an_opener_that_was_pickled_opens_the_same_images(
    tmp_path: Path, kind: Callable[[Path], DataSource]
) -> None:
    source = kind(tmp_path)
    for each in (source, replace(source, one_by_one=True, patients_protected=True)):
        dataset = load(each, 0)
        content = pickle.dumps(dataset.opener)
        assert b"MRN-" not in content
        opener = pickle.loads(content)
        for index in range(len(dataset)):
            assert opener(index, 0).tobytes() == dataset.open_image(index).tobytes()


def test_a_few_row_groups_of_a_parquet_file_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "KEPT", 4)
    wanted = [bytes([index]) for index in range(30)]
    for name, rows in (("train", slice(20)), ("test", slice(20, 30))):
        pq.write_table(
            pa.table({"image": wanted[rows]}), tmp_path / f"{name}.parquet", row_group_size=3
        )
    images = tables.ParquetImages([tmp_path / "train.parquet", tmp_path / "test.parquet"], "image")
    for order in (range(30), range(29, -1, -1), [0, 19, 20, 29] * 2):
        assert [images.read(index) for index in order] == [wanted[index] for index in order]
        assert sum(map(len, images._read.values())) <= 4 + 3


def test_a_file_that_cannot_be_opened_once_hides_no_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / "train.parquet", tmp_path / "test.parquet"]
    for number, file in enumerate(files):
        pq.write_table(pa.table({"image": [bytes([2 * number]), bytes([2 * number + 1])]}), file)
    opened, fail = pq.ParquetFile, [files[1]]

    def once_broken(file: Path) -> pq.ParquetFile:
        if file in fail:
            fail.remove(file)
            raise OSError("Input/output error")
        return opened(file)

    monkeypatch.setattr(pq, "ParquetFile", once_broken)
    images = tables.ParquetImages(files, "image")
    with pytest.raises(OSError, match="Input/output error"):
        images.read(0)
    assert [images.read(index) for index in range(4)] == [bytes([index]) for index in range(4)]
