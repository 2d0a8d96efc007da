"""Mixtures in a stream, compared with the fit in memory."""

import pytest
import torch
from torch import Tensor

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.surrogates import mixtures as fits
from fedsurrogate.common.surrogates.mixtures import (
    Mixtures,
    MixtureSettings,
    fit,
    fit_streamed,
    sample,
)
from tests.likelihood import log_likelihood

CLASSES, DIMENSION = 3, 6


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def records(count: int = 3000) -> tuple[Tensor, Tensor]:
    """Three clusters in each class, away from the origin; the last class is small."""
    rng = generator()
    labels = torch.where(torch.arange(count) % 50 == 0, 2, torch.arange(count) % 2)
    cluster = torch.randint(3, (count,), generator=rng)
    centres = 5 + 4 * torch.randn(CLASSES, 3, DIMENSION, generator=rng)
    return centres[labels, cluster] + torch.randn(count, DIMENSION, generator=rng) * 0.7, labels


def covariance(mixtures: Mixtures) -> Tensor:
    """What the covariance does to standard normals, by component: independent of the family."""
    return mixtures.covariance.variances_per_dimension()


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fits, "CHUNK", 500 * DIMENSION + 1)
    monkeypatch.setattr(fits, "SAMPLE", 900 * DIMENSION)


@pytest.mark.parametrize("family", ["full", "diag", "spherical", "lowrank", "gram"])
def test_one_gaussian_a_class_is_that_of_the_fit_in_memory(family: str) -> None:
    x, y = records()
    settings = MixtureSettings(family, rank=2)
    ours, theirs = (
        fit_streamed(x, y, CLASSES, settings, generator()),
        fit(x.double(), y, CLASSES, settings, generator()),
    )
    assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(ours.labels, theirs.labels)
    torch.testing.assert_close(ours.means.double(), theirs.means, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(covariance(ours).double(), covariance(theirs), rtol=1e-4, atol=1e-6)
    assert log_likelihood(ours, x, y) == pytest.approx(
        log_likelihood(theirs, x.double(), y), abs=1e-4
    )


@pytest.mark.parametrize("family", ["full", "diag", "spherical", "lowrank", "gram"])
def test_several_components_are_as_likely_as_those_of_the_fit_in_memory(family: str) -> None:
    x, y = records()
    settings = MixtureSettings(family, components=3, rank=2)
    ours, theirs = (each(x, y, CLASSES, settings, generator()) for each in (fit_streamed, fit))
    # A third of the records is in the sample.
    assert log_likelihood(ours, x, y) == pytest.approx(log_likelihood(theirs, x, y), abs=0.1)
    assert torch.equal(ours.components, theirs.components)
    sums = torch.zeros(CLASSES).index_add_(0, ours.labels, ours.weights)
    torch.testing.assert_close(sums, torch.ones(CLASSES))


def test_records_that_are_left_out_change_nothing() -> None:
    x, y = records()
    settings = MixtureSettings("gram")
    found = fit_streamed(
        torch.where((y == 1)[:, None], 1e4, x),
        torch.where(y == 1, -1, y),
        CLASSES,
        settings,
        generator(),
    )
    assert found.counts.tolist() == [int((y == 0).sum()), 0, int((y == 2).sum())]
    assert found.labels.tolist() == [0, 2]
    kept = y != 1
    theirs = fit(x[kept].double(), y[kept], CLASSES, settings, generator())
    torch.testing.assert_close(
        found.covariance.matrix.double(), theirs.covariance.matrix, rtol=1e-5, atol=1e-5
    )  # type: ignore[union-attr]


def test_no_component_stands_for_few_records() -> None:
    rng = generator()
    x = torch.cat(
        [torch.randn(2000, DIMENSION, generator=rng), 50 + torch.randn(3, DIMENSION, generator=rng)]
    )
    found = fit_streamed(
        x,
        torch.zeros(len(x), dtype=torch.int64),
        1,
        MixtureSettings("diag", components=4),
        generator(),
    )
    assert ((found.means - 50).norm(dim=1) > 50).all()
    assert (found.weights * len(x) >= 5).all()


def test_a_sample_holds_all_of_a_small_class_and_no_more_than_it_may() -> None:
    labels = torch.cat([torch.zeros(5000), torch.ones(40), torch.full((9000,), 2)]).long()
    rows = sample(labels, torch.bincount(labels), 1000, generator())
    assert torch.bincount(labels[rows]).tolist() == [480, 40, 480]


def test_no_records_are_an_error() -> None:
    with pytest.raises(DataError):
        fit_streamed(torch.zeros(4, 2), torch.full((4,), -1), 1, MixtureSettings(), generator())
