"""FedCGS: the Gaussian classifier of all records together, whatever the sites."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.models.classifiers import Head
from strategies.heads.global_statistics import GlobalStatistics, solve
from strategies.heads.pooled import Pooled
from tests.strategies.heads.test_analytic import CLASSES, records, sums


def test_the_head_is_the_papers_for_sites_of_one_class_each() -> None:
    features, labels = records()
    rows = [labels == index for index in range(3)]
    sites = [
        sums(features[own], torch.zeros(int(own.sum()), dtype=torch.int64), (CLASSES[i],), f"s{i}")
        for i, own in enumerate(rows)
    ]
    head = solve(Pooled.of(sites, [1.0] * 3, CLASSES), 0.0)
    x, y = features.numpy(), labels.numpy()
    means, counts = np.stack([x[y == c].mean(0) for c in range(3)]), np.bincount(y)
    weight = means @ np.linalg.inv(np.cov(x.T))
    np.testing.assert_allclose(head.weight, weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias, np.log(counts / len(y)) - (weight * means).sum(1) / 2, rtol=1e-4, atol=1e-5)


def test_a_dimension_without_variance_has_no_weight() -> None:
    features, labels = records()
    features[:, 4] = 0.0
    head = solve(Pooled.of([sums(features, labels)], [1.0], CLASSES), 0.0)
    assert head.weight.isfinite().all()
    assert not head.weight[:, 4].any()
    assert float((head.predict(features.float()) == labels).double().mean()) > 0.6


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_the_ridge_of_the_settings_is_a_share_of_the_mean_variance(ridge: float) -> None:
    features, labels = records()
    found = Pooled.of([sums(features, labels)], [1.0], CLASSES)
    strategy = GlobalStatistics({"method": "fedcgs", "fedcgs.ridge": ridge})
    head = strategy.learn([sums(features, labels)], CLASSES).model
    assert isinstance(head, Head)
    covariance = np.cov(features.numpy().T)
    covariance += ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    np.testing.assert_allclose(head.weight, np.linalg.solve(covariance, found.means.numpy().T).T, rtol=1e-4, atol=1e-5)
