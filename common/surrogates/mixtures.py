"""Gaussian mixtures of labelled features: one table of components for all classes of a site, with fit and sampling.

Source: FedPFT (Beitollahi et al. 2024), section 4.1 and algorithm 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common.errors import DataError
from common.models.devices import one_thread_each
from common.surrogates.covariances import Cluster, CovarianceLimits, CovarianceModel, products
from common.surrogates.shared_covariances import FAMILIES, AnyCovariance, Gram, LowRank, gram

# Lower bound of variances, as a share of the mean variance, like scikit-learn's reg_covar for unit-scale data.
RELATIVE_FLOOR = 1e-6
# Starts of k-means, the steps after which the best one is known, and the dimensions of the random projection in which they
# run: a projection keeps the cost of every clustering (Makarychev, Makarychev & Razenshteyn 2019). For ten components and
# CIFAR-10 features the fit takes a fifth less time than with starts in all dimensions, at higher likelihood.
STARTS, FIRST_STEPS, START_DIMENSIONS = 3, 6, 64


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
    ordered = features[labels.argsort(stable=True)]
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
    squares = [family.squares(part) for part in parts]
    smallest = settings.samples_per_component / 2
    covariance: AnyCovariance | None = None
    best = -torch.inf
    for step in itertools.count(1):
        clusters = [_summarise(*each) for each in zip(parts, responsibilities, squares, strict=True)]
        covariance = family.estimate(clusters, limits, covariance)
        if not family.iterative and all(len(c.sizes) == 1 for c in clusters):
            break
        joints = _joint_log_densities(clusters, covariance)
        likelihood = float(sum(joint.logsumexp(1).sum() for joint in joints)) / sum(map(len, parts))
        # Small components are removed even after the last iteration. Each time at least one goes, so the loop ends.
        if likelihood - best < settings.tolerance or step >= settings.max_iterations:
            too_small = any(len(c.sizes) > 1 and c.sizes.min() < smallest for c in clusters)
            if not too_small:
                break
            joints = [_without_small(joint, c.sizes, smallest) for joint, c in zip(joints, clusters, strict=True)]
            likelihood = -torch.inf
        best = likelihood
        responsibilities = [joint.softmax(1) for joint in joints]
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


def _without_small(joint: Tensor, sizes: Tensor, smallest: float) -> Tensor:
    """Drop the smaller half of the components below the bound; the other components take their records."""
    if len(sizes) == 1:
        return joint
    below = int((sizes < smallest).sum())
    return joint[:, sizes.argsort()[(below + 1) // 2 :].sort().values]


def k_means(points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20) -> Tensor:
    """Hard assignments (n, k) as 0/1, k <= clusters, from k-means++ seeds (Arthur & Vassilvitskii 2007) and Lloyd steps.

    The best of STARTS starts after FIRST_STEPS steps in few dimensions is continued in all. If points coincide, the result
    has fewer clusters, and none is empty.
    """
    if clusters == 1:
        return points.new_ones(len(points), 1)
    few, d = points, points.shape[1]
    if d > 2 * START_DIMENSIONS:
        few = points @ torch.randn(d, START_DIMENSIONS, generator=generator).to(points)
    norms = few.square().sum(1)
    starts = [_lloyd(few, norms, _seeds(few, norms, clusters, generator), FIRST_STEPS) for _ in range(STARTS)]
    _, one_hot = min(starts, key=lambda start: start[0])
    return _lloyd(points, points.square().sum(1), _centres(points, one_hot), iterations)[1]


def _seeds(points: Tensor, norms: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres (k, d), k <= clusters, by k-means++: each is the best of a few draws in proportion to the squared distance."""

    def pick(weights: Tensor, count: int = 1) -> Tensor:
        return torch.multinomial(weights.double().cpu(), count, replacement=True, generator=generator).to(points.device)

    chosen = pick(torch.ones(len(points)))
    nearest = _squared_distances(points, norms, points[chosen]).squeeze(1)
    trials = 2 + int(torch.log(torch.tensor(float(clusters))))
    smallest = torch.finfo(points.dtype).eps * 100 * norms.mean()
    while len(chosen) < clusters and nearest.max() > smallest:
        candidates = pick(nearest, trials)
        costs = torch.minimum(nearest[:, None], _squared_distances(points, norms, points[candidates]))
        best = costs.sum(0).argmin()
        chosen, nearest = torch.cat([chosen, candidates[best : best + 1]]), costs[:, best]
    return points[chosen]


def _lloyd(points: Tensor, norms: Tensor, centres: Tensor, iterations: int) -> tuple[float, Tensor]:
    """Sum of squared distances to the centres of the last assignment, and that assignment (n, k) as 0/1."""
    assignment = None
    for _ in range(iterations):
        distances = _squared_distances(points, norms, centres)
        previous, assignment = assignment, distances.argmin(1)
        one_hot = torch.nn.functional.one_hot(assignment, len(centres)).to(points)
        one_hot = one_hot[:, one_hot.sum(0) > 0]
        if previous is not None and torch.equal(previous, assignment):
            break
        centres = _centres(points, one_hot)
    return float(distances.amin(1).sum()), one_hot


def _centres(points: Tensor, one_hot: Tensor) -> Tensor:
    return one_hot.T @ points / one_hot.sum(0)[:, None]


def _squared_distances(points: Tensor, norms: Tensor, centres: Tensor) -> Tensor:
    return (norms[:, None] - 2 * products(points, centres) + centres.square().sum(1)).clamp_min(0)
