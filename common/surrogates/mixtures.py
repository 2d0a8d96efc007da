"""Gaussian mixtures of labelled features: one table of components for all classes of a site, with
fit and sampling. EM starts from k-means of each class.

Source: FedPFT (Beitollahi et al. 2024), section 4.1 and algorithm 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, DataError, SurrogateError
from ..escapes import ranges
from ..models.devices import one_thread_each
from .covariances import (
    FAMILIES,
    LOG_2PI,
    RELATIVE_FLOOR,
    AnyCovariance,
    Cluster,
    CovarianceModel,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
    cholesky,
    gram,
    products,
    weighted_sums,
)

# Sizes of the numbers in a frame, beyond which a difference in single precision is not finite.
LARGEST, SMALLEST = 1e37, 1e-37
# Of the offset and the scale of one column.
BYTES = 8


@dataclass(frozen=True)
class Frame:
    """Offsets and scales of d columns.

    Attributes:
        offset: (d,), float64, of numbers in single precision.
        scale: (d,), the same, zero or more; zero for a column that does not vary, which is only
            shifted.

    Example:
        >>> frame = Frame(torch.tensor([100.0, 5.0]), torch.tensor([10.0, 0.0]))
        >>> frame.apply(torch.tensor([[120.0, 5.0]])).tolist()
        [[2.0, 0.0]]
        >>> Frame.of(frame.packed()).scale.tolist()
        [10.0, 0.0]
    """

    offset: Tensor
    scale: Tensor

    @property
    def divisor(self) -> Tensor:
        """What divides each column, (d,): its scale, or one if it does not vary."""
        return torch.where(self.scale > 0, self.scale, 1.0)

    def apply(self, features: Tensor) -> Tensor:
        """Features (n, d) in this frame, in single precision.

        Raises:
            SurrogateError: for features of another dimension.
        """
        self.check(features.shape[1])
        to = features.device
        return (features.float() - self.offset.float().to(to)) / self.divisor.float().to(to)

    def check(self, dimension: int) -> None:
        """Raise SurrogateError unless the frame is of features of this dimension."""
        if len(self.offset) != dimension:
            raise SurrogateError(
                f"a frame of {len(self.offset)} columns for features of dimension {dimension}"
            )

    def packed(self) -> bytes:
        """All offsets, then all scales, as 32-bit numbers, little endian."""
        return torch.cat([self.offset, self.scale]).numpy().astype("<f4").tobytes()

    @classmethod
    def of(cls, packed: bytes) -> Frame:
        """Parse bytes of `packed`.

        Raises:
            SurrogateError: for bytes that are no frame.
        """
        whole = np.frombuffer(packed[: len(packed) // BYTES * BYTES], dtype="<f4")
        with np.errstate(invalid="ignore"):
            numbers = torch.from_numpy(whole.astype(np.float64))
        offset, scale = numbers.chunk(2) if packed else (numbers, numbers)
        sound = (offset.abs() <= LARGEST) & (scale <= LARGEST)
        if not packed or len(packed) % BYTES or not sound.all():
            raise SurrogateError(f"{len(packed)} bytes that are no frame of columns")
        if not ((scale == 0) | (scale >= SMALLEST)).all():
            raise SurrogateError("a frame of columns with a scale below zero, or too small")
        return cls(offset, scale)


def in_frame(features: Tensor, frame: bytes) -> Tensor:
    """Features in the frame of a header.

    Args:
        features: (n, d).
        frame: in bytes; empty for none.

    Returns:
        Features (n, d), float32; unchanged without a frame.
    """
    return Frame.of(frame).apply(features) if frame else features


def public_frame(text: str, dimension: int, private: bool) -> bytes:
    """The frame in which public ranges of columns become [-1, 1].

    Args:
        text: of `features.ranges`; empty for none.
        dimension: d.
        private: whether features are clipped: a record whose features all lie in their ranges then
            has norm one at most.

    Returns:
        The frame in bytes; empty without ranges.

    Raises:
        ConfigError: for ranges of another number of columns, or beyond single precision.

    Example:
        >>> frame = Frame.of(public_frame("0,10; 4,8", 2, private=False))
        >>> frame.offset.tolist(), frame.scale.tolist()
        ([5.0, 6.0], [5.0, 2.0])
    """
    given = ranges(text)
    if not given:
        return b""
    if len(given) not in (1, dimension):
        raise ConfigError(
            f"features.ranges has {len(given)} ranges for {dimension} features; give one for each, "
            "in their order, or one for all"
        )
    low, high = torch.tensor(given, dtype=torch.float64).expand(dimension, 2).T
    widest = math.sqrt(dimension) if private else 1.0
    frame = Frame(low / 2 + high / 2, widest * (high / 2 - low / 2))
    within = (frame.offset.abs() <= LARGEST) & (frame.scale >= SMALLEST) & (frame.scale <= LARGEST)
    if not within.all():
        raise ConfigError(
            f"features.ranges = {text[:100]!r} is beyond {SMALLEST:g} to {LARGEST:g}, the numbers of "
            "single precision; use other units"
        )
    return frame.packed()


def common_frame(frames: Sequence[bytes]) -> bytes:
    """The frame of all sites together: the median offset and scale of each column.

    A frame that few sites have is no reason to change what the others sent: it could be a lie.

    Args:
        frames: of the sites; empty for one without.

    Returns:
        The frame; empty if most sites have none.

    Example:
        >>> wide, far = (Frame(torch.tensor([x]), torch.tensor([1.0])).packed() for x in (1.0, 9.0))
        >>> common_frame([wide, wide, far]) == wide, common_frame([far, b"", b""])
        (True, b'')
    """
    known = [Frame.of(frame) for frame in frames if frame]
    if not known or 2 * len(known) < len(frames):
        return b""
    scales = torch.stack([frame.scale for frame in known])
    scale = scales.masked_fill(scales == 0, torch.nan).nanmedian(0).values.nan_to_num(0.0)
    offset = torch.stack([frame.offset for frame in known]).median(0).values
    # Numbers of single precision stay so: a median is one of them.
    return Frame(offset.clamp(-LARGEST, LARGEST), scale.clamp_max(LARGEST)).packed()


@dataclass(frozen=True)
class PublicMap:
    """The map from features x to projection @ (x - centre).

    Attributes:
        projection: (k, d); None if there is none.
        centre: (d,); None if there is none.

    Example:
        >>> public = PublicMap(torch.tensor([[1.0, 1.0]]), torch.tensor([1.0, 2.0]))
        >>> public.apply(torch.tensor([[1.0, 2.0], [4.0, 6.0]])).tolist()
        [[0.0], [7.0]]
    """

    projection: Tensor | None = None
    centre: Tensor | None = None

    def apply(self, features: Tensor) -> Tensor:
        """The mapped features.

        Args:
            features: (n, d).

        Returns:
            Features (n, k); (n, d) without a projection.

        Raises:
            SurrogateError: for a map of another dimension. The error depends on the request and the
                backbone only.
        """
        for what, part in (("centre", self.centre), ("projection", self.projection)):
            if part is not None and part.shape[-1] != features.shape[1]:
                raise SurrogateError(
                    f"a {what} of {part.shape[-1]} dimensions; features here have "
                    f"{features.shape[1]}"
                )
        if self.centre is not None:
            features = features - self.centre.to(features)
        if self.projection is None:
            return features
        matrix = self.projection.to(features)
        # One record at a time: the rounding of a product of matrices may depend on the other
        # records.
        return (
            torch.stack([matrix @ row for row in features])
            if len(features)
            else features.new_zeros(0, len(matrix))
        )


# Starts of k-means, the steps after which the best one is known, and the dimensions in which they run:
# sums of columns with random signs, which keep the distances of points (Charikar, Chen & Farach-Colton
# 2002; the cost of every clustering: Makarychev, Makarychev & Razenshteyn 2019).
STARTS, FIRST_STEPS, START_DIMENSIONS = 3, 6, 64


def k_means(
    points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 6
) -> Tensor:
    """Hard assignments of points to clusters, from k-means++ seeds and Lloyd steps.

    The best of STARTS starts after FIRST_STEPS steps in few dimensions is continued in all.

    Args:
        points: (n, d).
        clusters: most that the result has.
        generator: of the seeds.
        iterations: most Lloyd steps in all dimensions.

    Returns:
        Assignments (n, k) as 0/1, k <= clusters. If points coincide, there are fewer clusters, and
        none is empty.

    Source:
        Arthur & Vassilvitskii 2007.

    Example:
        >>> points = torch.tensor([[0.0], [0.1], [9.0], [9.1]])
        >>> assignments = k_means(points, 2, torch.Generator().manual_seed(0))
        >>> (assignments @ assignments.T).tolist()[0]
        [1.0, 1.0, 0.0, 0.0]
    """
    if clusters == 1:
        return points.new_ones(len(points), 1)
    one_hot = _first_assignment(_sketch(points, generator), clusters, generator)
    norms = points.square().sum(1)
    for _ in range(iterations):
        previous, one_hot = one_hot, one_hot[:, one_hot.any(0)]
        centres = weighted_sums(one_hot, points) / one_hot.sum(0)[:, None]
        one_hot = _nearest(_squared_distances(points, norms, centres))
        if torch.equal(previous, one_hot):
            break
    return one_hot[:, one_hot.any(0)]


def _nearest(distances: Tensor) -> Tensor:
    """The nearest centre of each point, (n, k) as 0/1. Much faster than argmin along columns."""
    nearest = distances.min(1).indices
    return torch.zeros_like(distances).scatter_(1, nearest[:, None], 1.0)


def _sketch(points: Tensor, generator: torch.Generator) -> Tensor:
    """The points in START_DIMENSIONS dimensions, if they have many more."""
    n, d = points.shape
    if d <= 2 * START_DIMENSIONS:
        return points
    signs = 2.0 * torch.randint(2, (d,), generator=generator) - 1
    signed = torch.nn.functional.pad(points * signs.to(points), (0, -d % START_DIMENSIONS))
    return signed.view(n, -1, START_DIMENSIONS).sum(1)


def _first_assignment(points: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Assignments (n, k) as 0/1 of the best start; all starts at once."""
    norms = points.square().sum(1)
    centres = _seeds(points, norms, clusters, generator)
    for _ in range(FIRST_STEPS):
        distances = _squared_distances(points, norms, centres.flatten(0, 1))
        nearest = distances.view(len(points), STARTS, -1).min(2)
        one_hot = torch.zeros_like(distances).view(len(points), STARTS, -1)
        one_hot.scatter_(2, nearest.indices[..., None], 1.0)
        sizes = one_hot.sum(0)[..., None]
        sums = (one_hot.flatten(1).T @ points).view_as(centres)
        centres = torch.where(sizes > 0, sums / sizes, centres)
    return one_hot[:, nearest.values.sum(0).argmin()]


def _seeds(points: Tensor, norms: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres (STARTS, k, d), k <= clusters, by k-means++: each is the best of a few draws in
    proportion to the squared distance. Where points coincide, so do centres.
    """
    starts = torch.arange(STARTS, device=points.device)

    def pick(weights: Tensor, count: int) -> Tensor:
        drawn = torch.multinomial(weights.double().cpu(), count, True, generator=generator)
        return drawn.to(points.device)

    def distances(rows: Tensor) -> Tensor:
        apart = _squared_distances(points, norms, points[rows.flatten()])
        return apart.T.reshape(*rows.shape, len(points))

    chosen = pick(torch.ones(STARTS, len(points)), 1)
    nearest = distances(chosen).squeeze(1)
    trials = 2 + int(math.log(clusters))
    smallest = torch.finfo(points.dtype).eps * 100 * norms.mean()
    while chosen.shape[1] < clusters and bool((far := nearest.amax(1) > smallest).any()):
        candidates = pick(torch.where(far[:, None], nearest, 1.0), trials)
        costs = torch.minimum(nearest[:, None], distances(candidates))
        best = costs.sum(2).argmin(1)
        chosen = torch.cat([chosen, candidates[starts, best][:, None]], 1)
        nearest = costs[starts, best]
    return points[chosen]


def _squared_distances(points: Tensor, norms: Tensor, centres: Tensor) -> Tensor:
    return (norms[:, None] - 2 * products(points, centres) + centres.square().sum(1)).clamp_min(0)


# Numbers in a chunk of records in a file (32 MiB in double precision), and in the sample that several
# components are fitted to.
CHUNK, SAMPLE = 2**22, 2**24
# A larger change of any responsibility calls for another step.
SETTLED = 1e-4

# Weights (K,) and means (K, d) of each class, and their covariance.
Fitted = tuple[list[Tensor], list[Tensor], AnyCovariance]


@dataclass(frozen=True)
class Mixtures:
    """M Gaussian components of C classes in d dimensions.

    Attributes:
        counts: records of each class, (C,), int64.
        labels: the class of each component, (M,), int64, ascending.
        weights: (M,), summing to one within a class.
        means: (M, d).
        covariance: of all components.

    Example:
        >>> identity = FAMILIES["spherical"](torch.ones(2))
        >>> means = torch.tensor([[0.0, 0.0], [8.0, 8.0]])
        >>> counts, labels = torch.tensor([30, 10]), torch.tensor([0, 1])
        >>> table = Mixtures(counts, labels, torch.ones(2), means, identity)
        >>> mean, variance = table.moments()
        >>> mean.tolist(), variance.tolist()
        ([2.0, 2.0], [13.0, 13.0])
        >>> streams = [torch.Generator().manual_seed(seed) for seed in (0, 1)]
        >>> features, labels = table.draw([2, 1], streams)
        >>> tuple(features.shape), labels.tolist()
        ((3, 2), [0, 0, 1])
    """

    counts: Tensor
    labels: Tensor
    weights: Tensor
    means: Tensor
    covariance: AnyCovariance

    @property
    def family(self) -> str:
        """Name of the covariance family."""
        return next(
            name for name, family in FAMILIES.items() if isinstance(self.covariance, family)
        )

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
            covariance = type(self.covariance)(
                *(table.to(device) for table in vars(self.covariance).values())
            )
        columns = self.counts, self.labels, self.weights, self.means
        counts, labels, weights, means = (column.to(device) for column in columns)
        return Mixtures(counts, labels, weights, means, covariance)

    def draw(
        self, counts: Sequence[int], streams: Sequence[torch.Generator]
    ) -> tuple[Tensor, Tensor]:
        """Sample features of every class from its own stream.

        Args:
            counts: number of samples of each class, (C,).
            streams: a generator for each class, (C,).

        Returns:
            Features (sum of counts, d), and their labels (sum of counts,).
        """
        total, dimension = sum(counts), self.means.shape[1]
        normals = torch.empty(total, self.covariance.width(dimension))
        component = torch.empty(total, dtype=torch.int64)
        first = (self.components.cumsum(0) - self.components).tolist()
        start = 0
        for count, begin, size, stream in zip(
            counts, first, self.components.tolist(), streams, strict=True
        ):
            rows = slice(start, start + count)
            start += count
            if count == 0:
                continue
            component[rows] = begin
            if size > 1:
                weights = self.weights[begin : begin + size].cpu()
                component[rows] += torch.multinomial(
                    weights, count, replacement=True, generator=stream
                )
            normals[rows].normal_(generator=stream)
        normals, component = normals.to(self.means), component.to(self.means.device)
        return self.means[component].add_(self.covariance.colour(normals, component)), self.labels[
            component
        ]

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
    """Settings of a mixture fit.

    `components` and `rank` are upper bounds: a class of n records gets at most
    n / samples_per_component components, and a site of n records at most that rank; always at least
    one.

    Attributes:
        family: of covariances, a name in `FAMILIES`.
        components: Gaussians of each class.
        rank: columns of the factor of a lowrank covariance.
        samples_per_component: fewest records for each component, and for each column.
        tolerance: EM ends when the mean log-density, in nats, rises by less.
        max_iterations: most steps of EM.
    """

    family: str = "lowrank"
    components: int = 1
    rank: int = 16
    samples_per_component: int = 10
    tolerance: float = 1e-3
    max_iterations: int = 100


def fit(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: MixtureSettings,
    generator: torch.Generator,
) -> Mixtures:
    """Fit one mixture per class by EM with k-means++ starts; a single component has a closed form.

    Differs from the paper: its reference code drops classes with n <= K. Here K is capped, because
    a dropped class costs accuracy, and K near n would send records verbatim.

    Args:
        features: (n, d), float32 or float64, on any device.
        labels: (n,), int64, in [0, num_classes).
        num_classes: of the result. Classes without records get no component.
        settings: of the fit.
        generator: of the starts.

    Returns:
        The mixtures. A component with fewer than samples_per_component / 2 records is merged into
        its neighbours, so that no mean is a single record (unless a class has so few records).

    Raises:
        DataError: without records.

    Source:
        Beitollahi et al. 2024, section 4.1 and algorithm 1.

    Example:
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0], [9.0, 7.0]])
        >>> labels = torch.tensor([0, 0, 1, 1])
        >>> settings = MixtureSettings("spherical")
        >>> mixtures = fit(features, labels, 3, settings, torch.Generator().manual_seed(0))
        >>> mixtures.counts.tolist(), mixtures.means.tolist()
        ([2, 2, 0], [[1.0, 0.0], [9.0, 8.0]])
    """
    if len(features) == 0:
        raise DataError("no records to fit mixtures to")
    counts = torch.bincount(labels, minlength=num_classes)
    by_class = labels.argsort(stable=True).to(features.device)
    classes = [rows for rows in torch.split(by_class, counts.tolist()) if len(rows)]
    family = FAMILIES[settings.family]
    rank = max(
        1, min(settings.rank, len(features) // settings.samples_per_component, features.shape[1])
    )

    def fit_group(group: Sequence[Tensor], stream: torch.Generator) -> Fitted:
        # Copies: the fit changes them in place.
        return _fit_group(
            [features.index_select(0, rows) for rows in group], family, rank, settings, stream
        )

    groups = [classes] if family.shared else [[rows] for rows in classes]
    if family.shared or settings.components == 1:
        fitted = [fit_group(group, generator) for group in groups]
    else:
        # A stream for each class, so that the result does not depend on which class is fitted
        # first, and starts on a GPU are those on a processor.
        work = [(group, _stream(generator)) for group in groups]
        fitted = (
            [fit_group(*each) for each in work]
            if features.is_cuda
            else one_thread_each(
                lambda each: fit_group(*each), work, [len(rows) for rows in classes]
            )
        )
    weights = [w for each, _, _ in fitted for w in each]
    # Without repeat_interleave: it wakes all threads for a few numbers, and they then spin on the
    # cores of the next fit.
    present = counts.nonzero().flatten().tolist()
    own = [torch.full((len(w),), label) for label, w in zip(present, weights, strict=True)]
    return Mixtures(
        counts=counts,
        labels=torch.cat(own).to(labels.device),
        weights=torch.cat(weights),
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
) -> Fitted:
    """EM over classes that share a covariance.

    `parts` are overwritten: for the fit, each class is centred, and all are scaled to unit mean
    variance.
    """
    # In double precision: the mean of equal numbers is then this number, and a constant dimension
    # has no variance. Otherwise the rounding is all that is left, and gives correlations that no
    # records have.
    centres = [part.mean(0, dtype=torch.float64).to(part.dtype) for part in parts]
    for part, centre in zip(parts, centres, strict=True):
        part.sub_(centre)
    norms = torch.stack([torch.linalg.vector_norm(part) for part in parts])
    scale = (
        float(torch.linalg.vector_norm(norms)) / sum(part.numel() for part in parts) ** 0.5 or 1.0
    )
    for part in parts:
        part.div_(scale)
    whole = gram(parts) if family.shared else torch.empty(0)
    responsibilities = [
        k_means(
            part,
            max(1, min(settings.components, len(part) // settings.samples_per_component)),
            generator,
        )
        for part in parts
    ]
    squares = [family.squares(part) for part in parts]
    smallest = settings.samples_per_component / 2
    covariance: AnyCovariance | None = None
    best = -torch.inf
    for step in itertools.count(1):
        clusters = [
            _summarise(*each) for each in zip(parts, responsibilities, squares, strict=True)
        ]
        covariance = family.estimate(clusters, rank, whole, covariance)
        if not family.iterative and all(len(c.sizes) == 1 for c in clusters):
            break
        joints = _joint_log_densities(clusters, covariance)
        updated = [_responsibilities(joint) for joint in joints]
        # A record's log-density is its joint one less the log-responsibility, of any component.
        densities = [j.amax(1) - r.amax(1).log() for j, r in zip(joints, updated, strict=True)]
        likelihood = float(torch.cat(densities).mean())
        changes = (
            float((new - old).abs().amax())
            for new, old in zip(updated, responsibilities, strict=True)
        )
        settled = not family.iterative and max(changes) < SETTLED
        # Small components are removed even after the last iteration. Each time at least one goes,
        # so the loop ends.
        if settled or likelihood - best < settings.tolerance or step >= settings.max_iterations:
            too_small = any(len(c.sizes) > 1 and c.sizes.min() < smallest for c in clusters)
            if not too_small:
                break
            kept = [
                _without_small(joint, c.sizes, smallest)
                for joint, c in zip(joints, clusters, strict=True)
            ]
            updated, likelihood = [_responsibilities(joint) for joint in kept], -torch.inf
        best, responsibilities = likelihood, updated
    assert covariance is not None  # the loop runs at least once
    weights = [c.sizes / c.sizes.sum() for c in clusters]
    means = [c.means * scale + centre for c, centre in zip(clusters, centres, strict=True)]
    return weights, means, covariance.scaled(scale)


def _summarise(points: Tensor, responsibilities: Tensor, squares: Tensor) -> Cluster:
    sizes = responsibilities.sum(0).clamp_min(torch.finfo(points.dtype).tiny)
    means = weighted_sums(responsibilities, points) / sizes[:, None]
    return Cluster(points, responsibilities, means, sizes, squares)


def _joint_log_densities(clusters: Sequence[Cluster], covariance: CovarianceModel) -> list[Tensor]:
    """log(weight) + log-density of every point under every component of its class."""
    return [
        covariance.log_density(c.points, c.means, c.squares) + (c.sizes / c.sizes.sum()).log()
        for c in clusters
    ]


def _responsibilities(joint: Tensor) -> Tensor:
    """Posterior probabilities (n, K) from joint log-densities (n, K). Over columns, softmax takes a
    tenth of the time.
    """
    return joint.T.softmax(0).T


def _without_small(joint: Tensor, sizes: Tensor, smallest: float) -> Tensor:
    """Drop the smaller half of the components below the bound; the other components take their
    records.
    """
    if len(sizes) == 1:
        return joint
    below = int((sizes < smallest).sum())
    return joint[:, sizes.argsort()[(below + 1) // 2 :].sort().values]


def fit_streamed(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: MixtureSettings,
    generator: torch.Generator,
    advance: Callable[[int], None] = lambda rows: None,
) -> Mixtures:
    """As `fit`, of more records than memory holds.

    One Gaussian a class follows from sums over chunks of records, in double precision. A shared
    covariance needs one matrix (d, d): 134 MB for 4,096 dimensions, so its exact decomposition is kept,
    and no randomised one. Several Gaussians a class are those of a sample of at most `SAMPLE` numbers,
    with the same number of records of every large class.

    Args:
        features: (n, d), on the processor; may be mapped from a file.
        labels: (n,), int64, below num_classes; records with -1 are left out.
        num_classes: of the result.
        settings: of the fit.
        generator: of the sample and the starts.
        advance: receives the rows of each chunk that was read: all rows twice, or once for a sample.

    Returns:
        The mixtures, in single precision; full covariances of one Gaussian a class stay in double.

    Raises:
        DataError: without records.

    Example:
        >>> features = torch.tensor([[0.0, 0.0], [2.0, 0.0], [9.0, 9.0], [5.0, 5.0]])
        >>> labels = torch.tensor([0, 0, 1, -1])
        >>> settings = MixtureSettings("spherical")
        >>> mixtures = fit_streamed(features, labels, 2, settings, torch.Generator())
        >>> mixtures.counts.tolist(), mixtures.means.tolist()
        ([2, 1], [[1.0, 0.0], [9.0, 9.0]])
    """
    counts, d = torch.bincount(labels[labels >= 0], minlength=num_classes), features.shape[1]
    if not (total := int(counts.sum())):
        raise DataError("no records to fit mixtures to")
    present = counts.nonzero().flatten()
    if settings.components > 1:
        rows = sample(labels, counts, max(len(present), SAMPLE // d), generator)
        fitted = fit(features[rows].float(), labels[rows], num_classes, settings, generator)
        advance(len(labels))
        return replace(fitted, counts=counts)
    family = FAMILIES[settings.family]
    centres, sums = torch.zeros(2, num_classes, d, dtype=torch.float64)
    shapes = {Diagonal: (num_classes, d), Spherical: (num_classes,), Full: (num_classes, d, d)}
    squares = torch.zeros(shapes.get(family, (d, d)), dtype=torch.float64)
    for label, points in _by_class(features, labels, advance):
        centres[label] += points.sum(0)
    centres /= counts.clamp_min(1)[:, None]
    for label, points in _by_class(features, labels, advance):
        points.sub_(centres[label])
        sums[label] += points.sum(0)
        if family.shared or family is Full:
            (squares if family.shared else squares[label]).addmm_(points.T, points)
        else:
            squares[label] += points.square().sum(0 if family is Diagonal else (0, 1))
    sizes = counts[present].double()
    # What rounding has left of the means.
    means = sums[present] / sizes[:, None]
    if family.shared:
        scatter = (squares - (means * sizes[:, None]).T @ means) / total
        rank = max(1, min(settings.rank, total // settings.samples_per_component, d))
        covariance: AnyCovariance = (
            _factored(scatter, rank, settings)
            if family is LowRank
            else Gram(((scatter + scatter.T) / 2).float())
        )
    else:
        covariance = _of_squares(squares[present], sizes, means, family)
    return Mixtures(
        counts, present, torch.ones(len(present)), (means + centres[present]).float(), covariance
    )


def sample(labels: Tensor, counts: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """A sample of records: all of small classes, and the same number of every larger one.

    Args:
        labels: (n,), -1 for a record that is left out.
        counts: records of each class, (C,).
        most: records in the sample.
        generator: that chooses among the records of a class.

    Returns:
        Indices of the records, at most `most`, ascending.
    """
    low, high = 1, int(counts.max())
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (
            (middle, high) if int(counts.clamp_max(middle).sum()) <= most else (low, middle - 1)
        )
    rows = []
    for label in counts.nonzero().flatten().tolist():
        own = (labels == label).nonzero().flatten()
        rows.append(
            own if len(own) <= low else own[torch.randperm(len(own), generator=generator)[:low]]
        )
    return torch.cat(rows).sort().values


def _by_class(
    features: Tensor, labels: Tensor, advance: Callable[[int], None]
) -> Iterator[tuple[int, Tensor]]:
    """Classes and features (m, d) of them, float64, chunk by chunk."""
    rows = max(1, CHUNK // features.shape[1])
    for points, own in zip(torch.split(features, rows), torch.split(labels, rows), strict=True):
        points = points.double()
        for label in torch.bincount(own[own >= 0]).nonzero().flatten().tolist():
            yield label, points[own == label]
        advance(len(own))


def _of_squares(
    squares: Tensor, sizes: Tensor, means: Tensor, family: type[AnyCovariance]
) -> AnyCovariance:
    """The covariance of each class, from its squares around a point near its mean."""
    d = means.shape[1]
    energy = squares.diagonal(dim1=1, dim2=2) if family is Full else squares
    spread = energy.reshape(len(sizes), -1).sum(1) / (sizes * d)
    floors = RELATIVE_FLOOR * torch.where(spread > 0, spread, 1.0)
    if family is Diagonal:
        variances = squares / sizes[:, None] - means.square()
        return Diagonal(variances.maximum(floors[:, None]).float())
    if family is Spherical:
        variances = (squares / sizes - means.square().sum(1)) / d
        return Spherical(variances.maximum(floors).float())
    scatters = squares / sizes[:, None, None] - means[:, :, None] * means[:, None, :]
    return Full(
        torch.stack([cholesky(s, float(floor)) for s, floor in zip(scatters, floors, strict=True)])
    )


def _factored(scatter: Tensor, rank: int, settings: MixtureSettings) -> LowRank:
    """Factor analysis until the likelihood rises by less than the tolerance; it depends on the
    scatter (d, d) alone.
    """
    floor = RELATIVE_FLOOR * (float(scatter.diagonal().mean()) or 1.0)
    best, covariance = -torch.inf, LowRank.of_scatter(scatter, rank, floor, None)
    for _ in range(settings.max_iterations - 1):
        likelihood = _likelihood(scatter, covariance)
        if likelihood - best < settings.tolerance:
            break
        best, covariance = likelihood, LowRank.of_scatter(scatter, rank, floor, covariance)
    return LowRank(covariance.factor.float(), covariance.variances.float())


def _likelihood(scatter: Tensor, covariance: LowRank) -> float:
    """Mean log-density of records with this scatter around their means."""
    whitened = covariance.factor / covariance.variances[:, None]
    core = torch.eye(whitened.shape[1], dtype=torch.float64) + covariance.factor.T @ whitened
    apart = (scatter.diagonal() / covariance.variances).sum()
    apart = apart - torch.linalg.solve(core, whitened.T @ scatter @ whitened).trace()
    determinant = covariance.variances.log().sum() + torch.linalg.slogdet(core).logabsdet
    return float(-0.5 * (apart + determinant + len(scatter) * LOG_2PI))
