"""Data sets from records in memory: classes and their order, splits, what is left out, and which of the
records a site has.
"""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets import dataset as module
from fedsurrogate.client_app.datasets import partition
from fedsurrogate.client_app.datasets.dataset import (
    Dataset,
    DataSource,
    class_order,
    folder_of,
    load,
    load_all,
    stratified_split,
)
from fedsurrogate.client_app.datasets.left_out import SourceError
from fedsurrogate.client_app.datasets.partition import share
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings import DataKind


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_site_is_a_source_by_its_own_settings(unit: str, private: bool, parts: int) -> None:
    budget = {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"} if private else {"classes": "a"}
    run = parse_run(budget)
    at = 1 if parts > 1 else 0
    node = NodeConfig(
        site="s", data="parquet", data_dir="/d", dataset=("x", "y", "z"), label_column="l", patient_column="p",
        dicom_frames="first", unit=unit, partition_id=at, num_partitions=parts,
    )  # fmt: skip
    assert DataSource.of_node(node, run) == DataSource(
        kind="parquet", folder="/d", names=("x", "y", "z")[at : at + 1] if private else ("x", "y", "z"),
        label_column="l", patient_column="p", test_fraction=run.settings.test_fraction,
        classes=run.settings.classes, frames="first", one_by_one=private,
        patients_protected=node.protects == "patient", noisy=private,
    )  # fmt: skip


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=24),
    st.sampled_from([0.0, 0.1, 0.2, 0.5, 0.9, 1.0]),
    st.integers(0, 99),
)
def test_a_share_of_every_class_is_held_out_and_never_its_last_record(
    labels: list[int], part: float, seed: int
) -> None:
    found = stratified_split(torch.tensor(labels), part, seed)
    generator = torch.Generator().manual_seed(seed)
    wanted = [True] * len(labels)
    for label in sorted(set(labels)):
        own = [at for at, each in enumerate(labels) if each == label]
        # Half a record counts as one.
        held = min(math.floor(len(own) * part + 0.5), len(own) - 1)
        for place in torch.randperm(len(own), generator=generator).tolist()[:held]:
            wanted[own[place]] = False
    assert found.tolist() == wanted
    patients = [f"p{at // 2}" for at in range(len(labels))]
    whole = stratified_split(torch.tensor(labels), part, seed, patients)
    firsts = stratified_split(torch.tensor(labels[::2]), part, seed)
    assert whole.tolist() == [bool(firsts[at // 2]) for at in range(len(labels))]


@given(st.lists(st.sampled_from(["10", "9", "09", "-1", "b", "B", ""]), max_size=7))
def test_classes_are_in_the_order_of_numbers_where_all_are_numbers(names: list[str]) -> None:
    distinct = sorted(set(names))
    if not {"b", "B", ""} & set(names):
        distinct.sort(key=int)
    assert class_order(names) == tuple(distinct)


class Files:
    """Records by the name of their data set."""

    def __init__(self, patch: pytest.MonkeyPatch, **files: Records) -> None:
        patch.setattr(module, "_read", lambda source, name: files[name or "own"])


def records(labels: str, **more: Any) -> Records:
    return Records(list(labels), "key", features=torch.arange(len(labels))[:, None], **more)


def source(**more: Any) -> DataSource:
    return DataSource("parquet", "folder", **more)


@pytest.mark.parametrize(
    ("declared", "names"),
    [
        ((None, None), ("a", "b", "c")),
        ((("c", "b", "a"), ("c", "b", "a")), ("c", "b", "a")),
        ((("b", "a"), ("c", "b")), ("a", "b", "c")),
        ((("b", "a", "z"), None), ("a", "b", "c", "z")),
        ((None, ("d", "c", "b")), ("a", "b", "c", "d")),
    ],
)
def test_data_sets_of_a_source_share_their_classes(
    monkeypatch: pytest.MonkeyPatch, declared: Any, names: tuple[str, ...]
) -> None:
    one, other = records("bab", classes=declared[0]), records("cbc", classes=declared[1])
    Files(monkeypatch, one=one, other=other)
    found = load_all(source(names=("one", "other")), 0)
    assert [each.name for each in found] == ["one", "other"]
    assert {each.classes for each in found} == {names}
    for own, text in zip(found, ("bab", "cbc"), strict=True):
        assert own.labels.tolist() == [names.index(k) for k in text]
    with pytest.raises(DataError, match=r"^dataset = 'one, other' names 2 data sets where one is"):
        load(source(names=("one", "other")), 0)
    assert load(source(names=("one",)), 0).name == "one"


@pytest.mark.parametrize("classes", [(), ("b", "a")])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("noisy", [False, True])
def test_records_of_the_runs_classes_stay_in_the_order_of_the_run(
    monkeypatch: pytest.MonkeyPatch, classes: tuple[str, ...], split: bool, noisy: bool
) -> None:
    text = "abcacbbada"
    train = torch.tensor([at % 3 > 0 for at in range(10)])
    own = records(text, is_train=train if split else None, warnings=("earlier",))
    Files(monkeypatch, own=own)
    found = load(source(classes=classes, noisy=noisy, test_fraction=0.3), 5)
    names = classes or ("a", "b", "c", "d")
    rows = [at for at, label in enumerate(text) if label in names]
    assert (found.name, found.classes, found.drawn) == ("parquet", names, not split)
    assert [names[at] for at in found.labels.tolist()] == [text[at] for at in rows]
    assert found.features is not None
    assert found.features[:, 0].tolist() == rows
    wanted = train[rows] if split else stratified_split(found.labels, 0.3, 5)
    assert found.is_train.tolist() == wanted.tolist()
    assert found.warnings[0] == "earlier"
    # Features are computed once for all classes.
    assert found.key == "key"
    if classes:
        why = "3 records are of no class of the run: 'c' (2), 'd' (1)"
        assert found.left_out == (Loss(why, 3),)
    else:
        assert found.left_out == ()
    assert found.whole is not None
    assert (len(found.whole), found.whole.key) == (10, "key")
    assert found.whole.classes == ()
    assert not found.whole.is_train.any()
    assert found.rows is not None
    assert found.rows.tolist() == rows


def test_test_records_that_leave_are_no_rows_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    same = torch.tensor([0, 1, 0, 3, 1])
    train = torch.tensor([True, False, False, True, False])
    own = records("acaba", is_train=train, same=lambda: same)
    Files(monkeypatch, own=own)
    found = load(source(classes=("a", "b")), 0)
    assert found.rows is not None
    assert found.rows.tolist() == [0, 3, 4]
    assert (found.labels.tolist(), found.is_train.tolist()) == ([0, 1, 0], [True, True, False])
    assert [each.count for each in found.left_out] == [1, 1]
    assert found.key != "key"


@pytest.mark.parametrize("one_by_one", [False, True])
def test_no_record_of_the_classes_is_refused_where_records_are_not_left_out(
    monkeypatch: pytest.MonkeyPatch, one_by_one: bool
) -> None:
    Files(monkeypatch, own=records("abacdefg"))
    asked = source(classes=("x", "y"), one_by_one=one_by_one)
    if one_by_one:
        assert len(load(asked, 0)) == 0
        return
    wanted = (
        r"^data set 'parquet' has no record of the classes x, y; it has 8 records of the classes a, b, "
        r"c, d, e; correct"
    )
    with pytest.raises(DataError, match=wanted):
        load(asked, 0)
    Files(monkeypatch, own=records(""))
    with pytest.raises(
        DataError, match=r"the classes \(none\); it has 0 records of the classes none"
    ):
        load(source(), 0)


def test_a_data_set_lies_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    assert folder_of(DataSource("parquet", str(tmp_path)), "below/x") == tmp_path
    for folder in ("", str(tmp_path / "none")):
        with pytest.raises(
            SourceError, match=rf"^data-dir = '{folder}': no such folder; .*parquet"
        ):
            folder_of(DataSource("parquet", folder), "")
    for name in ("/x", "../x", "below/../x"):
        with pytest.raises(SourceError, match=rf"^dataset = '{name}' leaves data-dir"):
            folder_of(DataSource("parquet", str(tmp_path)), name)


def test_a_record_without_a_place_is_known_by_its_number() -> None:
    own = Dataset("x", torch.zeros(3), ("a",), torch.ones(3) > 0, "key")
    assert own.where(0) == "record 1"
    assert (own.strata is own.labels, len(own)) == (True, 3)
    with pytest.raises(DataError, match="'x' holds precomputed features, no images"):
        own.open_image(0)
    placed = Dataset(
        "x",
        torch.zeros(1),
        ("a",),
        torch.ones(1) > 0,
        "key",
        opener=lambda at, shortest: (at, shortest),  # type: ignore[arg-type, return-value]
        place=lambda at: f"caf\udce9 {at}",
        groups=torch.ones(1),
    )
    assert placed.where(0) == "caf\\udce9 0"
    assert (placed.open_image(3, 7), placed.open_image(3)) == ((3, 7), (3, 0))
    assert placed.strata is placed.groups


def given_dataset(
    patch: pytest.MonkeyPatch, count: int = 12, drawn: bool = False, **more: Any
) -> Dataset:
    is_train = torch.tensor([at % 4 > 0 for at in range(count)])
    labels = torch.arange(count) % 2
    made = Dataset("own", labels, ("a", "b"), is_train, "key", drawn=drawn, **more)
    patch.setattr(partition, "load_all", lambda source, seed: [made])
    return made


OWN = NodeConfig(site="north", data="parquet", data_dir="x")


def test_a_site_without_training_records_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = given_dataset(monkeypatch)
    made.is_train[:] = False
    with pytest.raises(DataError, match=r"^site 0 of 1 has no training records; use fewer sites$"):
        share(parse_run({}), OWN)


KINDS = ("safetensors", "parquet")
NAMES = ("absent", "mild", "severe")


def write(folder: Path, kind: str, part: str, classes: list[str], labels: list[str]) -> None:
    numbers = [classes.index(label) for label in labels]
    if kind == "safetensors":
        content = {"x": torch.rand(len(labels), 2), "y": torch.tensor(numbers)}
        save_file(content, folder / f"{part}.safetensors", {"classes": ",".join(classes)})
        return
    stream = io.BytesIO()
    Image.new("L", (8, 8), len(labels)).save(stream, "PNG")
    features = {"label": {"names": classes, "_type": "ClassLabel"}}
    table = pa.table({"image": [stream.getvalue()] * len(labels), "label": numbers})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    pq.write_table(table.replace_schema_metadata(metadata), folder / f"{part}.parquet")


def names_in(folder: Path, kind: DataKind) -> list[str]:
    found = load(DataSource(kind, str(folder)), 0)
    return [found.classes[each] for each in found.labels.tolist()]


@settings(deadline=None, max_examples=20)
@given(
    st.sampled_from(KINDS),
    st.permutations(NAMES),
    st.permutations(NAMES),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=6),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=6),
)
def test_each_file_is_read_by_its_own_list(
    kind: DataKind, first: list[str], second: list[str], train: list[str], test: list[str]
) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), kind, "train", first, train)
        write(Path(folder), kind, "test", second, test)
        # Copies may leave the split, so labels are compared before.
        found = load(DataSource(kind, folder, noisy=True, one_by_one=True, classes=NAMES), 0)
        alone = [found.classes[each] for each in found.labels.tolist()]
    assert set(alone) <= {*train, *test}
    if kind == "safetensors":
        assert sorted(alone) == sorted([*train, *test])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["absent", "present"], ["no", "yes"]),
        (["absent", "present"], ["absent", "yes"]),
        (["False", "True"], ["0", "1"]),
        (["no", "yes"], ["No", "Yes", "maybe"]),
    ],
)
def test_lists_of_other_classes_are_refused_with_both(
    kind: DataKind, first: list[str], second: list[str], tmp_path: Path
) -> None:
    write(tmp_path, kind, "train", first, first)
    write(tmp_path, kind, "test", second, second)
    with pytest.raises(DataError, match=f"{first[1]}|{second[1]}") as error:
        names_in(tmp_path, kind)
    assert repr(first[0]) in str(error.value)
    assert repr(second[0]) in str(error.value)


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
