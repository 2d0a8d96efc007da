"""Releases of a private site: their sensitivity is at most that assumed for the noise, and no seed
repeats the noise.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import softmax
from torch import Tensor

from benchmarks.harness.site_data import SiteData, clipped, make_surrogate
from fedsurrogate.client_app.methods.fedpft import surrogate as fedpft_private
from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate
from fedsurrogate.client_app.methods.fedpft.surrogate import dp_em, noisy_sums, theorem_4_1
from fedsurrogate.client_app.methods.job import Clipped
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.privacy.exact_sums import COARSE
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy, clip
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.shares import EM_STEPS, budget_shares
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Spherical
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate

CLASSES = ("a", "b", "c")
MECHANISMS: dict[str, dict[str, Scalar]] = {
    "sums": {"fedpft.covariance": "lowrank"},
    "dp-em": {"fedpft.components": 2},
    "theorem-4.1": {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "full"},
}


def run(epsilon: float = 2.0, **settings: Scalar) -> Run:
    return parse_run({"epsilon": epsilon, "delta": 1e-5} | settings)


def promised(config: Run, unit: str = "record") -> Mechanism:
    claim = config.mechanism_for(unit)  # type: ignore[arg-type]
    assert claim is not None
    return claim


def records(count: int = 900) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    return torch.randn(count, 4, generator=generator) + 3 * torch.eye(3, 4)[labels], labels


def tables(surrogate: AnySurrogate) -> dict[str, Tensor]:
    """All numbers with noise."""
    if isinstance(surrogate, SumsSurrogate):
        found = {
            "counts": surrogate.sums.counts,
            "sums": surrogate.sums.sums,
            "squares": surrogate.sums.squares,
        }
        return {name: table for name, table in found.items() if table is not None}
    (spread,) = vars(surrogate.mixtures.covariance).values()
    # Of a Cholesky factor the upper triangle is zero.
    return {"means": surrogate.mixtures.means, "spread": spread[spread != 0]}


@pytest.mark.parametrize("family", ["spherical", "diag", "full", "lowrank"])
def test_without_a_budget_one_seed_twice_gives_the_same(family: str) -> None:
    config = parse_run({"fedpft.covariance": family, "fedpft.components": 2})
    first, second = (
        make_surrogate(SiteData(*records(), CLASSES, "f" * 16, "s"), config).surrogate
        for _ in range(2)
    )
    assert first.header == second.header
    assert first.claim is second.claim is None
    assert torch.equal(first.mixtures.means, second.mixtures.means)  # type: ignore[union-attr]
    for one, other in zip(
        *(vars(each.mixtures.covariance).values() for each in (first, second)), strict=True
    ):  # type: ignore[union-attr]
        assert torch.equal(one, other)


@pytest.mark.parametrize("good", [True, False])
def test_a_fit_leaves_the_number_of_threads_as_it_was(good: bool) -> None:
    """Also where it fails."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        config = parse_run({"fedpft.components": 2})
        x, y = records()
        broken = SiteData(x if good else x[:, :0], y, CLASSES, "f" * 16, "s")
        with contextlib.suppress(Exception):
            make_surrogate(broken, config)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_which_classes_a_site_has_does_not_show_in_the_shape_of_noisy_sums() -> None:
    features, labels = records()
    for keep in (labels >= 0, labels == 1, labels < 0):
        surrogate = make_surrogate(
            SiteData(features[keep], labels[keep], CLASSES, "f", "s"), run(**MECHANISMS["sums"])
        ).surrogate
        assert surrogate.header.classes == CLASSES
        assert [tuple(table.shape) for table in tables(surrogate).values()] == [(3,), (3, 4), (10,)]
        assert all((table != 0).all() for table in tables(surrogate).values())


class Recorder:
    """Replaces `with_noise`: records the statistics and returns constants, as the proof for adaptive
    composition assumes.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seen: list[dict[str, Tensor]] = []

    def __call__(self, statistics: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        assert {each.bound for each in statistics} == {1.0}
        self.seen.append({each.name: each.value for each in statistics})
        answers = []
        for each in statistics:
            draw = torch.randn(each.value.shape, generator=self.generator, dtype=torch.float64)
            answers.append(
                Noisy(each.name, 30 + 5 * draw if each.name == "counts" else 20 * draw, 1.0, 1.0)
            )
        return answers


@pytest.mark.slow
@pytest.mark.parametrize("patients", [False, True])
def test_every_step_of_dp_em_moves_by_at_most_its_bound_and_comes_close(
    monkeypatch: pytest.MonkeyPatch, patients: bool
) -> None:
    config = run(**MECHANISMS["dp-em"])
    claim = promised(config, "patient" if patients else "record")
    shares = budget_shares("spherical", claim.noise_multiplier * math.sqrt(EM_STEPS))
    generator = torch.Generator().manual_seed(3)
    worst = [dict.fromkeys(("counts", "sums", "together"), 0.0) for _ in range(EM_STEPS)]
    for attempt in range(150):
        n, own = 6, 1 + attempt % 3 if patients else 1
        scale = 10.0 ** torch.randint(-200, 200, (n + own, 1), generator=generator).double()
        features = torch.randn(n + own, 3, generator=generator).double() * scale
        labels = torch.randint(0, 3, (n + own,), generator=generator)
        if attempt % 2:
            features[n:], labels[n:] = features[n : n + 1], labels[n]
        units = [*"abcdef", *("p" * own)] if patients else None
        seen = []
        for rows in (n, n + own):
            recorder = Recorder(attempt)
            monkeypatch.setattr(fedpft_private, "with_noise", recorder)
            data = clipped(features[:rows], labels[:rows], units[:rows] if units else None)
            dp_em(data, 3, 2, claim, torch.Generator().manual_seed(attempt))
            seen.append(recorder.seen)
        for step, (fewer, more) in enumerate(zip(*seen, strict=True)):
            moved = {name: float((more[name] - fewer[name]).norm()) for name in more}
            moved["together"] = math.sqrt(sum(shares[name] * moved[name] ** 2 for name in shares))
            worst[step] = {name: max(moved[name], worst[step][name]) for name in moved}
    for step, name in itertools.product(range(EM_STEPS), worst[0]):
        assert 0.95 < worst[step][name] <= 1 + 1e-9, (step, name)


@pytest.mark.parametrize("mechanism", ["sums", "dp-em"])
def test_what_a_site_releases_composes_to_its_claim_and_has_the_noise_that_the_claim_names(
    monkeypatch: pytest.MonkeyPatch, mechanism: str
) -> None:
    config = run(3.0, **MECHANISMS[mechanism])
    released: list[tuple[float, list[Noisy]]] = []
    real = fedpft_private.with_noise

    def spy(statistics: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        noisy = real(statistics, mechanism)
        precision = sum((each.sensitivity / each.sigma) ** 2 for each in noisy)
        released.append((precision**-0.5, noisy))
        return noisy

    monkeypatch.setattr(fedpft_private, "with_noise", spy)
    made = make_surrogate(
        SiteData(torch.zeros(0, 40), torch.zeros(0, dtype=torch.int64), CLASSES, "f", "s"), config
    ).surrogate
    assert made.claim is not None
    events = [GaussianEvent(multiplier) for multiplier, _ in released]
    assert epsilon_spent(events, 1e-5) == pytest.approx(3.0, rel=1e-6)
    assert epsilon_spent([GaussianEvent(made.claim.noise_multiplier)], 1e-5) == pytest.approx(
        3.0, rel=1e-6
    )
    for _, statistics in released:
        # Without records a sum is only noise, so its spread shows the noise.
        for noisy in statistics:
            sigma, sensitivity = made.claim.noise[noisy.name]
            assert (noisy.sigma, noisy.sensitivity) == (pytest.approx(sigma, rel=1e-9), sensitivity)
            if noisy.value.numel() > 100:
                assert float(noisy.value.square().mean().sqrt()) == pytest.approx(sigma, rel=0.3)


def test_dp_em_keeps_few_components_of_noise_alone_and_most_that_exceed_it() -> None:
    """Two kinds of error, each in a share of many classes: a component of a class without records,
    and no component of a class with three standard deviations of records.
    """
    claim, classes = promised(run(8.0, **MECHANISMS["dp-em"])), 500
    sigma, _ = claim.noise["counts"]
    filled = torch.arange(0, classes, 8)
    labels = filled.repeat_interleave(math.ceil(3 * sigma))
    points = torch.ones(len(labels), 1, dtype=torch.float64)
    found, _ = dp_em(
        Clipped(points, labels, torch.ones(len(labels)), 0.0),
        classes,
        1,
        claim,
        torch.Generator().manual_seed(0),
    )
    kept = torch.zeros(classes, dtype=torch.bool)
    kept[found.labels] = True
    there = torch.zeros(classes, dtype=torch.bool)
    there[filled] = True
    # Of independent normal counts, 2.3 % and 84 % are above two deviations. The limits are more than
    # four deviations of these shares away.
    assert float(kept[~there].double().mean()) < 0.08
    assert float(kept[there].double().mean()) > 0.6


def test_dp_em_of_no_records_at_all_is_noise_that_can_be_sent() -> None:
    for _ in range(20):
        nobody = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
        surrogate = make_surrogate(
            SiteData(*nobody, CLASSES, "f", "s"), run(0.1, **MECHANISMS["dp-em"])
        ).surrogate
        assert 1 <= len(surrogate.header.classes) <= 3
        assert min(surrogate.counts) >= 1
        assert all(table.isfinite().all() for table in tables(surrogate).values())


@pytest.mark.parametrize("family", ["spherical", "diag", "full"])
def test_theorem_4_1_adds_the_published_noise_to_every_entry(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(
        "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian",
        lambda variance, count: np.full(count, math.isqrt(variance)),
    )
    features, labels = records(40)
    claim = promised(run(3.0, **{"fedpft.privacy": "theorem-4.1", "fedpft.covariance": family}))
    mixtures, _ = theorem_4_1(clipped(features, labels), 3, family, claim)
    for label, count in enumerate((14, 13, 13)):
        points = clip(features.double(), 0.0)[0][labels == label]
        noise = 4 / (count * 3.0) * math.sqrt(5 * math.log(4 / 1e-5))
        assert noise == pytest.approx(claim.noise_multiplier * 2 * math.sqrt(5) / count)
        assert torch.allclose(mixtures.means[label].double(), points.mean(0) + noise, atol=1e-5)
        # The matrix of ones is positive semi-definite, so projection changes nothing.
        expected = torch.cov(points.T, correction=0)
        match mixtures.covariance:
            case Full(cholesky):
                found, wanted = (cholesky @ cholesky.mT)[label], expected + noise
            case Diagonal(variances):
                found, wanted = variances[label], expected.diagonal() + noise
            case Spherical(variances):
                found, wanted = variances[label], expected.diagonal().mean() + noise
        assert torch.allclose(found.double(), wanted, atol=1e-4)


def test_under_theorem_4_1_a_full_covariance_stays_symmetric_and_positive() -> None:
    surrogate = make_surrogate(
        SiteData(*records(), CLASSES, "f", "s"), run(**MECHANISMS["theorem-4.1"])
    ).surrogate
    cholesky = surrogate.mixtures.covariance.cholesky  # type: ignore[union-attr]
    assert torch.equal(cholesky, cholesky.tril())
    assert float(torch.linalg.eigvalsh((cholesky @ cholesky.mT).double()).min()) > -1e-6


def test_theorem_4_1_is_refused_for_patients() -> None:
    with pytest.raises(ConfigError, match="protects single records"):
        make_surrogate(
            SiteData(*records(4), CLASSES, "f", "s", units=["p", "p", "q", "r"]),
            run(**MECHANISMS["theorem-4.1"]),
        )
    with pytest.raises(ConfigError, match="protects single records"):
        make_surrogate(
            SiteData(*records(4), CLASSES, "f", "s", units=["p", "o", "q", "r"]),
            run(**MECHANISMS["theorem-4.1"]),
        )


Array = NDArray[np.float64]
C, D, STEPS = 3, 3, 4
COUNTS, SUMS = 1.5, 0.4


class Given:
    """In place of `with_noise`: sums that a generator draws around a level, and what was summed."""

    def __init__(self, seed: int, level: float) -> None:
        self.draw, self.level = np.random.default_rng(seed), level
        self.seen: list[tuple[Array, Array]] = []
        self.sent: list[tuple[Array, Array]] = []

    def __call__(self, statistics: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        counts, sums = (each.value.numpy() for each in statistics)
        assert [each.bound for each in statistics] == [1.0, 1.0]
        self.seen.append((counts, sums))
        self.sent.append(
            (
                self.level + 2 * self.draw.normal(size=counts.shape),
                self.level / 2 * self.draw.normal(size=sums.shape),
            )
        )
        return [
            Noisy("counts", torch.from_numpy(self.sent[-1][0]), COUNTS, 1.0),
            Noisy("sums", torch.from_numpy(self.sent[-1][1]), SUMS, 1.0),
        ]


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 9999), st.integers(1, 3), st.sampled_from([-6.0, 0.0, 3.0, 30.0]))
@example(1, 2, -6.0)
@example(2, 2, 3.0)
@example(3, 2, 30.0)
def test_every_step_and_what_is_kept_are_those_of_loops(seed: int, k: int, level: float) -> None:
    draw = np.random.default_rng(seed)
    x = 0.5 * draw.normal(size=(12, D))
    x /= np.maximum(1, np.linalg.norm(x, axis=1, keepdims=True))
    y, w = draw.integers(0, C - 1, 12), draw.choice([1.0, 0.25], 12)
    data = Clipped(*map(torch.from_numpy, (x, y, w)), 0.125)
    claim, given_sums = promised(run(**MECHANISMS["dp-em"])), Given(seed, level)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_surrogate, "with_noise", given_sums)
        found, facts = dp_em(data, C, k, claim, torch.Generator().manual_seed(seed))
    directions = torch.randn(
        C, k, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).numpy()
    assert len(given_sums.sent) == STEPS
    means: list[list[Array]] = [[np.zeros(D)] for _ in range(C)]
    sizes, variances = [[1.0] for _ in range(C)], [1.0] * C
    parts: list[list[float]] = []
    for step in range(STEPS):
        many = len(sizes[0])
        counted, summed = np.zeros((C, many)), np.zeros((C, many, D))
        for row, label, weight in zip(x, y, w, strict=True):
            scores = [
                math.log(size) - float((row - mean) @ (row - mean)) / (2 * variances[label])
                for size, mean in zip(sizes[label], means[label], strict=True)
            ]
            shares = weight * softmax(scores)
            counted[label] += shares
            summed[label] += np.outer(shares, row)
        # In double precision, but for the products, whose factors are on a grid.
        most = {"rtol": 1e-12, "atol": len(x) * 2 * COARSE}
        np.testing.assert_allclose(given_sums.seen[step][0].reshape(C, many), counted, **most)
        np.testing.assert_allclose(given_sums.seen[step][1].reshape(C, many, D), summed, **most)
        raw = given_sums.sent[step][0].reshape(C, many)
        noisy = given_sums.sent[step][1].reshape(C, many, D)
        parts = []
        for label in range(C):
            sizes[label] = [max(1.0, each) for each in raw[label]]
            trusted = [each > 2 * COUNTS for each in raw[label]]
            total = sum(size for size, good in zip(sizes[label], trusted, strict=True) if good)
            parts.append(
                [
                    size / total if good else 0.0
                    for size, good in zip(sizes[label], trusted, strict=True)
                ]
            )
            energy = 0.0
            for at, size in enumerate(sizes[label]):
                mean = noisy[label, at] / size
                energy += parts[label][at] * min(1, max(0, mean @ mean - D * (SUMS / size) ** 2))
                if trusted[at] or step == 0:
                    means[label][at] = mean
            variances[label] = max(1e-8, (1 - energy) / D)
            if step == 0:
                spread = math.sqrt(variances[label])
                means[label] = [means[label][0] + spread * each for each in directions[label]]
                sizes[label] = sizes[label] * k
    kept = [(c, at) for c in range(C) for at in range(k) if parts[c][at] > 0]
    raw = given_sums.sent[-1][0].reshape(C, k)
    if not kept:
        kept = [divmod(int(raw.argmax()), k)]
        parts[kept[0][0]][kept[0][1]] = 1.0
    assert found.labels.tolist() == [c for c, _ in kept]
    assert found.weights.tolist() == pytest.approx([parts[c][at] for c, at in kept], rel=1e-6)
    np.testing.assert_allclose(found.means, [means[c][at] for c, at in kept], rtol=1e-5, atol=1e-6)
    assert isinstance(found.covariance, Spherical)
    sent = (found.weights, found.means, found.covariance.variances)
    assert {each.dtype for each in sent} == {torch.float32}
    assert found.covariance.variances.tolist() == pytest.approx(
        [variances[c] for c, _ in kept], rel=1e-5
    )
    assert found.counts.tolist() == [
        round(sum(max(1.0, raw[c, at]) for d, at in kept if d == c)) for c in range(C)
    ]
    assert facts == {
        "clip-fraction": 0.125,
        **{
            f"signal-to-noise-{name}": pytest.approx(
                math.sqrt(max(0.0, float(np.mean(sent**2)) / sigma**2 - 1))
            )
            for name, sent, sigma in (
                ("counts", given_sums.sent[-1][0], COUNTS),
                ("sums", given_sums.sent[-1][1], SUMS),
            )
        },
    }


CLASSES_KNOWN, D_KNOWN = 3, 4


def claim(family: str = "spherical") -> Mechanism:
    flat = {"epsilon": 5.0, "delta": 1e-5, "fedpft.covariance": family}
    found = parse_run(flat | ({"fedpft.components": 2} if family == "spherical" else {})).mechanism
    assert found is not None
    return found


class Added:
    """In the place of the noise: numbers that follow from the step, and a deviation that is given."""

    def __init__(self, sigma: float, seed: int) -> None:
        self.sigma, self.draw = sigma, np.random.default_rng(seed)
        self.sums: list[Array] = []

    def number(self, shape: Sequence[int]) -> Array:
        return 0.5 * self.sigma * self.draw.normal(size=shape)

    def __call__(self, given: Sequence[BoundedSum], mechanism: Mechanism) -> list[Noisy]:
        released = []
        for each in given:
            exact = each.value.double().numpy()
            self.sums.append(exact)
            value = torch.from_numpy(exact + self.number(exact.shape))
            sigma = self.sigma * (1 if each.name == "counts" else 0.1)
            released.append(Noisy(each.name, value, sigma, 1.0))
        return released


@settings(max_examples=20, deadline=None)
@given(
    family=st.sampled_from(["spherical", "diag", "full"]),
    count=st.integers(1, 9),
    norm=st.sampled_from([0.0, 1.5]),
    seed=st.integers(0, 99),
)
def test_noisy_sums_are_those_of_clipped_records_less_the_centre_weighted_by_patient(
    family: str, count: int, norm: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    raw, labels = (
        torch.randn(count, D_KNOWN, generator=draw),
        torch.randint(0, 2, (count,), generator=draw),
    )
    centre = torch.randn(D_KNOWN, generator=draw)
    patients = [str(each) for each in torch.randint(0, 3, (count,), generator=draw).tolist()]
    data = clipped(raw, labels, patients, norm, PublicMap(centre=centre).apply)
    moved = raw.double().numpy() - centre.double().numpy()
    lengths = np.linalg.norm(moved, axis=1)
    x = moved / np.maximum(lengths, norm)[:, None]
    np.testing.assert_allclose(data.features, x, rtol=1e-4, atol=1e-5)
    assert data.clip_fraction == pytest.approx((lengths > norm).mean())
    w = [1 / patients.count(each) for each in patients]
    np.testing.assert_allclose(data.weights, w, rtol=1e-6)
    assert data.done == ()
    added, again = Added(0.3, seed), np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_surrogate, "with_noise", added)
        found, facts = noisy_sums(data, CLASSES_KNOWN, family, claim(family))
    counts, sums, squares = (
        np.zeros(CLASSES_KNOWN),
        np.zeros((CLASSES_KNOWN, D_KNOWN)),
        np.zeros((D_KNOWN, D_KNOWN)),
    )
    for own, label, weight in zip(x, labels.tolist(), w, strict=True):
        counts[label] += weight
        sums[label] += weight * own
        squares += weight * np.outer(own, own)
    noise = [0.15 * again.normal(size=each.shape) for each in added.sums]
    np.testing.assert_allclose(found.counts, counts + noise[0], atol=1e-3)
    np.testing.assert_allclose(found.sums, sums + noise[1], atol=1e-3)
    assert (found.squares is None) == (family == "spherical")
    if family == "diag":
        np.testing.assert_allclose(added.sums[2], squares.diagonal(), atol=1e-3)
    wanted = {"clip-fraction", "signal-to-noise-counts", "signal-to-noise-sums"}
    assert set(facts) - wanted == (set() if family == "spherical" else {"signal-to-noise-squares"})
    assert math.isfinite(sum(facts.values()))
