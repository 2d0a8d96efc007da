"""Gaussian mixtures of labelled features: one table of components for all classes of a site, with fit and sampling.

Source: FedPFT (Beitollahi et al. 2024), section 4.1 and algorithm 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import DataError
from common.models.devices import one_thread_each
from common.surrogates.covariances import Cluster, CovarianceLimits, CovarianceModel, Spherical, squared_distances
from common.surrogates.shared_covariances import FAMILIES, AnyCovariance, Gram, LowRank, gram

# Lower bound of variances, as a share of the mean variance, like scikit-learn's reg_covar for unit-scale data.
RELATIVE_FLOOR = 1e-6
# Starts of k-means, and the dimensions of the random projection in which they run: a projection keeps the cost of every
# clustering (Makarychev, Makarychev & Razenshteyn 2019).
STARTS, START_DIMENSIONS = 3, 64
# EM steps with spherical covariances before those with covariances of another family: they still move records that the
# small variances of a diagonal covariance would hold. Ten components of CIFAR-10 features gain 9 nats with five steps.
SPHERICAL_STEPS = 5


SETTLED = 1e-4


@dataclass(frozen=True)
class Mixtures:
    """M Gaussian components of C classes in d dimensions.

    counts: (C,) int64, records of each class. labels: (M,) int64, ascending, the class of each component. weights: (M,),
    summing to one within a class. means: (M, d).
    """

    counts: Tensor
    labels: Tensor
    weights: Tensor
    means: Tensor
    covariance: AnyCovariance

    @property
    def family(self) -> str:
        """Name of the covariance family."""
        return next(name for name, family in FAMILIES.items() if isinstance(self.covariance, family))

    @property
    def components(self) -> Tensor:
        """Components of each class (C,)."""
        return torch.bincount(self.labels, minlength=len(self.counts))

    def to(self, device: str) -> Mixtures:
        """The same table on another device, with a stored covariance in memory."""
        covariance: AnyCovariance
        if isinstance(self.covariance, Gram):
            covariance = Gram(self.covariance.matrix.to(device))
        else:
            covariance = type(self.covariance)(*(table.to(device) for table in vars(self.covariance).values()))
        moved = (self.counts.to(device), self.labels.to(device), self.weights.to(device), self.means.to(device))
        return Mixtures(*moved, covariance)

    def log_likelihood(self, features: Tensor, labels: Tensor) -> float:
        """Mean log-density of features (n, d) under the mixture of their own class, in nats; tests use it."""
        joint = self.covariance.log_density(features, self.means) + self.weights.log()
        own = labels[:, None] == self.labels
        return float(joint.masked_fill(~own, -torch.inf).logsumexp(1).mean())

    def draw(self, counts: Sequence[int], streams: Sequence[torch.Generator]) -> tuple[Tensor, Tensor]:
        """Sample counts[c] features of every class c from its own stream: features (sum, d) and labels (sum,)."""
        total, dimension = sum(counts), self.means.shape[1]
        normals = torch.empty(total, self.covariance.width(dimension))
        component = torch.empty(total, dtype=torch.int64)
        first = (self.components.cumsum(0) - self.components).tolist()
        start = 0
        for count, begin, size, stream in zip(counts, first, self.components.tolist(), streams, strict=True):
            rows = slice(start, start + count)
            start += count
            if count == 0:
                continue
            component[rows] = begin
            if size > 1:
                weights = self.weights[begin : begin + size].cpu()
                component[rows] += torch.multinomial(weights, count, replacement=True, generator=stream)
            normals[rows].normal_(generator=stream)
        normals, component = normals.to(self.means), component.to(self.means.device)
        return self.means[component].add_(self.covariance.colour(normals, component)), self.labels[component]

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of every dimension over all classes, in closed form: two tensors (d,)."""
        share = self.weights * self.counts.to(self.weights)[self.labels] / self.counts.sum()
        mean = share @ self.means
        # After a fit, a full covariance is in double precision.
        variances = self.covariance.variances_per_dimension().to(share)
        within = (share[:, None] * variances).sum(0).expand_as(mean)
        return mean, within + share @ (self.means - mean).square()


@dataclass(frozen=True)
class MixtureSettings:
    """Settings of a mixture fit. `components` and `rank` are upper bounds: a class of n records gets at most
    n / samples_per_component components, and a site of n records at most that rank; always at least one.
    """

    family: str = "lowrank"
    components: int = 1
    rank: int = 16
    samples_per_component: int = 10
    tolerance: float = 1e-3
    max_iterations: int = 100


def fit(
    features: Tensor, labels: Tensor, num_classes: int, settings: MixtureSettings, generator: torch.Generator
) -> Mixtures:
    """Fit one mixture per class by EM with k-means++ starts; a single component has a closed form.

    features: (n, d) float32 or float64, on any device; labels: (n,) int64 in [0, num_classes). Classes without records
    get no component. A component with fewer than samples_per_component / 2 records is merged into its neighbours, so that
    no mean is a single record (unless a class has so few records). Raises DataError without records.

    Differs from the paper: its reference code drops classes with n <= K. Here K is capped, because a dropped class costs
    accuracy, and K near n would send records verbatim.
    """
    if len(features) == 0:
        raise DataError("no records to fit mixtures to")
    counts = torch.bincount(labels, minlength=num_classes)
    # A copy, sorted by class: the fit changes it in place.
    ordered = features.index_select(0, labels.to(features.device).argsort(stable=True))
    parts = [part for part in torch.split(ordered, counts.tolist()) if len(part)]
    family = FAMILIES[settings.family]
    rank = max(1, min(settings.rank, len(features) // settings.samples_per_component, features.shape[1]))
    if family.shared or settings.components == 1 or features.is_cuda:
        groups = [parts] if family.shared else [[part] for part in parts]
        fitted = [_fit_group(group, family, rank, settings, generator) for group in groups]
    else:
        # A stream for each class, so that the result does not depend on which class is fitted first.
        streams = [_stream(generator) for _ in parts]
        fitted = one_thread_each(
            lambda index: _fit_group([parts[index]], family, rank, settings, streams[index]),
            range(len(parts)),
            [len(part) for part in parts],
        )
    present = counts.nonzero().squeeze(1)
    sizes = torch.cat([torch.as_tensor([len(w) for w in weights]) for weights, _, _ in fitted]).to(labels.device)
    return Mixtures(
        counts=counts,
        labels=present.repeat_interleave(sizes),
        weights=torch.cat([w for weights, _, _ in fitted for w in weights]),
        means=torch.cat([m for _, means, _ in fitted for m in means]),
        covariance=_concatenate([covariance for _, _, covariance in fitted]),
    )


def _stream(generator: torch.Generator) -> torch.Generator:
    return torch.Generator().manual_seed(int(torch.randint(2**62, (1,), generator=generator)))


def _concatenate(tables: Sequence[AnyCovariance]) -> AnyCovariance:
    first = tables[0]
    if isinstance(first, Gram | LowRank):
        return first
    columns = zip(*(vars(table).values() for table in tables), strict=True)
    return type(first)(*(torch.cat(column) for column in columns))


def _fit_group(
    parts: Sequence[Tensor],
    family: type[AnyCovariance],
    rank: int,
    settings: MixtureSettings,
    generator: torch.Generator,
) -> tuple[list[Tensor], list[Tensor], AnyCovariance]:
    """EM over classes that share a covariance. Returns weights (K,) and means (K, d) of each class, and the covariance.

    `parts` are overwritten: for the fit, each class is centred, and all are scaled to unit mean variance.
    """
    # In double precision: the mean of equal numbers is then this number, and a constant dimension has no variance. Otherwise
    # the rounding is all that is left, and gives correlations that no records have.
    centres = [part.mean(0, dtype=torch.float64).to(part.dtype) for part in parts]
    for part, centre in zip(parts, centres, strict=True):
        part.sub_(centre)
    norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
    scale = float(torch.linalg.vector_norm(norms)) / sum(part.numel() for part in parts) ** 0.5 or 1.0
    for part in parts:
        part.div_(scale)
    limits = CovarianceLimits(RELATIVE_FLOOR, rank, gram(parts) if family.shared else None)
    responsibilities = [
        k_means(part, max(1, min(settings.components, len(part) // settings.samples_per_component)), generator)
        for part in parts
    ]
    if not (family.shared or family is Spherical):
        responsibilities = [_spherical_steps(*each, limits) for each in zip(parts, responsibilities, strict=True)]
    squares = [family.squares(part) for part in parts]
    smallest = settings.samples_per_component / 2
    covariance: AnyCovariance | None = None
    best, records = -torch.inf, sum(map(len, parts))
    for step in itertools.count(1):
        clusters = [_summarise(*each) for each in zip(parts, responsibilities, squares, strict=True)]
        covariance = family.estimate(clusters, limits, covariance)
        if not family.iterative and all(len(c.sizes) == 1 for c in clusters):
            break
        joints = _joint_log_densities(clusters, covariance)
        updated = [_responsibilities(joint) for joint in joints]
        likelihood = sum(float((j.amax(1) - r.amax(1).log()).sum()) for j, r in zip(joints, updated, strict=True)) / records
        settled = not family.iterative and all(
            float((new - old).abs().amax()) < SETTLED for new, old in zip(updated, responsibilities, strict=True)
        )
        # Small components are removed even after the last iteration. Each time at least one goes, so the loop ends.
        if settled or likelihood - best < settings.tolerance or step >= settings.max_iterations:
            too_small = any(len(c.sizes) > 1 and c.sizes.min() < smallest for c in clusters)
            if not too_small:
                break
            kept = [_without_small(joint, c.sizes, smallest) for joint, c in zip(joints, clusters, strict=True)]
            updated, likelihood = [_responsibilities(joint) for joint in kept], -torch.inf
        best, responsibilities = likelihood, updated
    assert covariance is not None  # the loop runs at least once
    weights = [c.sizes / c.sizes.sum() for c in clusters]
    means = [c.means * scale + centre for c, centre in zip(clusters, centres, strict=True)]
    return weights, means, covariance.scaled(scale)


def _summarise(points: Tensor, responsibilities: Tensor, squares: Tensor) -> Cluster:
    sizes = responsibilities.sum(0).clamp_min(torch.finfo(points.dtype).tiny)
    return Cluster(points, responsibilities, responsibilities.T @ points / sizes[:, None], sizes, squares)


def _joint_log_densities(clusters: Sequence[Cluster], covariance: CovarianceModel) -> list[Tensor]:
    """log(weight) + log-density of every point under every component of its class."""
    return [covariance.log_density(c.points, c.means, c.squares) + (c.sizes / c.sizes.sum()).log() for c in clusters]


def _responsibilities(joint: Tensor) -> Tensor:
    """Posterior probabilities (n, K) from joint log-densities (n, K). Over columns, softmax takes a tenth of the time."""
    return joint.T.softmax(0).T


def _without_small(joint: Tensor, sizes: Tensor, smallest: float) -> Tensor:
    """Drop the smaller half of the components below the bound; the other components take their records."""
    if len(sizes) == 1:
        return joint
    below = int((sizes < smallest).sum())
    return joint[:, sizes.argsort()[(below + 1) // 2 :].sort().values]


def _spherical_steps(points: Tensor, responsibilities: Tensor, limits: CovarianceLimits) -> Tensor:
    """Responsibilities (n, K) after EM steps with spherical covariances."""
    if responsibilities.shape[1] == 1:
        return responsibilities
    squares = Spherical.squares(points)
    for _ in range(SPHERICAL_STEPS):
        clusters = [_summarise(points, responsibilities, squares)]
        [joint] = _joint_log_densities(clusters, Spherical.estimate(clusters, limits, None))
        responsibilities = _responsibilities(joint)
    return responsibilities


def k_means(points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """Hard assignments (n, k) as 0/1, k <= clusters, from k-means++ seeds (Arthur & Vassilvitskii 2007) and Lloyd steps.

    The best of STARTS starts in few dimensions; one matrix product serves them all. If points coincide, the result has fewer
    clusters, and none is empty.
    """
    if clusters == 1:
        return points.new_ones(len(points), 1)
    d = points.shape[1]
    if d > 2 * START_DIMENSIONS:
        points = (torch.randn(START_DIMENSIONS, d, generator=generator).to(points) @ points.T).T
    norms = points.square().sum(1)
    centres, previous = _seeds(points, norms, clusters, generator), None
    shape = (STARTS, -1, len(points))
    for _ in range(iterations):
        distances = squared_distances(points, norms, centres)
        nearest, assignment = distances.view(shape).min(1, keepdim=True)
        if previous is not None and torch.equal(previous, assignment):
            break
        previous = assignment
        one_hot = torch.zeros_like(distances).view(shape).scatter_(1, assignment, 1)
        sizes = one_hot.sum(2).view(-1, 1)
        centres = one_hot.view_as(distances) @ points / sizes.clamp_min(1)
    costs = nearest.sum((1, 2))
    # The first of the best: rounding does not decide among starts that found the same clusters.
    best = one_hot[(costs <= costs.min() * (1 + 1e-4)).int().argmax()]
    return best[best.sum(1) > 0].T


def _seeds(points: Tensor, norms: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres (STARTS * k, d), k <= clusters, by k-means++: each is the best of a few draws in proportion to the squared
    distance.
    """
    chosen = torch.randint(len(points), (STARTS, 1), generator=generator).to(points.device)
    nearest = squared_distances(points, norms, points[chosen.flatten()])
    starts, trials = torch.arange(STARTS), 2 + int(math.log(clusters))
    smallest = torch.finfo(points.dtype).eps * 100 * norms.mean()
    while chosen.shape[1] < clusters and nearest.amax(1).min() > smallest:
        drawn = torch.multinomial(nearest.double().cpu(), trials, replacement=True, generator=generator).to(points.device)
        costs = squared_distances(points, norms, points[drawn.flatten()]).view(STARTS, trials, -1)
        costs = torch.minimum(costs, nearest[:, None])
        best = costs.sum(2).argmin(1)
        chosen, nearest = torch.cat([chosen, drawn[starts, best, None]], 1), costs[starts, best]
    return points[chosen.flatten()]
