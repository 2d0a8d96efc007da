"""Bags in arrays of users: many images of one unit, of which each array has a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsurrogate._arrays import names_of
from fedsurrogate.client_app.datasets.bags import pooled as pooled_records
from fedsurrogate.client_app.datasets.left_out import LeftOut
from fedsurrogate.client_app.datasets.records import Records
from fedsurrogate.client_app.features.extraction import Bags
from fedsurrogate.client_app.features.site_features import LabelledFeatures
from fedsurrogate.common.errors import ConfigError

# The column of a file that names the bag of an image.
COLUMN = "bag"


def pooled(images: LabelledFeatures, names: Sequence[str]) -> LabelledFeatures:
    """Bags of images, as a site pools them.

    Args:
        images: with n rows, their power applied.
        names: of the bag of each, (n,); they hold within a patient.

    Raises:
        DataError: for a bag whose images have different targets.
    """
    labels = list(map(str, images.labels.tolist()))
    records = Records(labels, "", patients=images.units, values=images.values, bags=tuple(names))
    found = pooled_records(records, LeftOut(), by_patient=True)
    assert found.images is not None
    members, firsts = found.images.members, found.images.firsts
    usable = torch.ones(len(labels), dtype=torch.bool)
    means = Bags(members, usable).means(images.features, torch.arange(len(members)), 1.0)
    return LabelledFeatures(means, images.labels[firsts], found.patients, values=found.values)


def numbered(given: Sequence[Any], sizes: Sequence[int]) -> list[Tensor]:
    """Numbers of the bags of each entry of a simulation, as its files have them.

    Args:
        given: arrays of names, one for each pair of features and labels, that of test records last.
        sizes: number of images of each entry.

    Returns:
        For each entry a number for every image, (n,), in the order of appearance; no two entries
        have one in common.

    Raises:
        ConfigError: for another number of arrays.
        DataError: for an array of another length.
    """
    if len(given) != len(sizes):
        raise ConfigError(
            f"bags has {len(given)} arrays for {len(sizes)} pairs of features and labels; give one "
            "for each site, or one for data, and one more for test records"
        )
    numbers, seen = [], dict[tuple[int, str], int]()
    for entry, (own, size) in enumerate(zip(given, sizes, strict=True)):
        names = names_of(own, size, "bag").names
        numbers.append(torch.tensor([seen.setdefault((entry, name), len(seen)) for name in names]))
    return numbers
