"""FedCGS: the Gaussian classifier of all records together, whatever the sites."""

from __future__ import annotations

import numpy as np
import pytest

from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.strategies.closed_form.solvers import gaussian
from fedsurrogate.strategies.closed_form.strategy import pooled_sums
from fedsurrogate.strategies.heads.analytic import GlobalStatistics
from tests.examples import CLASSES, Hospital, records, three_hospitals


def head_of(sent: list[Parameters]) -> Head:
    return gaussian(pooled_sums(sent, {}, CLASSES), 0.0).head(sent[0].header)


def test_the_head_is_the_papers_for_sites_of_one_class_each() -> None:
    whole = records()
    head = head_of([each.sums() for each in three_hospitals(whole)])
    x, y = whole.features.numpy(), whole.labels.numpy()
    means, counts = np.stack([x[y == c].mean(0) for c in range(3)]), np.bincount(y)
    weight = means @ np.linalg.inv(np.cov(x.T))
    np.testing.assert_allclose(head.weight, weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        head.bias, np.log(counts / len(y)) - (weight * means).sum(1) / 2, rtol=1e-4, atol=1e-5
    )


def without_variance() -> Hospital:
    """Records whose fifth dimension is always zero."""
    whole = records()
    whole.features[:, 4] = 0.0
    return whole


def test_a_dimension_without_variance_has_no_weight() -> None:
    whole = without_variance()
    head = head_of([whole.sums()])
    assert head.weight.isfinite().all()
    assert not head.weight[:, 4].any()
    assert float((head.predict(whole.features.float()) == whole.labels).double().mean()) > 0.6


def test_the_ridge_that_a_singular_covariance_took_is_stated() -> None:
    strategy = GlobalStatistics({"method": "fedcgs"})
    assert not strategy.learn([records().sums()], CLASSES).facts
    assert (
        0 < float(strategy.learn([without_variance().sums()], CLASSES).facts["added-ridge"]) < 1e-9
    )


@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_the_ridge_of_the_settings_is_a_share_of_the_mean_variance(ridge: float) -> None:
    whole = records()
    means = pooled_sums([whole.sums()], {}, CLASSES).means
    strategy = GlobalStatistics({"method": "fedcgs", "fedcgs.ridge": ridge})
    head = strategy.learn([whole.sums()], CLASSES).model
    assert isinstance(head, Head)
    covariance = np.cov(whole.features.numpy().T)
    covariance += ridge * np.trace(covariance) / len(covariance) * np.eye(len(covariance))
    np.testing.assert_allclose(
        head.weight, np.linalg.solve(covariance, means.numpy().T).T, rtol=1e-4, atol=1e-5
    )
