"""k-means of one class of features: the assignments from which EM starts."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsurrogate.common.surrogates.covariances import products

# Starts of k-means, the steps after which the best one is known, and the dimensions of the random
# projection in which they run: a projection keeps the cost of every clustering (Makarychev,
# Makarychev & Razenshteyn 2019). For ten components and CIFAR-10 features the fit takes a fifth
# less time than with starts in all dimensions, at higher likelihood.
STARTS, FIRST_STEPS, START_DIMENSIONS = 3, 6, 64


def k_means(
    points: Tensor, clusters: int, generator: torch.Generator, iterations: int = 20
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
    few, d = points, points.shape[1]
    if d > 2 * START_DIMENSIONS:
        few = points @ torch.randn(d, START_DIMENSIONS, generator=generator).to(points)
    norms = few.square().sum(1)
    starts = [
        _lloyd(few, norms, _seeds(few, norms, clusters, generator), FIRST_STEPS)
        for _ in range(STARTS)
    ]
    _, one_hot = min(starts, key=lambda start: start[0])
    return _lloyd(points, points.square().sum(1), _centres(points, one_hot), iterations)[1]


def _seeds(points: Tensor, norms: Tensor, clusters: int, generator: torch.Generator) -> Tensor:
    """Centres (k, d), k <= clusters, by k-means++: each is the best of a few draws in proportion to
    the squared distance.
    """

    def pick(weights: Tensor, count: int = 1) -> Tensor:
        return torch.multinomial(
            weights.double().cpu(), count, replacement=True, generator=generator
        ).to(points.device)

    chosen = pick(torch.ones(len(points)))
    nearest = _squared_distances(points, norms, points[chosen]).squeeze(1)
    trials = 2 + int(torch.log(torch.tensor(float(clusters))))
    smallest = torch.finfo(points.dtype).eps * 100 * norms.mean()
    while len(chosen) < clusters and nearest.max() > smallest:
        candidates = pick(nearest, trials)
        costs = torch.minimum(
            nearest[:, None], _squared_distances(points, norms, points[candidates])
        )
        best = costs.sum(0).argmin()
        chosen, nearest = torch.cat([chosen, candidates[best : best + 1]]), costs[:, best]
    return points[chosen]


def _lloyd(points: Tensor, norms: Tensor, centres: Tensor, iterations: int) -> tuple[float, Tensor]:
    """Sum of squared distances to the centres of the last assignment, and that assignment (n, k) as
    0/1.
    """
    assignment = None
    for _ in range(iterations):
        distances = _squared_distances(points, norms, centres)
        previous = assignment
        # Much faster than argmin along columns.
        nearest, assignment = distances.min(1)
        one_hot = torch.nn.functional.one_hot(assignment, len(centres)).to(points)
        one_hot = one_hot[:, one_hot.sum(0) > 0]
        if previous is not None and torch.equal(previous, assignment):
            break
        centres = _centres(points, one_hot)
    return float(nearest.sum()), one_hot


def _centres(points: Tensor, one_hot: Tensor) -> Tensor:
    return one_hot.T @ points / one_hot.sum(0)[:, None]


def _squared_distances(points: Tensor, norms: Tensor, centres: Tensor) -> Tensor:
    return (norms[:, None] - 2 * products(points, centres) + centres.square().sum(1)).clamp_min(0)
