"""What sites sent, in the few directions in which harm is measured. No Flower types."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.class_sums import PRESENT
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate, Surrogate
from fedsurrogate.strategies.closed_form.factored import Factored, dense
from fedsurrogate.strategies.closed_form.received import of_mixtures
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.robustness.harm import DIRECTIONS, RIDGE, Sites

# A site's covariance counts at most so many times the median site's where it is the common scale.
WIDEST = 3.0


def of_surrogates(surrogates: Sequence[AnySurrogate], classes: Sequence[str]) -> Sites:
    """The evidence of mixtures, by their moments, or of noisy sums.

    Args:
        surrogates: of the sites, of one kind, with the weights that they have.
        classes: that hold all of every site's; not used for noisy sums, which have the same ones.
    """
    sums = [each for each in surrogates if isinstance(each, SumsSurrogate)]
    if sums:
        parts, noise = _of_noisy_sums(sums)
        return sites_of(lambda: parts, noise)
    mixtures = [each for each in surrogates if isinstance(each, Surrogate)]
    return sites_of(lambda: (of_mixtures(each, classes) for each in mixtures))


def _of_noisy_sums(surrogates: Sequence[SumsSurrogate]) -> tuple[list[Statistics], Tensor]:
    """Statistics with one variance, as features of norm one have it, and the noise of class means."""
    counts, sums = (
        torch.stack([getattr(each.sums, name) for each in surrogates]).double()
        for name in ("counts", "sums")
    )
    sigmas = [[each.sums.sigmas[name] for name in ("counts", "sums")] for each in surrogates]
    of_count, of_sum = torch.tensor(sigmas, dtype=torch.float64).T[..., None]
    counts = torch.where(counts > PRESENT * of_count, counts, 0.0)
    known, d = counts.clamp_min(1), sums.shape[2]
    means = torch.where(counts[..., None] > 0, sums / known[..., None], 0.0)
    privacy = (of_sum / known).square()
    length = (means.square().mean(2) - privacy).clamp(0, 1 / d)
    noise = privacy + length * (of_count / known).square()
    there = counts > 0
    within = float((1 / d - length[there]).clamp_min(0).mean()) if there.any() else 1.0
    one = Factored(torch.zeros(d, 0).double(), torch.full((d,), within, dtype=torch.float64))
    # Pooled noisy means are weighted by the square of records.
    weights = counts.square() / float(counts[there].mean()) if there.any() else counts
    parts = [Statistics(*each, one) for each in zip(weights, means, strict=True)]
    return parts, torch.where(there, noise, 0.0)


def sites_of(parts: Callable[[], Iterable[Statistics]], noise: Tensor | None = None) -> Sites:
    """The statistics of sites in the directions in which their class means differ.

    Args:
        parts: gives the statistics of each site, one at a time, so that memory holds two covariances;
            called three times.
        noise: variance of the noise in each class mean, (S, C); None without privacy.
    """
    tables = [(each.counts, each.means, each.covariance.diagonal().sum()) for each in parts()]
    counts, means, sizes = (torch.stack(each) for each in zip(*tables, strict=True))
    centre = (counts[..., None] * means).sum((0, 1)) / counts.sum().clamp_min(1e-300)
    apart = (means - centre).flatten(0, 1) * counts.flatten().sqrt()[:, None]
    into, own = directions(parts, counts.sum(1), sizes, apart)
    return Sites(
        into.T @ into,
        torch.zeros_like(counts) if noise is None else noise,
        counts,
        torch.where(counts[..., None] > 0, (means - centre) @ into, 0.0),
        own,
        means.shape[2],
    )


def directions(
    parts: Callable[[], Iterable[Statistics]],
    records: Tensor,
    sizes: Tensor,
    apart: Tensor,
    noisy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The directions in which some vectors are longest, in deviations of a record of all sites.

    Args:
        parts: as in `sites_of`.
        records: of each site, (S,).
        sizes: traces of the sites' covariances, (S,).
        apart: the vectors, (n, d).
        noisy: whether covariances are noisy: only that of all sites counts then.

    Returns:
        The map of columns to directions, (d, k), and the covariance of each site in these, (S, k, k).
    """
    d = apart.shape[1]
    limits = (WIDEST * sizes.median() / sizes.clamp_min(1e-300)).clamp_max(1.0)
    weights = (records / records.sum().clamp_min(1e-300) * limits).tolist()
    common = torch.zeros(d, d, dtype=torch.float64)
    for part, weight in zip(parts(), weights, strict=True):
        common += weight * dense(part.covariance)
    # Few records in many columns vary hardly at all in most directions: only as far as they show.
    shrunk = max(RIDGE, d / (d + float(records.sum())))
    least = float(common.diagonal().mean()) + 1e-30
    if noisy:
        least -= min(0.0, float(torch.linalg.eigvalsh(common)[0]) / shrunk)
    common = (1 - shrunk) * common
    common.diagonal().add_(shrunk * least)
    root = torch.linalg.cholesky(common)
    whitened = torch.linalg.solve_triangular(root, apart.T, upper=False)
    lines = torch.linalg.svd(whitened, full_matrices=False)[0]
    into = torch.linalg.solve_triangular(root.T, lines[:, :DIRECTIONS], upper=True)
    one = torch.eye(into.shape[1], dtype=torch.float64)
    if noisy:
        return into, one.expand(len(records), -1, -1)
    own = torch.stack([into.T @ dense(part.covariance) @ into for part in parts()])
    share = (d / (d + records))[:, None, None]
    return into, (1 - share) * own + share * one
