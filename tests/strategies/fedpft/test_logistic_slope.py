"""The factor of a logistic head's scores: against the most likely one of the same records."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

from fedsurrogate.client_app.methods.fedpft.logistic_rounds import gaps
from fedsurrogate.common.methods.logistic_rounds import FACTORS, LENGTH
from fedsurrogate.strategies.fedpft.logistic_rounds import UNSURE, USUAL, factor_of

LARGE = st.floats(-6e4, 6e4)


def gaps_of(scores: np.ndarray, labels: np.ndarray) -> torch.Tensor:
    """What a site sends of records with these scores (n, C), as the head of unit features."""
    head = torch.eye(scores.shape[1], dtype=torch.float64) / LENGTH
    return gaps(torch.from_numpy(scores), torch.from_numpy(labels), head)


@given(
    st.integers(2, 6),
    st.floats(0.8, 3.6),
    st.floats(0.5, 2.5),
    st.integers(0, 10**6),
)
@settings(max_examples=25, deadline=None)
def test_without_noise_it_is_nearly_the_most_likely_factor(
    classes: int, true: float, spread: float, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    scores = spread * draw.normal(size=(4000, classes))
    chances = softmax(true * scores, axis=1).cumsum(1)
    labels = (draw.random(4000)[:, None] > chances[:, :-1]).sum(1)

    def loss(factor: float) -> float:
        logs = log_softmax(factor * scores, axis=1)
        return -float(logs[np.arange(4000), labels].mean())

    best = minimize_scalar(loss, bounds=(0.3, 8.0), method="bounded").x
    mean = gaps_of(scores, labels).mean(0) * math.sqrt(len(FACTORS))
    found = factor_of(mean, 1e-9)
    # Records weigh differently, and between two factors the curve is taken for a line.
    assert math.log(found) == pytest.approx(math.log(best), abs=0.25)
    assert loss(found) <= loss(best) + 0.01


@given(st.lists(st.floats(-1, 1), min_size=6, max_size=6), st.floats(1e-9, 10))
def test_it_is_within_the_factors_and_nearer_to_the_usual_one_with_more_noise(
    values: list[float], noise: float
) -> None:
    mean = torch.tensor(values)
    some, more = (factor_of(mean, sigma) for sigma in (noise, 3 * noise))
    exact = factor_of(mean, 1e-12)
    assert FACTORS[0] - 1e-6 <= exact <= FACTORS[-1] + 1e-6
    distances = [abs(math.log(each / USUAL)) for each in (exact, some, more)]
    assert distances == sorted(distances, reverse=True) or max(distances) < 1e-9
    fall = -float(np.polyfit(np.log(FACTORS), np.array(values, dtype=np.float32), 1)[0])
    trust = 1 / (1 + (noise / fall / UNSURE) ** 2) if fall > 0 else 0.0
    assert distances[1] == pytest.approx(trust * distances[0], rel=1e-3, abs=1e-6)


def test_gaps_that_rise_or_are_all_of_one_sign_give_the_usual_factor_or_an_end() -> None:
    falling = torch.linspace(0.3, 0.1, 6)
    assert factor_of(falling.flip(0), 1e-9) == USUAL
    assert factor_of(falling, 1e-9) == pytest.approx(4.0)
    assert factor_of(falling - 1, 1e-9) == pytest.approx(0.7)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_unit_more_changes_the_gaps_by_one_at_most_whatever_the_coordinator_sends(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 40))
    drawn = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    features = torch.nn.functional.normalize(torch.randn(count, 4, generator=drawn).double())
    labels = torch.randint(2, (count,), generator=drawn)
    head = torch.tensor(data.draw(st.lists(LARGE, min_size=8, max_size=8))).double().reshape(2, 4)
    found = gaps(features, labels, head)
    assert found.shape == (count, len(FACTORS))
    assert found.isfinite().all()
    assert float(found.norm(dim=1).max()) <= 1.0 + 1e-12
    # To the last bit, that of a record is the same alone.
    one = data.draw(st.integers(0, count - 1))
    alone = gaps(features[one : one + 1], labels[one : one + 1], head)
    assert torch.equal(alone[0], found[one])
