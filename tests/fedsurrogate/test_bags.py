"""Bags in Python: what is learned from images in bags is what is learned from their means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.common.errors import ConfigError, DataError

TARGETS: dict[str, dict[str, Any]] = {
    "class": {"covariance": "gram"},
    "number": {"task": "regression", "target_range": (-3, 3)},
    "labels": {"task": "multilabel", "label_columns": "edema,mass"},
    "time": {"task": "survival", "horizon": 3.0, "bins": 3, "secure_aggregation": True},
}


def bags(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images (m, d) in bags (m,), in any order, the mean of each bag, and one number of it."""
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, 6, (count,), generator=draw)
    of = torch.arange(count).repeat_interleave(sizes)
    of = of[torch.randperm(len(of), generator=draw)]
    # Bags stand in the order of their first images.
    _, first = torch.unique(of, return_inverse=True)
    seen: dict[int, int] = {}
    of = torch.tensor([seen.setdefault(bag, len(seen)) for bag in first.tolist()])
    x = torch.randn(len(of), 4, generator=draw)
    means = torch.stack([x[of == bag].double().mean(0) for bag in range(count)]).float()
    return x, of, means, means[:, 0] + 0.1 * torch.randn(count, generator=draw)


def target_of(kind: str, u: Tensor) -> Any:
    """The target (n, ...) that follows from a number (n,)."""
    return {
        "class": ["ab"[int(each > 0)] for each in u],
        "number": u,
        "labels": torch.stack([(u > 0).double(), (u > 0.3).double()], 1),
        "time": torch.stack([u.abs() + 0.1, (u > -0.5).double()], 1),
    }[kind]


def taken(values: Any, of: Tensor) -> Any:
    return [values[i] for i in of.tolist()] if isinstance(values, list) else values[of]


@pytest.mark.parametrize("kind", TARGETS)
def test_a_run_on_images_in_bags_is_one_on_the_means_of_the_bags(kind: str, tmp_path: Path) -> None:
    entries = [bags(40, seed) for seed in range(3)]
    images, means, names = [], [], []
    for x, of, mean, u in entries:
        values = target_of(kind, u)
        images.append((x, taken(values, of)))
        means.append((mean, values))
        names.append([f"bag {bag}" for bag in of.tolist()])
    settings = TARGETS[kind] | {"output_dir": tmp_path, "test_fraction": 0.25}
    pooled = fs.simulate(images[:2], test=images[2], bags=names, **settings)
    plain = fs.simulate(means[:2], test=means[2], **settings)
    one, other = (
        torch.cat([each.flatten() for each in run.model.classifier.arrays().values()])
        for run in (pooled, plain)
    )
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert pooled.metrics["accuracy"] == plain.metrics["accuracy"]
    for output, metric_values in plain.metric_values.items():
        assert pooled.metric_values[output] == pytest.approx(metric_values, rel=1e-4)
    assert "images in 60 bags" in str(pooled.metrics)


@pytest.mark.parametrize("kind", ["class", "number", "labels"])
def test_what_a_site_sends_for_bags_is_what_it_sends_for_their_means(kind: str) -> None:
    x, of, means, u = bags(30, 0)
    values = target_of(kind, u)
    one = fs.fit(x, taken(values, of), bags=of.tolist(), **TARGETS[kind])
    other = fs.fit(means, values, **TARGETS[kind])
    assert one.records == other.records == 30
    assert one.config.digest != other.config.digest
    assert len(one.payload) == len(other.payload)


def test_a_bag_with_two_targets_is_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"1 of 2 bags have images with different targets.*'left'"):
        fs.fit(torch.rand(3, 2), ["a", "b", "a"], bags=["left", "left", "right"])


def test_bags_of_two_patients_with_one_name_are_two() -> None:
    made = fs.fit(torch.rand(4, 2), ["a", "b"] * 2, bags=["left"] * 4, patients=["ann", "bob"] * 2)
    assert made.records == 2


def test_arrays_of_bags_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    pair = (torch.rand(4, 2), ["a", "b"] * 2)
    with pytest.raises(ConfigError, match="bags has 1 arrays for 2 pairs"):
        fs.simulate([pair, pair], bags=[[1, 1, 2, 2]], output_dir=tmp_path)
    with pytest.raises(DataError, match="3 bags for 4 records"):
        fs.simulate([pair], bags=[[1, 1, 2]], output_dir=tmp_path)
    with pytest.raises(ConfigError, match="bag-column"):
        fs.simulate(2, bags=[[1]], output_dir=tmp_path)
