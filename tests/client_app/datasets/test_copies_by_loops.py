"""Copies among records, by comparing every pair of them: files of equal content, what leaves a test
part, and what the data report says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.images import (
    once,
    same_bytes,
    same_files,
    same_rows,
    without_leaks,
)
from fedsurrogate.client_app.datasets.left_out import FolderWalk, LeftOut
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.common.data_report import Loss

# Alike in size and in their middle, but for one byte, which is before it, in it, or behind it.
LONG = b"a" * 20_000
CONTENTS = (
    b"",
    b"a",
    b"b",
    LONG,
    b"b" + LONG[1:],
    LONG[:10_001] + b"b" + LONG[10_002:],
    LONG[:-1] + b"b",
    LONG + b"a",
)


def assert_groups(found: torch.Tensor, contents: Sequence[object]) -> None:
    """Equal numbers for equal contents; what has none is alone. The number is the first of them."""
    numbers = found.tolist()
    assert len(numbers) == len(contents)
    for at, own in enumerate(contents):
        same = [other for other, each in enumerate(contents) if own and each == own]
        assert numbers[at] == (same or [at])[0]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([None, *CONTENTS]), max_size=8))
def test_files_are_copies_where_every_byte_is_equal(contents: list[bytes | None]) -> None:
    with TemporaryDirectory() as folder:
        paths = [Path(folder, str(at)) for at in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            if content is not None:
                path.write_bytes(content)
        assert_groups(same_files(paths), contents)

    def read(at: int) -> bytes:
        if contents[at] is None:
            raise OSError("no content")
        return contents[at] or str(at).encode()

    assert_groups(same_bytes(read, len(contents)), contents)


def records(group: Sequence[int], labels: Sequence[str], **more: Any) -> Records:
    groups = torch.tensor(group, dtype=torch.int64)
    return Records(list(labels), "key", same=lambda: groups, **more)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from("ab"), st.booleans()), min_size=1, max_size=9
)


@settings(max_examples=60)
@given(ROWS, st.booleans())
def test_without_noise_a_test_record_leaves_where_a_training_record_is_its_copy(
    rows: list[tuple[int, str, bool]], placed: bool
) -> None:
    group, labels, train = (list(each) for each in zip(*rows, strict=True))
    more: dict[str, Any] = {"place": (lambda at: f"file {at}")} if placed else {}
    own = records(group, labels, **more)
    kept, noted = without_leaks(own, torch.tensor(train))
    gone = [
        at
        for at, (number, inside) in enumerate(zip(group, train, strict=True))
        if not inside and any(number == g and t for g, t in zip(group, train, strict=True))
    ]
    rest = [at for at in range(len(rows)) if at not in gone]
    assert kept == (rest if gone else None)
    such = f", such as file {gone[0]}" if gone and placed else ""
    why = f"{len(gone)} test records are copies of training records{such}; they are not tested"
    assert noted.left_out == ((Loss(why, len(gone)),) if gone else ())
    copies = len(rest) - len({group[at] for at in rest})
    if all(train) or not copies:
        assert noted.warnings == ()
    else:
        torn = sum(
            len({labels[at] for at in range(len(rows)) if group[at] == number}) - 1
            for number in set(group)
        )
        labels_ = f", {torn} of them with another label" if torn else ""
        assert noted.warnings == (
            f"{copies} records are copies of others in the same part{labels_}",
        )
    assert noted.labels == own.labels


def test_records_without_a_way_to_compare_them_all_stay() -> None:
    own = Records(["a", "a"], "key")
    assert once(own, False) is own
    assert without_leaks(own, torch.tensor([True, False])) == (None, own)


def test_under_noise_the_report_counts_copies_and_contradictions() -> None:
    own = records([0, 0, 2, 2, 4], "aaabb", left_out=(Loss("earlier", 1),))
    found = once(own, False)
    assert found.labels == ["a", "b"]
    assert [each.count for each in found.left_out] == [1, 1, 2]
    assert found.left_out[1].why.startswith("1 records are copies of others; each content counts")
    assert found.left_out[2].why.startswith("2 records have the same content as another, but a")
    assert found.key != own.key
    alone = records([0, 1], "ab")
    assert once(alone, False) is alone
    patients = records([0, 0], "ab", patients=("x", "y"))
    assert once(patients, True) is patients
    assert once(patients, False).labels == []


def test_what_is_no_record_on_the_way_is_counted_by_its_kind(tmp_path: Path) -> None:
    for name in (
        "a/1.png",
        "a/2.doc",
        "a/.3",
        "a/b/4.png",
        "a/x.PNG/5.png",
        "a/.git/6.png",
        "7.png",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    for name in ("8.doc", "Thumbs.db"):
        (tmp_path / name).touch()
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    walk = FolderWalk(lambda path: path.suffix == ".png", frozenset({".png"}))
    assert walk.folders(tmp_path) == [tmp_path / "a"]
    assert walk.files(tmp_path / "a") == [tmp_path / "a" / "1.png", tmp_path / "a" / "b" / "4.png"]
    # Neither is a folder that can be read.
    assert walk.files(tmp_path / "none") == walk.files(tmp_path / "7.png") == []
    left = LeftOut()
    walk.report(left)
    wanted = {
        "files without the name of an image": (2, "8.doc"),
        "files of systems": (2, "Thumbs.db"),
        "images next to the folders of classes": (1, "7.png"),
        "folders with the name of a file": (1, "a/x.PNG"),
        "folders of systems": (1, "a/.git"),
        "linked folders that lead back to a folder above them": (1, "a/up"),
        "folders that cannot be read": (2, "none"),
    }
    assert {each.why: each.count for each in left.reasons} == {
        f"{count} {why}, such as '{tmp_path / name}'": count
        for why, (count, name) in wanted.items()
    }


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.5, float("inf")]), min_size=2, max_size=2),
        max_size=12,
    ),
)
def test_the_group_of_a_row_is_its_first_row_with_the_same_bytes(
    rows: list[list[float]],
) -> None:
    features = torch.tensor(rows).reshape(len(rows), 2)
    found = same_rows(features).tolist()
    content = [row.numpy().tobytes() for row in features]
    assert len(found) == len(rows)
    for at, own in enumerate(content):
        for other in range(at):
            assert (found[at] == found[other]) == (own == content[other])


def test_what_is_left_out_is_counted_once() -> None:
    left = LeftOut(one_by_one=True)
    left.note([1, 1, 2], "two")
    left.note([2], "none more")
    left.count_once([2, 3, 3], "one copy")
    assert left.reasons == [Loss("two", 2), Loss("one copy", 1)]
    assert left.kept(5) == [0, 4]
