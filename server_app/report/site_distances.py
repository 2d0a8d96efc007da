"""A map of the sites: how far apart their surrogates are, class by class, and which class a site's
class resembles.

It uses what the sites have released without noise, and nothing else: noise sets random sites apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.signed_models.making import settings_of_run
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Surrogate, class_order
from fedsurrogate.strategies import stored_strategy

from ..runs.reader import RunFolder, read_payloads
from .plots.rows import draw_site_map

# Directions in which distances are measured: those in which class means differ most.
DIRECTIONS = 8
# Samples of a class at a site, from which its covariance in these directions is estimated.
SAMPLES, FEWEST_SAMPLES = 256, 32
# Numbers that all samples together may have.
ROOM = 2**28
MOST_SITES, MOST_CLASSES = 60, 50
# A site is odd if its distance to the others (`_apart`) is so many times the median site's, and at
# least so large.
ODD, LEAST = 2.0, 0.5


@dataclass(frozen=True)
class Resemblance:
    """A class of a site whose mean is nearer to another class of the other sites than to its own.

    Attributes:
        site: name of the site.
        name: of the class.
        other: name of the class that it resembles.
    """

    site: str
    name: str
    other: str


@dataclass(frozen=True)
class SiteMap:
    """Sites in two dimensions, and their distances.

    Attributes:
        sites: names, S.
        points: (S, 2), in the units of the distances.
        distances: (S, S), in units of the standard deviation within classes, mean over the classes
            that both have.
        odd: sites far from the others.
        resemblances: classes that resemble another class of the other sites.
    """

    sites: tuple[str, ...]
    points: Tensor
    distances: Tensor
    odd: tuple[str, ...]
    resemblances: tuple[Resemblance, ...]


@dataclass(frozen=True)
class _Moments:
    """Of a site's classes: means (C, d); in the shared directions means (C, k) and covariances (C,
    k, k); which classes it has (C,).
    """

    whole: Tensor
    means: Tensor
    covariances: Tensor
    present: Tensor


def site_map(surrogates: Sequence[Surrogate]) -> SiteMap | None:
    """The map of two to sixty sites.

    The distance of two sites for a class is that of Bures and Wasserstein between Gaussians. Points
    are classical multidimensional scaling of the distances.

    Args:
        surrogates: of the sites, without noise.

    Returns:
        The map; None for another number of sites, or without a class that two sites have.
    """
    classes = class_order(surrogates)[:MOST_CLASSES]
    if not 2 <= len(surrogates) <= MOST_SITES:
        return None
    basis = _basis(surrogates)
    if basis is None:
        return None
    dimension = surrogates[0].dimension
    count = min(SAMPLES, max(FEWEST_SAMPLES, ROOM // (len(surrogates) * len(classes) * dimension)))
    moments = [_moments(each, classes, basis, count) for each in surrogates]
    present = torch.stack([each.present for each in moments])
    if not bool((present.sum(0) >= 2).any()):
        return None
    traces = torch.cat(
        [each.covariances.diagonal(dim1=1, dim2=2).sum(1)[each.present] for each in moments]
    )
    distances = _distances(moments) / float(traces.median().clamp_min(1e-30).sqrt())
    names = tuple(each.header.site for each in surrogates)
    apart = _apart(distances)
    limit = max(LEAST, ODD * float(apart.median()))
    odd = tuple(name for name, far in zip(names, apart.tolist(), strict=True) if far > limit)
    if len(names) < 3:
        odd = ()
    return SiteMap(
        names, _scaled(distances), distances, odd, tuple(_resemblances(moments, names, classes))
    )


def _class_means(mixtures: Mixtures) -> Tensor:
    sums = torch.zeros(len(mixtures.counts), mixtures.means.shape[1])
    return sums.index_add_(
        0, mixtures.labels, mixtures.weights[:, None].float() * mixtures.means.float()
    )


def _basis(surrogates: Sequence[Surrogate]) -> Tensor | None:
    """Orthonormal directions (d, k) in which the sites' class means differ most."""
    means = [_class_means(each.mixtures) for each in surrogates]
    if sum(map(len, means)) < 2:
        return None
    rows = torch.cat(means)
    _, _, directions = torch.linalg.svd((rows - rows.mean(0)).double(), full_matrices=False)
    basis: Tensor = directions[:DIRECTIONS].T.float()
    return basis


def _moments(surrogate: Surrogate, classes: tuple[str, ...], basis: Tensor, count: int) -> _Moments:
    k, size = basis.shape[1], len(classes)
    whole, means = torch.zeros(size, len(basis)), torch.zeros(size, k)
    covariances, present = torch.zeros(size, k, k), torch.zeros(size, dtype=torch.bool)
    mixtures, rows = surrogate.mixtures, class_indices(classes, surrogate.header.classes)
    # The same draws at every site, so that differences between sites are not those of the draws.
    streams = [torch.Generator().manual_seed(max(0, int(row))) for row in rows]
    features, labels = mixtures.draw([count if row >= 0 else 0 for row in rows.tolist()], streams)
    flat = features.float() @ basis
    centres = _class_means(mixtures)
    for label, row in enumerate(rows.tolist()):
        if row < 0:
            continue
        own = flat[labels == label]
        apart = own - own.mean(0)
        whole[row], means[row], present[row] = centres[label], centres[label] @ basis, True
        covariances[row] = apart.T @ apart / max(1, len(own) - 1)
    return _Moments(whole, means, covariances, present)


def _distances(moments: Sequence[_Moments]) -> Tensor:
    """Distances (S, S), mean over common classes; a pair without one gets the largest distance."""
    size, roots = len(moments), [_square_roots(each.covariances) for each in moments]
    distances = torch.zeros(size, size, dtype=torch.float64)
    known = torch.eye(size, dtype=torch.bool)
    for i in range(size):
        for j in range(i):
            values = []
            for c in (moments[i].present & moments[j].present).nonzero().flatten().tolist():
                apart = (moments[i].means[c] - moments[j].means[c]).double()
                square = float(apart.square().sum())
                values.append((square + _bures(roots[i][c], roots[j][c]) ** 2) ** 0.5)
            if values:
                distances[i, j] = distances[j, i] = sum(values) / len(values)
                known[i, j] = known[j, i] = True
    return torch.where(known, distances, distances.max())


def _apart(distances: Tensor) -> Tensor:
    """The distance of each site (S,) to the nearest third of all sites; distances (S, S).

    Up to half of the sites can be odd, each in its own way, without making the others seem far. Odd
    sites that are like each other, but fewer than a third, do not seem usual.
    """
    size = len(distances)
    others = distances + torch.diag(torch.full((size,), torch.inf, dtype=distances.dtype))
    return others.sort(1).values[:, -(-size // 3) - 1]


def _square_roots(covariances: Tensor) -> Tensor:
    """The symmetric square roots (C, m, m)."""
    values, vectors = torch.linalg.eigh(covariances.double())
    roots: Tensor = (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT
    return roots


def _bures(left: Tensor, right: Tensor) -> float:
    """The Bures distance of two covariances, from their square roots (Bhatia, Jain & Lim 2019,
    equation 1).
    """
    shared = float(torch.linalg.matrix_norm(left @ right, "nuc"))
    return math.sqrt(max(0.0, float(left.square().sum() + right.square().sum()) - 2 * shared))


def _scaled(distances: Tensor) -> Tensor:
    """Points (S, 2) whose distances are about these (classical multidimensional scaling, Torgerson
    1952).
    """
    size = len(distances)
    centring = torch.eye(size, dtype=torch.float64) - 1 / size
    values, vectors = torch.linalg.eigh(-0.5 * centring @ distances.square() @ centring)
    points = vectors.flip(1)[:, :2] * values.flip(0)[:2].clamp_min(0).sqrt()
    # The sign of an eigenvector is arbitrary. The largest entry is made positive, so that all
    # machines agree.
    signs = points.gather(0, points.abs().argmax(0, keepdim=True)).sign()
    points = points * torch.where(signs == 0, torch.ones_like(signs), signs)
    return torch.nn.functional.pad(points, (0, 2 - points.shape[1])).float()


def _resemblances(
    moments: Sequence[_Moments], names: Sequence[str], classes: Sequence[str]
) -> list[Resemblance]:
    """Classes whose mean at a site is nearer to another class of the other sites.

    Two others must have both classes. All dimensions are used: two classes can differ in others than
    the shared directions.
    """
    present, means = (
        torch.stack([getattr(each, key) for each in moments]) for key in ("present", "whole")
    )
    listed = []
    for site, own in enumerate(moments):
        others = present.clone()
        others[site] = False
        judged = (others.sum(0) >= 2).nonzero().flatten().tolist()
        # The median is not moved by one other odd site.
        centres = {c: means[others[:, c], c].median(0).values for c in judged}
        for c in (each for each in judged if own.present[each]):
            squares = {
                other: float((own.whole[c] - centres[other]).square().sum()) for other in judged
            }
            nearest = min(squares, key=lambda other: squares[other])
            if squares[nearest] < 0.5 * squares[c]:
                listed.append(Resemblance(names[site], classes[c], classes[nearest]))
    return listed


# Above this dimension a covariance of a site is not read for a picture.
LARGEST_DIMENSION = 4096


def site_map_of(run: RunFolder, folder: Path) -> SiteMap | None:
    """The map of a run's sites, from their stored surrogates.

    Args:
        run: the content of the run folder.
        folder: the run folder.

    Returns:
        The map; None for a run with privacy, whose noise sets random sites apart, for one that has
        none, or whose surrogates are of another kind.
    """
    if not 2 <= len(list((folder / "surrogates").glob("*.pb"))) <= MOST_SITES:
        return None
    try:
        config = settings_of_run(folder)
        if config.private or not config.plan.combination.stored or config.plan.kind != "one-shot":
            return None
        strategy = stored_strategy(config)(config)
        surrogates = strategy.in_one_frame(
            [strategy.unpack(payload) for payload in read_payloads(folder)]
        )
    except (FedSurrogateError, ValueError, TypeError):
        # A report of a damaged folder leaves the picture out.
        return None
    kept = [each for each in surrogates if isinstance(each, Surrogate)]
    kinds = {(each.dimension, each.header.fingerprint) for each in kept}
    if len(kept) < 2 or len(kinds) > 1 or kept[0].dimension > LARGEST_DIMENSION:
        return None
    return site_map(kept)


def words_of(map_of_sites: SiteMap) -> list[str]:
    """Sites that stand apart, and labels that may be swapped, in sentences; none without any."""
    far = " and ".join(
        filter(
            None, (", ".join(map(_site, map_of_sites.odd[:-1])), *map(_site, map_of_sites.odd[-1:]))
        )
    )
    sentences = [f"The surrogates of {far} are far from those of the other sites."] if far else []
    pairs = [(each.site, each.name, each.other) for each in map_of_sites.resemblances]
    for site in dict.fromkeys(site for site, _, _ in pairs):
        own = [
            f"{name} looks like {other} of the others"
            for each, name, other in pairs
            if each == site
        ]
        sentences.append(f"At {_site(site)}, {', '.join(own)}: labels may be swapped there.")
    return sentences


def _site(name: str) -> str:
    return f"site {name}" if name.isdecimal() else name


def drawn_map(map_of_sites: SiteMap) -> str:
    """The picture of a map."""
    marked = {*map_of_sites.odd, *(each.site for each in map_of_sites.resemblances)}
    return draw_site_map(map_of_sites.sites, map_of_sites.points.tolist(), marked)
