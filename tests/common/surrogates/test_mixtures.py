"""Mixtures and class sums, compared with scikit-learn, closed forms and statistics of large samples."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.decomposition import FactorAnalysis
from sklearn.mixture import GaussianMixture
from torch import Tensor
from torch.distributions import MultivariateNormal

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.surrogates.class_sums import Sums, as_mixtures
from fedsurrogate.common.surrogates.covariances import (
    MANY,
    Diagonal,
    Full,
    LowRank,
    Spherical,
    eigen,
    weighted_sums,
)
from fedsurrogate.common.surrogates.mixtures import (
    RELATIVE_FLOOR,
    Mixtures,
    MixtureSettings,
    fit,
    k_means,
)
from tests.likelihood import log_likelihood

FAMILIES = ("full", "diag", "spherical", "lowrank")
# Families that scikit-learn's GaussianMixture knows under the same name.
CLASSIC = ("full", "diag", "spherical")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def correlated(n: int, dimension: int, seed: int = 0) -> Tensor:
    """Correlated normals (n, dimension) away from the origin, with variances between about 0.1 and
    10.
    """
    rng = generator(seed)
    mixing = torch.randn(dimension, dimension, generator=rng, dtype=torch.float64) / dimension**0.5
    scales = torch.logspace(-0.5, 0.5, dimension, dtype=torch.float64)
    return torch.randn(n, dimension, generator=rng, dtype=torch.float64) @ mixing * scales + 3.0


def blobs(
    n: int, clusters: int, dimension: int, seed: int = 0, spread: float = 20.0
) -> tuple[Tensor, Tensor]:
    """Blobs (n, dimension), each with its own correlations, and the blob of each row."""
    rng = generator(seed)
    member = torch.arange(n) % clusters
    centres = torch.randn(clusters, dimension, generator=rng, dtype=torch.float64) * spread
    noise = torch.empty(n, dimension, dtype=torch.float64)
    for cluster in range(clusters):
        rows = member == cluster
        noise[rows] = correlated(int(rows.sum()), dimension, seed * 100 + cluster)
    return centres[member] + noise, member


def fit_one(x: Tensor, family: str, components: int = 1, seed: int = 0, **more: float) -> Mixtures:
    chosen = MixtureSettings(family=family, components=components, **more)  # type: ignore[arg-type]
    return fit(x, torch.zeros(len(x), dtype=torch.int64), 1, chosen, generator(seed))


def likelihood(mixtures: Mixtures, x: Tensor) -> float:
    return log_likelihood(mixtures, x, torch.zeros(len(x), dtype=torch.int64))


def covariances(mixtures: Mixtures) -> Tensor:
    """Covariance matrices (M, d, d), computed from each family's definition."""
    count, dimension = mixtures.means.shape
    match mixtures.covariance:
        case Full(cholesky):
            return cholesky @ cholesky.mT
        case Diagonal(variances):
            return torch.diag_embed(variances)
        case Spherical(variances):
            return variances[:, None, None] * torch.eye(dimension, dtype=variances.dtype)
        case LowRank(factor, variances):
            return (factor @ factor.T + variances.diag()).expand(count, -1, -1)


def random_mixtures(family: str, counts: tuple[int, ...] = (3000, 1000), seed: int = 0) -> Mixtures:
    """Two components per class in three dimensions, with correlations, unequal weights and unequal
    sizes.
    """
    rng = generator(seed)
    count, dimension = 2 * len(counts), 3

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=rng) + 0.3

    cholesky = torch.randn(count, dimension, dimension, generator=rng).tril(-1) + torch.diag_embed(
        uniform(count, dimension)
    )
    covariance = {
        "full": lambda: Full(cholesky),
        "diag": lambda: Diagonal(uniform(count, dimension)),
        "spherical": lambda: Spherical(uniform(count)),
        "lowrank": lambda: LowRank(torch.randn(dimension, 2, generator=rng), uniform(dimension)),
    }[family]()
    return Mixtures(
        counts=torch.tensor(counts),
        labels=torch.arange(len(counts)).repeat_interleave(2),
        weights=torch.tensor([0.3, 0.7]).repeat(len(counts)),
        means=torch.randn(count, dimension, generator=rng) * 2,
        covariance=covariance,
    )


def check_usable(mixtures: Mixtures, x: Tensor, y: Tensor, classes: int) -> None:
    """Check the properties that every fit must have, for any data."""
    expected = torch.bincount(y, minlength=classes)
    assert torch.equal(mixtures.counts, expected)
    assert torch.equal(mixtures.components > 0, expected > 0)
    tables = [mixtures.weights, mixtures.means, *vars(mixtures.covariance).values()]
    assert all(table.isfinite().all() for table in tables)
    totals = torch.zeros(classes).to(x).index_add_(0, mixtures.labels, mixtures.weights)
    torch.testing.assert_close(totals[expected > 0], torch.ones_like(totals[expected > 0]))
    assert (mixtures.covariance.variances_per_dimension() > 0).all()
    assert np.isfinite(log_likelihood(mixtures, x, y))
    drawn, labels = mixtures.draw(expected.tolist(), [generator(i) for i in range(classes)])
    assert drawn.isfinite().all()
    assert torch.equal(labels, y.sort().values)
    assert all(moment.isfinite().all() for moment in mixtures.moments())


@pytest.mark.parametrize("family", CLASSIC)
def test_one_component_is_scikit_learns(family: str) -> None:
    x = correlated(500, 6)
    # `full` adds a floor to the diagonal as reg_covar does; the other two only keep variances above
    # it.
    floor = RELATIVE_FLOOR * float(x.var(0, correction=0).mean()) if family == "full" else 0.0
    theirs = GaussianMixture(1, covariance_type=family, reg_covar=floor).fit(x.numpy())
    ours = fit_one(x, family)
    torch.testing.assert_close(ours.means, torch.from_numpy(theirs.means_))
    wanted = torch.from_numpy(
        np.array([np.diag(v) if v.ndim == 1 else v for v in _matrices(theirs, 6)])
    )
    torch.testing.assert_close(covariances(ours), wanted, rtol=1e-9, atol=1e-12)
    assert likelihood(ours, x) == pytest.approx(theirs.score(x.numpy()), abs=1e-9)


def _matrices(theirs: GaussianMixture, dimension: int) -> list[np.ndarray]:
    values = theirs.covariances_
    return [np.full(dimension, v) if np.ndim(v) == 0 else v for v in values]


@pytest.mark.parametrize("family", CLASSIC)
def test_one_component_in_single_precision_is_scikit_learns(family: str) -> None:
    x = correlated(500, 6).float()
    theirs = GaussianMixture(1, covariance_type=family, reg_covar=1e-9).fit(x.double().numpy())
    ours = fit_one(x, family)
    assert likelihood(ours, x) == pytest.approx(theirs.score(x.double().numpy()), abs=1e-4)
    assert all(moment.dtype == torch.float32 for moment in ours.moments())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clusters", [2, 5])
@pytest.mark.parametrize("family", CLASSIC)
def test_blobs_are_found_as_well_as_by_scikit_learn(family: str, clusters: int, seed: int) -> None:
    x, _ = blobs(600, clusters, 5, seed)
    floor = RELATIVE_FLOOR * float(x.var(0, correction=0).mean())
    theirs = GaussianMixture(
        clusters, covariance_type=family, reg_covar=floor, random_state=seed
    ).fit(x.numpy())
    ours = fit_one(x, family, clusters, seed)
    assert ours.components.tolist() == [clusters]
    assert likelihood(ours, x) >= theirs.score(x.numpy()) - 1e-3


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_lowrank_of_one_component_is_factor_analysis(rank: int) -> None:
    rng = generator(1)
    loadings = torch.randn(rank, 20, generator=rng, dtype=torch.float64)
    noise = torch.randn(900, 20, generator=rng, dtype=torch.float64) * torch.linspace(
        0.3, 2, 20, dtype=torch.float64
    )
    y = torch.arange(900) % 3
    x = (
        torch.randn(900, rank, generator=rng, dtype=torch.float64) @ loadings
        + noise
        + 5 * y[:, None]
    )
    centred = x - torch.stack([x[y == label].mean(0) for label in range(3)])[y]
    theirs = FactorAnalysis(rank).fit(centred.numpy()).score(centred.numpy())
    patient = MixtureSettings(family="lowrank", rank=rank, tolerance=1e-6, max_iterations=1000)
    ours = fit(x, y, 3, patient, generator())
    assert ours.covariance.factor.shape == (20, rank)
    assert log_likelihood(ours, x, y) >= theirs - 1e-4
    by_default = fit(x.float(), y, 3, MixtureSettings(family="lowrank", rank=rank), generator())
    assert log_likelihood(by_default, x.float(), y) >= theirs - 0.01


@pytest.mark.slow
@pytest.mark.parametrize("components", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_likelihood_never_decreases(family: str, components: int) -> None:
    x, y = blobs(400, 2, 6, seed=3, spread=0.7)
    found = [
        # The tolerance never stops the fit, so the number of steps is exact.
        log_likelihood(
            fit(
                x, y, 2, MixtureSettings(family, components, 3, 10, -torch.inf, steps), generator(5)
            ),
            x,
            y,
        )
        for steps in range(1, 26)
    ]
    assert all(after >= before - 1e-5 for before, after in itertools.pairwise(found))
    assert found[-1] > found[0] or (components == 1 and family != "lowrank")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_density_is_the_multivariate_normals(family: str, dtype: torch.dtype) -> None:
    mixtures = random_mixtures(family)
    covariance = type(mixtures.covariance)(
        *(table.to(dtype) for table in vars(mixtures.covariance).values())
    )
    x = torch.randn(50, 3, generator=generator(), dtype=dtype) * 3
    means = mixtures.means.to(dtype)
    ours = covariance.log_density(x, means)
    matrices = covariances(
        Mixtures(mixtures.counts, mixtures.labels, mixtures.weights, means, covariance)
    ).double()
    oracle = MultivariateNormal(means.double(), matrices).log_prob(x.double()[:, None])
    torch.testing.assert_close(
        ours.double(), oracle, rtol=1e-4 if dtype == torch.float32 else 1e-10, atol=1e-4
    )


@pytest.mark.parametrize("noise", [1e-2, 1e-4, 1e-6])
def test_lowrank_density_keeps_its_digits_without_much_noise(noise: float) -> None:
    rng = generator()
    # The second factor is weak, so that the two differ in scale as well.
    factor = torch.randn(8, 2, generator=rng) * torch.tensor([1.0, 0.01])
    narrow = LowRank(factor, torch.full((8,), noise))
    x = (
        torch.randn(20, 2, generator=rng) @ factor.T
        + torch.randn(20, 8, generator=rng) * noise**0.5
    )
    means = torch.randn(3, 8, generator=rng) * noise**0.5
    ours = narrow.log_density(x, means).double()
    oracle = LowRank(factor.double(), narrow.variances.double()).log_density(
        x.double(), means.double()
    )
    torch.testing.assert_close(ours, oracle, rtol=1e-3, atol=0.02)
    matrix = (factor.double() @ factor.double().T) + noise * torch.eye(8)
    exact = MultivariateNormal(means.double(), matrix).log_prob(x.double()[:, None])
    torch.testing.assert_close(oracle, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_likelihood_is_the_density_of_a_records_own_class(family: str) -> None:
    mixtures = random_mixtures(family)
    x, y = torch.randn(40, 3, generator=generator()), torch.arange(40) % 2
    single = MultivariateNormal(mixtures.means, covariances(mixtures)).log_prob(x[:, None]).exp()
    own = (mixtures.labels == y[:, None]) * mixtures.weights
    assert log_likelihood(mixtures, x, y) == pytest.approx(
        float((single * own).sum(1).log().mean()), rel=1e-4
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_have_the_mean_and_covariance_of_their_mixture(family: str) -> None:
    mixtures, n = random_mixtures(family), 100_000
    drawn, labels = mixtures.draw([n, n], [generator(1), generator(2)])
    for label in range(2):
        rows = mixtures.labels == label
        weights, means, inner = (
            mixtures.weights[rows],
            mixtures.means[rows],
            covariances(mixtures)[rows],
        )
        mean = weights @ means
        between = means - mean
        wanted = (weights[:, None, None] * (inner + between[:, :, None] * between[:, None, :])).sum(
            0
        )
        sample = drawn[labels == label]
        deviation = wanted.diagonal().sqrt()
        # Six standard errors of a mean; twice that is enough for a covariance of a mixture of
        # normals.
        assert ((sample.mean(0) - mean).abs() / deviation).max() < 6 / n**0.5
        assert (
            (sample.T.cov() - wanted) / deviation / deviation[:, None]
        ).abs().max() < 12 / n**0.5


@pytest.mark.parametrize("family", FAMILIES)
def test_classes_draw_from_their_own_streams(family: str) -> None:
    mixtures, n = random_mixtures(family), 20_000
    both, _ = mixtures.draw([n, n], [generator(1), generator(2)])
    first, second = both[:n], both[n:]
    assert torch.corrcoef(torch.cat([first.T, second.T]))[:3, 3:].abs().max() < 0.05
    alone, labels = mixtures.draw([0, n], [generator(1), generator(2)])
    assert torch.equal(alone, second)
    assert (labels == 1).all()


@pytest.mark.parametrize("components", [1, 6])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "case",
    ["one record", "few records", "constant", "duplicates", "one dimension", "flat dimension"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_poor_data_still_gives_every_class_a_mixture(
    case: str, family: str, components: int, dtype: torch.dtype
) -> None:
    x = correlated(60, 4).to(dtype)
    x, y = {
        "one record": (x[:1], torch.zeros(1, dtype=torch.int64)),
        "few records": (x[:7], torch.tensor([0, 1, 1, 3, 3, 3, 3])),
        "constant": (torch.full_like(x, 0.1), torch.arange(60) % 2),
        "duplicates": (x[:3].repeat(20, 1), torch.arange(60) % 2),
        "one dimension": (x[:, :1], torch.arange(60) % 2),
        "flat dimension": (x * torch.tensor([1, 0, 1, 1]), torch.arange(60) % 2),
    }[case]
    for samples_per_component in (1, 10):
        chosen = MixtureSettings(family, components, 8, samples_per_component)
        check_usable(fit(x, y, 4, chosen, generator()), x, y, 4)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_any_small_table_can_be_fitted(data: st.DataObject) -> None:
    n, dimension = data.draw(st.integers(1, 25)), data.draw(st.integers(1, 4))
    cell = st.sampled_from([-3.0, 0.0, 0.1, 1.0, 1000.0])
    rows = data.draw(
        st.lists(st.lists(cell, min_size=dimension, max_size=dimension), min_size=n, max_size=n)
    )
    labels = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    chosen = MixtureSettings(
        data.draw(st.sampled_from(FAMILIES)), data.draw(st.integers(1, 5)), 2, 1
    )
    x, y = torch.tensor(rows), torch.tensor(labels)
    check_usable(fit(x, y, 3, chosen, generator()), x, y, 3)


def test_no_records_are_refused() -> None:
    with pytest.raises(DataError, match="no records"):
        fit(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 1, MixtureSettings(), generator())


@pytest.mark.parametrize("family", FAMILIES)
def test_components_are_capped_by_records(family: str) -> None:
    x, member = blobs(72, 8, 4, spread=60.0)
    y = torch.cat([torch.zeros(36, dtype=torch.int64), torch.ones(36, dtype=torch.int64)])
    capped = fit(x, y, 2, MixtureSettings(family, 8, 2, 10), generator())
    assert (capped.components <= 3).all()
    assert len(member.unique()) == 8
    free = fit(x, y, 2, MixtureSettings(family, 8, 2, 4), generator())
    assert (free.components == 8).all()


@pytest.mark.parametrize("components", [5, 60])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_component_stands_for_a_handful_of_records(family: str, components: int) -> None:
    rng = generator(7)
    # Heavy tails and outliers: k-means++ gives nearly every outlier its own cluster.
    x = torch.randn(800, 3, generator=rng) / torch.rand(800, 1, generator=rng)
    y = (torch.arange(800) % 20 == 0).long() + 2 * (torch.arange(800) < 3).long()
    y = y.clamp_max(2)
    mixtures = fit(x, y, 3, MixtureSettings(family, components, 2, 10), generator())
    sizes = mixtures.weights * mixtures.counts[mixtures.labels]
    alone = mixtures.components[mixtures.labels] == 1
    assert mixtures.components[2] == 1
    assert (sizes[~alone] >= 5 - 1e-3).all()


@pytest.mark.parametrize("factor", [1e-4, 1e4])
@pytest.mark.parametrize("components", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_fit_is_equivariant_to_the_scale_of_features(
    family: str, components: int, factor: float
) -> None:
    x, y = blobs(300, 3, 12, seed=2, spread=4.0)
    y = y.clamp_max(1)
    chosen = MixtureSettings(family, components, 3)
    plain, scaled = (
        fit(x.float(), y, 2, chosen, generator()),
        fit(x.float() * factor, y, 2, chosen, generator()),
    )
    assert torch.equal(plain.labels, scaled.labels)
    torch.testing.assert_close(plain.weights, scaled.weights, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(plain.means, scaled.means / factor, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(
        covariances(plain), covariances(scaled) / factor**2, rtol=1e-2, atol=1e-3
    )
    shift = x.shape[1] * float(np.log(factor))
    assert log_likelihood(scaled, x.float() * factor, y) + shift == pytest.approx(
        log_likelihood(plain, x.float(), y), abs=1e-2
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_fit_is_equivariant_to_a_shift_of_features(family: str) -> None:
    x, y = blobs(300, 3, 5, seed=2, spread=4.0)
    chosen = MixtureSettings(family, 2, 3)
    plain, shifted = fit(x, y, 3, chosen, generator()), fit(x + 1000, y, 3, chosen, generator())
    torch.testing.assert_close(plain.means, shifted.means - 1000, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(covariances(plain), covariances(shifted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_gives_the_same_bits(family: str) -> None:
    x, y = blobs(300, 6, 5, spread=1.0)
    first, again = (
        fit(x.float(), y % 2, 2, MixtureSettings(family, 4, 3), generator(9)) for _ in range(2)
    )
    for ours, theirs in ((first.means, again.means), (first.weights, again.weights)):
        assert torch.equal(ours, theirs)
    for name, table in vars(first.covariance).items():
        assert torch.equal(table, getattr(again.covariance, name))
    one, two = (
        mixtures.draw([50, 50], [generator(1), generator(2)])[0] for mixtures in (first, again)
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("family", CLASSIC)
def test_a_class_is_fitted_as_if_it_were_alone(family: str) -> None:
    x, y = blobs(300, 3, 4)
    together = fit(x, y, 3, MixtureSettings(family), generator())
    for label in range(3):
        alone = fit_one(x[y == label], family)
        torch.testing.assert_close(together.means[label], alone.means[0])
        torch.testing.assert_close(
            covariances(together)[label], covariances(alone)[0], rtol=1e-5, atol=1e-8
        )


@pytest.mark.parametrize("shared", [0.0, 0.1, 1.0], ids=lambda share: f"{share:.0%}")
@pytest.mark.parametrize("components", [1, 2, 10])
def test_sums_of_many_rows_are_those_of_the_product(components: int, shared: float) -> None:
    """Rows of one component alone, and a share of rows that several have."""
    rows = torch.randn(500, MANY // 400, generator=generator())
    logits = torch.randn(500, components, generator=generator())
    sharp = torch.where(torch.arange(500) < 500 * shared, 1.0, 1e6)
    responsibilities = (logits * sharp[:, None]).softmax(1)
    found = weighted_sums(responsibilities, rows)
    exact = responsibilities.double().T @ rows.double()
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("labels_device", ["cpu", "cuda"])
@pytest.mark.parametrize("components", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_finds_what_the_processor_finds(
    family: str, components: int, labels_device: str
) -> None:
    x, y = blobs(400, 8, 5, spread=20.0)
    chosen = MixtureSettings(family, components, 3)
    here = fit(x, y % 2, 2, chosen, generator())
    there = fit(x.cuda(), (y % 2).to(labels_device), 2, chosen, generator()).to("cpu")
    assert log_likelihood(there, x, y % 2) == pytest.approx(
        log_likelihood(here, x, y % 2), abs=1e-3
    )
    drawn, labels = there.to("cuda").draw([20, 30], [generator(1), generator(2)])
    assert drawn.is_cuda
    torch.testing.assert_close(drawn.cpu(), there.draw([20, 30], [generator(1), generator(2)])[0])
    assert torch.bincount(labels).tolist() == [20, 30]


D = 4


def sums(counts: list[float], sigma: float = 10.0, lengths: float = 0.5) -> Sums:
    """Classes along the axes; each mean has this norm if its count is exact."""
    table = torch.eye(len(counts), D) * lengths * torch.tensor(counts)[:, None]
    return Sums(torch.tensor(counts), table, None, {"counts": sigma, "sums": 1e-6})


@pytest.mark.parametrize("sigma", [0.1, 1.0, 10.0, 1e3])
def test_a_class_counts_from_two_standard_deviations_of_its_noise_on(sigma: float) -> None:
    found = as_mixtures(sums([2.1 * sigma, 1.9 * sigma, -5 * sigma, 50 * sigma], sigma))
    assert found is not None
    mixtures, kept = found
    assert kept == [0, 3]
    assert mixtures.labels.tolist() == [0, 1]
    assert mixtures.weights.tolist() == [1, 1]
    assert mixtures.counts.tolist() == [max(1, round(2.1 * sigma)), round(50 * sigma)]
    assert as_mixtures(sums([1.9 * sigma, 0.0], sigma)) is None


def test_no_class_is_less_than_one_record_so_that_no_mean_is_longer_than_its_sum() -> None:
    found = as_mixtures(sums([0.5, 100.0], sigma=0.01))
    assert found is not None
    assert torch.allclose(found[0].means.norm(dim=1), torch.tensor([0.25, 0.5]))


def test_of_a_feature_of_length_one_what_is_not_in_its_mean_is_variance() -> None:
    for length in (0.0, 0.3, 0.9):
        found = as_mixtures(sums([1000.0], lengths=length))
        assert found is not None
        assert float(found[0].covariance.variances) * D == pytest.approx(1 - length**2, abs=1e-3)  # type: ignore[union-attr]


# Of 14 and 35 the solver gives NaN without an error, with kernels of AVX-512; of 5, 9 and 23 with those of SSE.
@pytest.mark.parametrize("seed", [*range(12), 14, 23, 35])
def test_two_records_with_many_zeros_have_eigenvectors_in_single_precision(seed: int) -> None:
    """Of such scatters LAPACK's solver fails for one in four; two records are what a small site has."""
    drawn = generator(seed)
    apart = torch.randn(1024, generator=drawn) * (torch.rand(1024, generator=drawn) < 0.56)
    scatter = torch.outer(apart, apart)
    values, vectors = eigen(scatter)
    assert values.dtype == vectors.dtype == torch.float32
    length = float(apart.square().sum())
    np.testing.assert_allclose(values[-1], length, rtol=1e-5)
    np.testing.assert_allclose(values[:-1], 0, atol=1e-5 * length)
    made = (vectors * values) @ vectors.T
    np.testing.assert_allclose(made, scatter, atol=1e-5 * length)


@pytest.mark.parametrize("family", FAMILIES)
def test_moments_are_those_of_a_huge_sample(family: str) -> None:
    mixtures, n = random_mixtures(family, (3000, 1000)), 50_000
    drawn, _ = mixtures.draw([3 * n, n], [generator(1), generator(2)])
    mean, variance = mixtures.moments()
    deviation = drawn.std(0)
    assert ((drawn.mean(0) - mean).abs() / deviation).max() < 6 / (4 * n) ** 0.5
    assert (drawn.var(0) / variance - 1).abs().max() < 12 / (4 * n) ** 0.5


def test_k_means_finds_separated_blobs_and_leaves_no_cluster_empty() -> None:
    x, member = blobs(300, 6, 4, spread=60.0)
    found = k_means(x, 6, generator())
    assert torch.equal(found.sum(1), torch.ones(300, dtype=x.dtype))
    overlap = found.T @ torch.nn.functional.one_hot(member).to(x)
    assert ((overlap > 0).sum(1) == 1).all()
    assert k_means(x[:3].repeat(10, 1), 6, generator()).sum(0).tolist() == [10, 10, 10]
