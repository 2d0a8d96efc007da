"""Releases of a private site: their sensitivity is at most that assumed for the noise, and no seed
repeats the noise.
"""

import contextlib
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.methods.fedpft import surrogate as fedpft_private
from fedsurrogate.client_app.methods.fedpft.surrogate import (
    Clipped,
    SiteData,
    dp_em,
    make_surrogate,
    theorem_4_1,
)
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.privacy.accounting import GaussianEvent, epsilon_spent
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy, clip
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.shares import EM_STEPS, budget_shares
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.covariances import Diagonal, Full, Spherical
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
            data = Clipped.of(features[:rows], labels[:rows], units[:rows] if units else None)
            dp_em(data, 3, 2, claim, torch.Generator().manual_seed(attempt))
            seen.append(recorder.seen)
        for step, (less, more) in enumerate(zip(*seen, strict=True)):
            moved = {name: float((more[name] - less[name]).norm()) for name in more}
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
    mixtures, _ = theorem_4_1(Clipped.of(features, labels), 3, family, claim)
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
