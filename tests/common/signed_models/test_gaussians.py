"""Out-of-distribution scores: the closed form of a Gaussian, and outliers that are seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.signed_models import gaussians
from fedsurrogate.common.signed_models.gaussians import (
    SMALLEST,
    Gaussians,
    LowRankCovariance,
    fit_gaussians,
)
from fedsurrogate.common.signed_models.signed_model import gaussians_of


def records(
    count: int = 600, dimension: int = 12, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(dimension, dimension, generator=generator)
    labels = torch.arange(count) % 3
    return torch.randn(count, dimension, generator=generator) @ mixing + 3.0 * labels[
        :, None
    ], labels


def matrix(covariance: LowRankCovariance) -> np.ndarray:
    """The covariance as a whole: its own directions, and the same variance along all others."""
    directions = covariance.directions.double().numpy()
    others = np.eye(directions.shape[1]) - directions.T @ directions
    own = directions.T @ np.diag(covariance.variances.double().numpy()) @ directions
    return np.asarray(own + float(covariance.rest) * others)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=4).filter(lambda sizes: max(sizes) > 1),
    dimension=st.integers(2, 6),
    rank=st.integers(0, 8),
    seed=st.integers(0, 99),
)
def test_covariances_have_the_largest_directions_and_the_mean_of_the_others(
    sizes: list[int], dimension: int, rank: int, seed: int
) -> None:
    """With any number of records and classes; classes of one record have no part in anything."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.randn(len(labels), dimension, generator=generator) * torch.arange(1, dimension + 1)
    x += 5 * labels[:, None]
    order = torch.randperm(len(labels), generator=generator)
    found = fit_gaussians(x[order], labels[order], rank)
    own = [x[labels == k].double().numpy() for k, size in enumerate(sizes) if size > 1]
    rows, means = np.concatenate(own), np.stack([each.mean(0) for each in own])
    assert found.means.numpy() == pytest.approx(means, rel=1e-5, abs=1e-5)
    assert found.mean.numpy() == pytest.approx(rows.mean(0), rel=1e-5, abs=1e-5)
    centred = np.concatenate([each - each.mean(0) for each in own])
    for covariance, rest in ((found.within, centred), (found.total, rows - rows.mean(0))):
        values = np.linalg.eigvalsh(rest.T @ rest / len(rest))[::-1]
        kept = min(rank, dimension - 1, len(rest) - 1)
        floor = max(1e-12, SMALLEST * (values[0] if kept else values.sum()))
        wanted = np.full(dimension, max(float(values[kept:].mean()), floor))
        wanted[:kept] = np.maximum(values[:kept], floor)
        assert len(covariance.variances) == kept
        whole = np.linalg.eigvalsh(matrix(covariance))[::-1]
        assert whole == pytest.approx(np.sort(wanted)[::-1], rel=2e-3, abs=1e-5 * values[0])
    asked = torch.randn(3, dimension, generator=generator) * 9
    inverses = [np.linalg.inv(matrix(each)) for each in (found.within, found.total)]
    for row, near, apart in zip(asked.double().numpy(), *found.scores(asked), strict=True):
        steps = [row - mean for mean in found.means.double().numpy()]
        nearest = min(float(step @ inverses[0] @ step) for step in steps)
        step = row - found.mean.double().numpy()
        assert float(near) == pytest.approx(nearest, rel=1e-3)
        background = float(step @ inverses[1] @ step)
        assert float(apart) == pytest.approx(nearest - background, rel=1e-3, abs=1e-3 * nearest)


@settings(max_examples=40)
@given(st.data())
def test_received_gaussians_fit_together_in_every_part(data: st.DataObject) -> None:
    """Each variance is above zero and each shape is that of the others, wherever one is wrong."""
    whole = fit_gaussians(*records(60, 5), rank=2).tensors()
    name = data.draw(st.sampled_from(sorted(whole)))
    wrong = whole[name].clone()
    at = data.draw(st.integers(0, wrong.numel() - 1))
    if name.endswith(("variances", "rest")):
        wrong.view(-1)[at] = data.draw(st.sampled_from([0.0, -1e-9, torch.nan, torch.inf]))
    else:
        wrong.view(-1)[at] = data.draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    shorter = whole[name][..., :-1]
    longer = torch.cat([whole[name], whole[name][..., :1]], -1)
    for tensor in (wrong, shorter, longer, whole[name][None], whole[name][..., None]):
        with pytest.raises(SurrogateError, match="Gaussians cannot be read"):
            gaussians_of(whole | {name: tensor})
    less = {other: each for other, each in whole.items() if other != name}
    for tensors in (less, less | {f"{name}s": whole[name]}):
        with pytest.raises(SurrogateError, match="Gaussians cannot be read"):
            gaussians_of(tensors)
    assert gaussians_of({}) is None
    assert gaussians_of(whole) is not None


SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
PARTS = ("within", "total")
TENSORS = (
    *("means", "mean"),
    *(f"{part}.{key}" for part in PARTS for key in ("directions", "variances", "rest")),
)


def without_dimension(mean: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Each shape is that of the others, but for a mean of several dimensions."""
    shapes: dict[str, tuple[int, ...]] = {"mean": mean, "means": (1, 0)}
    for part in PARTS:
        shapes |= {f"{part}.directions": (1, 0), f"{part}.variances": (1,), f"{part}.rest": (1,)}
    return shapes


@settings(max_examples=300)
@given(
    shapes=st.fixed_dictionaries(dict.fromkeys(TENSORS, SHAPES))
    | st.sampled_from(((2, 2), (2, 0), (3, 0, 2))).map(without_dimension)
)
def test_only_gaussians_of_one_dimension_are_read(shapes: dict[str, tuple[int, ...]]) -> None:
    """Of any shapes, together: either all fit, and each record gets two scores, or none is read."""
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    try:
        found = Gaussians.of(tensors)
    except ValueError:
        return
    (d,), count = shapes["mean"], shapes["means"][0]
    assert shapes["means"] == (count, d)
    assert all(each.shape == (4,) for each in found.scores(torch.zeros(4, d)))


def test_many_dimensions_are_decomposed_as_few_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond a dimension the decomposition is a random one of low rank."""
    (x, y), rank = records(), 11
    exact = fit_gaussians(x, y, rank)
    before = torch.get_rng_state()
    monkeypatch.setattr(gaussians, "EXACT_DIMENSION", 11)
    found = fit_gaussians(x, y, rank)
    assert torch.equal(torch.get_rng_state(), before)
    for one, other in ((found.within, exact.within), (found.total, exact.total)):
        assert torch.allclose(one.variances, other.variances, rtol=2e-2)
        assert torch.allclose(one.rest, other.rest, rtol=5e-2)
        # The same directions, whatever their signs.
        assert (one.directions * other.directions).sum(1).abs()[0] > 0.99
    monkeypatch.setattr(gaussians, "EXACT_DIMENSION", 12)
    again = fit_gaussians(x, y, rank)
    assert torch.equal(again.within.variances, exact.within.variances)


def test_records_of_another_distribution_score_higher() -> None:
    x, y = records(dimension=40)
    far = torch.randn(300, 40, generator=torch.Generator().manual_seed(5)) * 12
    found = fit_gaussians(x, y, rank=8)
    truth = [0] * len(x) + [1] * len(far)
    for column in found.scores(torch.cat([x, far])):
        assert roc_auc_score(truth, column) > 0.8


def test_a_class_without_two_records_has_no_gaussian() -> None:
    x, y = records()
    y[0] = 3
    assert len(fit_gaussians(x, y).means) == 3
    with pytest.raises(ValueError, match="no class has two records"):
        fit_gaussians(x[:1], y[:1])


def test_constant_features_give_finite_scores() -> None:
    x, y = records()
    x[:, 3] = 0.0
    for column in fit_gaussians(x, y).scores(x + 1):
        assert column.isfinite().all()
