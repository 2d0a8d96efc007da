"""Heads in closed form without noise: probabilities on new records, of few records and of many."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedsurrogate.strategies.closed_form.solvers import (
    Solution,
    balanced_ridge,
    calibrated,
    lda,
    ridge,
)
from tests.examples import statistics_of

D, CLASSES = 60, 3
SOLVERS = {"lda": lda, "ridge": ridge, "balanced-ridge": balanced_ridge}


def records(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Normal classes with one covariance."""
    shape, generator = torch.Generator().manual_seed(5), torch.Generator().manual_seed(seed)
    root = torch.randn(D, D, generator=shape).double() / D**0.5 + torch.eye(D)
    means = 0.25 * torch.randn(CLASSES, D, generator=shape).double() @ root.T
    labels = torch.arange(count) % CLASSES
    return means[labels] + torch.randn(count, D, generator=generator).double() @ root.T, labels


def error(solution: Solution, x: Tensor, y: Tensor) -> float:
    """Difference of confidence and accuracy over ten equal parts by confidence."""
    sure, most = (x @ solution.weight.T + solution.bias).softmax(1).max(1)
    right = (most == y).double()
    order = sure.argsort().chunk(10)
    return sum(abs(float(right[rows].mean() - sure[rows].mean())) / 10 for rows in order)


@pytest.mark.parametrize("how", SOLVERS)
@pytest.mark.parametrize("count", [150, 600, 6000])
@pytest.mark.parametrize("seed", range(3))
def test_probabilities_of_new_records_mean_what_they_say(how: str, count: int, seed: int) -> None:
    statistics, (x, y) = statistics_of(*records(count, seed), CLASSES), records(6000, 99)
    plain = SOLVERS[how](statistics)
    found = calibrated(plain, statistics, how != "lda")
    assert torch.equal(
        (x @ found.weight.T + found.bias).argmax(1), (x @ plain.weight.T + plain.bias).argmax(1)
    )
    assert error(found, x, y) < (0.12 if count == 150 else 0.06)
    assert error(found, x, y) < error(plain, x, y) + 0.01
    if count == 150 or how != "lda":
        assert error(found, x, y) < error(plain, x, y) / 1.5
