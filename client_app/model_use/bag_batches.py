"""Features of new images in batches, and of bags of them as their images come."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedsurrogate.common.backbones.feature_power import raised


@dataclass(frozen=True, eq=False)
class Batch:
    """Features of some rows.

    Attributes:
        rows: positions in the list of rows with features.
        features: of `rows`, (n, d); None without any.
        broken: positions of rows without features, each with a reason.
        notes: on rows with features, by position.
    """

    rows: list[int]
    features: Tensor | None
    broken: list[tuple[int, str]]
    notes: Mapping[int, str] = field(default_factory=dict)


@dataclass
class _Bag:
    """The images of a bag so far: the sum of their features (d,), and their numbers."""

    total: Tensor | None = None
    used: int = 0
    unread: list[str] = field(default_factory=list)


def pooled(
    batches: Iterable[Batch], bags: Sequence[Sequence[int]], power: float
) -> Iterator[Batch]:
    """Batches of bags, each as soon as all of its images have come. Of a bag that has begun, its sum
    alone is in memory.

    Args:
        batches: of the images of all bags, one bag after the other.
        bags: the images of each bag; only their number counts.
        power: of the features of images, before the mean.
    """
    owners = [at for at, own in enumerate(bags) for _ in own]
    begun: dict[int, _Bag] = {}
    for batch in batches:
        features = None if batch.features is None else raised(batch.features.double(), power)
        for row, x in zip(batch.rows, features if features is not None else (), strict=True):
            bag = begun.setdefault(owners[row], _Bag())
            bag.total = x.clone() if bag.total is None else bag.total + x
            bag.used += 1
        for row, why in batch.broken:
            begun.setdefault(owners[row], _Bag()).unread.append(why)
        done = [at for at, bag in begun.items() if bag.used + len(bag.unread) == len(bags[at])]
        yield _means({at: begun.pop(at) for at in done})


def _means(done: Mapping[int, _Bag]) -> Batch:
    used = {at: bag.total / bag.used for at, bag in done.items() if bag.total is not None}
    notes = {
        at: f"{len(bag.unread)} of {bag.used + len(bag.unread)} images are not in the mean"
        for at, bag in done.items()
        if bag.used and bag.unread
    }
    return Batch(
        list(used),
        torch.stack(list(used.values())).float() if used else None,
        [(at, bag.unread[0]) for at, bag in done.items() if not bag.used],
        notes,
    )


def digest_of(names: Sequence[str]) -> str:
    """A digest of which image is in which bag, by which an output file is continued."""
    return hashlib.sha256(repr(tuple(names)).encode()).hexdigest()[:16]
