"""The strength of ridges and the weights under noise, by their formulas in plain loops over
generated covariances, outcomes and noise.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.strategies.targets.number import (
    Directions,
    Outcomes,
    cross_validated,
    expected,
    of_least_error,
)

Array = NDArray[np.float64]
D = 4
few = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 9999)
# Ridges in mean variances; powers and explained shares among which priors are averaged.
GRID = [10 ** (-8 + at / 6) for at in range(61)]
POWERS = [-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0]
EXPLAINED = [math.exp(-6 + at / 10) for at in range(81)]


def problem(
    seed: int, outputs: int, records: float, noise: float = 0.0, least: float = 0.0
) -> tuple[Directions, Outcomes, Array, Array]:
    """A covariance with its values and vectors, and outcomes that it explains in part."""
    draw = np.random.default_rng(seed)
    vectors, _ = np.linalg.qr(draw.normal(size=(D, D)))
    values = np.sort(draw.uniform(0.05, 3, D))
    # Some outcomes vary less than the features explain.
    cross = draw.normal(size=(outputs, D)) * draw.choice([0.1, 0.6], (outputs, 1))
    cross = cross @ (vectors * values @ vectors.T)
    variance = draw.uniform(0.2, 1.5, outputs)
    directions = Directions(
        torch.from_numpy(values),
        torch.from_numpy(vectors),
        torch.from_numpy(values * draw.uniform(0.5, 1, D)),
        least,
    )
    outcomes = Outcomes(
        torch.from_numpy(cross),
        torch.from_numpy(variance),
        torch.full((outputs,), records, dtype=torch.float64) + torch.arange(outputs),
        noise * (1 + torch.arange(outputs).double()),
    )
    return directions, outcomes, values, vectors


def ridges(values: Array, rotated: Array) -> list[tuple[float, float, float, float]]:
    """Of each ridge its strength, the covariance of outcome and prediction, the variance of the
    prediction, and the degrees of freedom with one for the intercept.
    """
    found = []
    for part in GRID:
        strength = part * values.mean()
        fit = sum(c * c / (v + strength) for c, v in zip(rotated, values, strict=True))
        spread = sum(c * c * v / (v + strength) ** 2 for c, v in zip(rotated, values, strict=True))
        found.append((strength, fit, spread, 1 + sum(v / (v + strength) for v in values)))
    return found


@few
@given(
    SEEDS,
    st.integers(1, 3),
    st.sampled_from([4.0, 7.0, 60.0]),
    st.sampled_from([1.0, 1 + 1e-9]),
    st.sampled_from([1.0, 1.4]),
    st.sampled_from([0.0, 0.02, 2.0, 1e6]),
)
def test_the_strength_has_the_smallest_generalised_error_that_is_allowed(
    seed: int, outputs: int, records: float, largest: float, caution: float, least: float
) -> None:
    directions, outcomes, values, vectors = problem(seed, outputs, records, least=least)
    found = cross_validated(directions, outcomes, largest, caution)
    for row in range(outputs):
        n, variance = records + row, float(outcomes.variance[row])
        own = outcomes.cross[row].numpy()
        best = None
        compared = ridges(values, own @ vectors)
        for at, (strength, fit, spread, freedom) in enumerate(compared):
            residual, share = max(variance - 2 * fit + spread, 0.0), freedom / n
            fits = caution * share < 0.99 and fit < largest * variance and strength >= least
            error, judged = (
                residual / max(1 - each, 0.01) ** 2 for each in (share, caution * share)
            )
            if fits and (best is None or judged < best[0]):
                best = (judged, strength, error)
            if best is None and at == len(compared) - 1:
                best = (judged, strength, error)
        assert best is not None
        assert float(found.strength[row]) == pytest.approx(best[1])
        assert float(found.error[row]) == pytest.approx(best[2], rel=1e-6, abs=1e-12)
        ridged = vectors * (values + best[1]) @ vectors.T
        np.testing.assert_allclose(found.weight[row], np.linalg.solve(ridged, own), rtol=1e-6)
    assert found.cross is outcomes.cross
    assert found.doubt.tolist() == [0.0] * outputs


@few
@given(
    SEEDS,
    st.integers(1, 3),
    st.sampled_from([4.0, 9.0, 60.0]),
    st.sampled_from([4.0, 30.0, 400.0]),
    st.sampled_from([0.0, 0.5]),
)
def test_the_strength_for_other_records_has_the_smallest_expected_error(
    seed: int, outputs: int, records: float, whole: float, least: float
) -> None:
    directions, outcomes, values, vectors = problem(seed, outputs, records, least=least)
    found = of_least_error(directions, outcomes, whole)
    for row in range(outputs):
        n, variance = records + row, float(outcomes.variance[row])
        compared = ridges(values, outcomes.cross[row].numpy() @ vectors)
        allowed = [
            freedom < 0.99 * n and fit < variance and strength >= least
            for strength, fit, _, freedom in compared
        ]
        allowed[-1] = allowed[-1] or not any(allowed)
        residual, best = variance, -1
        for _ in range(3):
            errors = [
                variance
                - 2 * (fit - residual * freedom / n)
                + spread / max(1 - freedom / whole, 0.01)
                if fits
                else math.inf
                for (_, fit, spread, freedom), fits in zip(compared, allowed, strict=True)
            ]
            best = int(np.argmin(errors))
            residual = min(max(errors[best], 0.05 * variance), variance)
        assert float(found.strength[row]) == pytest.approx(compared[best][0])
        assert float(found.error[row]) == pytest.approx(residual)
        ridged = vectors * (values + compared[best][0]) @ vectors.T
        wanted = np.linalg.solve(ridged, outcomes.cross[row].numpy())
        np.testing.assert_allclose(found.weight[row], wanted, rtol=1e-6)
    assert found.cross is outcomes.cross
    assert found.doubt.tolist() == [0.0] * outputs


@few
@given(SEEDS, st.integers(1, 2), st.sampled_from([5.0, 80.0]), st.sampled_from([0.01, 0.2, 2.0]))
def test_weights_under_noise_are_means_over_powers_and_scales(
    seed: int, outputs: int, records: float, noise: float
) -> None:
    directions, outcomes, values, vectors = problem(seed, outputs, records, noise)
    found = expected(directions, outcomes)
    measured = directions.measured.numpy()
    judged = measured + 0.5 * (values - measured)
    for row in range(outputs):
        own, variance = outcomes.cross[row].numpy() @ vectors, float(outcomes.variance[row])
        residual, square = variance, float(outcomes.noise[row]) ** 2
        for _ in range(3):
            chance = values * residual / (records + row) + square
            logs, shares = [], []
            for power in POWERS:
                for share in EXPLAINED:
                    scale = share / (values ** (power + 1)).sum()
                    whole = variance * scale * values ** (power + 2) + chance
                    logs.append(-0.5 * float((np.log(whole) + own**2 / whole).sum()))
                    shares.append(1 - chance / whole)
            likely = np.exp(np.array(logs) - max(logs))
            likely /= likely.sum()
            table = np.stack(shares)
            kept = likely @ table
            cross, weight = kept * own, kept * own / values
            explained = float((2 * weight * cross - judged * weight**2).sum())
            residual = max(variance - explained, 0.05 * variance)
        apart = likely @ (table - kept) ** 2 * own**2
        assert float(found.error[row]) == pytest.approx(residual, rel=1e-6)
        assert float(found.doubt[row]) == pytest.approx(
            float(((kept * square + apart) / values).sum()), rel=1e-6
        )
        np.testing.assert_allclose(found.weight[row], vectors @ weight, rtol=1e-6, atol=1e-10)
        np.testing.assert_allclose(found.cross[row], vectors @ cross, rtol=1e-6, atol=1e-10)
    assert found.strength.isnan().all()
