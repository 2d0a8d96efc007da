"""Heads for numbers against scikit-learn and statsmodels, and their intervals."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge, RidgeCV
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.number import (
    STRENGTHS,
    Directions,
    NumberHead,
    Outcomes,
    cross_validated,
    expected,
    number_head,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import noisy, number_sums

LOW, HIGH = 25.0, 346.0


def diabetes() -> tuple[Tensor, Tensor]:
    x, y = load_diabetes(return_X_y=True)
    return torch.tensor(x) / 0.05, torch.tensor(y)[:, None]


def of_sites(x: Tensor, y: Tensor, count: int, seed: int = 0) -> CodedSums:
    """The sum of sites of very different sizes and means: records sorted by their number, with
    some order left to chance.
    """
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.full(count, 0.1))
    site = random.choice(count, size=len(x), p=shares / shares.sum())
    site[:count] = np.arange(count)
    at = torch.tensor(site)
    total = number_sums(y[at == 0], x[at == 0], LOW, HIGH)
    for each in range(1, count):
        total = total + number_sums(y[at == each], x[at == each], LOW, HIGH)
    return total


@pytest.mark.parametrize("sites", [1, 5, 50])
def test_the_ridge_is_that_of_scikit_learn_for_any_number_of_sites(sites: int) -> None:
    x, y = diabetes()
    x = x + 0.7
    head = number_head(of_sites(x, y, sites), [LOW], [HIGH])
    pooled = Ridge(alpha=len(x) * float(head.strength)).fit(x.numpy(), y[:, 0].numpy())
    assert np.abs(head.weight[0].numpy() - pooled.coef_).max() < 1e-9
    assert abs(float(head.bias[0]) - pooled.intercept_) < 1e-9


def test_several_numbers_are_learned_as_each_alone() -> None:
    x, y = diabetes()
    both = torch.cat([y, 300 - 0.5 * y + x[:, 2:3]], 1)
    head = number_head(number_sums(both, x, LOW, HIGH), [LOW, LOW], [HIGH, HIGH])
    for index in range(2):
        alone = number_head(number_sums(both[:, index : index + 1], x, LOW, HIGH), [LOW], [HIGH])
        assert torch.allclose(head.weight[index], alone.weight[0], atol=1e-9)
        assert float(head.strength[index]) == pytest.approx(float(alone.strength[0]))
        assert float(head.deviation[index]) == pytest.approx(float(alone.deviation[0]))


def test_the_chosen_strength_has_the_smallest_generalised_error_of_the_grid() -> None:
    """The error from the hat matrix of the records, for each strength."""
    x, y = diabetes()
    sums = number_sums(y, x, LOW, HIGH)
    head = number_head(sums, [LOW], [HIGH])
    apart, target, n = (x - x.mean(0)).numpy(), (y - y.mean())[:, 0].numpy(), len(x)
    errors = []
    grid = STRENGTHS.numpy() * np.trace(apart.T @ apart / n) / x.shape[1]
    for strength in grid:
        hat = apart @ np.linalg.solve(apart.T @ apart + n * strength * np.eye(10), apart.T)
        left = target - hat @ target
        errors.append(np.mean(left**2) / (1 - (1 + np.trace(hat)) / n) ** 2)
    assert float(head.strength[0]) == pytest.approx(grid[int(np.argmin(errors))], rel=1e-9)
    assert float(head.deviation[0]) ** 2 == pytest.approx(min(errors), rel=1e-9)


def test_the_strength_predicts_as_well_as_leaving_records_out() -> None:
    x, y = diabetes()
    train, rest = slice(0, 300), slice(300, None)
    head = number_head(number_sums(y[train], x[train], LOW, HIGH), [LOW], [HIGH])
    pooled = RidgeCV(alphas=np.logspace(-3, 5, 41)).fit(x[train].numpy(), y[train, 0].numpy())
    own = x[rest] @ head.weight[0] + head.bias[0]
    other = torch.from_numpy(pooled.predict(x[rest].numpy()))
    errors = [float((each - y[rest, 0]).square().mean()) for each in (own, other)]
    assert errors[0] < 1.01 * errors[1]


def test_the_range_changes_no_exact_prediction() -> None:
    x, y = diabetes()
    heads = [
        number_head(number_sums(y, x, *each), *([e] for e in each))
        for each in ((0.0, 400.0), (-1e3, 1e3))
    ]
    assert torch.allclose(heads[0].weight, heads[1].weight, atol=1e-8)
    assert torch.allclose(heads[0].deviation, heads[1].deviation, atol=1e-8)


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


def test_strengths_that_leave_too_few_records_are_not_taken() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(30, 29, generator=draw, dtype=torch.float64)
    sums = number_sums(torch.randn(30, 1, generator=draw, dtype=torch.float64), x, -4, 4)
    directions = Directions.of(sums.covariance)
    one = torch.ones(1, dtype=torch.float64)
    cross = sums.sums[1:] / 30 - torch.outer(sums.code[1:] / 30, sums.mean)
    fitted = cross_validated(directions, Outcomes(cross, one, 30 * one, 0 * one))
    freedom = 1 + float((directions.values / (directions.values + fitted.strength)).sum())
    assert freedom < 0.99 * 30


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


def test_noise_that_vanishes_gives_the_exact_head() -> None:
    x, y = in_ball(5000, 8, 0)
    exact = number_head(number_sums(y, x, -1, 1), [-1.0], [1.0])
    nearly = number_head(released(x, y, 1e-9, 0), [-1.0], [1.0])
    apart = x @ (exact.weight - nearly.weight).T + exact.bias - nearly.bias
    assert float(apart.abs().max()) < 0.02
    assert float(nearly.deviation[0]) == pytest.approx(float(exact.deviation[0]), rel=0.02)


def test_of_noise_alone_next_to_nothing_is_kept() -> None:
    draw = torch.Generator().manual_seed(0)
    directions = Directions.of(torch.linspace(0.2, 1, 50).double().diag())
    cross = 0.1 * torch.randn(20, 50, generator=draw, dtype=torch.float64)
    one = torch.ones(20, dtype=torch.float64)
    kept = [
        float(
            expected(directions, Outcomes(cross, one, 1e6 * one, each * one)).cross.square().mean()
        )
        for each in (0.1, 1e-6)
    ]
    assert kept[0] < 0.05 * 0.1**2
    assert kept[1] > 0.9 * 0.1**2, "without knowing the noise, it is taken for a signal"


def test_more_noise_predicts_worse_and_its_intervals_say_so() -> None:
    x, y = in_ball(3000, 16, 1)
    heads = [number_head(released(x, y, scale, 1), [-1.0], [1.0]) for scale in (0.1, 3.0, 12.0)]
    errors = [float((x @ h.weight.T + h.bias - y).square().mean()) for h in heads]
    assert errors[0] < errors[1] < errors[2]
    widths = [float(head.deviation[0]) for head in heads]
    assert widths[0] < widths[1] < widths[2]


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
