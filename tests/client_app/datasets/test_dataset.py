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


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_table_names_paths_labels_split_and_site(tmp_path: Path, suffix: str) -> None:
    for i in range(4):
        picture(tmp_path / "images" / f"{i}.png", level=i)
    columns = {
        "path": [f"images/{i}.png" for i in (2, 0, 1, 3)],
        "finding": ["10", "9", "9", "10"],
        "split": ["train", "train", "test", "train"],
        "hospital": ["n", "s", "n", "s"],
    }
    if suffix == ".csv":
        lines = [",".join(columns), *(",".join(row) for row in zip(*columns.values(), strict=True))]
        (tmp_path / "list.csv").write_text("\n".join(lines))
    else:
        pq.write_table(pa.table(columns), tmp_path / "list.parquet")
    source = DataSource(
        "imagefolder", str(tmp_path), label_column="finding", site_column="hospital"
    )
    dataset = load(source, seed=0)
    assert dataset.classes == ("9", "10")
    assert dataset.labels.tolist() == [1, 0, 0, 1]
    assert dataset.is_train.tolist() == [True, True, False, True]
    assert dataset.origin == ("n", "s", "n", "s")
    assert dataset.open_image(0).getpixel((0, 0)) == (2, 0, 253)


def test_classes_of_the_run_choose_and_order_records(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", ["a", "b", "c", "b"])
    dataset = load(DataSource("parquet", str(tmp_path), classes=("c", "absent", "b")), seed=0)
    assert dataset.classes == ("c", "absent", "b")
    assert dataset.labels.tolist() == [2, 0, 2]
    assert dataset.open_image(0).getpixel((0, 0)) == (1, 1, 1)
    (loss,) = dataset.left_out
    assert (loss.count, loss.why) == (1, "1 records are of no class of the run: 'a' (1)")
    assert dataset.warnings == ("no record of 'absent'",)
    # Features are computed once for the records of all classes; this selects some of them.
    whole = load(DataSource("parquet", str(tmp_path)), seed=0)
    assert dataset.whole is not None
    assert dataset.rows is not None
    assert (dataset.whole.key, len(dataset.whole), dataset.rows.tolist()) == (
        whole.key,
        len(whole),
        [1, 2, 3],
    )
    with pytest.raises(DataError, match="no record of the classes absent"):
        load(DataSource("parquet", str(tmp_path), classes=("absent",)), seed=0)


def test_key_changes_with_content_and_place(tmp_path: Path) -> None:
    for folder in ("here", "there"):
        picture(tmp_path / folder / "a" / "1.png")
    key = load(DataSource("imagefolder", str(tmp_path / "here")), seed=0).key
    assert key == load(DataSource("imagefolder", str(tmp_path / "here")), seed=5).key
    assert key != load(DataSource("imagefolder", str(tmp_path / "there")), seed=0).key
    picture(tmp_path / "here" / "a" / "1.png", size=30)
    assert key != load(DataSource("imagefolder", str(tmp_path / "here")), seed=0).key


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
