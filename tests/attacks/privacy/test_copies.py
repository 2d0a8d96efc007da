"""Attacks with copies: one image as several records under privacy, or in training and in test.

Under privacy, removing copies must itself be private: one record more changes at most one record of
what is left.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.datasets.images import once
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.diagnostics.site_checks import check_site
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.node_config import parse_node_config
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run
from tests.attacks.privacy.neighbours import Data, Record
from tests.attacks.privacy.visits import METHODS, PRIVATE, Hospital, Visit, close_logs

RUN = parse_run(PRIVATE | METHODS["sums spherical"])
KINDS = ("folder", "table", "features", "parquet")
COPIES = (Record(), Record(), Record(), Record(grey=3), Record("b", grey=4))


@pytest.fixture(autouse=True)
def _logs() -> Any:
    yield
    close_logs()


@pytest.mark.parametrize("unit", ["patient", "record"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_is_there_three_times_is_one_record_under_privacy(
    tmp_path: Path, kind: str, unit: str
) -> None:
    node = parse_node_config(Hospital(tmp_path / "h", kind, COPIES, unit=unit).node)
    found = load_site(RUN, node, policy_of(node).cache_mib)
    assert sorted(found.train.labels.tolist()) == [0, 0, 1]
    data = next(each for each in check_site(RUN, node) if each.what == "data")
    assert (data.state, "2 records are copies of others" in data.found) == ("WARN", True)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_with_two_labels_is_no_record_under_privacy(tmp_path: Path, kind: str) -> None:
    """Either label would do, but then a new copy could change the label of an old record: two
    changes for one.
    """
    records = (Record("a"), Record("b"), Record("b", grey=3))
    node = parse_node_config(Hospital(tmp_path / "h", kind, records, unit="record").node)
    found = load_site(RUN, node, policy_of(node).cache_mib)
    assert found.train.labels.tolist() == [1]


def records_of(rows: list[tuple[int, str, str, bool]]) -> Records:
    """Records of (content, label, patient, is_train)."""
    content, labels, who, train = zip(*rows, strict=True) if rows else ((), (), (), ())
    group, is_train = (
        torch.tensor(content, dtype=torch.int64),
        torch.tensor(train, dtype=torch.bool),
    )
    return Records(
        labels, "key", is_train, patients=who, features=group[:, None].float(), same=lambda: group
    )


def left(rows: list[tuple[int, str, str, bool]], patients: bool) -> Counter[tuple[int, str, str]]:
    """What is left for training of records (content, label, patient, is_train)."""
    found = once(records_of(rows), patients)
    assert found.features is not None
    assert found.patients is not None
    assert found.is_train is not None
    kept = zip(found.features.flatten().int().tolist(), found.labels, found.patients, strict=True)
    # Without the patient where records are protected: which of the equal records is left has no
    # effect on a release.
    every = [(number, label, one if patients else "") for number, label, one in kept]
    return Counter(itertools.compress(every, found.is_train.tolist()))


rows_ = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.sampled_from("PQR"), st.booleans()),
    max_size=9,
)


@settings(max_examples=500, deadline=None)
@given(rows=rows_, patients=st.booleans())
def test_of_each_content_of_a_unit_one_record_is_left_and_none_if_labels_differ(
    rows: list[tuple[int, str, str, bool]], patients: bool
) -> None:
    """Where records are protected, also across patients: an image that two patients have would
    count twice. Where patients are, within each.
    """
    together: dict[tuple[int, str], list[tuple[str, bool]]] = {}
    for content, label, who, train in rows:
        together.setdefault((content, who if patients else ""), []).append((label, train))
    expected = Counter(
        (content, copies[0][0], who)
        for (content, who), copies in together.items()
        if len({label for label, _ in copies}) == 1 and any(train for _, train in copies)
    )
    found = left(rows, patients)
    assert found == expected
    # So one record more changes at most one that is left, and one patient more none of another's.
    if patients:
        others = [row for row in rows if row[2] != "R"]
        assert left(others, patients) == Counter({k: n for k, n in found.items() if k[2] != "R"})
    else:
        fewer = left(rows[1:], patients)
        assert (found - fewer).total() + (fewer - found).total() <= 1


@settings(max_examples=100, deadline=None)
@given(rows=rows_, patients=st.booleans())
def test_a_site_is_shown_each_record_that_is_left_out_under_one_reason(
    rows: list[tuple[int, str, str, bool]], patients: bool
) -> None:
    labels_of: dict[tuple[int, str], list[str]] = {}
    for content, label, who, _ in rows:
        labels_of.setdefault((content, who if patients else ""), []).append(label)
    torn = sum(len(each) for each in labels_of.values() if len(set(each)) > 1)
    copies = sum(len(each) - 1 for each in labels_of.values() if len(set(each)) == 1)
    shown = once(records_of(rows), patients).left_out
    assert {"copies" in each.why: each.count for each in shown} == {
        of_copies: count for of_copies, count in ((True, copies), (False, torn)) if count
    }
    assert all(each.why.startswith(f"{each.count} ") for each in shown)


PAIRS: dict[str, tuple[str, Data, Data]] = {
    "a copy": ("folder", (Record(),), (Record(), Record())),
    "a copy with another label": ("folder", (Record(),), (Record(), Record("b"))),
    "a copy of another patient": ("table", (Record(),), (Record(), Record("a", "2"))),
    "a copied row": ("features", (Record(),), (Record(), Record())),
    "one folder more": ("folder", (Record("a"),), (Record("a"), Record("x", grey=7))),
}


@pytest.mark.parametrize("unit", ["patient", "record"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_coordinator_cannot_see_whether_there_is_a_copy(
    tmp_path: Path, name: str, unit: str
) -> None:
    kind, *data = PAIRS[name]
    visits: list[Visit] = []
    for number, each in enumerate(data):
        visits.append(
            Hospital(tmp_path / str(number), kind, each, unit=unit).visit(METHODS["sums spherical"])
        )
        close_logs()
    assert visits[0].differences(visits[1]) == []


def pictures(folder: Path, names: list[str], seed: int = 0) -> None:
    random_ = np.random.default_rng(seed)
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_.integers(0, 255, (6, 6), dtype=np.uint8)).save(file)


def copy(folder: Path, name: str, to: str) -> None:
    (folder / to).parent.mkdir(parents=True, exist_ok=True)
    (folder / to).write_bytes((folder / name).read_bytes())


def in_folders(folder: Path) -> DataSource:
    parts = itertools.product(("train", "test"), "ab", range(3))
    pictures(folder, [f"{part}/{label}/{i}.png" for part, label, i in parts])
    copy(folder, "train/a/0.png", "test/a/another name.png")
    return DataSource("imagefolder", str(folder))


def in_rows(folder: Path) -> DataSource:
    folder.mkdir()
    x = torch.randn(12, 4)
    for part, rows in (("train", [*range(6)]), ("test", [*range(6, 12), 0])):
        write_rows(folder, part, x[rows], torch.tensor(rows) % 2)
    return DataSource("safetensors", str(folder), ("f",))


def write_rows(folder: Path, part: str, x: torch.Tensor, y: torch.Tensor) -> None:
    save_file({"x": x, "y": y}, folder / f"f-{part}.safetensors", {"classes": "a,b"})


@pytest.mark.parametrize("write", [in_folders, in_rows])
def test_a_test_record_that_is_also_a_training_record_is_not_tested(
    tmp_path: Path, write: Callable[[Path], DataSource]
) -> None:
    dataset = load(write(tmp_path / "data"), seed=0)
    assert (int(dataset.is_train.sum()), int((~dataset.is_train).sum())) == (6, 6)
    assert "1 test records are copies of training records" in dataset.left_out[0].why


def test_a_split_that_is_drawn_has_no_image_on_both_sides(tmp_path: Path) -> None:
    pictures(tmp_path, [f"{label}/{i}.png" for label in "ab" for i in range(10)])
    for i in range(10):
        copy(tmp_path, f"a/{i}.png", f"a/copy {i}.png")
    for seed in range(3):
        dataset = load(DataSource("imagefolder", str(tmp_path)), seed)
        sides: list[set[bytes]] = [set(), set()]
        for row, trains in enumerate(dataset.is_train.tolist()):
            sides[trains].add(Path(dataset.where(row)).read_bytes())
        assert sides[0]
        assert not sides[0] & sides[1]


def table(folder: Path, *rows: str) -> DataSource:
    pictures(folder, [f"{i}.png" for i in range(4)])
    (folder / "t.csv").write_text("\n".join(["path,label,split", *rows]) + "\n")
    return DataSource("imagefolder", str(folder))


def test_a_path_that_is_listed_twice_counts_once(tmp_path: Path) -> None:
    rows = ("0.png,a,train", "1.png,b,train", "./0.png,a,train", "2.png,a,test", "0.png,a,train")
    dataset = load(table(tmp_path / "t", *rows), seed=0)
    assert dataset.labels.tolist() == [0, 1, 0]
    assert any("2 rows" in loss.why for loss in dataset.left_out)


@pytest.mark.parametrize("second", ["0.png,b,train", "0.png,a,test"])
def test_a_path_that_is_listed_twice_and_differs_is_refused(tmp_path: Path, second: str) -> None:
    with pytest.raises(DataError, match=r"line 2 and line 4 of .* name the same image but differ"):
        load(table(tmp_path / "t", "0.png,a,train", "1.png,b,train", second), seed=0)


def test_records_of_equal_content_in_training_stay_without_privacy(tmp_path: Path) -> None:
    """Rows of a table of few values are often equal, and each is a record."""
    folder = tmp_path / "d"
    folder.mkdir()
    for part, x in (("train", [[0.0], [0.0], [1.0]]), ("test", [[2.0], [3.0]])):
        write_rows(folder, part, torch.tensor(x), torch.arange(len(x)) % 2)
    assert len(load(DataSource("safetensors", str(folder), ("f",)), seed=0)) == 5


def test_a_file_that_cannot_be_read_is_a_copy_of_nothing(tmp_path: Path) -> None:
    records = (Record(fault="missing"), Record("b", "2", fault="missing"), Record("a", "3"))
    node = parse_node_config(Hospital(tmp_path / "h", "table", records, unit="record").node)
    dataset = load(DataSource.of_node(node, RUN), 0)
    assert len(dataset) == 3
