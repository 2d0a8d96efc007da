"""Scores of records under a release are the densities, distances and odds that scipy, numpy and
scikit-learn compute, with any order of classes and with classes that the release lacks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax, logsumexp
from scipy.stats import multivariate_normal
from sklearn.metrics import roc_curve
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from fedsurrogate.client_app.audit.membership import (
    Trials,
    _rates,
    distinct,
    lira,
    means_of,
    nearest,
    scores_of,
    success,
    summary,
)
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate, Surrogate

CLASSES, D = ("a", "b", "c"), 3
SENT = st.permutations(("a", "b", "other")).flatmap(
    lambda names: st.integers(1, 3).map(lambda count: tuple(names[:count]))
)
Numbers = NDArray[np.float64]


def release(kind: str, names: tuple[str, ...], seed: int) -> Any:
    """A release of classes in the order of `names`; of mixtures, one to three means of each
    class.
    """
    generator, count = torch.Generator().manual_seed(seed), len(names)
    header = Header("m", "r", "s", "f", names)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "mixtures":
        labels = torch.arange(count).repeat_interleave(
            torch.randint(1, 4, (count,), generator=generator)
        )
        raw = torch.rand(len(labels), generator=generator) + 0.1
        weights = raw / torch.zeros(count).index_add_(0, labels, raw)[labels]
        spread = Diagonal(torch.rand(len(labels), D, generator=generator) + 0.2)
        counts = torch.full((count,), 9)
        return Surrogate(header, Mixtures(counts, labels, weights, normal(len(labels), D), spread))
    if kind == "noisy sums":
        claim = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()
        return SumsSurrogate(header, Sums(torch.ones(count), normal(count, D), None, {}), claim)
    if kind == "head":
        return Parameters(header, 1, {"weight": normal(count, D), "bias": normal(count)})
    counts = torch.randint(1, 9, (count,), generator=generator)
    return Parameters(header, 1, {"counts": counts, "sums": 4 * normal(count, D)})


def known(sent: Any, name: str, x: Numbers) -> float:
    """The score of a record x of a class that the release has."""
    at = sent.header.classes.index(name)
    if isinstance(sent, Surrogate):
        table = sent.mixtures
        spread = table.covariance.variances.numpy()  # type: ignore[union-attr]
        own = np.flatnonzero(table.labels.numpy() == at)
        parts = [multivariate_normal(table.means[m].numpy(), np.diag(spread[m])) for m in own]
        return float(logsumexp([each.logpdf(x) for each in parts], b=table.weights[own].numpy()))
    if isinstance(sent, SumsSurrogate):
        return float(x @ sent.sums.sums[at].numpy() / np.linalg.norm(x))
    if "weight" in sent.tensors:
        logits = sent.tensors["weight"].numpy() @ x + sent.tensors["bias"].numpy()
        chances = log_softmax(np.append(logits, -1e9))
        return float(chances[at] - logsumexp(np.delete(chances, at)))
    counts = sent.tensors["counts"][at].numpy()
    if "means" in sent.tensors:
        means = sent.tensors["means"][at].numpy()[counts > 0]
    else:
        means = (sent.tensors["sums"][at].numpy() / counts)[None]
    return -float(((means - x) ** 2).sum(1).min())


@settings(max_examples=60)
@given(
    st.sampled_from(["mixtures", "noisy sums", "head", "sums"]),
    SENT.filter(lambda names: len(names) > 1),
    st.integers(0, 10**6),
)
def test_a_score_is_the_density_the_product_the_distance_or_the_odds_of_its_class(
    kind: str, names: tuple[str, ...], seed: int
) -> None:
    sent, generator = release(kind, names, seed), torch.Generator().manual_seed(seed + 1)
    x, labels = torch.randn(9, D, generator=generator), torch.arange(9) % 3
    found = scores_of(sent, CLASSES, x, labels)
    for row, label, score in zip(x.double().numpy(), labels.tolist(), found.tolist(), strict=True):
        there = CLASSES[label] in names
        assert score == (
            pytest.approx(known(sent, CLASSES[label], row), rel=1e-4, abs=1e-4)
            if there
            else -np.inf
        )


def test_a_release_that_no_attack_reads_is_refused() -> None:
    header = Header("m", "r", "s", "f", CLASSES)
    for tensors in ({}, {"weight": torch.ones(3, D)}, {"counts": torch.ones(3)}):
        sent = Parameters(header, 1, tensors)
        assert means_of(sent) is None
        with pytest.raises(ConfigError, match="no membership attack"):
            scores_of(sent, CLASSES, torch.ones(1, D), torch.zeros(1, dtype=torch.int64))


@settings(max_examples=40)
@given(st.sampled_from(["mixtures", "sums"]), SENT, st.integers(0, 10**6))
def test_the_records_next_to_a_mean_are_those_of_scikit_learn(
    kind: str, names: tuple[str, ...], seed: int
) -> None:
    classes, drawn = (*CLASSES, "other"), np.random.default_rng(seed)
    sent, count = release(kind, names, seed), int(drawn.integers(2, 14))
    x, labels = drawn.normal(size=(count, D)), drawn.integers(0, 4, count)
    inside = np.arange(count) % 2 == 0
    drawn.shuffle(inside)

    def to(mean: Numbers, chosen: NDArray[np.bool_]) -> float:
        fitted = NearestNeighbors(n_neighbors=1).fit(x[chosen])
        return float(fitted.kneighbors(mean[None])[0][0, 0])

    wanted, (means, kinds) = [], means_of(sent) or (torch.zeros(0, D), torch.zeros(0))
    for mean, kind_ in zip(means.numpy(), kinds.tolist(), strict=True):
        own = labels == classes.index(names[int(kind_)])
        others = own & ~inside if (own & ~inside).any() else ~inside
        if (own & inside).any():
            wanted.append((names[int(kind_)], to(mean, own & inside), to(mean, others)))
    given_ = torch.from_numpy(x), torch.from_numpy(labels), torch.from_numpy(inside)
    found = nearest(sent, classes, *given_)
    assert [each[0] for each in found] == [each[0] for each in wanted]
    assert [each[1:] for each in found] == [pytest.approx(each[1:], rel=1e-6) for each in wanted]
    # A release of the records themselves is made of copies; the farther, the fewer.
    if found:
        for usual, copies in ((0.0, 0.0), (1e9, 1.0)):
            made = summary(found, usual)
            assert made is not None
            assert (made.copies, bool(made.classes)) == (copies, copies == 1)
            assert made.smallest == pytest.approx(min(used / rest for _, used, rest in wanted))
            assert made.ratio == pytest.approx(np.median([used / rest for _, used, rest in wanted]))


def coins(count: int, records: int, drawn: np.random.Generator) -> NDArray[np.bool_]:
    """Pairs of complementary releases."""
    half = drawn.random((count // 2, records)) < 0.5
    return np.stack([half, ~half], 1).reshape(count, records)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(3, 60), st.integers(0, 2))
def test_rates_are_those_of_scikit_learns_curve(
    seed: int, pairs: int, records: int, digits: int
) -> None:
    """The rate at a false one is the largest on the curve with no more false alarms, also with
    ties.
    """
    drawn = np.random.default_rng(seed)
    members = coins(2 * pairs, records, drawn)
    scores = np.round(drawn.normal(size=members.shape) + members, digits)
    false, true, _ = roc_curve(members.ravel(), scores.ravel(), drop_intermediate=False)
    limits = np.append(drawn.random(9), [0.0, 1.0])
    found = _rates(scores, members, limits)
    assert found == pytest.approx([true[false <= limit].max() for limit in limits])


def test_the_success_of_an_attack_is_its_area_its_rates_and_their_curve() -> None:
    drawn = np.random.default_rng(0)
    members = coins(16, 300, drawn)
    scores = drawn.normal(size=members.shape) + 1.5 * members
    found = success(scores, members)
    false, true, _ = roc_curve(members.ravel(), scores.ravel(), drop_intermediate=False)
    assert found.auc == pytest.approx(np.trapezoid(true, false))
    assert found.rate_at_one_percent == pytest.approx(true[false <= 0.01].max())
    assert found.rate_at_one_in_thousand == pytest.approx(true[false <= 0.001].max())
    assert [rate for _, rate in found.curve] == pytest.approx(
        [true[false <= limit].max() for limit, _ in found.curve]
    )
    # DeLong's standard error, as the records are independent here.
    member, other = scores[members], scores[~members]
    beaten = [
        np.searchsorted(np.sort(b), a) / len(b) for a, b in ((member, other), (other, member))
    ]
    error = np.sqrt(sum(each.var(ddof=1) / each.size for each in beaten))
    assert (found.high - found.low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.4)


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.floats(-3, 3), st.floats(0.1, 10))
def test_with_many_releases_lira_is_the_optimal_test(seed: int, place: float, wide: float) -> None:
    """Scores are normal, one deviation higher for members: the logarithm of the ratio of densities
    is known, and another unit or origin of the scores changes nothing.
    """
    drawn = np.random.default_rng(seed)
    members = coins(200, 6, drawn)
    unit = 1.0 * members + drawn.normal(size=members.shape)
    trials, found = Trials(place + wide * unit, members), lira(Trials(unit, members))
    np.testing.assert_allclose(lira(trials), found, rtol=1e-6, atol=1e-6)
    optimal = unit - 0.5
    assert np.abs(found - optimal).mean() < 0.35
    assert np.corrcoef(found.ravel(), optimal.ravel())[0, 1] > 0.97
    assert distinct(trials) == pytest.approx(1, abs=0.7)
