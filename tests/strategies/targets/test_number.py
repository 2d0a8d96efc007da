"""Heads for numbers against scikit-learn and statsmodels, and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import RidgeCV
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.number import NumberHead, number_head
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import noisy, number_sums

LOW, HIGH = 25.0, 346.0


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x) / 0.05, torch.tensor(y)[:, None]


def test_the_strength_predicts_as_well_as_leaving_records_out() -> None:
    x, y = diabetes()
    train, rest = slice(0, 300), slice(300, None)
    head = number_head(number_sums(y[train], x[train], LOW, HIGH), [LOW], [HIGH])
    pooled = RidgeCV(alphas=np.logspace(-3, 5, 41)).fit(x[train].numpy(), y[train, 0].numpy())
    own = x[rest] @ head.weight[0] + head.bias[0]
    other = torch.from_numpy(pooled.predict(x[rest].numpy()))
    errors = [float((each - y[rest, 0]).square().mean()) for each in (own, other)]
    assert errors[0] < 1.01 * errors[1]


def interval(head: NumberHead, predictions: Tensor) -> tuple[Tensor, Tensor]:
    """That hold 95 % of new records, if their errors are normal."""
    return predictions - 1.96 * head.deviation, predictions + 1.96 * head.deviation


def test_prediction_intervals_hold_new_records() -> None:
    x, y = diabetes()
    held = []
    for seed in range(10):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, rest = order[:300], order[300:]
        head = number_head(number_sums(y[train], x[train], LOW, HIGH), [LOW], [HIGH])
        low, high = interval(head, x[rest] @ head.weight.T + head.bias)
        held.append(float(((low <= y[rest]) & (y[rest] <= high)).double().mean()))
    assert 0.93 < sum(held) / 10 < 0.98


def test_with_fewer_records_than_dimensions_there_is_a_head() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 40, generator=draw, dtype=torch.float64)
    head = number_head(number_sums(x[:, :1], x, -4, 4), [-4.0], [4.0])
    assert head.weight.isfinite().all()
    assert float(head.deviation[0]) > 0


NOISES = {"code": [20.0, 15.0], "sums": [10.0, 6.0]}


def released(x: Tensor, y: Tensor, scale: float, seed: int) -> CodedSums:
    code, sums = (scale * torch.tensor(each, dtype=torch.float64) for each in NOISES.values())
    return noisy(number_sums(y, x, -1, 1), code, sums, 6.0 * scale, seed, products=20.0 * scale)


def in_ball(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features of norm at most one, and a number in [-1, 1] that depends on some of them."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    x = x * torch.linspace(2, 0.3, d).double()
    x = x / x.norm(dim=1, keepdim=True)
    y = 0.8 * x[:, :4].sum(1, keepdim=True)
    return x, (y + 0.2 * torch.randn(n, 1, generator=draw, dtype=torch.float64)).clamp(-1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_intervals_of_noisy_heads_hold_new_records(scale: float) -> None:
    held, better = [], 0
    for seed in range(40):
        x, y = in_ball(5000, 32, seed)
        train, rest = slice(0, 4000), slice(4000, None)
        head = number_head(released(x[train], y[train], scale, seed), [-1.0], [1.0])
        predicted = x[rest] @ head.weight.T + head.bias
        low, high = interval(head, predicted)
        held.append(float(((low <= y[rest]) & (y[rest] <= high)).double().mean()))
        better += float((predicted - y[rest]).square().mean()) < float(y[rest].var())
    assert 0.93 < sum(held) / len(held) < 0.975
    assert better == 40, "a head under this noise is better than the mean"


def test_what_cannot_be_learned_is_refused() -> None:
    x, y = diabetes()
    with pytest.raises(RunError, match="number 1 has the variance"):
        number_head(number_sums(torch.full_like(y, 100.0), x, LOW, HIGH), [LOW], [HIGH])
    one = torch.ones(2, dtype=torch.float64)
    narrow = noisy(number_sums(y, x, -1e4, 1e4), one, one, 1.0, 0, products=30.0)
    with pytest.raises(RunError, match="within the noise"):
        number_head(narrow, [-1e4], [1e4])
    with pytest.raises(ValueError, match="low must lie below high"):
        number_head(number_sums(y, x, LOW, HIGH), [HIGH], [LOW])
    whole = number_sums(y, x, LOW, HIGH)
    without = CodedSums(whole.code, whole.sums, whole.moment)
    with pytest.raises(ValueError, match="need the products"):
        number_head(without, [LOW], [HIGH])
