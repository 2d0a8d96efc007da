"""Bags from images in memory: which images belong together, which bags contradict themselves, and what a
bag has of its images.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.records import Records, select
from fedsurrogate.client_app.datasets.table_records import (
    ALONE,
    bags_by_folder,
    described,
    pooled,
    same_bags,
)
from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.errors import DataError

# Of an image: its bag, patient, target, part of the split, site and content.
IMAGES = st.lists(
    st.tuples(
        st.sampled_from("xy"),
        st.sampled_from("pq"),
        st.sampled_from("aab"),
        st.sampled_from([True, True, False]),
        st.sampled_from("nnm"),
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60)
@given(IMAGES, st.booleans(), st.sampled_from(["split", "site", "values", "names", "features"]))
def test_images_of_a_bag_agree_or_the_bag_is_left_out(
    images: list[tuple[str, str, str, bool, str, int]], by_patient: bool, without: str
) -> None:
    bags, patients, targets, train, sites, content = (
        list(each) for each in zip(*images, strict=True)
    )
    count, group = len(images), torch.tensor(content)
    numbers = torch.tensor([[float("nan") if each == "a" else 1.0] for each in targets])
    own = Records(
        targets if without != "values" else ["text"] * count,
        "key",
        None if without == "split" else torch.tensor(train),
        None if without == "site" else tuple(sites),
        features=None if without == "features" else torch.ones(count, 2),
        patients=tuple(patients),
        values=numbers if without == "values" else None,
        bags=None if without == "names" else tuple(bags),
        same=lambda: group,
        left_out=(Loss("earlier", 1),),
        warnings=("earlier",),
    )
    found = pooled(own, LeftOut(one_by_one=True), by_patient)
    members: dict[tuple[str, str], list[int]] = {}
    for at in range(count):
        whose = patients[at] if by_patient else ""
        members.setdefault((whose, str(at) if without == "names" else bags[at]), []).append(at)
    torn, kept = [], []
    for key, rows in members.items():
        stated = {
            (
                targets[at],
                without == "split" or train[at],
                "" if without == "site" else sites[at],
            )
            for at in rows
        }
        (torn if len(stated) > 1 else kept).append(key)
    assert found.images is not None
    assert found.images.records is own
    assert [each.tolist() for each in found.images.members] == [members[key] for key in kept]
    firsts = [members[key][0] for key in kept]
    assert found.images.firsts.tolist() == firsts
    assert found.labels == [own.labels[at] for at in firsts]
    assert found.patients == tuple(patients[at] for at in firsts)
    if without != "split":
        assert found.is_train is not None
        assert found.is_train.tolist() == [train[at] for at in firsts]
    assert found.bags is None
    assert (found.features is None) == (without == "features")
    assert found.features is None or found.features.shape == (0, 2)
    if torn:
        why = (
            f"{len(torn)} of {len(members)} bags have images with different targets, or in both parts "
            f"of the split, such as bag {torn[0][1]!r}; correct them, or leave them out"
        )
        assert found.left_out == (Loss("earlier", 1), Loss(why, len(torn)))
        with pytest.raises(DataError, match=f"^{len(torn)} of {len(members)} bags have images"):
            pooled(own, LeftOut(), by_patient)
    else:
        assert found.left_out == own.left_out
    assert found.warnings == (("earlier", ALONE) if without == "names" else ("earlier",))
    assert found.place is not None
    assert [found.place(at) for at in range(len(kept))] == [f"bag {key[1]!r}" for key in kept]
    assert found.same is not None
    rows = list(range(len(kept)))[::-2]
    fewer = select(found, rows)
    assert fewer.images is not None
    assert [each.tolist() for each in fewer.images.members] == [members[kept[at]] for at in rows]
    assert fewer.features is found.features
    contents = [sorted(content[at] for at in members[key]) for key in kept]
    assert found.same().tolist() == [contents.index(each) for each in contents]


def test_a_key_of_bags_is_that_of_their_images() -> None:
    def key(of: str, *names: str) -> str:
        return pooled(Records(["a"] * 3, of, bags=names), LeftOut(), False).key

    assert key("k", "x", "x", "y") == key("k", "p", "p", "q")
    others = {key("k", "x", "y", "y"), key("k", "x", "y", "z"), key("l", "x", "x", "y"), "k"}
    assert len(others | {key("k", "x", "x", "y")}) == 5


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=6))
def test_bags_are_copies_where_their_images_are_in_any_order(contents: list[list[int]]) -> None:
    group = torch.tensor([each for own in contents for each in own], dtype=torch.int64)
    members, at = [], 0
    for own in contents:
        members.append(torch.arange(at, at + len(own)))
        at += len(own)
    ordered = [sorted(own) for own in contents]
    assert same_bags(group, members).tolist() == [ordered.index(own) for own in ordered]
    sizes = [len(own) for own in contents] or [0]
    assert described(members) == (
        f"{sum(sizes)} images in {len(contents)} bags, of {min(sizes)} to {max(sizes)} each"
    )


def test_folders_are_bags() -> None:
    one, other = Path("a"), Path("b")
    paths = [one / "1", one / "p" / "2", other / "p" / "q" / "3", other / "4"]
    wanted = ("a/1", "a/p", "b/p/q", "b/4")
    assert bags_by_folder(paths, [one, one, other, other]) == wanted
