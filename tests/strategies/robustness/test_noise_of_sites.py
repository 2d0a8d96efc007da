"""What the screen takes for noise, and for the distances without it, against many honest sites: the
stated variances are those of the sites' means, correlations and second moments.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums, fold, unfold
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.robustness.agreement import _length, agreement, correlations
from fedsurrogate.strategies.robustness.bounded_surrogates import can_bound
from fedsurrogate.strategies.robustness.class_points import ClassPoints, of_sums, standard_error
from fedsurrogate.strategies.robustness.second_moments import oddness, within
from fedsurrogate.strategies.robustness.site_map import _unbiased

CLAIM = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()
SITES = 300


def unit(count: int, d: int, spread: float, generator: torch.Generator, mean: Tensor) -> Tensor:
    """Records of norm one around a direction."""
    x = mean + spread * torch.randn(count, d, generator=generator) / math.sqrt(d)
    return torch.nn.functional.normalize(x, dim=1).double()


def noisy(
    site: int, records: list[Tensor], sigmas: dict[str, float], generator: torch.Generator,
    squares: str = "",
) -> SumsSurrogate:  # fmt: skip
    """Noisy sums of records by class."""

    def add(table: Tensor, name: str) -> Tensor:
        drawn = torch.randn(table.shape, generator=generator, dtype=torch.float64)
        return (table + sigmas[name] * drawn).float()

    x = torch.cat(records)
    moments = {"": None, "diag": x.square().sum(0), "full": fold(x.T @ x)}[squares]
    sums = Sums(
        add(torch.tensor([float(len(each)) for each in records]).double(), "counts"),
        add(torch.stack([each.sum(0) for each in records]), "sums"),
        None if moments is None else add(moments, "squares"),
        sigmas,
    )
    names = tuple("abcdefgh"[: len(records)])
    return SumsSurrogate(Header("fedpft", "r", str(site), "f", names), sums, CLAIM)


@pytest.mark.parametrize(
    ("counts", "sums", "spread"), [(1e-6, 1e-6, 2.0), (6.0, 1e-6, 0.01), (1e-6, 4.0, 0.5)]
)
def test_the_noise_of_a_mean_is_its_variance_over_sites(
    counts: float, sums: float, spread: float
) -> None:
    """By chance, from noisy counts, and from noisy sums: each alone, where it is the largest."""
    generator, d, n = torch.Generator().manual_seed(1), 16, 60
    direction = torch.nn.functional.normalize(torch.ones(1, d))
    sigmas = {"counts": counts, "sums": sums}
    sites = [
        noisy(site, [unit(n, d, spread, generator, direction)], sigmas, generator)
        for site in range(SITES)
    ]
    found = of_sums(sites)
    variance = float(found.means[:, 0].var(0).mean())
    assert float(found.noise.mean()) == pytest.approx(variance, rel=0.25)
    lengths = found.means[:, 0].norm(dim=1)
    # The count divides the whole mean, so it changes its length.
    if counts > 1:
        spread_of = float(lengths.std() / lengths.mean())
        assert float(found.stretch.mean()) == pytest.approx(spread_of, rel=0.25)
        return
    # The rest of a record's norm of one is its variance within its class.
    exact = 1 - float(torch.stack([each.sums.sums[0] / n for each in sites]).mean(0).norm()) ** 2
    assert found.within == pytest.approx(exact, abs=0.05)


def test_counts_that_do_not_stand_out_from_their_noise_are_not_judged() -> None:
    generator = torch.Generator().manual_seed(2)
    sigmas, direction = {"counts": 1.0, "sums": 1e-6}, torch.ones(1, 4)
    sites = [
        noisy(site, [torch.zeros(0, 4).double(), unit(40, 4, 1.0, generator, direction)], sigmas,
              generator)
        for site in range(SITES)
    ]  # fmt: skip
    has = of_sums(sites).counts > 0
    assert has[:, 1].all()
    assert float(has[:, 0].double().mean()) < 0.06


@pytest.mark.parametrize("kind", ["diag", "full"])
def test_second_moments_within_classes_are_those_of_numpy_with_the_noise_that_is_stated(
    kind: str,
) -> None:
    generator, d = torch.Generator().manual_seed(3), 5
    groups = [
        unit(n, d, 1.0, generator, mean)
        for n, mean in zip((300, 500), torch.randn(2, 1, d, generator=generator), strict=True)
    ]
    x, means = torch.cat(groups), [each.mean(0) for each in groups]
    rest = torch.cat([each - mean for each, mean in zip(groups, means, strict=True)])
    exact = rest.square().mean(0) if kind == "diag" else rest.T @ rest / len(x)

    def moments(sums: float, squares: float) -> tuple[Tensor, float]:
        sigmas = {"counts": 1e-6, "sums": sums, "squares": squares}
        found = within(noisy(0, groups, sigmas, generator, kind))
        assert found is not None
        return found[0] if kind == "diag" else unfold(found[0], d), found[1]

    torch.testing.assert_close(moments(1e-9, 1e-9)[0], exact, rtol=1e-4, atol=1e-5)
    # The square of noise in the means is expected, and subtracted.
    drawn = torch.stack([moments(8.0, 1e-9)[0] for _ in range(200)])
    error = drawn.std(0) / math.sqrt(len(drawn))
    assert bool(((drawn.mean(0) - exact).abs() < 5 * error).all())
    drawn = torch.stack([moments(1e-9, 8.0)[0] for _ in range(200)])
    diagonal = drawn.var(0) if kind == "diag" else drawn.var(0).diagonal()
    assert float(diagonal.mean()) == pytest.approx(moments(1e-9, 8.0)[1], rel=0.2)
    # Without second moments, and where all counts may be noise, nothing is known.
    assert within(noisy(0, groups, {"counts": 0.5, "sums": 1.0}, generator)) is None
    few = {"counts": 2000.0, "sums": 1.0, "squares": 1.0}
    lost = noisy(0, groups, few | {"counts": 1e-9}, generator, kind)
    assert within(SumsSurrogate(lost.header, Sums(**vars(lost.sums) | {"sigmas": few}), CLAIM)) is (
        None
    )


@pytest.mark.parametrize("sigma", [1e-3, 1.0, 6.0])
def test_honest_second_moments_are_not_odd_and_those_of_other_data_are(sigma: float) -> None:
    generator, d = torch.Generator().manual_seed(4), 6
    sigmas = {"counts": 1.0, "sums": sigma, "squares": sigma}
    means = torch.nn.functional.normalize(torch.randn(2, 1, d, generator=generator), dim=2)

    def site(number: int) -> SumsSurrogate:
        groups = [unit(400, d, 0.6, generator, mean) for mean in means]
        return noisy(number, groups, sigmas, generator, "full")

    sites = [site(number) for number in range(12)]
    assert float(oddness(sites).max()) < 1
    # All of a liar's variation lies along one direction, and is as large as if norms were three.
    squares = fold(9 * 800 * torch.eye(d, dtype=torch.float64)[:1].T @ torch.eye(d).double()[:1])
    lie = Sums(**vars(sites[5].sums) | {"squares": squares.float()})
    scores = oddness([*sites[:5], SumsSurrogate(sites[5].header, lie, CLAIM), *sites[6:]])
    assert int(scores.argmax()) == 5
    assert float(scores[5]) > 1
    assert float(scores[[*range(5), *range(6, 12)]].max()) < 1
    assert oddness(sites[:2]).tolist() == [0.0, 0.0]


@settings(max_examples=25)
@given(
    st.integers(3, 9), st.sampled_from([0.0, 1e-30, 1e-9, 1.0]), st.sampled_from(["diag", "full"])
)
def test_sites_that_are_equal_are_not_odd_however_little_they_vary(
    count: int, spread: float, kind: str
) -> None:
    """Also where nothing varies and no noise is added: nothing is divided by zero."""
    none, d = dict.fromkeys(("counts", "sums", "squares"), 0.0), 4
    start = torch.Generator().manual_seed(count)
    x = torch.eye(d)[:1] + spread * torch.randn(6, d, generator=start)
    sites = [noisy(site, [x.double()] * 2, none, start, kind) for site in range(count)]
    assert oddness(sites).tolist() == [0.0] * count


def test_three_sites_or_more_are_compared_each_with_each_unless_they_are_too_many() -> None:
    generator = torch.Generator().manual_seed(0)
    groups = [unit(5, 4, 0.5, generator, torch.eye(4)[:1])] * 2
    one = noisy(0, groups, {"counts": 1.0, "sums": 1.0}, generator)
    # The page on threats names this number.
    numbers = (1, 2, 3, 4, 64, 65)
    assert [can_bound([one] * number) for number in numbers] == [False] * 2 + [True] * 3 + [False]


def points(means: Tensor, noise: float, power: float, generator: torch.Generator) -> ClassPoints:
    """Sites whose class means (C, d) differ by noise."""
    drawn = means + math.sqrt(noise) * torch.randn(
        SITES // 10, *means.shape, generator=generator, dtype=torch.float64
    )
    counts = torch.full(drawn.shape[:2], 100.0)
    zeros = torch.zeros_like(counts)
    names = tuple(map(str, range(len(drawn))))
    classes = tuple(map(str, range(len(means))))
    table = (drawn.float(), counts, torch.full_like(counts, noise), zeros, zeros[:, 0])
    return ClassPoints(names, classes, *table, 1.0, power)


@pytest.mark.parametrize("signal", [0.0, 1.0, 2.0])
def test_the_correlation_of_two_sites_has_the_error_that_is_stated(signal: float) -> None:
    """Noise has no correlation, and sites with the same means without it have one."""
    generator, d, noise = torch.Generator().manual_seed(5), 40, 0.02
    values, variances = [], []
    means = torch.randn(6, d, generator=generator, dtype=torch.float64) / math.sqrt(d)
    for _ in range(4):
        found = points(signal * means, noise, 2.0, generator)
        pairs = correlations(found)
        chosen = pairs.shared > 0
        if not chosen.any():
            continue
        assert set(pairs.shared[chosen].tolist()) == {5.0}
        assert not pairs.shared.diagonal().any(), "no site is its own partner"
        values.append(pairs.correlation[chosen])
        variances.append((pairs.mine + pairs.theirs)[chosen])
    correlation, variance = torch.cat(values), torch.cat(variances)
    error = float(variance.mean().sqrt())
    if signal:
        assert float(correlation.mean()) == pytest.approx(1, abs=0.05)
        quantile, certain = agreement(pairs)
        assert float((quantile - 1).abs().max()) < 4 * float(certain.max())
        # Noise along the means themselves changes both lengths too, and cancels.
        assert 0.3 * error < float(correlation.std()) < 1.2 * error
    else:
        assert float(correlation.mean().abs()) < error


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.floats(0, 3), st.floats(0.01, 3), st.integers(1, 200))
def test_a_squared_distance_without_its_noise_is_right_in_the_mean(
    seed: int, length: float, noise: float, d: int
) -> None:
    drawn = np.random.default_rng(seed)
    true = torch.from_numpy(drawn.normal(size=d))
    true = length * true / true.norm()
    differences = true + math.sqrt(noise) * torch.from_numpy(drawn.normal(size=(2000, d)))
    found = torch.tensor([_unbiased(each, noise) for each in differences[:400]])
    error = float(standard_error(torch.tensor(length**2), torch.tensor(noise), d))
    assert float(found.mean()) == pytest.approx(length**2, abs=5 * error / 20)
    every = differences.square().sum(1) - d * noise
    assert float(every.std()) < 1.2 * error
    assert float(every.std()) > 0.65 * error


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(2, 6), st.floats(0, 2))
def test_the_extent_of_class_means_is_right_in_the_mean(
    seed: int, classes: int, noise: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, 30, generator=generator, dtype=torch.float64)
    exact = float((means - means.mean(0)).square().sum(1).mean())
    found = [
        float(_length(means + math.sqrt(noise) * torch.randn(means.shape, generator=generator),
                      torch.full((classes,), noise)))
        for _ in range(200)
    ]  # fmt: skip
    assert np.mean(found) == pytest.approx(exact, abs=5 * np.std(found) / math.sqrt(200) + 1e-6)
    assert _length(means[:1], torch.ones(1)).isnan()
    # No squared length is below zero: where noise explains more than there is, it is zero.
    assert min(found) >= 0
    assert float(_length(means, torch.full((classes,), 2 * exact + 1.0))) == 0
