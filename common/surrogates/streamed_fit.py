"""Mixtures of more records than memory holds: sums over chunks of records, and EM that starts from
a sample.

One Gaussian a class follows from sums alone: the result is that of `mixtures.fit`, in double
precision. Several components start from `mixtures.fit` on a sample of at most `SAMPLE` numbers, the
same number of records of every large class; then `PASSES` EM steps over all records follow. Memory
depends on the classes, the components and the dimension only. A shared covariance needs one matrix
(d, d): 134 MB for 4,096 dimensions, so its exact decomposition is kept, and no randomised one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.surrogates.covariances import LOG_2PI, Diagonal, Full, Spherical, cholesky
from fedsurrogate.common.surrogates.mixtures import RELATIVE_FLOOR, Mixtures, MixtureSettings, fit
from fedsurrogate.common.surrogates.shared_covariances import FAMILIES, AnyCovariance, Gram, LowRank

# Numbers in a chunk of records (32 MiB in double precision), and in the sample from which EM
# starts.
CHUNK, SAMPLE = 2**22, 2**24
PASSES = 3


@dataclass(frozen=True)
class Stream:
    """Records that are read chunk by chunk.

    Attributes:
        features: (n, d).
        labels: (n,), -1 for a record that is left out.
        advance: receives the rows of each chunk.
    """

    features: Tensor
    labels: Tensor
    advance: Callable[[int], None]

    def by_class(self) -> Iterator[tuple[int, Tensor]]:
        """Classes and features (m, d) of them, float64, chunk by chunk."""
        rows = max(1, CHUNK // self.features.shape[1])
        for start in range(0, len(self.labels), rows):
            points, labels = (
                self.features[start : start + rows].double(),
                self.labels[start : start + rows],
            )
            for label in torch.bincount(labels[labels >= 0]).nonzero().flatten().tolist():
                yield label, points[labels == label]
            self.advance(len(labels))


@dataclass(frozen=True)
class Table:
    """M components during a fit, float64.

    Attributes:
        labels: classes (M,), ascending.
        weights: (M,).
        means: (M, d), around the class centres.
        covariance: of all components; None before the first step where each class has one.
    """

    labels: Tensor
    weights: Tensor
    means: Tensor
    covariance: AnyCovariance | None = None

    def responsibilities(self, label: int, points: Tensor) -> tuple[slice, Tensor]:
        """The components of a class, and their responsibilities for points.

        Args:
            label: of the class.
            points: of this class, (n, d).

        Returns:
            The rows of its K components in the table, and the responsibilities (n, K).
        """
        at = (self.labels == label).nonzero().flatten()
        own = slice(int(at[0]), int(at[-1]) + 1)
        if len(at) == 1 or self.covariance is None:
            return own, points.new_ones(len(points), 1)
        tables = vars(self.covariance).values()
        covariance = type(self.covariance)(
            *(each if self.covariance.shared else each[own] for each in tables)
        )
        return own, (
            covariance.log_density(points, self.means[own]) + self.weights[own].log()
        ).softmax(1)


@dataclass(frozen=True)
class Expected:
    """Sums over all records, around the class centres.

    Attributes:
        sizes: of the components, (M,).
        sums: of the records by component, (M, d).
        squares: what the family needs of the squares, by component.
        scatter: (d, d), for a shared covariance.
        energy: the sum of all squares, by class, (C,).
    """

    sizes: Tensor
    sums: Tensor
    squares: Tensor
    scatter: Tensor
    energy: Tensor


def fit_streamed(
    features: Tensor,
    labels: Tensor,
    num_classes: int,
    settings: MixtureSettings,
    generator: torch.Generator,
    advance: Callable[[int], None] = lambda rows: None,
) -> Mixtures:
    """As `mixtures.fit`, with memory that does not grow with the records.

    Args:
        features: (n, d), on the processor; may be mapped from a file.
        labels: (n,), int64, below num_classes; records with -1 are left out.
        num_classes: of the result.
        settings: of the fit.
        generator: of the sample and the starts.
        advance: receives the rows of each chunk that was read.

    Returns:
        The mixtures, in single precision; full covariances stay in double.

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
    used = labels >= 0
    counts = torch.bincount(labels[used], minlength=num_classes)
    if not (total := int(counts.sum())):
        raise DataError("no records to fit mixtures to")
    stream, d = Stream(features, labels, advance), features.shape[1]
    family = FAMILIES[settings.family]
    rank = max(1, min(settings.rank, total // settings.samples_per_component, d))
    centres = torch.zeros(num_classes, d, dtype=torch.float64)
    for label, points in stream.by_class():
        centres[label] += points.sum(0)
    centres /= counts.clamp_min(1)[:, None]
    present = counts.nonzero().flatten()
    table = Table(
        present,
        torch.ones(len(present), dtype=torch.float64),
        torch.zeros(len(present), d, dtype=torch.float64),
    )
    if settings.components > 1:
        rows = sample(labels, counts, max(len(present), SAMPLE // d), generator)
        start = fit(features[rows].float(), labels[rows], num_classes, settings, generator)
        covariance = type(start.covariance)(
            *(each.double() for each in vars(start.covariance).values())
        )
        table = Table(
            start.labels,
            start.weights.double(),
            start.means.double() - centres[start.labels],
            covariance,
        )
    several, smallest = len(table.labels) > len(present), settings.samples_per_component / 2
    for step in itertools.count(1):
        expected = _expected(stream, table, centres, family)
        kept = _kept(table.labels, expected.sizes, smallest)
        table = _maximised(table, expected, kept, counts, family, rank)
        if kept.all() and (not several or step >= PASSES):
            break
    if isinstance(table.covariance, LowRank) and not several:
        table = Table(
            table.labels,
            table.weights,
            table.means,
            _converged(expected.scatter / total, table.covariance, settings),
        )
    assert table.covariance is not None  # every step sets it
    values = vars(table.covariance).values()
    single = (
        table.covariance
        if family is Full
        else type(table.covariance)(*(value.float() for value in values))
    )
    means = (table.means + centres[table.labels]).float()
    return Mixtures(counts, table.labels, table.weights.float(), means, single)


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


def _expected(
    stream: Stream, table: Table, centres: Tensor, family: type[AnyCovariance]
) -> Expected:
    """E-step: one pass over all records."""
    (m, d), classes = table.means.shape, len(centres)
    shapes = {Diagonal: (m, d), Spherical: (m,), Full: (m, d, d)}
    squares = torch.zeros(shapes.get(family, (0,)), dtype=torch.float64)
    scatter = torch.zeros((d, d) if family.shared else (0, 0), dtype=torch.float64)
    expected = Expected(
        table.weights.new_zeros(m),
        torch.zeros_like(table.means),
        squares,
        scatter,
        centres.new_zeros(classes),
    )
    for label, points in stream.by_class():
        points.sub_(centres[label])
        own, shares = table.responsibilities(label, points)
        expected.sizes[own] += shares.sum(0)
        expected.sums[own] += shares.T @ points
        energies = points.square()
        expected.energy[label] += energies.sum()
        if family.shared:
            scatter.addmm_(points.T, points)
        elif family is Diagonal:
            squares[own] += shares.T @ energies
        elif family is Spherical:
            squares[own] += shares.T @ energies.sum(1)
        else:
            squares[own] += torch.stack(
                [(points * share[:, None]).T @ points for share in shares.T]
            )
    return expected


def _kept(labels: Tensor, sizes: Tensor, smallest: float) -> Tensor:
    """Which components (M,) stay: the smaller half of those below the bound goes, never the last
    one of a class.
    """
    kept = torch.ones(len(labels), dtype=torch.bool)
    for label in torch.bincount(labels).nonzero().flatten().tolist():
        own = (labels == label).nonzero().flatten()
        below = int((sizes[own] < smallest).sum())
        if len(own) > 1 and below:
            kept[own[sizes[own].argsort()[: (below + 1) // 2]]] = False
    return kept


def _maximised(
    table: Table,
    expected: Expected,
    kept: Tensor,
    counts: Tensor,
    family: type[AnyCovariance],
    rank: int,
) -> Table:
    """M-step: weights, means and covariance of the components that stay."""
    labels, sizes = table.labels[kept], expected.sizes[kept]
    totals = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, labels, sizes)
    means = expected.sums[kept] / sizes[:, None]
    d, records = table.means.shape[1], int(counts.sum())
    covariance: AnyCovariance
    if family.shared:
        all_ = expected.sums / expected.sizes.clamp_min(torch.finfo(torch.float64).tiny)[:, None]
        scatter = (expected.scatter - (all_ * expected.sizes[:, None]).T @ all_) / records
        floor = RELATIVE_FLOOR * (float(expected.energy.sum()) / (records * d) or 1.0)
        previous = table.covariance if isinstance(table.covariance, LowRank) else None
        covariance = (
            LowRank.of_scatter(scatter, rank, floor, previous)
            if family is LowRank
            else Gram((scatter + scatter.T) / 2)
        )
    else:
        spread = (expected.energy / (counts * d).clamp_min(1))[labels]
        floors = RELATIVE_FLOOR * torch.where(spread > 0, spread, 1.0)
        covariance = _own(expected.squares[kept], sizes, means, floors, family)
    return Table(labels, sizes / totals[labels], means, covariance)


def _own(
    squares: Tensor, sizes: Tensor, means: Tensor, floors: Tensor, family: type[AnyCovariance]
) -> AnyCovariance:
    """The covariance of each component."""
    if family is Diagonal:
        return Diagonal((squares / sizes[:, None] - means.square()).maximum(floors[:, None]))
    if family is Spherical:
        return Spherical(
            ((squares / sizes - means.square().sum(1)) / means.shape[1]).maximum(floors)
        )
    scatters = squares / sizes[:, None, None] - means[:, :, None] * means[:, None, :]
    return Full(
        torch.stack([cholesky(s, float(floor)) for s, floor in zip(scatters, floors, strict=True)])
    )


def _converged(scatter: Tensor, covariance: LowRank, settings: MixtureSettings) -> LowRank:
    """Factor analysis until the likelihood rises by less than the tolerance; it depends on the
    scatter (d, d) alone.
    """
    floor, rank = (
        RELATIVE_FLOOR * (float(scatter.diagonal().mean()) or 1.0),
        covariance.factor.shape[1],
    )
    best = -torch.inf
    for step in itertools.count(1):
        likelihood = _likelihood(scatter, covariance)
        if likelihood - best < settings.tolerance or step >= settings.max_iterations:
            return covariance
        best, covariance = likelihood, LowRank.of_scatter(scatter, rank, floor, covariance)
    raise AssertionError("unreachable")


def _likelihood(scatter: Tensor, covariance: LowRank) -> float:
    """Mean log-density of records with this scatter around their means."""
    whitened = covariance.factor / covariance.variances[:, None]
    core = torch.eye(whitened.shape[1], dtype=torch.float64) + covariance.factor.T @ whitened
    apart = (scatter.diagonal() / covariance.variances).sum()
    apart = apart - torch.linalg.solve(core, whitened.T @ scatter @ whitened).trace()
    determinant = covariance.variances.log().sum() + torch.linalg.slogdet(core).logabsdet
    return float(-0.5 * (apart + determinant + len(scatter) * LOG_2PI))
