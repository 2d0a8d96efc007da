"""Probabilities of heads of noisy sums: against Bayes' rule for normal classes, and on new records."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import multivariate_normal
from torch import Tensor

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import clip, with_noise
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.privacy.shares import budget_shares
from fedsurrogate.common.surrogates.class_sums import Sums, statistics
from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.closed_form.solvers import slope_of
from fedsurrogate.strategies.fedpft.private_head import learn_from_sums, of_classes, spread_of
from fedsurrogate.strategies.pooling.class_means import Components

few = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 9999)


def drawn(seed: int, classes: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """Priors, means and a covariance."""
    generator = torch.Generator().manual_seed(seed)
    priors = torch.rand(classes, generator=generator).double() + 0.1
    means = torch.randn(classes, d, generator=generator).double()
    root = torch.randn(d, d, generator=generator).double()
    return priors / priors.sum(), means, root @ root.T / d + 0.3 * torch.eye(d)


@few
@given(seed=SEEDS, classes=st.integers(2, 5), d=st.integers(1, 6), scale=st.floats(0.01, 100))
def test_exact_discriminants_of_any_scale_get_the_posterior_of_normal_classes(
    seed: int, classes: int, d: int, scale: float
) -> None:
    priors, means, covariance = drawn(seed, classes, d)
    means = means * (1 + torch.arange(classes))[:, None]
    weight = scale * torch.linalg.solve(covariance, means.T).T
    between = torch.cdist(means, means) + torch.eye(classes)
    assume(float(between.min()) > 0.5)
    scores = weight @ means.T, weight @ covariance @ weight.T
    slope = slope_of(scores, priors)
    assert slope == pytest.approx(1 / scale, rel=1e-6)
    x = torch.randn(20, d, generator=torch.Generator().manual_seed(seed + 1)).double()
    bias = scale * priors.log() - (weight * means).sum(1) / 2
    found = (slope * (x @ weight.T + bias)).softmax(1)
    densities = [multivariate_normal(m, covariance.numpy()).pdf(x.numpy()) for m in means.numpy()]
    joint = np.reshape(densities, (classes, 20)).T * priors.numpy()
    assert np.allclose(found, joint / joint.sum(1, keepdims=True), atol=1e-8)


def test_components_of_one_class_add_their_differences_to_the_spread() -> None:
    components = Components(
        ("a", "b"),
        torch.tensor([0, 1, 1]),
        torch.zeros(3, 1).double(),
        torch.zeros(3, 3).double(),
        torch.tensor([2.0, 1.0, 1.0]).double(),
        torch.tensor([0.5, 0.25, 0.25]).double(),
    )
    of_components = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 5.0]]).double()
    found = of_classes((of_components, torch.eye(2).double()), components)
    assert found[0].tolist() == [[1.0, 1.0], [0.0, 4.0]]
    assert found[1].tolist() == [[1.5, 0.5], [0.5, 1.5]]


def test_the_larger_spread_counts_and_noise_varies_as_any_direction() -> None:
    directions, noise = torch.eye(2, 220).double(), 0.25 * torch.eye(2).double()
    alike = LowRank(torch.zeros(220, 0).double(), torch.ones(220).double())
    usual = spread_of(directions, alike, noise, None)
    assert torch.allclose(usual, (10 * 0.75 + 0.25) * torch.eye(2).double())
    large, small = (size * torch.eye(220).double() for size in (20, 1))
    assert torch.allclose(spread_of(directions, alike, noise, large), 20 * torch.eye(2).double())
    assert torch.equal(spread_of(directions, alike, noise, small), usual)


def records(count: int, seed: int, priors: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Features of 200 columns that vary in few directions, along which classes differ, too."""
    generator, shape = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(7)
    directions = torch.randn(25, 200, generator=shape) / 200**0.5
    means = 0.8 * torch.randn(len(priors), 25, generator=shape) @ directions
    labels = torch.multinomial(torch.tensor(priors), count, True, generator=generator)
    noise = torch.randn(count, 25, generator=generator) @ directions
    return means[labels] + noise + 0.02 * torch.randn(count, 200, generator=generator), labels


def head(family: str, epsilon: float, seed: int, priors: tuple[float, ...]) -> Head:
    shares = partial(budget_shares, family)
    claim = NoisySums("sums", epsilon, 1e-5, shares).mechanism()
    names, sent = tuple(map(str, range(len(priors)))), []
    for site in range(3):
        x, y = records(1000, 10 * seed + site, priors)
        x = clip(x.double(), 0.0)[0]
        released = with_noise(statistics(x, y, torch.ones(1000), len(priors), family), claim)
        header = Header("fedpft", "run", str(site), "f", names)
        sent.append(SumsSurrogate(header, Sums.of(released), claim))
    return learn_from_sums(sent, family, 64)[0]


@pytest.mark.parametrize("priors", [(0.5, 0.5), (0.1, 0.9), (0.2, 0.2, 0.3, 0.3)])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
@pytest.mark.parametrize("family", ["spherical", "diag", "full"])
def test_on_new_records_the_mean_probability_is_the_share_that_is_right(
    family: str, epsilon: float, priors: tuple[float, ...]
) -> None:
    x, y = records(4000, 999, priors)
    gaps, naive = [], []
    for seed in range(2):
        scores = head(family, epsilon, seed, priors).scores(x).double()
        for factor, found in ((1.0, gaps), (10.0, naive)):
            sure, most = (factor * scores).softmax(1).max(1)
            found.append(abs(float(sure.mean()) - float((most == y).double().mean())))
    assert np.mean(gaps) < 0.1
    assert np.mean(gaps) < np.mean(naive)
