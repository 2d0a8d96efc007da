import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import (
    DataSource,
    class_order,
    load,
    load_all,
    stratified_split,
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


def write_features(path: Path, x: torch.Tensor, y: torch.Tensor, **metadata: str) -> None:
    save_file({"x": x, "y": y}, path, metadata=metadata or None)


def test_digits_keep_all_17_grey_levels() -> None:
    digits = load(DataSource("digits"), seed=0)
    assert len(digits) == 1797
    assert digits.classes == tuple("0123456789")
    levels = {
        level for i in range(100) for level in np.asarray(digits.open_image(i)).ravel().tolist()
    }
    assert len(levels) == 17
    assert digits.open_image(0).mode == "RGB"


def test_split_is_stratified_seeded_and_leaves_a_train_record_of_every_class() -> None:
    labels = torch.tensor([0] * 50 + [1] * 10 + [2] * 2 + [3])
    is_train = stratified_split(labels, 0.2, seed=1)
    assert [int((~is_train & (labels == c)).sum()) for c in range(4)] == [10, 2, 0, 0]
    assert torch.equal(is_train, stratified_split(labels, 0.2, seed=1))
    assert not torch.equal(is_train, stratified_split(labels, 0.2, seed=2))
    assert all((stratified_split(labels, 0.99, seed=1) & (labels == c)).any() for c in range(4))


def test_classes_sort_as_numbers_where_all_are() -> None:
    assert class_order(["10", "9", "-1", "9"]) == ("-1", "9", "10")
    assert class_order(["10", "9", "x"]) == ("10", "9", "x")


def test_image_folder_has_a_class_per_folder(tmp_path: Path) -> None:
    for first, name in ((0, "healthy"), (100, "ill")):
        for i in range(5):
            picture(tmp_path / name / f"{i}.png", level=first + i)
    dataset = load(DataSource("imagefolder", str(tmp_path)), seed=0)
    assert dataset.classes == ("healthy", "ill")
    assert dataset.labels.tolist() == [0] * 5 + [1] * 5
    assert dataset.is_train.sum() == 8
    assert dataset.open_image(3).getpixel((0, 0)) == (3, 0, 252)


def test_train_and_test_folders_are_kept_as_the_split(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 2)):
        for i in range(count):
            picture(tmp_path / "clinic" / split / "a" / f"{i}.png", level=10 * count + i)
    dataset = load(DataSource("imagefolder", str(tmp_path), ("clinic",)), seed=0)
    assert dataset.is_train.tolist() == [True] * 3 + [False] * 2


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


@pytest.mark.parametrize("path", ["../secret.png", "/etc/secret.png", "a/../../secret.png"])
def test_table_paths_cannot_leave_the_folder(tmp_path: Path, path: str) -> None:
    (tmp_path / "list.csv").write_text(f"path,label\n{path},1\n")
    with pytest.raises(DataError, match=r"line 2 .* leaves"):
        load(DataSource("imagefolder", str(tmp_path)), seed=0)


def test_dataset_names_cannot_leave_the_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="leaves data-dir"):
        load(DataSource("imagefolder", str(tmp_path), ("../other",)), seed=0)


@pytest.mark.parametrize(
    ("names", "files"),
    [(("x",), ("x-train", "x-test")), ((), ("train", "test")), (("x",), ("x",)), ((), ("only",))],
)
def test_parquet_files_are_found_by_name(
    tmp_path: Path, names: tuple[str, ...], files: tuple[str, ...]
) -> None:
    for file in files:
        write_parquet(tmp_path / f"{file}.parquet", [0, 1, 0, 1, 0, 1])
    dataset = load(DataSource("parquet", str(tmp_path), names, test_fraction=0.3), seed=0)
    assert len(dataset) == 6 * len(files)
    assert int(dataset.is_train.sum()) == (6 if len(files) == 2 else 4)
    assert [dataset.open_image(i).getpixel((0, 0)) for i in (0, 5)] == [(0, 0, 0), (5, 5, 5)]


def test_parquet_class_names_come_from_its_metadata(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", [1, 0, 1], ["zebra", "ape", "unseen"])
    dataset = load(DataSource("parquet", str(tmp_path)), seed=0)
    assert dataset.classes == ("zebra", "ape", "unseen")
    assert dataset.labels.tolist() == [1, 0, 1]


def test_parquet_takes_string_labels_and_raw_bytes(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"scan": [png(7), png(8)], "label": ["b", "a"]}), tmp_path / "x.parquet"
    )
    dataset = load(DataSource("parquet", str(tmp_path)), seed=0)
    assert dataset.labels.tolist() == [1, 0]
    assert dataset.open_image(1).getpixel((0, 0)) == (8, 8, 8)


def test_classes_of_the_run_choose_and_order_records(tmp_path: Path) -> None:
    write_parquet(tmp_path / "x.parquet", ["a", "b", "c", "b"])
    dataset = load(DataSource("parquet", str(tmp_path), classes=("c", "absent", "b")), seed=0)
    assert dataset.classes == ("c", "absent", "b")
    assert dataset.labels.tolist() == [2, 0, 2]
    assert dataset.open_image(0).getpixel((0, 0)) == (1, 1, 1)
    (loss,) = dataset.left_out
    assert (loss.count, loss.why) == (1, "1 records are of no class of the run: 'a' (1)")
    assert dataset.odd == ("no record of 'absent'",)
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


def test_features_are_taken_as_they_are(tmp_path: Path) -> None:
    x = torch.randn(6, 3).half()
    write_features(
        tmp_path / "f-train.safetensors",
        x[:4],
        torch.tensor([2, 0, 2, 1]),
        fingerprint="abc",
        classes="u,v,w",
    )
    write_features(tmp_path / "f-test.safetensors", x[4:], torch.tensor([1, 0]), fingerprint="abc")
    dataset = load(DataSource("safetensors", str(tmp_path), ("f",)), seed=0)
    assert dataset.features is not None
    assert torch.equal(dataset.features, x)
    assert dataset.classes == ("u", "v", "w")
    assert dataset.fingerprint == "abc"
    assert dataset.is_train.tolist() == [True] * 4 + [False] * 2
    with pytest.raises(DataError, match="precomputed"):
        dataset.open_image(0)


def test_several_names_share_their_classes(tmp_path: Path) -> None:
    write_parquet(tmp_path / "one.parquet", ["a", "b"])
    write_parquet(tmp_path / "two.parquet", ["c", "b"])
    one, two = load_all(DataSource("parquet", str(tmp_path), ("one", "two")), seed=0)
    assert one.classes == two.classes == ("a", "b", "c")
    assert two.labels.tolist() == [2, 1]
    assert one.key != two.key


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


@pytest.mark.parametrize("folder", ["", "missing"])
def test_missing_folder_is_named(tmp_path: Path, folder: str) -> None:
    with pytest.raises(DataError, match=r"data-dir = .*no such folder"):
        load(DataSource("parquet", str(tmp_path / folder) if folder else ""), seed=0)


def test_what_is_there_instead_is_listed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no images in class folders; it has nothing"):
        load(DataSource("imagefolder", str(tmp_path)), seed=0)
    for i in range(7):
        write_parquet(tmp_path / f"s{i}.parquet", [0])
    with pytest.raises(
        DataError,
        match=r"lacks 'q-train.parquet' and 'q-test.parquet'.*'s0.parquet'.*'s4.parquet', \.\.\.",
    ):
        load(DataSource("parquet", str(tmp_path), ("q",)), seed=0)
    with pytest.raises(DataError, match=r"lacks the columns 'finding'; it has 'image', 'label'"):
        load(DataSource("parquet", str(tmp_path), ("s1",), label_column="finding"), seed=0)
    with pytest.raises(DataError, match=r"no such sub-folder or table"):
        load(DataSource("imagefolder", str(tmp_path), ("q",)), seed=0)


def test_labels_must_be_names_or_numbers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "real.parquet", [0.5, 1.0])
    assert load(DataSource("parquet", str(tmp_path), ("real",)), seed=0).classes == ("0.5", "1")
    write_parquet(tmp_path / "gap.parquet", ["a", None])
    write_parquet(tmp_path / "beyond.parquet", [0, 2], ["a", "b"])
    with pytest.raises(DataError, match=r"1 of 2 records have no label .* such as row 2"):
        load(DataSource("parquet", str(tmp_path), ("gap",)), seed=0)
    with pytest.raises(DataError, match="names 2 classes but has the label 2"):
        load(DataSource("parquet", str(tmp_path), ("beyond",)), seed=0)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.ones(3, 2), torch.zeros(2, dtype=torch.int64), "3 rows of x but 2 of y"),
        (
            torch.tensor([[1.0], [float("nan")]]),
            torch.tensor([0, 1]),
            "NaN or infinity in 1 of 2 rows, first in row 1",
        ),
        (torch.ones(2, 2), torch.tensor([0.0, 1.0]), "must be integers"),
        (torch.ones(2), torch.tensor([0, 1]), "shape"),
    ],
)
def test_unusable_features_are_refused(
    tmp_path: Path, x: torch.Tensor, y: torch.Tensor, message: str
) -> None:
    write_features(tmp_path / "f.safetensors", x, y)
    with pytest.raises(DataError, match=message):
        load(DataSource("safetensors", str(tmp_path)), seed=0)


@pytest.mark.parametrize("kind", ["parquet", "safetensors"])
def test_files_of_another_format_are_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / f"x.{kind}").write_bytes(b"nonsense" * 10)
    with pytest.raises(DataError, match="write"):
        load(DataSource(kind, str(tmp_path)), seed=0)  # type: ignore[arg-type]
