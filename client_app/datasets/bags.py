"""Bags: many images of one unit, such as the slices of a study, as one record.

A bag's feature is the mean of its images' features. So a bag is one record in every count and sum, and
all bounds stay what they are. Bags are formed here, before records are split into training and test:
no bag lies on both sides.

Whatever is wrong with a bag concerns this bag alone. Images of one bag with different targets, or in
both parts of a split, make it unusable. What a bag is depends on its own images alone, so one image more
changes one bag. The name of a bag holds within a patient where data name patients: two patients with a
bag "left" have two.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.records import Images, Records, select

# A column that is none: images in one folder are a bag, where no table is.
OF_FOLDER = "folder"
ALONE = "no bag-column: each image is a bag of its own"


def pooled(records: Records, left: LeftOut, by_patient: bool) -> Records:
    """Records of bags.

    Args:
        records: of images.
        left: collects unusable bags.
        by_patient: whether a name of a bag holds within a patient.

    Returns:
        The bags, in the order of their first images; each image alone where the source names no
        bags.

    Raises:
        DataError: for a bag whose images do not agree, unless records are left out one by one.
    """
    count = len(records.labels)
    names = records.bags or tuple(map(str, range(count)))
    owners = records.patients if by_patient and records.patients is not None else [""] * count
    rows: dict[tuple[str, str], list[int]] = defaultdict(list)
    for row, whose in enumerate(zip(owners, names, strict=True)):
        rows[whose].append(row)
    said = _said(records)
    torn = [at for at, own in enumerate(rows.values()) if len({said[row] for row in own}) > 1]
    keys = list(rows)
    left.note(
        torn,
        f"{len(torn)} of {len(rows)} bags have images with different targets, or in both parts of "
        f"the split, such as bag {keys[torn[0]][1] if torn else ''!r}; correct them, or leave them "
        "out",
    )
    kept = left.kept(len(rows))
    members = tuple(torch.tensor(rows[keys[at]], dtype=torch.int64) for at in kept)
    titles = [keys[at][1] for at in kept]
    images = Images(records, members)
    found = select(replace(records, bags=None, features=None), images.firsts.tolist())
    same = records.same
    return replace(
        found,
        key=_key(records.key, members),
        # Without rows: a bag's feature is the mean of its images'.
        features=None if records.features is None else records.features[:0],
        same=None if same is None else lambda: same_bags(same(), members),
        place=lambda at: f"bag {titles[at]!r}",
        left_out=(*records.left_out, *left.reasons),
        odd=(*records.odd, *([] if records.bags else [ALONE])),
        images=images,
    )


def _said(records: Records) -> list[object]:
    """What each image says of its bag: target, part of the split, and site."""
    count = len(records.labels)
    if records.values is None:
        targets: Sequence[object] = records.labels
    else:
        # NaN, which no value equals, is "not annotated".
        targets = [tuple(row) for row in records.values.nan_to_num(nan=torch.inf).tolist()]
    parts = [None] * count if records.is_train is None else records.is_train.tolist()
    sites = [None] * count if records.origin is None else records.origin
    return list(zip(targets, parts, sites, strict=True))


def described(members: Sequence[Tensor]) -> str:
    """How many images are in how many bags.

    Args:
        members: indices of each bag's images.

    Example:
        >>> described([torch.tensor([0, 2]), torch.tensor([1])])
        '3 images in 2 bags, of 1 to 2 each'
    """
    sizes = [len(own) for own in members] or [0]
    return f"{sum(sizes)} images in {len(members)} bags, of {min(sizes)} to {max(sizes)} each"


def _key(key: str, members: Sequence[Tensor]) -> str:
    digest = hashlib.sha256(f"bags {key}".encode())
    for own in members:
        digest.update(own.numpy().tobytes() + b";")
    return digest.hexdigest()


def same_bags(group: Tensor, members: Sequence[Tensor]) -> Tensor:
    """Group (n,) of each bag: equal numbers for bags with equal images.

    Args:
        group: of each image, with equal numbers for equal content.
        members: indices of each bag's images.

    Example:
        >>> bags = [torch.tensor(own) for own in ([0, 1], [2], [4, 3])]
        >>> same_bags(torch.tensor([7, 8, 7, 7, 8]), bags).tolist()
        [0, 1, 0]
    """
    seen: dict[bytes, int] = {}
    found = [
        seen.setdefault(group[own].sort().values.numpy().tobytes(), at)
        for at, own in enumerate(members)
    ]
    return torch.tensor(found, dtype=torch.int64)


def bags_by_folder(paths: Sequence[Path], tops: Sequence[Path]) -> tuple[str, ...]:
    """Images in one folder are a bag; those right in a top folder are each a bag.

    Args:
        paths: of images.
        tops: of each, the folder below which folders are bags.

    Example:
        >>> root = Path("a")
        >>> bags_by_folder([root / "1.png", root / "p" / "1.png", root / "p" / "2.png"], [root] * 3)
        ('a/1.png', 'a/p', 'a/p')
    """
    return tuple(
        str(path if path.parent == top else path.parent)
        for path, top in zip(paths, tops, strict=True)
    )
