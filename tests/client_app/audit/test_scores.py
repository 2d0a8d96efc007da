"""Scores of records under a release are the densities, distances and odds that scipy, numpy and
scikit-learn compute, with any order of classes and with classes that the release lacks.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.spatial.distance import cdist, pdist
from scipy.special import expit, log_softmax, logsumexp
from scipy.stats import multivariate_normal
from sklearn.metrics import roc_curve
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

from fedsurrogate.client_app.audit.membership import (
    CODED,
    MOMENT,
    Trials,
    _rates,
    coded_scores,
    distinct,
    lira,
    means_of,
    nearest,
    rmia,
    scores_of,
    success,
    summary,
    usual_distance,
)
from fedsurrogate.client_app.audit.release_audit import closest_synthetic, likelihood
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.models.generators import Decoder
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import NoisySums
from fedsurrogate.common.surrogates.class_sums import Sums, fold
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, SumsSurrogate, Surrogate
from fedsurrogate.common.targets.target import CODE, PRODUCTS, RECORDS, SQUARES, SUMS, TOTALS

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


LATENT, CLASSES_FORMULAS, D_FORMULAS = 2, 3, 5


def decoder(seed: int, hidden: int = 0, learned: bool = True, prior: bool = True) -> Decoder:
    """With drawn parameters and class means."""
    draw = torch.Generator().manual_seed(seed)
    made = Decoder(
        LATENT, hidden, CLASSES_FORMULAS, D_FORMULAS, learned_variance=learned, class_prior=prior
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=draw))
    made.means.copy_(torch.randn(CLASSES_FORMULAS, D_FORMULAS, generator=draw))
    return made


def unit(features: Tensor) -> Numbers:
    """Records as a generator sees them: of length sqrt(d)."""
    x = features.double().numpy()
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True) * math.sqrt(x.shape[1]))


def prior_of(made: Decoder, label: int) -> tuple[Numbers, Numbers]:
    """Mean and variance of z in a class."""
    if made.prior is None:
        return np.zeros(LATENT), np.ones(LATENT)
    both = made.prior.weight.detach().double().numpy()[:, label]
    return both[:LATENT], np.exp(both[LATENT:])


@settings(max_examples=20)
@given(
    st.integers(0, 10**6), st.booleans(), st.booleans(), st.sampled_from([[2, 0], [1], [0, 1, 1]])
)
def test_a_linear_decoder_has_the_gaussian_of_its_factors_in_each_class(
    seed: int, learned: bool, prior: bool, labels: list[int]
) -> None:
    made = decoder(seed, learned=learned, prior=prior)
    features = torch.randn(
        len(labels), D_FORMULAS, generator=torch.Generator().manual_seed(seed + 1)
    )
    weight, bias = (each.detach().double().numpy() for each in made.linear.parameters())
    found = likelihood(made, features, torch.tensor(labels))
    for record, label, own in zip(unit(features), labels, found.tolist(), strict=True):
        middle, width = prior_of(made, label)
        mean = made.means[label].numpy() + weight[:, :LATENT] @ middle + weight[:, LATENT + label]
        noise = np.ones(D_FORMULAS)
        if made.variance is not None:
            noise = np.exp(made.variance.weight.detach().double().numpy()[:, 0])
        spread = weight[:, :LATENT] @ np.diag(width) @ weight[:, :LATENT].T + np.diag(noise)
        wanted = multivariate_normal(mean + bias, spread).logpdf(record)
        assert own == pytest.approx(float(wanted), rel=1e-4, abs=1e-4)


@pytest.mark.parametrize(("learned", "prior"), [(False, True), (True, False), (True, True)])
def test_a_deep_decoder_is_judged_after_a_hundred_steps_to_the_best_latent_vector(
    learned: bool, prior: bool
) -> None:
    made, labels = decoder(5, 4, learned, prior), [0, 2, 2]
    features = torch.randn(3, D_FORMULAS, generator=torch.Generator().manual_seed(6))
    found = likelihood(made, features, torch.tensor(labels))
    records, kinds = torch.from_numpy(unit(features)).float(), torch.eye(CLASSES_FORMULAS)[labels]
    both = [np.stack(each) for each in zip(*(prior_of(made, each) for each in labels), strict=True)]
    middle, width = (torch.from_numpy(each).float() for each in both)
    inside = torch.distributions.Normal(middle, width.sqrt())
    noise = torch.ones(D_FORMULAS)
    if made.variance is not None:
        noise = made.variance.weight.detach()[:, 0].exp()
    z = middle.clone().requires_grad_()

    def terms() -> Tensor:
        around = torch.distributions.Normal(made(z, kinds), noise.sqrt())
        return torch.cat([around.log_prob(records), inside.log_prob(z)], 1)

    def joint() -> Tensor:
        return terms().sum(1)

    before, first, second = joint().detach(), torch.zeros_like(z), torch.zeros_like(z)
    for step in range(1, 101):
        (slope,) = torch.autograd.grad(-joint().sum(), [z])
        # Adam, with its usual moments.
        first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope.square()
        sizes = (second / (1 - 0.999**step)).sqrt() + 1e-8
        z = (z.detach() - 0.05 * first / (1 - 0.9**step) / sizes).requires_grad_()
    # Each of the D + LATENT terms is off by some units in the last place, and so is their sum.
    rounding = (
        2
        * (D_FORMULAS + LATENT)
        * torch.finfo(torch.float32).eps
        * float(terms().detach().abs().sum(1).max())
    )
    assert found == pytest.approx(joint().detach(), abs=rounding, rel=0)
    assert 0 < rounding < 1e-3
    assert bool((found > before).all())
    assert not found.requires_grad


@pytest.mark.parametrize("labels", [[2, 0, 0, 2], [1], [2, 1, 0]])
def test_the_black_box_is_the_distance_to_the_nearest_of_the_drawn_records_of_the_class(
    labels: list[int],
) -> None:
    made = decoder(1)
    features = torch.randn(len(labels), D_FORMULAS, generator=torch.Generator().manual_seed(2))
    chosen = torch.tensor(labels)
    found = closest_synthetic(made, features, chosen)
    generator = torch.Generator().manual_seed(0)
    for label in sorted(set(labels)):
        kinds = torch.eye(CLASSES_FORMULAS)[[label] * 500]
        drawn = made.draw(kinds, generator).detach().double().numpy()
        for at, record in enumerate(unit(features)):
            if labels[at] == label:
                near = float(cdist(record[None], drawn).min())
                assert float(found[at]) == pytest.approx(-near / math.sqrt(D_FORMULAS), rel=1e-4)


def release_formulas(tensors: dict[str, Numbers], claim: Any = None) -> Parameters:
    made = {name: torch.from_numpy(each) for name, each in tensors.items()}
    return Parameters(Header("m", "r", "s", "f", ("risk",)), 1, made, claim=claim)


def folded(moment: Numbers) -> Numbers:
    return fold(torch.from_numpy(moment)).numpy()


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.booleans())
def test_scores_of_exact_sums_are_products_in_the_second_moment(seed: int, counts: bool) -> None:
    drawn = np.random.default_rng(seed)
    x, code = drawn.normal(size=(4, 3)) + 1, drawn.normal(size=(4, 2)) * drawn.choice([0.3, 2.0], 2)
    spread, totals, sums = (
        drawn.normal(size=(9, 3)),
        drawn.normal(size=3),
        drawn.normal(size=(2, 3)),
    )
    sizes, moment = np.array([0.4, 3.0]), spread.T @ spread
    tensors = {RECORDS: np.array([9.0]), TOTALS: totals, SQUARES: folded(moment)}
    target: Any = SimpleNamespace(code=lambda values: values, counts=counts)
    sent = release_formulas(tensors | {SUMS: sums, CODE: sizes})
    found = coded_scores(sent, target, torch.from_numpy(x), torch.from_numpy(code))
    moment = moment / 9 + 1e-3 * np.trace(moment / 9) / 3 * np.eye(3)
    means = sums / np.maximum(sizes if counts else (code**2).sum(0), 1.0)[:, None]
    assert list(found) == [CODED, MOMENT]
    for at in range(4):
        near = np.linalg.solve(moment, x[at] - totals / 9)
        assert float(found[MOMENT][at]) == pytest.approx(-(x[at] - totals / 9) @ near)
        assert float(found[CODED][at]) == pytest.approx(code[at] @ means @ near)


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.sampled_from([1, 4, 513]))
def test_scores_of_noisy_sums_are_products_over_the_variances_of_the_noise(
    seed: int, records: int
) -> None:
    drawn = np.random.default_rng(seed)
    x, code = drawn.normal(size=(records, 3)), drawn.normal(size=(records, 2))
    shapes = {RECORDS: 1, CODE: 2, TOTALS: 3, SUMS: (2, 3), SQUARES: 6, PRODUCTS: 3}
    tensors = {name: np.asarray(drawn.normal(size=shape)) for name, shape in shapes.items()}
    noise = {name: (float(drawn.uniform(0.5, 3)), 7.0) for name in shapes}
    target: Any = SimpleNamespace(code=lambda values: values)
    sent = release_formulas(tensors, SimpleNamespace(clip=1.5, noise=noise))
    found = coded_scores(sent, target, torch.from_numpy(x), torch.from_numpy(code))
    assert list(found) == [CODED]
    assert len(found[CODED]) == records
    for at in {0, records - 1}:
        z = x[at] / max(float(np.linalg.norm(x[at])), 1.5)
        added = {
            RECORDS: np.ones(1),
            CODE: code[at],
            TOTALS: z,
            SUMS: np.outer(code[at], z),
            SQUARES: folded(np.outer(z, z)),
            PRODUCTS: folded(np.outer(code[at], code[at])),
        }
        parts = [(added[name] * tensors[name]).sum() / noise[name][0] ** 2 for name in shapes]
        assert float(found[CODED][at]) == pytest.approx(sum(parts), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("pairs", [2, 3])
def test_rmia_of_releases_has_the_others_as_references_down_to_the_last_digits(
    pairs: int,
) -> None:
    """Also where a reference is zero, for which a probability of a trillionth stands."""
    drawn = np.random.default_rng(3)
    half = drawn.random((pairs, 5)) < 0.5
    members = np.stack([half, ~half], 1).reshape(2 * pairs, 5)
    scores = 2 * drawn.normal(size=(2 * pairs, 5))
    scores[:, 0], scores[:, 1] = -np.inf, 1e4
    chance, found = expit(scores), rmia(Trials(scores, members))
    for k in range(2 * pairs):
        rest = [j for j in range(2 * pairs) if j // 2 != k // 2]
        both = [
            np.array([chance[rest, n][side[rest, n]].mean() for n in range(5)])
            for side in (members, ~members)
        ]
        usual = (both[0] + both[1]) / 2
        for n in range(5):
            ratios = [chance[k][m] / max(usual[m], 1e-12) for m in range(5)]
            beaten = sum(ratios[n] / 2 >= other for other in ratios)
            wanted = beaten / 5 * (1 - 1e-6) + 1e-6 * ratios[n] / (1 + ratios[n])
            assert found[k][n] == pytest.approx(wanted, abs=1e-13)


def test_a_release_of_all_records_is_near_to_no_others() -> None:
    sent = release_formulas({"counts": np.array([2.0]), "sums": np.ones((1, 3))})
    x, labels = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)
    for inside in (torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool)):
        assert nearest(sent, ("risk",), x, labels, inside) == []
    ((name, used, other),) = nearest(sent, ("risk",), x, labels, torch.arange(4) < 2)
    assert (name, type(used), type(other)) == ("risk", float, float)


def test_records_far_from_the_origin_are_as_far_from_a_mean_as_they_are() -> None:
    """In single precision a distance of a hundredth vanishes there."""
    x = 1000 + torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
    inside = torch.arange(60) < 30
    for shift, first in ((0.01, 0), (0.01, 59)):
        sums = 2 * (x[first].double().numpy() + shift)[None]
        near = nearest(
            release_formulas({"counts": np.array([2.0], np.float32), "sums": sums}),
            ("risk",),
            x,
            torch.zeros(60, dtype=torch.int64),
            inside,
        )
        wanted = cdist(sums / 2, x.double().numpy())[0]
        assert near == [
            ("risk", pytest.approx(wanted[:30].min()), pytest.approx(wanted[30:].min()))
        ]
    for rows in (x[:30], x):
        assert usual_distance(rows) == pytest.approx(
            sorted(pdist(rows.double().numpy()))[(len(rows) * (len(rows) - 1) // 2 - 1) // 2]
        )


@pytest.mark.parametrize("count", [3, 499, 501])
def test_the_usual_distance_is_the_median_of_pairs_of_at_most_five_hundred_records(
    count: int,
) -> None:
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(count))
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(0)).tolist()[:500]
    distances = sorted(pdist(x.double().numpy()[chosen]))
    # Of an even number, the lower one of the two in the middle.
    assert usual_distance(x) == pytest.approx(distances[(len(distances) - 1) // 2], rel=1e-9)
    assert type(usual_distance(x)) is float
