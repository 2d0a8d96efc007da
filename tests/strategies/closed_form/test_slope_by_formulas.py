"""The slope of calibrated scores by its formulas in numpy, over generated statistics, and where a
solution stays as it is.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.strategies.closed_form.solvers import Solution, calibrated, slope_of
from fedsurrogate.strategies.closed_form.statistics import Factored, Statistics

Array = NDArray[np.float64]
D = 5
few = settings(max_examples=60, deadline=None)


def slope_by_pairs(means: Array, spread: Array, priors: Array) -> float:
    """Expected difference of two scores over its variance, over all pairs of classes."""
    apart = variance = total = 0.0
    for a, p in enumerate(priors):
        for b, q in enumerate(priors):
            if a == b:
                continue
            apart += p * q * (means[a, a] + means[b, b] - means[a, b] - means[b, a])
            variance += p * q * (spread[a, a] + spread[b, b] - spread[a, b] - spread[b, a])
            total += p * q
    if variance <= 0:
        return 1.0
    return max(apart / variance, 0.1 / math.sqrt(variance / max(total, 1e-12)))


@few
@given(
    st.integers(0, 9999),
    st.integers(2, 4),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
    st.booleans(),
    st.sampled_from(["matrix", "factors"]),
    st.sampled_from([3.0, 12.0, 300.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_a_solution_is_multiplied_by_the_slope_of_what_new_records_would_score(
    seed: int,
    classes: int,
    shrinkage: float,
    of_all: bool,
    form: str,
    records: float,
    added: float,
) -> None:
    draw = np.random.default_rng(seed)
    root, variances = draw.normal(size=(D, 2)), draw.uniform(0.1, 2, D)
    within = root @ root.T + np.diag(variances)
    counts = records * draw.uniform(0.3, 2, classes)
    means = 2 * draw.normal(size=(classes, D))
    statistics = Statistics(
        torch.from_numpy(counts),
        torch.from_numpy(means),
        torch.from_numpy(within)
        if form == "matrix"
        else Factored(torch.from_numpy(root), torch.from_numpy(variances)),
    )
    weight, bias = draw.normal(size=(classes, D)) + means, draw.normal(size=classes)
    solution = Solution(torch.from_numpy(weight), torch.from_numpy(bias), shrinkage, added)
    found = calibrated(solution, statistics, of_all)
    whole, priors = counts.sum(), counts / counts.sum()
    centre = priors @ means
    between = sum(p * np.outer(m - centre, m - centre) for p, m in zip(priors, means, strict=True))
    matrix = within + between if of_all else within
    kept = 1.0 if of_all else 1 - shrinkage
    shrunk = kept * matrix + shrinkage * matrix.trace() / D * np.eye(D)
    share = kept * np.trace(matrix @ np.linalg.inv(shrunk)) / whole
    # Single precision decides at one itself.
    assume(abs(share - 1) > 1e-4)
    if share >= 1 or added >= 1 or not kept:
        assert found is solution
        return
    plain = weight @ means.T + bias[:, None]
    spread = weight @ within @ weight.T
    unit = slope_by_pairs(plain, spread, priors) if of_all else 1.0
    optimism = share / (1 - share)
    for c in range(classes):
        plain[c, c] -= optimism / kept * whole / counts[c] / unit
    slope = slope_by_pairs(plain, (1 + optimism) ** 2 * spread, priors)
    np.testing.assert_allclose(found.weight, slope * weight, rtol=2e-3)
    np.testing.assert_allclose(found.bias, slope * bias, rtol=2e-3)
    assert (found.shrinkage, found.added) == (shrinkage, added)
    restricted = Statistics(
        statistics.counts, statistics.means, statistics.covariance, sampled=False
    )
    assert calibrated(solution, restricted, of_all) is solution
    one = statistics.within(torch.tensor([0]))
    alone = Solution(solution.weight[:1], solution.bias[:1], shrinkage)
    assert calibrated(alone, one, of_all) is alone


def test_scores_that_do_not_vary_keep_their_slope() -> None:
    assert slope_of((torch.eye(3), torch.zeros(3, 3)), torch.ones(3) / 3) == 1.0
