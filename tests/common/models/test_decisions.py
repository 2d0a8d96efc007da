"""Decisions from probabilities: each is the best one for its own cost."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.models.decisions import (
    least_cost,
    mean_rank,
    median_rank,
    with_prevalence,
    with_priors,
)


def chances(seed: int, n: int = 20, k: int = 5) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(n, k, generator=draw, dtype=torch.float64)).softmax(1)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_ranks_are_those_of_least_expected_cost(seed: int) -> None:
    chance = chances(seed)
    apart = (torch.arange(5)[:, None] - torch.arange(5)).double()
    assert torch.equal(mean_rank(chance), least_cost(chance, apart.square()))
    assert torch.equal(median_rank(chance), least_cost(chance, apart.abs()))
    wrong = 1 - torch.eye(5, dtype=torch.float64)
    assert torch.equal(chance.argmax(1), least_cost(chance, wrong))


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 1000))
def test_other_shares_of_the_classes_follow_the_rule_of_bayes(seed: int) -> None:
    chance = chances(seed)
    learned, own = chances(seed + 1, 1)[0], chances(seed + 2, 1)[0]
    shifted = with_priors(chance.log(), learned, own).softmax(1)
    weighted = chance * own / learned
    assert torch.allclose(shifted, weighted / weighted.sum(1, keepdim=True))
    assert torch.allclose(with_priors(chance.log(), learned, learned).softmax(1), chance)
    two = with_priors(chance[:, :2].log(), learned[:2], own[:2]).softmax(1)[:, 1:]
    odds = (chance[:, 1:2] / chance[:, :1]).log()
    share = [each[1:2] / each[:2].sum() for each in (learned, own)]
    assert torch.allclose(with_prevalence(odds, *share).sigmoid(), two)
