"""Small data of hospitals that several tests share, and what their sites would send, made by hand
in double precision.

The statistics here are computed from the definitions, with plain products of all records. So they
are an oracle for code that never sees all records.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import fold
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form.statistics import Statistics

CLASSES = ("a", "b", "c")
HOSPITALS = ("north", "south", "west")
RECORDS, DIMENSION = 200, 6


@dataclass(frozen=True)
class Hospital:
    """Records of one site: features (n, d), float64, and labels (n,) as indices into `classes`, the
    site's own.
    """

    site: str
    features: Tensor
    labels: Tensor
    classes: tuple[str, ...] = CLASSES

    def sums(self) -> Parameters:
        """What a site of AFL sends: records and feature sums of each class, and the second moment
        around class means.
        """
        targets = torch.eye(len(self.classes), dtype=torch.float64)[self.labels]
        counts, totals = targets.sum(0), targets.T @ self.features
        deviations = self.features - (totals / counts.clamp_min(1)[:, None])[self.labels]
        header = Header("afl", parse_run({"method": "afl"}).digest, self.site, "f", self.classes)
        tensors = {"counts": counts, "sums": totals, "squares": fold(deviations.T @ deviations)}
        return Parameters(header, 1, tensors, len(self.labels))


def records(count: int = RECORDS, dimension: int = DIMENSION) -> Hospital:
    """Records of three classes in turn, all at one site, which are 2 apart and vary by 1 around a
    mean of 1.
    """
    labels = torch.arange(count) % 3
    noise = torch.randn(count, dimension, generator=torch.Generator().manual_seed(1))
    return Hospital("s", (noise + 2 * torch.eye(3, dimension)[labels] + 1).double(), labels)


def three_hospitals(everything: Hospital | None = None) -> list[Hospital]:
    """The same records at three sites, each of which has one class only: no partition is harder for
    an average of heads.
    """
    whole = everything or records()
    sites = []
    for label, (site, name) in enumerate(zip(HOSPITALS, CLASSES, strict=True)):
        features = whole.features[whole.labels == label]
        sites.append(
            Hospital(site, features, torch.zeros(len(features), dtype=torch.int64), (name,))
        )
    return sites


def statistics_of(features: Tensor, labels: Tensor, classes: int) -> Statistics:
    """The statistics of records from their definition: features (n, d), labels (n,) below
    `classes`; with variances.
    """
    x, targets = features.double(), torch.eye(classes, dtype=torch.float64)[labels]
    counts = targets.sum(0)
    divisors = counts.clamp_min(1)[:, None]
    means = targets.T @ x / divisors
    deviations = x - means[labels]
    return Statistics(
        counts,
        means,
        deviations.T @ deviations / len(x),
        targets.T @ deviations.square() / divisors,
    )
