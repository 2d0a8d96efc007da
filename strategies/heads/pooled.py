"""Statistics of all sites' records, from the sums that each site sends or from the sum over all sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from common.errors import RunError
from common.models.classifiers import Head, class_indices
from common.models.parameters import Parameters
from common.surrogates.class_sums import unfold
from common.surrogates.surrogates import Header
from strategies.base.defended import Defended
from strategies.base.one_shot import Learned
from strategies.pooling.possible import check_moments
from strategies.pooling.total import Total


@dataclass(frozen=True)
class Pooled:
    """Statistics of all sites' records: counts (C,), class means (C, d) and scatter around them (d, d); float64.

    header: of the coordinator, with the classes. variances (C, d): within each class; None where sites do not send them.
    """

    header: Header
    counts: Tensor
    means: Tensor
    scatter: Tensor
    variances: Tensor | None = None

    @classmethod
    def of(cls, sent: Sequence[Parameters], shares: Sequence[float], classes: tuple[str, ...]) -> Pooled:
        """shares: of its weight that each site keeps."""
        d, rows = sent[0].tensors["sums"].shape[1], [class_indices(classes, each.header.classes) for each in sent]
        counts, means = torch.zeros(len(classes), dtype=torch.float64), torch.zeros(len(classes), d, dtype=torch.float64)
        for each, share, own in zip(sent, shares, rows, strict=True):
            counts.index_add_(0, own, share * each.tensors["counts"].double())
            means.index_add_(0, own, share * each.tensors["sums"].double())
        means.div_(counts.clamp_min(1e-30)[:, None])
        scatter, variances = torch.zeros(d, d, dtype=torch.float64), torch.zeros_like(means)
        for each, share, own in zip(sent, shares, rows, strict=True):
            apart = centred(each, means[own])
            scatter.add_(unfold(each.tensors["squares"].double(), d).addmm_(apart.T, apart), alpha=share)
            if "variances" in each.tensors:
                within = each.tensors["counts"].double()[:, None] * each.tensors["variances"].double()
                variances.index_add_(0, own, share * (within + apart.square()))
        first = sent[0].header
        header = Header(first.method, first.run, "coordinator", first.fingerprint, classes)
        known = "variances" in sent[0].tensors
        return cls(header, counts, means, scatter, variances / counts.clamp_min(1e-30)[:, None] if known else None)

    @property
    def priors(self) -> Tensor:
        """Shares of the classes (C,)."""
        return self.counts / self.counts.sum()

    def between(self) -> Tensor:
        """Class means minus the mean of all records, times the square root of the class's share (C, d)."""
        return (self.means - self.priors @ self.means) * self.priors.sqrt()[:, None]

    def covariance(self) -> Tensor:
        """The covariance of all records around their mean (d, d)."""
        between = self.between()
        return torch.addmm(self.scatter / self.counts.sum(), between.T, between)


def in_projection(head: Head, total: Total) -> Learned:
    """The head of features to which the sites applied a public map before the sum."""
    return Learned(replace(head, projection=total.public.projection, centre=total.public.centre), Defended([]))


def pooled_of(total: Total) -> Pooled:
    """The statistics of the sum over all sites, of classes with records.

    Raises RunError when no class has one, or no records have these sums.
    """
    check_moments(total)
    counts, sums = total.tensors["counts"].round(), total.tensors["sums"]
    kept = counts > 0
    if not kept.any():
        raise RunError("the secure sum has no record of any class of the run")
    header = replace(
        total.header, classes=tuple(n for n, there in zip(total.header.classes, kept.tolist(), strict=True) if there)
    )
    counts, sums = counts[kept], sums[kept]
    around = unfold(total.tensors["squares"], sums.shape[1]) - (sums / counts[:, None]).T @ sums
    return Pooled(replace(header, site="coordinator"), counts, sums / counts[:, None], (around + around.T) / 2)


def centred(sent: Parameters, centre: Tensor) -> Tensor:
    """Class means (C, d) minus a centre (d,) or (C, d), times the square root of the records; zero without records."""
    counts = sent.tensors["counts"].double()[:, None]
    return (sent.tensors["sums"].double() / counts.clamp_min(1e-30) - centre) * counts.sqrt()
