"""Noisy class means of sites, pooled, shrunk and compared, by their formulas in plain loops over
generated sites: some classes within the noise, another noise at each site, means far apart or alike.
"""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate
from fedsurrogate.strategies.pooling.class_means import (
    Components,
    by_site,
    differ_across,
    even_lengths,
    noise_of_counts_and_sums,
    pool,
    shrink,
)

Array = NDArray[np.float64]
CLAIM = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()
NAMES, D = ("a", "b", "c", "d", "e"), 6
# A count of so many deviations of its noise stands out from it.
STANDS_OUT = 2.0
few = settings(max_examples=40, deadline=None)


@st.composite
def hospitals(draw: st.DrawFn) -> list[SumsSurrogate]:
    """Noisy sums; class means differ between sites by nothing, a little, or much."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    apart = draw(st.sampled_from([0.0, 0.03, 0.15, 0.6]))
    lengths = draw(st.sampled_from([0.05, 0.3, 0.8]))
    classes = draw(st.integers(1, 5))
    # Some classes have a mean that is much longer than the others'.
    longer = torch.tensor([draw(st.sampled_from([1.0, 1.0, 1.0, 9.0])) for _ in range(classes)])
    common = torch.nn.functional.normalize(torch.randn(classes, D, generator=random), dim=1)
    common = common * lengths * longer[:, None]
    made = []
    for site in range(draw(st.integers(1, 5))):
        of_count, of_sum = draw(st.sampled_from([1.0, 4.0])), draw(st.sampled_from([0.1, 1.0, 3.0]))
        sizes = [draw(st.sampled_from([-3.0, 1.0, 9.0, 60.0, 400.0])) for _ in range(classes)]
        # At the limit itself a class does not stand out.
        sizes[0] = draw(st.sampled_from([STANDS_OUT * of_count, 50.0]))
        counts = torch.tensor(sizes)
        means = common + apart * torch.randn(classes, D, generator=random)
        sums = means * counts[:, None] + of_sum * torch.randn(classes, D, generator=random)
        released = Sums(counts, sums, None, {"counts": of_count, "sums": of_sum})
        made.append(SumsSurrogate(Header("", "", str(site), "", NAMES[:classes]), released, CLAIM))
    return made


def components(sent: list[SumsSurrogate]) -> Components | None:
    with suppress(RunError):
        return by_site(sent)
    return None


def test_where_no_class_stands_out_the_error_says_what_helps() -> None:
    sums = Sums(torch.full((1,), 2.0), torch.ones(1, D), None, {"counts": 1.0, "sums": 1.0})
    alone = SumsSurrogate(Header("", "", "s", "", NAMES[:1]), sums, CLAIM)
    with pytest.raises(RunError, match="no class stands out from the privacy noise; more records"):
        by_site([alone])


@few
@given(hospitals())
def test_means_that_stand_out_have_the_noise_of_their_sums_and_counts(
    sent: list[SumsSurrogate],
) -> None:
    rows = []
    for each in sent:
        counts, sums = each.sums.counts.double().numpy(), each.sums.sums.double().numpy()
        of_count, of_sum = each.sums.sigmas["counts"], each.sums.sigmas["sums"]
        for label, count in enumerate(counts):
            if count <= STANDS_OUT * of_count:
                continue
            mean = sums[label] / count
            square = max(0.0, float((mean**2).mean()) - (of_sum / count) ** 2)
            noise = (of_sum**2 + square * of_count**2) / count**2
            weight = count * counts.clip(0).sum()
            rows.append((label, mean, noise, count, weight, of_count, of_sum))
    found = components(sent)
    if found is None:
        assert not rows
        return
    labels, means, noise, records, weights, of_counts, of_sums = zip(*rows, strict=True)
    names = sent[0].header.classes
    assert found.classes == tuple(name for at, name in enumerate(names) if at in labels)
    assert [found.classes[at] for at in found.labels.tolist()] == [names[at] for at in labels]
    np.testing.assert_allclose(found.means, np.stack(means))
    np.testing.assert_allclose(found.noise, np.diag(noise))
    np.testing.assert_allclose(found.records, records)
    np.testing.assert_allclose(found.shares, np.array(weights) / sum(weights))
    for ours, theirs in zip(noise_of_counts_and_sums(sent), (of_counts, of_sums), strict=True):
        np.testing.assert_allclose(ours, theirs)


def weights_of(own: Components, power: float) -> Array:
    """Of each site's mean in the mean of each class, (C, J)."""
    table = np.zeros((len(own.classes), len(own.labels)))
    for at, (label, records) in enumerate(
        zip(own.labels.tolist(), own.records.tolist(), strict=True)
    ):
        table[label, at] = records**power
    return np.array([row / row.sum() for row in table])


def variance_within(own: Components) -> float:
    """Of records of length one around the mean of their class and site, by records."""
    explained = sum(
        float(n) * (float(m @ m) - D * float(own.noise[j, j]))
        for j, (n, m) in enumerate(zip(own.records, own.means, strict=True))
    )
    return max(0.0, 1 - explained / float(own.records.sum()))


def correlated(own: Components, seed: int) -> Components:
    """The same with noise that means share, as after pooling."""
    count = len(own.labels)
    roots = np.random.default_rng(seed).normal(size=(count, count)) / 30
    noise = own.noise + torch.from_numpy(roots @ roots.T)
    return Components(own.classes, own.labels, own.means, noise, own.records, own.shares)


def check(
    found: Components, own: Components, means: Array, noise: Array, labels: list[int]
) -> None:
    """All of the found components; records and shares of a class are those of its sites."""
    assert found.classes == own.classes
    assert found.labels.tolist() == labels
    np.testing.assert_allclose(found.means, means, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found.noise, noise, rtol=1e-9, atol=1e-12)
    if found.records is not own.records:
        for at in range(len(own.classes)):
            mine = own.labels == at
            assert float(found.records[at]) == pytest.approx(float(own.records[mine].sum()))
            assert float(found.shares[at]) == pytest.approx(float(own.shares[mine].sum()))


@few
@given(hospitals(), st.integers(0, 99))
def test_pooled_means_weigh_by_the_square_of_records(sent: list[SumsSurrogate], seed: int) -> None:
    if (own := components(sent)) is None:
        return
    own = correlated(own, seed)
    weights = weights_of(own, 2)
    check(
        pool(own),
        own,
        weights @ own.means.numpy(),
        weights @ own.noise.numpy() @ weights.T,
        list(range(len(own.classes))),
    )


@few
@given(hospitals(), st.integers(0, 99))
def test_differences_are_kept_by_the_share_that_chance_does_not_explain(
    sent: list[SumsSurrogate], seed: int
) -> None:
    if (own := components(sent)) is None:
        return
    own = correlated(own, seed)
    labels, means, noise = own.labels.tolist(), own.means.numpy(), own.noise.numpy()
    records, count = own.records.numpy(), len(own.labels)
    within, weights = variance_within(own), weights_of(own, 2)
    apart = np.eye(count) - weights[labels]
    chance = noise + np.diag(within / D / records)
    seen = expected = 0.0
    for j in range(count):
        seen += records[j] * float(((apart[j] @ means) ** 2).sum())
        expected += records[j] * D * float(apart[j] @ chance @ apart[j])
    wanted = max(0.0, 1 - expected / seen) if seen > 0 else 0.0
    found, share = shrink(own)
    assert share == pytest.approx(wanted, abs=1e-9)
    towards = weights_of(own, 2 - share)[labels]
    mixing = (1 - share) * towards + share * np.eye(count)
    check(found, own, mixing @ means, mixing @ noise @ mixing.T, labels)
    assert found.records.equal(own.records)
    assert found.shares.equal(own.shares)


@few
@given(hospitals())
def test_differences_across_the_class_mean_are_beyond_three_deviations_of_chance(
    sent: list[SumsSurrogate],
) -> None:
    if (own := components(sent)) is None:
        return
    labels, means, records = own.labels.tolist(), own.means.numpy(), own.records.numpy()
    of_sum = noise_of_counts_and_sums(sent)[1]
    weights, count = weights_of(own, 2), len(own.labels)
    within = variance_within(own)
    seen = 0.0
    for j, label in enumerate(labels):
        mean = weights[label] @ means
        direction = mean / np.linalg.norm(mean)
        difference = means[j] - mean
        seen += records[j] * float(((difference - (difference @ direction) * direction) ** 2).sum())
    # sum_j n_j |sum_i A_ji e_i|^2 of normal errors e_i in the d - 1 directions across.
    form = np.zeros((count, count))
    deviations = np.sqrt((of_sum.numpy() / records) ** 2 + within / D / records)
    apart = np.eye(count) - weights[labels]
    for j in range(count):
        form += records[j] * np.outer(apart[j] * deviations, apart[j] * deviations)
    values = np.linalg.eigvalsh(form)
    expected = (D - 1) * values.sum() + 3 * math.sqrt(2 * (D - 1) * (values**2).sum())
    wanted = max(0.0, 1 - expected / seen) if seen > 1e-20 else 0.0
    assert differ_across(own, of_sum) == pytest.approx(wanted, abs=1e-9)


@few
@given(hospitals())
def test_lengths_of_several_sites_by_a_plain_loop(sent: list[SumsSurrogate]) -> None:
    """Logarithms of lengths are normal around one value, with the variance of DerSimonian and Laird
    beyond their noise; no length changes by more than a factor of two.
    """
    if (own := components(sent)) is None:
        return
    plain, noise = pool(own), noise_of_counts_and_sums(sent)
    found = even_lengths(plain, own, *noise)
    if len(own.classes) < 4:
        assert found is plain
        return
    weights = weights_of(own, 2)
    logs, errors, by_count, squares = [], [], [], []
    for row, mean in zip(weights, plain.means.numpy(), strict=True):
        of_count, of_sum = (
            sum(
                (w * s / n) ** 2
                for w, s, n in zip(row, sigmas.tolist(), own.records.tolist(), strict=True)
            )
            for sigmas in noise
        )
        square = max(1e-3, float(mean @ mean) - D * of_sum)
        logs.append(math.log(square) / 2)
        errors.append(of_count + (D * of_sum**2 / 2 + square * of_sum) / square**2)
        by_count.append(of_count)
        squares.append(square)
    precision = [1 / error for error in errors]
    whole = sum(precision)
    middle = sum(p * log for p, log in zip(precision, logs, strict=True)) / whole
    around = sum(p * (log - middle) ** 2 for p, log in zip(precision, logs, strict=True))
    between = max(
        0.0,
        (around - (len(logs) - 1)) / (whole - sum(p * p for p in precision) / whole),
    )
    kept = [between / (between + error) for error in errors]
    factors = np.array(
        [
            min(2.0, max(0.5, math.exp((1 - k) * (middle - log))))
            for k, log in zip(kept, logs, strict=True)
        ]
    )
    less = np.diag([(1 - k) * c * s / D for k, c, s in zip(kept, by_count, squares, strict=True)])
    check(
        found,
        own,
        plain.means.numpy() * factors[:, None],
        (plain.noise.numpy() - less) * np.outer(factors, factors),
        plain.labels.tolist(),
    )
