"""Harm where numbers, labels or times are learned: by its definition in loops, its metrics against
libraries, and what the rule does with honest and with false sites.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lifelines.utils import concordance_index
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score

from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.robustness.defence import by_harm
from fedsurrogate.strategies.robustness.harm import (
    AREA,
    CONCORDANCE,
    RIDGE,
    Coded,
    Ordering,
    Outputs,
    judged,
    largest,
    outputs_of,
)

Array = NDArray[np.float64]
Records = tuple[Array, Array]
few = settings(max_examples=25, deadline=None)
D, OUTPUTS = 6, 2


def records(
    seed: int, size: int = 200, turned: bool = False, shift: float = 0.0, binary: bool = False
) -> Records:
    """Features, and numbers or labels that depend on them; NaN where a label is not known."""
    common, own = np.random.default_rng(0), np.random.default_rng(seed)
    slopes = common.normal(size=(D, OUTPUTS))
    x = own.normal(size=(size, D)) + shift
    y = x @ slopes + own.normal(size=(size, OUTPUTS))
    if binary:
        y = (y > 0).astype(float)
    y = (1 - y if binary else -y) if turned else y
    return x, y


def coded(site: Records, noise: float = 0.0) -> Coded:
    x, y = (torch.from_numpy(each) for each in site)
    known = (~y.isnan()).double()
    y = y.nan_to_num()
    apart = x - x.mean(0)
    moment = Statistics(
        torch.tensor([float(len(x))]).double(), x.mean(0)[None], apart.T @ apart / len(x)
    )
    draw = torch.Generator().manual_seed(len(x))
    added = noise * torch.randn(y.shape[1], D, generator=draw, dtype=torch.float64)
    noises = torch.full((y.shape[1],), noise, dtype=torch.float64)
    return Coded(
        moment, known.sum(0), y.sum(0), y.square().sum(0), y.T @ x + added, known.T @ x, noises
    )


def evidence(sites: list[Records], ordering: Ordering = CONCORDANCE, noise: float = 0.0) -> Outputs:
    parts = [coded(site, noise) for site in sites]
    return outputs_of(lambda: parts, ordering)


@pytest.mark.parametrize("correlated", [-0.6, 0.0, 0.3, 0.9])
def test_concordance_is_that_of_normal_scores(correlated: float) -> None:
    draw = np.random.default_rng(0)
    score = draw.normal(size=20_000)
    y = correlated * score + np.sqrt(1 - correlated**2) * draw.normal(size=20_000)
    found = torch.tensor([[np.corrcoef(score, y)[0, 1]]])
    expected = concordance_index(y, score)
    assert float(CONCORDANCE.of(found, torch.zeros(1))) == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("apart", [-1.0, 0.0, 0.5, 2.0])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_area_is_that_of_scores_that_are_normal_in_both_groups(
    apart: float, share: float
) -> None:
    draw = np.random.default_rng(0)
    y = (draw.random(50_000) < share).astype(float)
    score = draw.normal(size=50_000) + apart * y
    found = torch.tensor([[np.corrcoef(score, y)[0, 1]]])
    area = float(AREA.of(found, torch.tensor([y.mean()])))
    assert area == pytest.approx(roc_auc_score(y, score), abs=0.01)


def direct(sites: list[Records], ordering: Ordering) -> Outputs:
    """Evidence in the columns themselves, whose sums are exact."""
    parts = [coded(site) for site in sites]
    names = ("known", "totals", "squares", "sums", "features")
    return Outputs(
        torch.eye(D, dtype=torch.float64),
        torch.stack([each.noise for each in parts]),
        ordering,
        torch.stack([each.moment.counts[0] for each in parts]),
        torch.stack([each.moment.means[0] for each in parts]),
        torch.stack([each.moment.matrix for each in parts]),
        *(torch.stack([getattr(each, name) for each in parts]) for name in names),
    )


def quality(ordering: Ordering, judge: Records, others: list[Records]) -> float:
    """Of a ridge of the others' records, at the judge's."""
    x, y = (np.concatenate([each[at] for each in others]) for at in (0, 1))
    covariance = np.cov(x.T, bias=True)
    ridged = covariance + RIDGE * np.trace(covariance) / D * np.eye(D)
    shares = []
    for output in range(OUTPUTS):
        cross = (y[:, output] - y[:, output].mean()) @ (x - x.mean(0)) / len(x)
        score = judge[0] @ np.linalg.solve(ridged, cross)
        found = torch.tensor([[np.corrcoef(score, judge[1][:, output])[0, 1]]])
        shares.append(float(ordering.of(found, torch.tensor([judge[1][:, output].mean()]))))
    return float(np.mean(shares))


@few
@given(
    seeds=st.lists(st.integers(1, 99), min_size=3, max_size=5, unique=True),
    sizes=st.lists(st.integers(40, 80), min_size=5, max_size=5),
    binary=st.booleans(),
)
def test_harm_is_what_its_definition_says(seeds: list[int], sizes: list[int], binary: bool) -> None:
    sites = [records(each, sizes[at], binary=binary) for at, each in enumerate(seeds)]
    ordering = AREA if binary else CONCORDANCE
    harm = np.full((len(sites), len(sites)), -1.0)
    gain = np.zeros(len(sites))
    for judge, own in enumerate(sites):
        others = [at for at in range(len(sites)) if at != judge]
        best = quality(ordering, own, [sites[at] for at in others])
        gain[judge] = quality(ordering, own, sites) - best
        for site in others:
            kept = [sites[at] for at in others if at != site]
            outside = quality(ordering, own, kept) - best
            inside = quality(ordering, own, [*kept, own]) - quality(ordering, own, sites)
            harm[site, judge] = max(inside, outside)
    found = direct(sites, ordering)
    assert found.harms().numpy() == pytest.approx(harm, abs=1e-9)
    assert found.gains().numpy() == pytest.approx(gain, abs=1e-9)


@few
@given(
    seed=st.integers(0, 99),
    order=st.permutations(range(5)),
    binary=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
)
def test_neither_order_nor_rotation_nor_scale_of_the_columns_matters(
    seed: int, order: list[int], binary: bool, scale: float
) -> None:
    sites = [records(seed + at, 60 + 20 * at, at == 2, binary=binary) for at in range(5)]
    ordering = AREA if binary else CONCORDANCE
    rotation = scale * np.linalg.qr(np.random.default_rng(seed).normal(size=(D, D)))[0]
    moved = [(sites[at][0] @ rotation, sites[at][1]) for at in order]
    first, again = (judged(evidence(each, ordering)) for each in (sites, moved))
    assert again.weights.numpy() == pytest.approx(first.weights[order].numpy(), abs=1e-9)
    assert again.harm.numpy() == pytest.approx(first.harm[order].numpy(), abs=1e-6)


@few
@given(
    seed=st.integers(0, 999),
    sizes=st.lists(st.integers(60, 400), min_size=4, max_size=8),
    shifts=st.lists(st.floats(-3, 3), min_size=8, max_size=8),
    binary=st.booleans(),
)
def test_honest_hospitals_of_other_sizes_and_scanners_keep_their_weight(
    seed: int, sizes: list[int], shifts: list[float], binary: bool
) -> None:
    sites = [
        records(seed + at, size, shift=shifts[at], binary=binary) for at, size in enumerate(sizes)
    ]
    decided = judged(evidence(sites, AREA if binary else CONCORDANCE))
    assert (decided.weights == 1).all(), decided
    assert decided.out == ()


@few
@given(seed=st.integers(0, 999), count=st.integers(4, 8), binary=st.booleans())
def test_a_site_whose_outputs_are_turned_round_decides_little(
    seed: int, count: int, binary: bool
) -> None:
    """It has as many records as all others together."""
    sites = [records(seed + at, 150, binary=binary) for at in range(count - 1)]
    sites.append(records(seed + 99, 150 * (count - 1), True, binary=binary))
    ordering = AREA if binary else CONCORDANCE
    decided = judged(evidence(sites, ordering))
    assert (decided.weights[:-1] == 1).all()
    assert float(decided.weights[-1]) < 0.2
    assert float(largest(evidence(sites[:-1], ordering).harms()).max()) < ordering.most


def test_a_label_that_two_sites_know_leaves_none_of_them_out() -> None:
    sites = [records(at, 200, at == 0, binary=True) for at in range(5)]
    for _, labels in sites[2:]:
        labels[:, 1] = np.nan
    assert judged(evidence(sites, AREA)).out == ()


def test_noise_that_hides_everything_accuses_nobody() -> None:
    sites = [records(at, 450 if at == 0 else 150, at == 0) for at in range(4)]
    assert (judged(evidence(sites, noise=300.0)).weights == 1).all()
    assert float(judged(evidence(sites, noise=0.01)).weights[0]) < 1


@pytest.mark.parametrize("ordering", [CONCORDANCE, AREA])
def test_the_score_of_a_site_that_is_left_out_is_one_at_the_limit_of_its_measure(
    ordering: Ordering,
) -> None:
    binary = ordering.binary
    sites = [records(at, 150, binary=binary) for at in range(4)]
    sites.append(records(9, 900, True, binary=binary))
    found = judged(evidence(sites, ordering))
    (suspect,) = by_harm(list("abcde"), found, {}).suspects
    assert suspect.site == "e"
    assert suspect.score == pytest.approx(float(found.harm[-1]) / ordering.out)
    assert f"points of {ordering.name}" in suspect.reason
