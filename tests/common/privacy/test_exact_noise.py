"""Releases add discrete Gaussian noise to integers: sensitivity is a fact about integers, and the
noise costs no more than the continuous noise that is charged.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.harness.site_data import clipped
from fedsurrogate.client_app.methods.dp.record_gradients import add_clipped, norms_of, sums_like
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy import gaussian_mechanism
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent, gaussian_epsilon
from fedsurrogate.common.privacy.exact_sums import BITS, IntegerSum, power_above
from fedsurrogate.common.privacy.gaussian_mechanism import CONTINUOUS, MOST_STEPS, BoundedSum, Noisy
from fedsurrogate.common.surrogates.class_sums import fold, statistics, unfold

BOUNDS = st.floats(1e-6, 1e6)
SIGMAS = st.floats(0.05, 1e4)


def whole(sum_: IntegerSum) -> list[int]:
    """The sum as integers of Python, which have no limit."""
    return [
        (high << BITS) + low
        for high, low in zip(
            sum_.coarse.flatten().tolist(), sum_.fine.flatten().tolist(), strict=True
        )
    ]


def drawn_by(monkeypatch: pytest.MonkeyPatch, noise: Any) -> list[tuple[int, int]]:
    """Replace the sampler by `noise` (variance, count); the list gets what it was asked for."""
    asked: list[tuple[int, int]] = []

    def sampler(variance: int, count: int) -> np.ndarray:
        asked.append((variance, count))
        return np.asarray(noise(variance, count), dtype=np.int64)

    monkeypatch.setattr(gaussian_mechanism, "discrete_gaussian", sampler)
    return asked


TOTALS = st.integers(-(2**51), 2**51)
FINES = st.integers(-(2**52), 2**52)


@given(
    st.lists(st.tuples(TOTALS, FINES), min_size=1, max_size=4),
    FINES,
    st.integers(-(2**61), 2**61),
    BOUNDS,
)
def test_a_release_is_a_function_of_sum_plus_noise_and_of_nothing_else(
    parts: list[tuple[int, int]], moved: int, noise: int, bound: float
) -> None:
    """Two data sets whose sums differ by `moved` steps, and noise that makes up for it, give the
    same bits. If any digit of the sum itself came through, or a rounding depended on it, they would
    not.
    """
    step = power_above(bound) * 2.0**-44
    coarse, fine = (torch.tensor(each) for each in zip(*parts, strict=True))
    sums = IntegerSum(coarse, fine, step), IntegerSum(coarse, fine + moved, step)
    # The same integer, split in another way.
    sums += (IntegerSum(coarse - 1, fine + 2**BITS, step),)
    found = []
    for sum_, added in zip(sums, (noise + moved, noise, noise + moved), strict=True):
        with pytest.MonkeyPatch.context() as patch:
            drawn_by(patch, lambda variance, count, added=added: [added] * count)
            found.append(BoundedSum("a", sum_, bound).noisy(3.0 * bound).value)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@given(BOUNDS, SIGMAS, st.integers(1, 4), st.booleans())
def test_the_sampler_gets_the_variance_of_the_claim_in_steps(
    bound: float, multiplier: float, dimension: int, squares: bool
) -> None:
    rows, columns = torch.triu_indices(dimension, dimension)
    sum_ = IntegerSum.of(torch.zeros(len(rows)), bound)
    with pytest.MonkeyPatch.context() as patch:
        asked = drawn_by(patch, lambda variance, count: [0] * count)
        twice = rows != columns if squares else None
        sigma = multiplier * bound
        made = BoundedSum("a", sum_, bound, twice).noisy(sigma)
    assert made.sigma == sigma
    exact = Fraction(sigma) / Fraction(sum_.step)
    if exact > MOST_STEPS:
        # Coarse steps, to which the sum is rounded.
        exact /= 2**BITS
        exact += Fraction(sigma / bound) * Fraction(math.sqrt(len(rows)))
    count = int((rows != columns).sum()) if squares else 0
    wanted = [
        (parts, entries) for parts, entries in ((1, len(rows) - count), (2, count)) if entries
    ]
    for (parts, entries), (variance, drawn) in zip(wanted, asked, strict=True):
        assert drawn == entries
        assert variance >= exact**2 / parts + 2 * CONTINUOUS
        assert variance <= (exact * Fraction("1.001")) ** 2 / parts + 2 * CONTINUOUS + 1


def moves(more: BoundedSum, less: BoundedSum) -> bool:
    """Whether one unit moves a statistic by more than its bound, in integers: no floating point
    takes part.
    """
    weights = [1] * more.sum.fine.numel()
    if more.twice is not None:
        weights = [2 if each else 1 for each in more.twice.flatten().tolist()]
    moved = sum(
        weight * (a - b) ** 2
        for weight, a, b in zip(weights, whole(more.sum), whole(less.sum), strict=True)
    )
    return moved > (Fraction(more.bound) / Fraction(more.sum.step)) ** 2


@given(
    st.sampled_from(["spherical", "diag", "full", "lowrank"]),
    st.integers(1, 6),
    st.integers(-12, 12),
    st.integers(0, 2**32),
    st.booleans(),
)
def test_one_unit_moves_the_integers_of_class_sums_by_at_most_the_bound(
    family: str, own: int, power: int, seed: int, patients: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    n, own = 4, own if patients else 1
    features = torch.randn(n + own, 3, generator=generator).double() * 10.0**power
    labels = torch.randint(0, 2, (n + own,), generator=generator)
    if seed % 2:
        features[n:], labels[n:] = features[n : n + 1], 0
    units = [*map(str, range(n)), *("p" * own)] if patients else None
    found = []
    for rows in (n, n + own):
        data = clipped(features[:rows], labels[:rows], units[:rows] if units else None)
        found.append(statistics(data.features, data.labels, data.weights, 2, family))
    for less, more in zip(*found, strict=True):
        assert not moves(more, less), more.name


@given(
    st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=4), BOUNDS
)
def test_one_record_moves_the_integers_of_gradients_by_at_most_the_clip(
    gradients: list[list[float]], clip: float
) -> None:
    each = [torch.tensor(gradients)[:, :2], torch.tensor(gradients)[:, 2:]]
    found = []
    for rows in (len(gradients) - 1, len(gradients)):
        total = sums_like([torch.zeros(2), torch.zeros(1)], clip)
        some = [part[:rows] for part in each]
        if rows:
            add_clipped(total, some, norms_of(some), clip)
        found.append(
            BoundedSum("gradients", IntegerSum.joined([part.total for part in total]), clip)
        )
    assert not moves(found[1], found[0])


@settings(max_examples=30)
@given(st.floats(0.3, 12), st.integers(1, 3000), st.sampled_from([1e-3, 1e-5, 1e-9]))
def test_the_exact_privacy_of_the_noise_that_is_drawn_is_never_above_the_claim(
    multiplier: float, shift: int, delta: float
) -> None:
    """Delta of integers that differ by the whole bound, summed up over all outcomes, also where the
    steps are coarse.
    """
    sum_ = IntegerSum(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1.0)
    with pytest.MonkeyPatch.context() as patch:
        asked = drawn_by(patch, lambda variance, count: [0] * count)
        BoundedSum("a", sum_, float(shift)).noisy(multiplier * shift)
    variance, epsilon = asked[0][0], gaussian_epsilon(multiplier, delta)
    most = math.ceil(14 * math.sqrt(variance))
    weights = np.exp(-(np.arange(-most, most + 1.0) ** 2) / (2 * variance))
    here = np.pad(weights / weights.sum(), (shift, 0))
    there = np.pad(weights / weights.sum(), (0, shift))
    assert np.clip(here - math.exp(epsilon) * there, 0, None).sum() <= delta * (1 + 1e-9)


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 1), (0.1, 40), (0.01, 300)])
def test_on_poisson_samples_too_the_accountant_of_discrete_noise_finds_no_more(
    rate: float, steps: int
) -> None:
    """The oracle is dp-accounting's loss distribution of the discrete mechanism."""
    from dp_accounting.pld import privacy_loss_distribution as pld

    multiplier, shift, delta = 1.3, 50, 1e-5
    sum_ = IntegerSum(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 1.0)
    with pytest.MonkeyPatch.context() as patch:
        asked = drawn_by(patch, lambda variance, count: [0] * count)
        BoundedSum("a", sum_, float(shift)).noisy(multiplier * shift)
    loss = pld.from_discrete_gaussian_mechanism(
        math.sqrt(asked[0][0]), shift, value_discretization_interval=1e-4, sampling_prob=rate
    )
    found = loss.self_compose(steps).get_epsilon_for_delta(delta)
    charged = epsilon_spent([GaussianEvent(multiplier, rate, steps)], delta)
    # This oracle rounds the losses of discrete noise up, by half an interval each in the mean.
    assert found <= charged * 1.001 + steps * 1e-4 / 2
    assert found >= charged * 0.97


def test_opendp_draws_the_same_noise() -> None:
    """Where OpenDP is installed: both samples are of one distribution."""
    dp = pytest.importorskip("opendp.prelude")
    from scipy import stats

    dp.enable_features("contrib")
    noise = dp.m.make_gaussian(
        dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T="f64"), scale=20.0
    )
    from fedsurrogate.common.privacy.gaussian_mechanism import discrete_gaussian

    theirs, ours = noise([0] * 20_000), discrete_gaussian(400, 20_000)
    assert stats.ks_2samp(theirs, ours).pvalue > 1e-6


def test_noise_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="set a larger epsilon"):
        BoundedSum("a", IntegerSum.of(torch.zeros(2), 1.0), 1.0).noisy(2.0**46)


def test_the_value_of_a_release_is_that_of_its_sum() -> None:
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0)).double()
    matrix = matrix @ matrix.T
    rows, columns = torch.triu_indices(5, 5)
    upper = IntegerSum.of(matrix, 64.0).map(lambda table: table[rows, columns])
    squares = BoundedSum("squares", upper, 64.0, rows != columns)
    assert torch.allclose(squares.value, fold(matrix), atol=1e-9)
    with pytest.MonkeyPatch.context() as patch:
        drawn_by(patch, lambda variance, count: [0] * count)
        made = squares.noisy(128.0)
    assert isinstance(made, Noisy)
    assert torch.allclose(unfold(made.value, 5), matrix, atol=1e-9)
    assert torch.equal(made.value, squares.value)


def test_scalars_and_empty_sums_have_noise_of_their_shape() -> None:
    shapes: list[tuple[int, ...]] = [(), (0,), (0, 3), (2, 3)]
    for shape in shapes:
        value: Tensor = (
            BoundedSum("a", IntegerSum.of(torch.zeros(shape), 1.0), 1.0).noisy(9.0).value
        )
        assert tuple(value.shape) == shape
        assert value.dtype == torch.float64
        assert not bool((value == 0).any())
