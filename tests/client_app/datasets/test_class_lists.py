"""The numbers of a file's labels are named by the list of classes of this file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.settings import DataKind

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
def test_a_shorter_list_is_a_part_of_the_longer_one(kind: DataKind, tmp_path: Path) -> None:
    write(tmp_path, kind, "train", ["mild", "absent"], ["mild", "absent"])
    write(tmp_path, kind, "test", ["severe", "absent", "mild"], ["mild", "severe", "absent"])
    assert names_in(tmp_path, kind) == ["mild", "absent", "mild", "severe", "absent"]


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
