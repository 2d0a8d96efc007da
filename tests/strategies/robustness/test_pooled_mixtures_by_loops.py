"""The pooled mixture of a robust rule, site by site and dimension by dimension with plain loops: who
votes for a mean, for a variance and for the directions of the covariance.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.common.surrogates.covariances import Diagonal, Spherical
from fedsurrogate.common.surrogates.mixtures import Mixtures
from fedsurrogate.common.surrogates.shared_covariances import Gram, LowRank
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.pooling.robust_centres import robust_mean
from fedsurrogate.strategies.robustness.reach import Moments, Reach
from fedsurrogate.strategies.robustness.robust_mixtures import pooled_mixture

Array = NDArray[np.float64]
D, CLASSES = 3, ("a", "b", "c")


@st.composite
def federations(draw: st.DrawFn) -> list[Surrogate]:
    """Sites with some of three classes, one or two components each, and one family of covariance."""
    family = draw(st.sampled_from(["spherical", "diag", "lowrank", "gram", "gram with lowrank"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    sites = []
    for number in range(draw(st.integers(3, 6))):
        names = draw(st.lists(st.sampled_from(CLASSES), min_size=1, max_size=3, unique=True))
        components = [draw(st.integers(1, 2)) for _ in names]
        labels = torch.arange(len(names)).repeat_interleave(torch.tensor(components))
        raw = torch.rand(len(labels), generator=generator) + 0.2
        weights = raw / torch.zeros(len(names)).index_add_(0, labels, raw)[labels]
        counts = torch.tensor([draw(st.sampled_from([1, 4, 5, 6, 40])) for _ in names])
        own = family
        if family == "gram with lowrank":
            own = "lowrank" if number == 0 else "gram"
        mixtures = Mixtures(
            counts,
            labels,
            weights,
            torch.randn(len(labels), D, generator=generator),
            covariance(own, len(labels), generator),
        )
        header = Header("fedpft", "r", f"site {number}", "f", tuple(names))
        sites.append(Surrogate(header, mixtures))
    return sites


def covariance(family: str, count: int, generator: torch.Generator) -> Any:
    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator) + 0.1

    rows = torch.randn(2 * D, D, generator=generator)
    return {
        "spherical": lambda: Spherical(positive(count)),
        "diag": lambda: Diagonal(positive(count, D)),
        "lowrank": lambda: LowRank(torch.randn(D, 2, generator=generator), positive(D)),
        "gram": lambda: Gram(rows.T @ rows / len(rows)),
    }[family]()


def inside(site: Surrogate, component: int) -> Array:
    """Variances of a component."""
    match site.mixtures.covariance:
        case Spherical(variances):
            return np.full(D, float(variances[component]))
        case Diagonal(variances):
            return variances[component].double().numpy()
        case LowRank(factor, variances):
            return (factor.square().sum(1) + variances).double().numpy()
        case Gram(matrix):
            return matrix.diagonal().double().numpy()
    raise AssertionError


def class_moments(site: Surrogate, place: int) -> tuple[Array, Array]:
    """Mean and variances of a class."""
    table = site.mixtures
    own = [m for m, label in enumerate(table.labels.tolist()) if label == place]
    weights, means = table.weights.double().numpy(), table.means.double().numpy()
    mean = sum((weights[m] * means[m] for m in own), np.zeros(D))
    spread = sum(
        (weights[m] * (inside(site, m) + (means[m] - mean) ** 2) for m in own), np.zeros(D)
    )
    return mean, spread


def centre(points: list[Array], rule: str) -> Array:
    rows = torch.from_numpy(np.stack(points))
    return robust_mean(rows, torch.ones(len(points)), rule).double().numpy()


@settings(max_examples=40, deadline=None)
@given(federations(), st.sampled_from(["median", "trimmed"]), st.integers(1, 2))
def test_each_site_with_enough_records_has_one_vote(
    sites: list[Surrogate], rule: str, rank: int
) -> None:
    found = pooled_mixture(sites, rule, rank)
    reach = Reach.of([Moments.of(site) for site in sites])
    names = list(dict.fromkeys(name for site in sites for name in site.header.classes))
    assert found.header.classes == tuple(names)
    assert (found.header.site, found.header.method) == ("pooled", "fedpft")
    table = found.mixtures
    assert table.labels.tolist() == list(range(len(names)))
    assert table.weights.tolist() == [1.0] * len(names)
    for place, name in enumerate(names):
        owners = [
            (at, site.header.classes.index(name), site)
            for at, site in enumerate(sites)
            if name in site.header.classes
        ]
        records = [int(site.mixtures.counts[k]) for _, k, site in owners]
        assert int(table.counts[place]) == sum(records)
        means = [class_moments(site, k)[0] for _, k, site in owners]
        voters = [mean for mean, count in zip(means, records, strict=True) if count >= 5]
        if len(voters) < 3:
            # No majority: all of them, each within the range of the others' classes.
            voters = [
                reach.bounded(at, torch.from_numpy(mean).float()[None])[0].double().numpy()
                for (at, _, _), mean in zip(owners, means, strict=True)
            ]
        np.testing.assert_allclose(table.means[place], centre(voters, rule), rtol=1e-4, atol=1e-4)
    sizes = [int(site.mixtures.counts.sum()) for site in sites]
    spreads = [
        sum(
            (int(n) * class_moments(site, k)[1] for k, n in enumerate(site.mixtures.counts)),
            np.zeros(D),
        )
        / size
        for site, size in zip(sites, sizes, strict=True)
    ]
    voting = [spread for spread, size in zip(spreads, sizes, strict=True) if size >= 5]
    usual = centre(voting if len(voting) >= 3 else spreads, rule)
    middle = np.median(np.stack(spreads), 0)
    apart = [float(((np.sqrt(each) - np.sqrt(middle)) ** 2).sum()) for each in spreads]
    core = sorted(range(len(sites)), key=apart.__getitem__)[: max(1, round(len(sites) / 2))]
    _has_directions_of(table.covariance, [sites[at] for at in core], sites, (usual, rank))


def _has_directions_of(
    found: Any, core: list[Surrogate], sites: list[Surrogate], limits: tuple[Array, int]
) -> None:
    """The variances are the usual ones, and the directions those of the core sites."""
    usual, rank = limits
    dense = found.matrix if isinstance(found, Gram) else found.factor @ found.factor.T
    np.testing.assert_allclose(
        found.variances_per_dimension().expand(1, D)[0], usual, rtol=1e-4, atol=1e-5
    )
    forms = [site.mixtures.covariance for site in core]
    if any(isinstance(site.mixtures.covariance, Gram) for site in sites):
        whole = np.mean(
            [
                each.matrix.double().numpy()
                if isinstance(each, Gram)
                else (each.factor @ each.factor.T + each.variances.diag()).double().numpy()
                for each in forms
            ],
            0,
        )
        scale = np.sqrt(usual / whole.diagonal())
        np.testing.assert_allclose(dense, whole * scale * scale[:, None], rtol=1e-3, atol=1e-4)
        return
    assert isinstance(found, LowRank)
    factors = [each.factor.double().numpy() for each in forms if isinstance(each, LowRank)]
    if not factors:
        assert found.factor.shape == (D, 0)
        return
    mean = sum(each @ each.T for each in factors) / len(factors)
    values, vectors = np.linalg.eigh(mean)
    kept = vectors[:, ::-1][:, :rank] * np.sqrt(np.maximum(values[::-1][:rank], 0))
    kept = kept * np.sqrt(np.minimum(usual / (kept**2).sum(1), 1))[:, None]
    np.testing.assert_allclose(dense, kept @ kept.T, rtol=1e-3, atol=1e-4)
    assert float(found.variances.min()) > 0


@pytest.mark.parametrize("rule", ["median", "trimmed"])
def test_one_site_of_five_moves_nothing_beyond_the_others(rule: str) -> None:
    generator = torch.Generator().manual_seed(0)

    def site(number: int, mean: float) -> Surrogate:
        table = Mixtures(
            torch.tensor([20]),
            torch.tensor([0]),
            torch.ones(1),
            mean + torch.randn(1, D, generator=generator),
            Diagonal(torch.ones(1, D) * max(1.0, mean)),
        )
        return Surrogate(Header("fedpft", "r", f"s{number}", "f", ("a",)), table)

    pooled = pooled_mixture([*(site(k, 0.0) for k in range(4)), site(4, 1e6)], rule, 1)
    assert float(pooled.mixtures.means.abs().max()) < 4
    assert float(pooled.mixtures.covariance.variances_per_dimension().max()) < 2
