"""Small data of hospitals that several tests share, statistics of them in double precision, and a
method whose sites send class sums.

The statistics here are computed from the definitions, with plain products of all records. So they
are an oracle for code that never sees all records.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedsurrogate.common.methods import plan_of
from fedsurrogate.common.methods.method import Method
from fedsurrogate.common.methods.sums import class_sums_plan
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import parse_settings
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
    `classes`.
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
    )


def nearest_mean(statistics: Statistics, header: Header) -> tuple[Head, dict[str, float]]:
    """The nearest class mean as a linear head."""
    means = statistics.means.float()
    return Head(header, means, -means.square().sum(1) / 2), {}


NEAREST_MEAN = Method(
    "nearest-mean",
    "Nearest class mean",
    "Mensink et al. 2013",
    lambda settings: class_sums_plan(
        settings, "tests.examples:nearest_mean", shares={"counts": 0.1, "sums": 0.9}
    ),
)


def class_sums_run(**given: Any) -> Run:
    """A run of a method whose sites send counts and sums by class, as docs/tutorials/add-a-method.md
    adds one.
    """
    flat = {"method": NEAREST_MEAN.name, "defence": "none"} | given
    settings = parse_settings(Settings, flat)
    return Run(settings, NEAREST_MEAN, plan_of(NEAREST_MEAN, settings))
