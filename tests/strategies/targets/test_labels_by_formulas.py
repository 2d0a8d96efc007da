"""Heads of labels by their formulas in numpy, over generated annotations, noise and moments: which labels
are left out and why, the discriminant, and the slope that its log odds get.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.number import (
    CAUTION,
    Annotated,
    Directions,
    Outcomes,
    cross_validated,
    expected,
    label_heads,
    of_least_error,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import coded, exact_code, moment_of, noisy, ridge_discriminant

Array = NDArray[np.float64]
D, L = 4, 2
few = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 9999)
QUARTERS = st.integers(-12, 120).map(lambda each: each / 4)


def cohort(seed: int, n: int, apart: float, missing: float) -> tuple[Tensor, Tensor]:
    """Features (n, D), and labels (n, L) of which some are NaN; the first label is annotated always."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, D)) * draw.uniform(0.5, 2, D)
    scores = apart * x[:, :L] + draw.normal(size=(n, L)) - np.array([0.0, 0.7])
    labels = (scores > 0).astype(float)
    labels[:2, :] = [[0.0, 0.0], [1.0, 1.0]]
    labels[2:, 1] = np.where(draw.random(n - 2) < missing, np.nan, labels[2:, 1])
    return torch.from_numpy(x / 3), torch.from_numpy(labels)


def log_odds(p: float) -> float:
    return math.log(p / (1 - p))


def discriminant_of(
    cross: Array, weight: Array, p: float, mean: Array, difference: Array
) -> tuple[Array, float]:
    spread = p * (1 - p)
    scale = spread * (1 - float(weight @ cross) / spread)
    middle = 2 * mean + (1 - 2 * p) * difference
    return weight / scale, log_odds(p) - float(weight @ middle) / (2 * scale)


def limited(weight: Array, bias: float, p: float, distance: float, n: float) -> tuple[Array, float]:
    most = math.log(n + 1)
    slope = 2 * most / distance if distance > 2 * most else 1.0
    return slope * weight, slope * (bias - log_odds(p)) + log_odds(p)


@few
@given(
    SEEDS,
    st.integers(12, 120),
    st.sampled_from([0.3, 2.0, 40.0]),
    st.sampled_from([0.0, 0.4]),
    st.sampled_from(["shared", "own"]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
def test_a_head_without_noise(
    seed: int, n: int, apart: float, missing: float, moment: str, rounding: float, calibrated: bool
) -> None:
    x, y = cohort(seed, n, apart, missing)
    plain = coded(exact_code(y), x)
    sums = CodedSums(plain.code, plain.sums, plain.moment, rounding=rounding)
    annotated = Annotated.exact(sums, L)
    moments = None
    if moment == "own":
        moments = [moment_of(x[~y[:, at].isnan()]) for at in range(L)]
    found = label_heads(sums, annotated, ["a", "b"], moments, calibrated=calibrated)
    assert found.labels == ("a", "b")
    assert found.left_out == {}
    for at in range(L):
        seen = ~y[:, at].isnan().numpy()
        own, label = x.numpy()[seen], y[:, at].numpy()[seen]
        count, p, mean = len(own), float(label.mean()), own.mean(0)
        difference = own[label == 1].mean(0) - own[label == 0].mean(0)
        cross = p * (1 - p) * difference
        about = sums.moment if moments is None else moments[at]
        directions = Directions.of(about.matrix, rounding * n / about.records)
        outcome = Outcomes(
            torch.from_numpy(cross)[None],
            torch.tensor([p * (1 - p)]).double(),
            torch.tensor([float(count)]).double(),
            torch.zeros(1).double(),
        )
        fit = partial(cross_validated, largest=1.0, caution=CAUTION)
        if moments is None and count < 0.999 * n:
            fit = partial(of_least_error, records=float(n))
        fitted = fit(directions, outcome)
        ridge = fitted.weight[0].numpy()
        weight, bias = discriminant_of(cross, ridge, p, mean, difference)
        strength = float(fitted.strength[0])
        assert float(found.strength[at]) == pytest.approx(strength)
        assert float(found.prevalence[at]) == pytest.approx(p)
        if calibrated:
            values, vectors = directions.values.numpy(), directions.vectors.numpy()
            share = float((values / (values + strength)).sum()) / count
            optimism = share / (1 - share) if share < 1 else math.inf
            apart_ = float(weight @ difference)
            within = float((values * (weight @ vectors) ** 2).sum()) - p * (1 - p) * apart_**2
            new = apart_ - optimism * count * (1 / (p * count) + 1 / ((1 - p) * count))
            if share < 1 and new > 0 and within > 0:
                slope = new / ((1 + optimism) ** 2 * within)
                shift = optimism * (1 / (1 - p) - 1 / p) / 2
                bias = slope * (bias - log_odds(p) - shift) + log_odds(p)
                weight = slope * weight
            weight, bias = limited(weight, bias, p, float(weight @ difference), count)
        np.testing.assert_allclose(found.weight[at], weight, rtol=1e-6, atol=1e-8)
        assert float(found.bias[at]) == pytest.approx(bias, rel=1e-6, abs=1e-8)
        if calibrated:
            continue
        # For a ridge that is given, with scikit-learn's covariance of all.
        for kappa in (0.1, 2.0):
            covariance = about.matrix.numpy()
            ridge = np.linalg.solve(covariance + kappa * np.eye(D), cross)
            if ridge @ cross >= p * (1 - p):
                continue
            weight, bias = discriminant_of(cross, ridge, p, mean, difference)
            ours = ridge_discriminant(annotated, at, about.matrix, kappa)
            np.testing.assert_allclose(ours[0], weight, rtol=1e-6, atol=1e-9)
            assert float(ours[1]) == pytest.approx(bias, abs=1e-9)


@few
@given(SEEDS, st.sampled_from([0.5, 3.0]), st.sampled_from([0.3, 3.0]), st.booleans())
def test_a_head_under_noise(seed: int, apart: float, scale: float, calibrated: bool) -> None:
    x, y = cohort(seed, 400, apart, 0.3)
    of_code, of_sums = (
        scale * torch.tensor(each).double()
        for each in ([4.0, 2.0, 3.0, 1.0, 2.0], [1.0, 2.0, 1.5, 3.0, 1.0])
    )
    sums = noisy(coded(exact_code(y), x), of_code, of_sums, 2 * scale, seed, centre=True)
    annotated = Annotated.exact(sums, L)
    found = label_heads(sums, annotated, ["a", "b"], calibrated=calibrated)
    directions = Directions.of_noisy(sums.covariance, 2 * scale / sums.records, 0.1)
    for at in range(L):
        positive, negative = (float(each) for each in sums.code[1 + 2 * at : 3 + 2 * at])
        rows = sums.sums[1 + 2 * at : 3 + 2 * at].numpy()
        count = positive + negative
        p, mean = positive / count, rows.sum(0) / count
        cross = rows[0] / count - p * mean
        # (1 - p) times the noise of positives, and p times that of negatives.
        of_cross = math.hypot((1 - p) * float(of_sums[1 + 2 * at]), p * float(of_sums[2 + 2 * at])) / count  # fmt: skip
        fitted = expected(
            directions,
            Outcomes(
                torch.from_numpy(cross)[None],
                torch.tensor([p * (1 - p)]).double(),
                torch.tensor([count]).double(),
                torch.tensor([of_cross]).double(),
            ),
        )
        ridge, cross = fitted.weight[0].numpy(), fitted.cross[0].numpy()
        share = float(ridge @ cross) / (p * (1 - p))
        shorter = min(1.0, math.sqrt(0.95 / max(share, 1e-300)))
        ridge, cross = shorter * ridge, shorter * cross
        difference = cross / (p * (1 - p))
        weight, bias = discriminant_of(cross, ridge, p, mean, difference)
        if calibrated:
            longer = np.linalg.norm(weight) / np.linalg.norm(ridge)
            of_mean = (
                math.hypot(*(float(each) for each in of_sums[1 + 2 * at : 3 + 2 * at])) / count
            )
            doubt = float(fitted.doubt[0]) * (shorter * longer) ** 2
            doubt += float(weight @ weight) * of_mean**2
            slope = 1 / math.sqrt(1 + math.pi * doubt / 8)
            weight, bias = slope * weight, slope * (bias - log_odds(p)) + log_odds(p)
            weight, bias = limited(weight, bias, p, float(weight @ difference), count)
        np.testing.assert_allclose(found.weight[at], weight, rtol=1e-6, atol=1e-9)
        assert float(found.bias[at]) == pytest.approx(bias, rel=1e-6, abs=1e-8)
        assert math.isnan(float(found.strength[at]))


@few
@given(
    st.lists(st.tuples(QUARTERS, QUARTERS), min_size=1, max_size=3),
    st.sampled_from([1.0, 5.0]),
    st.sampled_from([0.0, 1.0, 4.0]),
    st.sampled_from([0.0, 3.0]),
)
def test_labels_with_too_few_records_are_named_with_what_is_needed(
    counts: list[tuple[float, float]], fewest: float, of_positive: float, of_all: float
) -> None:
    names = [f"l{at}" for at in range(len(counts))]
    positive, negative = (torch.tensor(list(each)).double() for each in zip(*counts, strict=True))
    noise = [of_positive * torch.ones(2, len(counts)), of_all * torch.ones(2, len(counts))]
    table = torch.randn(len(counts), D, generator=torch.Generator().manual_seed(0)).double() / 9
    annotated = Annotated(
        positive, positive + negative, table, 2 * table, noise[0].double(), noise[1].double(),
        torch.zeros(len(counts)).double(),
    )  # fmt: skip
    x = torch.randn(99, D, generator=torch.Generator().manual_seed(1)).double()
    sums = coded(exact_code(torch.zeros(99, 1).double()), x)
    wanted = {}
    for name, (own, other) in zip(names, counts, strict=True):
        # The noise of negatives is at least that of both.
        for word, count, deviation in (
            ("positive", own, of_positive),
            ("negative", other, max(of_positive, of_all)),
        ):
            least = max(fewest, 2 * deviation)
            if count < least and name not in wanted:
                wanted[name] = (
                    f"{count:.4g} {word} records, fewer than the {least:.4g} that are needed"
                )
    if len(wanted) == len(names):
        with pytest.raises(RunError) as caught:
            label_heads(sums, annotated, names, fewest=fewest)
        assert str(caught.value) == "no label can be learned: " + "; ".join(
            f"{name!r} has {why}" for name, why in wanted.items()
        )
        return
    found = label_heads(sums, annotated, names, fewest=fewest)
    assert found.left_out == wanted
    assert found.labels == tuple(name for name in names if name not in wanted)
    assert found.weight.shape == (len(found.labels), D)
    with pytest.raises(ValueError, match="their numbers must be the same"):
        label_heads(sums, annotated, [*names, "more"])
    with pytest.raises(ValueError, match="their numbers must be the same"):
        label_heads(sums, annotated, names, [sums.moment] * (len(names) + 1))


def test_a_label_of_fewer_records_than_the_ridge_takes_keeps_its_log_odds() -> None:
    """The strongest ridge keeps about a hundredth of each of 300 dimensions, for two records."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(60, 300, generator=draw, dtype=torch.float64)
    x[1] = x[0] + 0.03 * x[1]
    y = torch.full((60, 1), torch.nan, dtype=torch.float64)
    y[:2, 0] = torch.tensor([1.0, 0.0])
    sums = coded(exact_code(y), x)
    annotated = Annotated.exact(sums, 1)
    free, held = (
        label_heads(sums, annotated, ["a"], fewest=1, calibrated=each) for each in (False, True)
    )
    values = torch.linalg.eigvalsh(sums.covariance).clamp_min(0)
    assert float((values / (values + float(held.strength[0]))).sum()) > 2
    distance = float(free.weight[0] @ (x[0] - x[1]))
    weight, bias = limited(free.weight[0].numpy(), float(free.bias[0]), 0.5, distance, 2)
    np.testing.assert_allclose(held.weight[0], weight, rtol=1e-9)
    assert float(held.bias[0]) == pytest.approx(bias, abs=1e-9)
