"""A head from noisy sums: the textbook's without noise, unbiased with noise, and without classes
hidden by noise.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from torch import Tensor

from benchmarks.harness.site_data import SiteData, make_surrogate
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import Sums, as_mixtures
from fedsurrogate.common.surrogates.covariances import LowRank
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate, without_classes
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from fedsurrogate.strategies.fedpft.private_head import (
    learn_from_sums,
    least_squares,
    observed_within,
    unused,
)
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.pooling.class_means import Components, by_site, pool

CLASSES = ("a", "b", "c")
DIMENSION = 6
# A budget so large that the noise is far below the rounding to 16 bits.
PLENTY = 1e9
# Families with a whole second moment.
WHOLE = ("full", "lowrank")


def data(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features of three classes that overlap."""
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(DIMENSION, DIMENSION, generator=torch.Generator().manual_seed(5))
    centres = 1.5 * torch.randn(3, DIMENSION, generator=torch.Generator().manual_seed(6))
    labels = torch.randint(0, 3, (count,), generator=generator)
    return torch.randn(count, DIMENSION, generator=generator) @ mixing + centres[labels], labels


def made(
    features: Tensor, labels: Tensor, epsilon: float, family: str = "spherical", site: str = "s"
) -> SumsSurrogate:
    run = parse_run(
        {"epsilon": epsilon, "delta": 1e-5, "fedpft.covariance": family, "fedpft.rank": DIMENSION}
    )
    found = make_surrogate(SiteData(features, labels, CLASSES, "f" * 16, site), run).surrogate
    assert isinstance(found, SumsSurrogate)
    return found


def quiet(surrogate: SumsSurrogate) -> SumsSurrogate:
    """The same surrogate with almost no claimed noise, for comparison with noise-free formulas."""
    return replace(
        surrogate, sums=replace(surrogate.sums, sigmas=dict.fromkeys(surrogate.sums.sigmas, 1e-9))
    )


def test_without_noise_spherical_is_the_nearest_class_mean() -> None:
    features, labels = data(3000)
    head, _ = learn_from_sums([made(features, labels, PLENTY)], "spherical", 1)
    unit = clip(features, 0.0)[0]
    means = torch.stack([unit[labels == c].mean(0) for c in range(3)])
    variance = (
        1 - float((torch.bincount(labels) / 3000 * means.square().sum(1)).sum())
    ) / DIMENSION
    assert torch.allclose(head.weight * variance, means, atol=1e-4)
    bias = -means.square().sum(1) / (2 * variance) + (torch.bincount(labels) / 3000).log()
    assert torch.allclose(head.bias - head.bias.mean(), bias - bias.mean(), atol=1e-2)


def test_without_noise_full_is_linear_discriminant_analysis() -> None:
    features, labels = data(6000)
    thirds = [slice(0, 1000), slice(1000, 3000), slice(3000, 6000)]
    sites = [
        quiet(made(features[rows], labels[rows], PLENTY, "full", str(i)))
        for i, rows in enumerate(thirds)
    ]
    head, _ = learn_from_sums(sites, "full", 1)
    unit = clip(features, 0.0)[0].numpy()
    peer = LinearDiscriminantAnalysis(solver="lsqr").fit(unit, labels.numpy())
    agreed = float(np.mean(head.predict(features).numpy() == peer.predict(unit)))
    # The spherical head agrees on 0.95 of them; the two weight sites differently, by n^2 here.
    assert agreed > 0.98
    assert head.accuracy(features, CLASSES, labels)[0] == pytest.approx(
        peer.score(unit, labels.numpy()) * 6000, rel=0.01
    )


@given(seed=st.integers(0, 2**31), noise=st.floats(1e-4, 1e3), family=st.sampled_from(WHOLE))
@settings(max_examples=40, deadline=None)
def test_a_second_moment_is_used_only_where_it_stands_out(
    seed: int, noise: float, family: str
) -> None:
    """Lost in noise, it changes no score; known well, it gives another head, and a better one."""
    features, labels = data(2000, seed)
    exact = quiet(made(features, labels, PLENTY, family))
    generator = torch.Generator().manual_seed(seed)
    assert exact.sums.squares is not None
    drawn = noise * torch.randn(exact.sums.squares.shape, generator=generator)
    sigmas = exact.sums.sigmas | {"squares": noise}
    sums = replace(exact.sums, squares=exact.sums.squares + drawn, sigmas=sigmas)
    surrogate = replace(exact, sums=sums)
    head, gaussians = learn_from_sums([surrogate], family, DIMENSION)
    plain, _ = learn_from_sums([surrogate], "spherical", DIMENSION)
    lost = torch.equal(head.weight, plain.weight)
    assert bool(unused([surrogate], gaussians)) == lost
    edge = noise / 2000 * (2 * DIMENSION) ** 0.5 / variance_within(features, labels)
    assert lost or edge <= 0.3
    assert edge > 0.1 or not lost
    if edge > 0.1 and not lost:
        standing = float(gaussians.covariance.factor.square().sum())
        assert standing >= 0.499 * (standing + float(gaussians.covariance.variances.sum()))
    right, usual = (each.accuracy(features, CLASSES, labels)[0] for each in (head, plain))
    assert right > usual - 40


@pytest.mark.parametrize("seed", range(3))
def test_few_directions_with_most_of_the_variance_are_used_in_more_noise(seed: int) -> None:
    """Records of 64 columns that vary along three directions; a second moment of as much noise as
    would hide any other.
    """
    drawn = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (3000,), generator=drawn)
    ways, means = torch.randn(3, 64, generator=drawn), torch.randn(3, 64, generator=drawn)
    features = means[labels] + torch.randn(3000, 64, generator=drawn)
    features += 3 * torch.randn(3000, 3, generator=drawn) @ ways
    exact = quiet(made(features, labels, PLENTY, "lowrank"))
    noise = 0.2 * 3000 / 128**0.5
    assert exact.sums.squares is not None
    table = exact.sums.squares + noise * torch.randn(exact.sums.squares.shape, generator=drawn)
    sums = replace(exact.sums, squares=table, sigmas=exact.sums.sigmas | {"squares": noise})
    surrogate = replace(exact, sums=sums)
    found, plain = (
        learn_from_sums([surrogate], family, 64)[0].accuracy(features, CLASSES, labels)[0]
        for family in ("lowrank", "spherical")
    )
    assert found > plain + 150


def variance_within(features: Tensor, labels: Tensor) -> float:
    """Of features of unit norm, within classes, over all dimensions."""
    unit = clip(features.double(), 0.0)[0]
    means = torch.stack([unit[labels == c].mean(0) for c in range(3)])
    return float((unit - means[labels]).square().sum(1).mean())


def test_means_are_unbiased_and_as_noisy_as_reported() -> None:
    features, labels = data(900)
    true = torch.stack([clip(features, 0.0)[0].double()[labels == c].mean(0) for c in range(3)])
    errors, noise = [], []
    for _ in range(400):
        surrogate = made(features, labels, 1.0)
        # Noise of a count scales its mean; this test is on the noise of the sums.
        known = {"counts": 0.0, "sums": surrogate.sums.sigmas["sums"]}
        sums = replace(surrogate.sums, counts=torch.bincount(labels), sigmas=known)
        pooled = pool(by_site([replace(surrogate, sums=sums)]))
        errors.append(pooled.means - true)
        noise.append(pooled.noise.diagonal())
    errors_ = torch.stack(errors)
    assert float(errors_.mean(0).abs().max()) < 4 * float(errors_.std(0).max()) / 400**0.5
    assert torch.allclose(errors_.var(0).mean(1), torch.stack(noise).mean(0), rtol=0.25)


def test_sites_without_a_class_add_no_noise_to_it() -> None:
    features, labels = data(3000)
    empty = torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.int64)
    alone = pool(by_site([made(features, labels, 1.0)])).noise
    others = [made(*empty, 1.0, site=str(i)) for i in range(9)]
    crowd = pool(by_site([made(features, labels, 1.0), *others])).noise
    assert float((crowd.diagonal() / alone.diagonal()).mean()) < 1.2


def test_without_noise_least_squares_is_that_of_the_records() -> None:
    """With as many dimensions as directions it equals regression on one-hot labels without ridge."""
    features, labels = data(6000)
    unit = clip(features, 0.0)[0].double()
    means = torch.stack([unit[labels == c].mean(0) for c in range(3)])
    counts = torch.bincount(labels).double()
    centred = unit - means[labels]
    values, vectors = torch.linalg.eigh(centred.T @ centred / len(unit))
    spread = LowRank(
        vectors * (values - values.min() / 2).sqrt(), (values.min() / 2).expand(DIMENSION)
    )
    exact = Components(
        CLASSES,
        torch.arange(3),
        means,
        torch.zeros(3, 3, dtype=torch.float64),
        counts,
        counts / 6000,
    )
    solved = least_squares(exact, spread)
    weight, bias = solved.weight, solved.bias
    inputs = np.hstack([unit.numpy(), np.ones((6000, 1))])
    peer = np.linalg.lstsq(inputs, np.eye(3)[labels.numpy()], rcond=None)[0]
    scores = (unit @ weight.T + bias).numpy()
    assert np.abs(scores - inputs @ peer).max() < 1e-3


@pytest.mark.parametrize("dimension", [8, 64])
def test_the_variance_of_one_class_from_noisy_sums_is_unbiased_in_any_dimension(
    dimension: int,
) -> None:
    """Every dimension adds its noise to the square of a mean."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.nn.functional.normalize(torch.randn(dimension, generator=generator), dim=0) * 0.7
    sigma, count = 20.0, 400.0
    energies = []
    for _ in range(600):
        noisy = count * mean + sigma * torch.randn(dimension, generator=generator)
        found = as_mixtures(
            Sums(torch.tensor([count]), noisy[None], None, {"counts": 1.0, "sums": sigma})
        )
        assert found is not None
        (variances,) = vars(found[0].covariance).values()
        energies.append(1 - dimension * float(variances[0]))
    # Noise alone would add dimension (sigma / count)^2: 0.02 and 0.16.
    assert sum(energies) / 600 == pytest.approx(0.49, abs=0.01)


def test_where_sites_differ_one_mean_a_class_is_too_few() -> None:
    def centres(site: int) -> Tensor:
        return 2 * torch.randn(3, 64, generator=torch.Generator().manual_seed(30 + site))

    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (4000,), generator=generator)
    features = [
        centres(site)[labels] + torch.randn(4000, 64, generator=generator) for site in range(2)
    ]
    # The second site has the first site's classes in another order: their means almost cancel.
    features[1] = (-centres(0).roll(1, 0))[labels] + torch.randn(4000, 64, generator=generator)
    sites = [made(features[i], labels, 4.0, site=str(i)) for i in range(2)]
    head, gaussians = learn_from_sums(sites, "spherical", 1)
    assert len(gaussians.labels) == 6
    right = sum(head.accuracy(each, CLASSES, labels)[0] for each in features) / 8000
    one_mean, _ = learn_from_sums(sites[:1], "spherical", 1)
    alone = sum(one_mean.accuracy(each, CLASSES, labels)[0] for each in features) / 8000
    assert right > 0.9 > alone


def test_a_class_lost_in_noise_is_not_in_the_head() -> None:
    features, labels = data(3000)
    present = labels != 1
    for _ in range(5):
        surrogate = made(features[present], labels[present], 1.0)
        assert surrogate.header.classes == CLASSES
        # A true count of zero reaches two standard deviations once in forty times.
        if float(surrogate.sums.counts[1]) < 2 * surrogate.sums.sigmas["counts"]:
            head, _ = learn_from_sums([surrogate], "spherical", 1)
            assert head.header.classes == ("a", "c")
            return
    pytest.fail("a class that is not there stood out five times")


def test_with_nothing_but_noise_there_is_nothing_to_learn() -> None:
    run = parse_run({"epsilon": 0.01, "delta": 1e-5, "fedpft.covariance": "spherical"})
    nobody = make_surrogate(
        SiteData(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), CLASSES, "f", "s"), run
    ).surrogate
    assert isinstance(nobody, SumsSurrogate)
    silent = replace(nobody, sums=replace(nobody.sums, counts=torch.zeros(3)))
    with pytest.raises(RunError, match="no class stands out"):
        learn_from_sums([silent], "spherical", 1)


@pytest.mark.parametrize(
    "settings", [{}, {"fedpft.components": 3}, {"fedpft.privacy": "theorem-4.1"}]
)
def test_every_mechanism_learns_what_is_far_apart(settings: dict[str, object]) -> None:
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(6000) % 3
    features = 5 * torch.eye(3, 8)[labels] + 0.3 * torch.randn(6000, 8, generator=generator)
    run = parse_run({"epsilon": 8.0, "delta": 1e-5, "fedpft.covariance": "spherical", **settings})  # type: ignore[dict-item]
    sent = [
        unpack_surrogate(
            pack_surrogate(
                make_surrogate(
                    SiteData(features[i::2], labels[i::2], CLASSES, "f", str(i)), run
                ).surrogate
            )
        )
        for i in range(2)
    ]
    head = unpack_classifier(pack_classifier(learn(sent, run, "cpu").model))
    assert head.clip == 0.0
    assert head.accuracy(features, CLASSES, labels)[0] > 5900


@pytest.mark.parametrize("family", ["diag", "full", "lowrank"])
def test_the_second_moment_of_all_classes_is_not_that_of_some(family: str) -> None:
    features, labels = data(3000)
    sent = made(features, labels, PLENTY, family)
    cut = without_classes(sent, ("a", "c"))
    assert isinstance(cut, SumsSurrogate)
    assert cut.sums.squares is None
    assert cut.sums.sigmas.keys() == {"counts", "sums"}
    expected = observed_within([cut], pool(by_site([cut])), "spherical", 1)[0]
    assert observed_within([cut], pool(by_site([cut])), family, 1)[0].variances.equal(
        expected.variances
    )
    whole = without_classes(sent, CLASSES)
    assert isinstance(whole, SumsSurrogate)
    assert whole.sums.squares is sent.sums.squares
