"""Records of a site as tensors, and the surrogate that the site's own code makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import NO_LIMITS, SiteLimits
from fedsurrogate.client_app.methods.fedpft import surrogate
from fedsurrogate.client_app.methods.job import Clipped, Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate


@dataclass(frozen=True)
class SiteData:
    """Training records of a site.

    Attributes:
        features: (n, d).
        labels: indices into `classes`, (n,).
        classes: names of classes.
        fingerprint: of the backbone.
        site: its name.
        units: the patient of each record, if the site protects patients.
        folder: where features are, mapped from a file, if memory is not to hold all of them.
    """

    features: Tensor
    labels: Tensor
    classes: Sequence[str]
    fingerprint: str
    site: str
    units: Sequence[str] | None = None
    folder: Path | None = None

    def job(self, run: Run, limits: SiteLimits = NO_LIMITS) -> Job:
        """A request to this site."""
        units = None if self.units is None else tuple(self.units)
        train = LabelledFeatures(self.features, self.labels, units, folder=self.folder)
        test = LabelledFeatures(self.features[:0], torch.zeros(0, dtype=torch.int64))
        found = SiteFeatures(train, test, tuple(self.classes), self.fingerprint, 0.0, False)
        return Job(run, NodeConfig(), self.site, found, limits)


@dataclass(frozen=True)
class Made:
    """A surrogate, and facts that stay at the site."""

    surrogate: AnySurrogate
    facts: dict[str, float] = field(default_factory=dict)


def make_surrogate(
    data: SiteData, run: Run, limits: SiteLimits = NO_LIMITS, centre: Tensor | None = None
) -> Made:
    """What FedPFT's code at a site makes of these records."""
    return Made(*surrogate.make_surrogate(data.job(run, limits), centre))


def clipped(
    features: Tensor,
    labels: Tensor,
    units: Sequence[str] | None = None,
    norm: float = 0.0,
    change: Callable[[Tensor], Tensor] = lambda features: features,
    folder: Path | None = None,
) -> Clipped:
    """These records, clipped as a site does."""
    owners = None if units is None else tuple(units)
    return Clipped.of(LabelledFeatures(features, labels, owners, folder=folder), norm, change)
