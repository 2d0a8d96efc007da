"""Output of a reader: labels, features or an image opener, and patients if known."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from fedsurrogate.common.data_report import Loss
from fedsurrogate.common.image_histograms import Value

from .left_out import LeftOut

# Facts of an image by the name of their histogram.
Facts = dict[str, Value]
# (record, shortest) -> image; `shortest` > 0: the caller then resizes the shorter side to that many
# pixels. It can be pickled, for the processes of several GPUs.
Opener = Callable[[int, int], Image.Image]


@dataclass(frozen=True, eq=False)
class Images:
    """The images of records that are bags.

    Attributes:
        records: all images of the source.
        members: of each bag, indices of its images, (m,) int64, ascending.
    """

    records: Records
    members: tuple[Tensor, ...]

    @property
    def firsts(self) -> Tensor:
        """The first image of each bag, (n,)."""
        return torch.tensor([int(own[0]) for own in self.members], dtype=torch.int64)


@dataclass(frozen=True, eq=False)
class Found:
    """All images that a reader has found: features are computed for these, whichever of them a run
    leaves out.

    Attributes:
        records: before any was left out.
        rows: indices of the records that are left, (n,) int64.
    """

    records: Records
    rows: Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Content:
    """What is known of records, whether a reader has found them or a data set holds them.

    Attributes:
        origin: value of the site column per record.
        features: (n, d); None for images.
        fingerprint: of the backbone that made `features`, if their file names it.
        opener: opens an image; None for features.
        describe: what the file of an image states of it, for surveys; None where it states nothing.
        patients: of each record, if known.
        burned_in: number of images with text burned into their pixels, as headers state.
        left_out: reasons for missing records.
        warnings: warnings for the data report.
        place: where a record is, for the site's own log.
        values: of the target, (n, k), float64; None for classes.
    """

    origin: tuple[str, ...] | None = None
    features: Tensor | None = None
    fingerprint: str = ""
    opener: Opener | None = None
    describe: Callable[[int], Facts] | None = None
    patients: tuple[str, ...] | None = None
    burned_in: int = 0
    left_out: tuple[Loss, ...] = ()
    warnings: tuple[str, ...] = ()
    place: Callable[[int], str] | None = None
    values: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Records(Content):
    """Records of a reader.

    Attributes:
        labels: a class name for each; with another target than classes, a text of its values.
        key: identifies content and order.
        is_train: (n,) bool; None if the files have no split.
        classes: that the files declare, in their order.
        same: finds copies, as a group (n,) of each record with equal numbers for equal content;
            None for public data that are known.
        bags: name of the bag of each image, where bags are pooled and the source names them.
        images: of each record, where it is a bag; None where it is an image.
        found: where some images were left out, all that the reader has found.
    """

    labels: Sequence[str]
    key: str
    is_train: Tensor | None = None
    classes: tuple[str, ...] | None = None
    same: Callable[[], Tensor] | None = None
    bags: tuple[str, ...] | None = None
    images: Images | None = None
    found: Found | None = None


# What a reader says of each row, one by one.
BY_ROW = ("labels", "is_train", "origin", "patients", "features", "values", "bags")


def select(records: Records, positions: Sequence[int]) -> Records:
    """The records at these positions, in this order."""
    rows = list(positions)
    if rows == list(range(len(records.labels))):
        return records
    opener, same, place, images = records.opener, records.same, records.place, records.images
    describe = records.describe
    found = records.found or Found(records, torch.arange(len(records.labels)))
    # Bags have no features of their own.
    whole = () if images is None else ("features",)
    own = {name: _rows(getattr(records, name), rows) for name in BY_ROW if name not in whole}
    if images is not None:
        images = replace(images, members=_rows(images.members, rows))
    return replace(
        records,
        **own,
        opener=None if opener is None else partial(_open_row, opener, rows),
        describe=None if describe is None else lambda i: describe(rows[i]),
        same=None if same is None else lambda: same()[rows],
        place=None if place is None else lambda i: place(rows[i]),
        images=images,
        found=replace(found, rows=found.rows[rows]),
    )


def _rows(values: Any, rows: list[int]) -> Any:
    if values is None or isinstance(values, Tensor):
        return None if values is None else values[rows]
    return type(values)(values[row] for row in rows)


def _open_row(opener: Opener, rows: Sequence[int], index: int, shortest: int) -> Image.Image:
    return opener(rows[index], shortest)


def without(records: Records, left: LeftOut) -> Records:
    """The records that are not left out. Their key then changes, which identifies rows."""
    noted = replace(records, left_out=tuple(left.reasons), warnings=tuple(left.warnings))
    return only(noted, left.kept(len(records.labels))) if left.rows else noted


def only(records: Records, positions: Sequence[int]) -> Records:
    """As `select`, with a key for these records."""
    key = hashlib.sha256(repr((records.key, list(positions))).encode()).hexdigest()
    return replace(select(records, positions), key=key)
