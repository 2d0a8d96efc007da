"""Heads for labels with missing annotations, against discriminants on the annotated records."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.strategies.targets.number import (
    Annotated,
    label_heads,
    moderated,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from tests.coded import capped_code, coded, exact_code, moment_of, noisy, ridge_discriminant

NAMES = ["edema", "fracture", "effusion"]


def findings(seed: int, n: int = 400, d: int = 5, missing: float = 0.3) -> tuple[Tensor, Tensor]:
    """Features and labels (n, 3), NaN where not annotated."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    scores = x[:, :3] + torch.randn(n, 3, generator=draw, dtype=torch.float64) - 0.5
    labels = (scores > 0).double()
    labels[torch.rand(n, 3, generator=draw) < missing] = torch.nan
    return x, labels


def of(x: Tensor, labels: Tensor) -> tuple[CodedSums, Annotated]:
    sums = coded(exact_code(labels), x)
    return sums, Annotated.exact(sums, labels.shape[1])


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 500),
    missing=st.floats(0, 0.8),
    scale=st.sampled_from([0.01, 1.0, 100.0]),
    sites=st.integers(1, 50),
)
def test_logits_of_the_own_moment_are_those_of_scikit_learn(
    seed: int, missing: float, scale: float, sites: int
) -> None:
    x, labels = findings(seed, missing=missing)
    x = x * torch.tensor([scale, 1, 1, 1, 1], dtype=torch.float64) + 1
    site = torch.arange(len(x)) % sites
    parts = [coded(exact_code(labels[site == s]), x[site == s]) for s in range(sites)]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    for index in range(3):
        known = ~labels[:, index].isnan()
        own = labels[known, index]
        assume(own.sum() > 8 and (1 - own).sum() > 8)
        covariance = moment_of(x[known]).matrix
        weight, bias = ridge_discriminant(Annotated.exact(total, 3), index, covariance, 0.0)
        fit = LinearDiscriminantAnalysis(solver="lsqr").fit(x[known].numpy(), own.numpy())
        ours = (x @ weight + bias).numpy()
        theirs = fit.decision_function(x.numpy())
        assert np.abs(ours - theirs).max() < 1e-9 * max(1, np.abs(theirs).max())


def test_probabilities_are_calibrated_and_a_prior_shift_is_one_offset() -> None:
    import statsmodels.api as sm

    draw = torch.Generator().manual_seed(0)
    labels = (torch.rand(20_000, 1, generator=draw) < 0.3).double()
    x = torch.randn(20_000, 3, generator=draw, dtype=torch.float64) + labels
    sums, annotated = of(x, labels)
    heads = label_heads(sums, annotated, ["finding"])
    few = torch.cat([x[labels[:, 0] == 0], x[labels[:, 0] == 1][:1000]])
    truth = torch.cat([torch.zeros(int((labels == 0).sum())), torch.ones(1000)])
    own = truth.mean()[None].double()
    for records, true, shift in ((x, labels[:, 0], False), (few, truth, True)):
        odds = records @ heads.weight.T + heads.bias
        if shift:
            odds = odds + own.logit() - heads.prevalence.logit()
        fit = sm.Logit(true.numpy(), sm.add_constant(odds.numpy())).fit(disp=0)
        assert np.abs(fit.params - [0, 1]).max() < 0.1


def test_a_moment_that_explains_more_than_there_is_is_refused_or_strengthened() -> None:
    x, labels = findings(5, missing=0.0)
    sums, annotated = of(x, labels)
    # A moment of other records, with far smaller variances.
    small = moment_of(0.3 * x)
    with pytest.raises(RunError, match="must be below 1"):
        ridge_discriminant(annotated, 0, small.matrix, 1e-9)
    heads = label_heads(sums, annotated, NAMES, [small] * 3)
    assert heads.weight.isfinite().all()
    assert roc_auc_score(labels[:, 0].numpy(), (x @ heads.weight[0]).numpy()) > 0.7


def test_the_capped_code_is_exact_where_no_record_has_many_labels() -> None:
    x, labels = findings(7, missing=0.0)
    member = torch.arange(400) % 2
    # Site 0 annotates the first two labels, site 1 the last two.
    members = torch.tensor([[True, True, False], [False, True, True]])
    labels[~members[member]] = torch.nan
    exact = of(x, labels)[1]
    sums = coded(capped_code(labels, member, 2, 3.0), x)
    capped = Annotated.capped(sums, members)
    for one, other in (
        (capped.positive, exact.positive),
        (capped.annotated, exact.annotated),
        (capped.positive_sums, exact.positive_sums),
        (capped.annotated_sums, exact.annotated_sums),
    ):
        assert torch.allclose(one, other, atol=1e-9)
    low = Annotated.capped(coded(capped_code(labels, member, 2, 1.0), x), members)
    assert bool((low.positive < exact.positive).all()), "positives are counted low"
    assert torch.allclose(low.annotated, exact.annotated)


@settings(max_examples=60, deadline=None)
@given(score=st.floats(-8, 8), prevalence=st.floats(0.02, 0.98), deviation=st.floats(0, 6))
def test_a_moderated_probability_is_the_mean_over_what_the_noise_may_have_been(
    score: float, prevalence: float, deviation: float
) -> None:
    """By quadrature, around the log odds of the prevalence, which stay."""
    middle = math.log(prevalence / (1 - prevalence))
    one = torch.ones(1, dtype=torch.float64)
    weight, bias = moderated(score * one, middle * one[0], prevalence, deviation**2)
    at = torch.linspace(-6, 6, 2001, dtype=torch.float64)
    density = (-at.square() / 2).exp()
    chances = (score + deviation * at).sigmoid()
    mean = float((density * chances).sum() / density.sum())
    assert float((weight[0] + bias - middle).sigmoid()) == pytest.approx(mean, abs=0.025)
    assert float(bias) == pytest.approx(middle)


def test_a_label_whose_noise_exceeds_its_signal_has_no_extreme_probabilities() -> None:
    """Of noise alone, probabilities near 0 and 1 were made, worse than the prevalence for all."""
    losses = []
    for seed in range(20):
        draw = torch.Generator().manual_seed(seed)
        spread = 0.9 ** torch.arange(24).double()
        x = torch.randn(2000, 24, generator=draw, dtype=torch.float64) * spread
        present = (x[:, 0] + torch.randn(2000, generator=draw).double() > 0.7).double()
        x = x / x.norm(dim=1, keepdim=True)
        exact = coded(exact_code(present[:1000, None])[:, 1:], x[:1000])
        code, sums = torch.full((2,), 3.0).double(), torch.full((2,), 60.0).double()
        release = noisy(exact, code, sums, 30.0, seed, centre=True)
        heads = label_heads(release, Annotated.exact(release, 1), ["a"], calibrated=True)
        chance = (x[1000:] @ heads.weight[0] + heads.bias[0]).sigmoid().clamp(1e-6, 1 - 1e-6)
        truth, share = present[1000:], present.mean()
        entropy = -(share * share.log() + (1 - share) * (1 - share).log())
        loss = -(truth * chance.log() + (1 - truth) * (1 - chance).log()).mean()
        losses.append(float(loss - entropy))
    assert sum(losses) / len(losses) < 0
    assert max(losses) < 0.1
