"""Harm by its definition in loops, and what the rule does with honest and with false sites."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import norm

from fedsurrogate.strategies.closed_form.solvers import SiteDifferences
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.robustness import harm
from fedsurrogate.strategies.robustness.harm import sites_of

Array = NDArray[np.float64]
few = settings(max_examples=25, deadline=None)
D, C = 8, 4


def site(
    seed: int, records: int = 200, shift: float = 0.0, classes: int = C, swap: bool = False
) -> Statistics:
    """A site's statistics of normal records; its scanner moves all of them by `shift`."""
    common, own = np.random.default_rng(0), np.random.default_rng(seed)
    means = 3 * common.normal(size=(C, D))
    labels = np.arange(records) % classes
    x = means[labels] + own.normal(size=(records, D)) + shift
    if swap:
        labels = (labels + 1) % classes
    counts = np.bincount(labels, minlength=C).astype(float)
    centres = np.stack([x[labels == c].mean(0) if counts[c] else np.zeros(D) for c in range(C)])
    apart = x - centres[labels]
    return Statistics(
        torch.from_numpy(counts),
        torch.from_numpy(centres),
        torch.from_numpy(apart.T @ apart / records),
    )


def evidence(parts: list[Statistics]) -> harm.Sites:
    return sites_of(lambda: parts)


@st.composite
def drawn_sites(draw: st.DrawFn) -> harm.Sites:
    """Sites with uneven classes, some of which are missing."""
    seed, count = draw(st.integers(0, 10**6)), draw(st.integers(4, 6))
    random = np.random.default_rng(seed)
    k = draw(st.integers(2, 5))
    counts = random.integers(0, 40, (count, C)) * (random.random((count, C)) < 0.8) + 10.0 * (
        np.arange(C) == random.integers(0, C, (count, 1))
    )
    means = random.normal(size=(count, C, k)) * (counts > 0)[..., None]
    roots = random.normal(size=(count, k, k))
    noise = random.uniform(0, 0.001, (count, C)) * draw(st.sampled_from([0.0, 1.0]))
    return harm.Sites(
        torch.eye(k, dtype=torch.float64),
        *(
            torch.from_numpy(each)
            for each in (noise, counts, means, roots @ roots.transpose(0, 2, 1))
        ),
        D,
    )


def head_of(sites: harm.Sites, kept: list[int], least_squares: bool) -> tuple[Array, Array]:
    """The head of the records of some sites, record by record as far as moments go."""
    n, m, v = (each.numpy() for each in (sites.counts, sites.means, sites.covariances))
    total = n[kept].sum(0)
    centre = np.stack(
        [sum(n[s, c] * m[s, c] for s in kept) / max(total[c], 1e-9) for c in range(C)]
    )
    within = (
        sum(
            n[s].sum() * v[s]
            + sum(n[s, c] * np.outer(m[s, c] - centre[c], m[s, c] - centre[c]) for c in range(C))
            for s in kept
        )
        / total.sum()
    )
    has = total > 1e-6
    if not least_squares:
        ridged = within + harm.RIDGE * within.trace() / len(within) * np.eye(len(within))
        rows = np.linalg.solve(ridged, centre.T).T
        prior = np.log(np.clip(total / total.sum(), 1e-12, None))
        return rows, np.where(has, prior - (rows * centre).sum(1) / 2, -1e6)
    share = has / has.sum()
    middle = share @ centre
    apart = np.where(has[:, None], centre - middle, 0)
    between = within + sum(share[c] * np.outer(apart[c], apart[c]) for c in range(C))
    ridged = between + harm.RIDGE * between.trace() / len(between) * np.eye(len(between))
    rows = np.linalg.solve(ridged, (share[:, None] * apart).T).T
    return rows, np.where(has, share - rows @ middle, -1e6)


def right_of(sites: harm.Sites, judge: int, rows: Array, bias: Array) -> float:
    n, m, v, noise = (
        each[judge].numpy() for each in (sites.counts, sites.means, sites.covariances, sites.noise)
    )
    right = 0.0
    for c in range(C):
        if not n[c]:
            continue
        margins = [
            ((rows[c] - rows[e]) @ m[c] + bias[c] - bias[e])
            / math.sqrt(
                max(
                    (rows[c] - rows[e]) @ v @ (rows[c] - rows[e])
                    + noise[c] * ((rows[c] - rows[e]) ** 2).sum(),
                    1e-14,
                )
            )
            for e in range(C)
            if e != c
        ]
        right += n[c] * norm.cdf(min(margins))
    return right / float(n.sum())


@few
@given(drawn_sites(), st.booleans())
def test_harm_is_what_the_head_with_or_without_the_judge_loses_on_its_records(
    sites: harm.Sites, least_squares: bool
) -> None:
    found = replace(sites, heads=harm.least_squares if least_squares else harm.discriminant).harms()
    everyone = range(len(sites))
    for at, judge in enumerate(each for each in everyone if sites.counts[each].sum() >= 10):
        for one in everyone:
            if one == judge:
                assert found[one, at] == -1
                continue
            others = [each for each in everyone if each != judge]
            without = [each for each in others if each != one]
            wanted = [
                right_of(sites, judge, *head_of(sites, [*without, *own], least_squares))
                - right_of(sites, judge, *head_of(sites, [*others, *own], least_squares))
                for own in ([[]] if sites.noise.any() else [[], [judge]])
            ]
            assert float(found[one, at]) == pytest.approx(max(wanted), abs=1e-6)


@few
@given(drawn_sites())
def test_sites_differ_without_one_as_they_differ_where_it_never_was(sites: harm.Sites) -> None:
    sites = replace(sites, noise=torch.zeros_like(sites.noise))
    found, excess = harm.differ_without_one(sites)
    for one in range(len(sites)):
        rest = sites.of([each for each in range(len(sites)) if each != one])
        seen = SiteDifferences()
        list(
            seen.watched(
                Statistics(*each)
                for each in zip(rest.counts, rest.means, rest.covariances, strict=True)
            )
        )
        assert float(excess[one]) == pytest.approx(seen.excess, rel=1e-6, abs=1e-9)
        assert bool(found[one]) == seen.found


@few
@given(st.permutations(range(5)), st.permutations(range(C)))
def test_no_order_of_sites_or_classes_changes_what_is_decided(
    order: list[int], classes: list[int]
) -> None:
    parts = [site(each) for each in range(4)] + [site(9, swap=True)]
    decided = harm.judged(evidence(parts))
    again = harm.judged(evidence([parts[each].within(torch.tensor(classes)) for each in order]))
    torch.testing.assert_close(again.weights, decided.weights[order])
    torch.testing.assert_close(again.harm, decided.harm[order], atol=1e-6, rtol=0)
    assert [order[each] for each in again.out] == list(decided.out)


@pytest.mark.parametrize("count", [3, 4, 10, 40])
def test_a_lone_site_of_another_scanner_keeps_its_weight(count: int) -> None:
    parts = [site(each) for each in range(count - 1)] + [site(99, shift=1.0)]
    decided = harm.judged(evidence(parts))
    assert (decided.weights == 1).all()
    assert not decided.out


@pytest.mark.parametrize("count", [4, 5, 10])
@pytest.mark.parametrize("times", [1, 30])
def test_false_labels_lose_their_weight_and_nobody_else_does(count: int, times: int) -> None:
    parts = [site(each) for each in range(count - 1)]
    parts.append(site(99, swap=True).scaled(times))
    decided = harm.judged(evidence(parts))
    assert float(decided.weights[-1]) < 0.5 or float(decided.harm[-1]) <= harm.MOST
    assert times == 1 or float(decided.weights[-1]) < 0.5
    assert (decided.weights[:-1] == 1).all()


@few
@given(st.integers(0, 10**6), st.integers(4, 8), st.sampled_from([1, 30]), st.booleans())
def test_honest_sites_of_few_classes_are_not_lowered_for_a_false_one_of_all(
    seed: int, count: int, times: int, swap: bool
) -> None:
    """What only a false site says of a class is not what an honest one is measured by."""
    random = np.random.default_rng(seed)
    parts = list[Statistics]()
    for each in range(count - 1):
        has = torch.from_numpy(random.permutation(C) < 2)
        own = site(each)
        parts.append(replace(own, counts=torch.where(has, own.counts, 0.0)))
    liar = site(99, swap=swap).scaled(times)
    if not swap:
        liar = replace(liar, means=liar.means.roll(1, 0) * random.uniform(0.5, 2))
    assert (harm.judged(evidence([*parts, liar])).weights[:-1] == 1).all()


@few
@given(st.integers(0, 10**6), st.sampled_from([5, 10]))
def test_one_sites_records_alone_accuse_nobody(seed: int, count: int) -> None:
    """A false site claims what an honest one harms most: the negative of its means."""
    parts = [site(each) for each in range(count - 1)]
    random = np.random.default_rng(seed)
    liar = site(99)
    parts.append(replace(liar, means=liar.means * -random.uniform(0.5, 3)))
    assert (harm.judged(evidence(parts)).weights[:-1] == 1).all()


@few
@given(st.integers(3, 12), st.integers(1, 12), st.integers(0, 10**6))
def test_never_half_of_the_sites_are_lowered(count: int, hostile: int, seed: int) -> None:
    hostile = min(hostile, count)
    parts = [site(each) for each in range(count - hostile)]
    parts += [site(seed + each, swap=True, shift=each) for each in range(hostile)]
    assert 2 * int((harm.judged(evidence(parts)).weights < 1).sum()) < count


def test_a_class_that_two_sites_have_is_left_to_both() -> None:
    parts = [site(each, classes=3) for each in range(6)]
    parts += [site(8), site(9, swap=True).scaled(30)]
    decided = harm.judged(evidence(parts))
    assert float(decided.weights[7]) < 0.5
    # The honest one of the two keeps the class.
    assert float(decided.weights[6]) == 1


def test_sites_of_a_few_records_do_not_judge() -> None:
    """Two records say half or all of a site."""
    parts = [site(each) for each in range(4)] + [site(20 + each, records=2) for each in range(8)]
    assert evidence(parts).harms().shape == (12, 4)


def test_noise_that_hides_records_accuses_nobody() -> None:
    parts = [site(each) for each in range(4)] + [site(9, swap=True)]
    noise = torch.full((5, C), 100.0, dtype=torch.float64)
    assert (harm.judged(sites_of(lambda: parts, noise)).weights == 1).all()


def test_gain_is_large_for_a_site_whose_classes_nobody_else_has() -> None:
    parts = [site(each, classes=2) for each in range(4)] + [site(9)]
    gain = harm.judged(evidence(parts)).gain
    assert float(gain[-1]) > 0.4
    assert float(gain[:-1].abs().max()) < 0.05


def test_a_huge_false_covariance_does_not_blind_the_others() -> None:
    parts = [site(each) for each in range(4)] + [site(9, swap=True)]
    parts[-1] = replace(parts[-1], covariance=1e8 * parts[-1].matrix)
    assert (harm.judged(evidence(parts)).weights[:-1] == 1).all()
