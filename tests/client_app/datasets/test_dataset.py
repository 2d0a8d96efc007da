import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedsurrogate.client_app.datasets.dataset import (
    DataSource,
    load,
)
from fedsurrogate.common.errors import DataError


def picture(path: Path, level: int = 100, size: int = 12) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (size, size), (level, 0, 255 - level)).save(path)
    return path


def png(level: int) -> bytes:
    file = io.BytesIO()
    Image.new("L", (6, 6), level).save(file, "PNG")
    return file.getvalue()


def write_parquet(
    path: Path, labels: list[object], names: list[str] | None = None, **columns: list[str]
) -> None:
    # No image is in training and test.
    first = 100 if path.stem.endswith("test") else 0
    image = pa.array([{"bytes": png(first + i), "path": f"{i}.png"} for i in range(len(labels))])
    table = pa.table({"image": image, "label": labels, **columns})
    if names:
        info = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path)


def test_digits_keep_all_17_grey_levels() -> None:
    digits = load(DataSource("digits"), seed=0)
    assert len(digits) == 1797
    assert digits.classes == tuple("0123456789")
    levels = {
        level for i in range(100) for level in np.asarray(digits.open_image(i)).ravel().tolist()
    }
    assert len(levels) == 17
    assert digits.open_image(0).mode == "RGB"


def test_sixteen_bit_radiographs_keep_their_contrast(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    values = np.linspace(0, 65535, 256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "a" / "x.png")
    image = load(DataSource("imagefolder", str(tmp_path)), seed=0).open_image(0)
    assert np.asarray(image)[..., 0].ravel().tolist() == list(range(256))


def test_large_jpegs_are_decoded_smaller_but_never_below_twice_the_need(tmp_path: Path) -> None:
    picture(tmp_path / "a" / "x.jpg", size=1000)
    dataset = load(DataSource("imagefolder", str(tmp_path)), seed=0)
    assert dataset.open_image(0).size == (1000, 1000)
    assert dataset.open_image(0, shortest=200).size == (500, 500)


def test_labels_must_be_names_or_numbers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "real.parquet", [0.5, 1.0])
    assert load(DataSource("parquet", str(tmp_path), ("real",)), seed=0).classes == ("0.5", "1")
    write_parquet(tmp_path / "gap.parquet", ["a", None])
    write_parquet(tmp_path / "beyond.parquet", [0, 2], ["a", "b"])
    with pytest.raises(DataError, match=r"1 of 2 records have no label .* such as row 2"):
        load(DataSource("parquet", str(tmp_path), ("gap",)), seed=0)
    with pytest.raises(DataError, match="names 2 classes but has the label 2"):
        load(DataSource("parquet", str(tmp_path), ("beyond",)), seed=0)
