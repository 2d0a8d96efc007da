"""The strength of ridges holds where features are ill-conditioned, as raw pixels are: from messages of
16 bits, and from sums in whole steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import roc_auc_score

import fedsurrogate as fs
from fedsurrogate.strategies.targets.number import (
    Annotated,
    Directions,
    Outcomes,
    cross_validated,
    label_heads,
    of_least_error,
)
from tests.coded import coded, exact_code

Array = NDArray[np.float64]


def pixels(draw: np.random.Generator, records: int, size: int, decay: float) -> Array:
    """Records of which each pixel is nearly the mean of those around it, in 0 to 1, and some nearly
    twice there: eigenvalues of the covariance fall by ten to the power of `decay`.
    """
    basis = np.linalg.qr(draw.normal(size=(size, size)))[0]
    scores = draw.normal(size=(records, size)) * np.logspace(0, -decay / 2, size)
    scores[records // 2 :] = scores[: records - records // 2] * 0.98 + 0.02 * scores[records // 2 :]
    return np.asarray(0.5 + 0.1 * scores @ basis)


@pytest.mark.parametrize("secure_aggregation", [False, True])
@pytest.mark.parametrize("decay", [3.0, 7.0, 10.0])
def test_a_run_on_ill_conditioned_features_predicts_as_scikit_learn_does(
    decay: float, secure_aggregation: bool, tmp_path: Path
) -> None:
    draw = np.random.default_rng(int(decay))
    x = pixels(draw, 900, 240, decay)
    true = x @ draw.normal(size=240)
    y = true + true.std() * draw.normal(size=900)
    train, test = slice(0, 600), slice(600, 900)
    span = 4 * float(y.std())
    parts = [(x[train][i::3], y[train][i::3]) for i in range(3)]
    more: dict[str, Any] = {
        "secure_aggregation": secure_aggregation,
        "secure_aggregation_range": 4.0,
    }
    middle = float(y.mean())
    run = fs.simulate(
        parts,
        task="regression",
        target_range=(middle - span, middle + span),
        output_dir=tmp_path,
        **(more | {"dropouts": 0.0} if secure_aggregation else {}),
    )
    told = run.model.answers(x[test])["value"]
    ours = 1 - np.square(told - y[test]).mean() / y[test].var()
    pooled = RidgeCV(np.logspace(-8, 3, 60)).fit(x[train], y[train]).score(x[test], y[test])
    assert ours > pooled - 0.03


@given(
    seed=st.integers(0, 2**20),
    size=st.integers(5, 80),
    records=st.integers(60, 300),
    decay=st.floats(0.0, 12.0),
    digits=st.sampled_from([2.0**-11, 2.0**-8, 0.0]),
)
@settings(max_examples=40, deadline=None)
def test_no_rounding_makes_weights_that_predict_worse_than_the_mean(
    seed: int, size: int, records: int, decay: float, digits: float
) -> None:
    draw = np.random.default_rng(seed)
    x = torch.tensor(pixels(draw, records, size, decay))
    y = (x - x.mean(0)) @ torch.tensor(draw.normal(size=size))
    y = y / y.std() + torch.tensor(draw.normal(size=records))
    covariance, cross = torch.cov(x.T, correction=0), (x - x.mean(0)).T @ y / records
    error = torch.tensor(draw.uniform(-1, 1, (size, size))).tril()
    error = (error + error.tril(-1).T) * covariance.abs() * digits
    rounding = 2 * digits / 3**0.5 * float(covariance.norm(dim=1).max())
    outcomes = Outcomes(
        cross[None],
        y.var(correction=0)[None],
        torch.tensor([float(records)], dtype=torch.float64),
        torch.zeros(1, dtype=torch.float64),
    )
    directions = Directions.of(covariance + error, rounding)
    for fitted in (
        cross_validated(directions, outcomes),
        of_least_error(directions, outcomes, float(records)),
    ):
        weight = fitted.weight[0]
        # On the records themselves: what a ridge without rounding could never exceed.
        error_of = float(outcomes.variance[0] - 2 * weight @ cross + weight @ covariance @ weight)
        assert error_of <= 1.05 * float(outcomes.variance[0])
        assert float(fitted.strength[0]) >= min(rounding, float(directions.values.mean()) * 100)


@given(seed=st.integers(0, 2**20), decay=st.floats(0.0, 4.0))
@settings(max_examples=12, deadline=None)
def test_labels_of_few_records_rank_as_logistic_regression_does(seed: int, decay: float) -> None:
    """Where as many dimensions as records are, residuals of a shared covariance would choose hardly
    any ridge.
    """
    draw = np.random.default_rng(seed)
    x = pixels(draw, 1200, 150, decay)
    scores = (x - x.mean(0)) @ draw.normal(size=(150, 4))
    truth = (scores / scores.std(0) + 0.7 * draw.normal(size=scores.shape) > 0.5).astype(float)
    labels = np.where(draw.random((240, 4)) < 0.6, truth[:240], np.nan)
    sums = coded(exact_code(torch.tensor(labels)), torch.tensor(x[:240]))
    heads = label_heads(sums, Annotated.exact(sums, 4), list("abcd"))
    test = x[600:900]
    told = (torch.tensor(test) @ heads.weight.T + heads.bias).numpy()
    ours, pooled = [], []
    for column, name in enumerate(heads.labels):
        at = "abcd".index(name)
        seen = ~np.isnan(labels[:, at])
        ours.append(roc_auc_score(truth[600:900, at], told[:, column]))
        peers = [
            LogisticRegression(C=c, max_iter=500).fit(x[:240][seen], labels[seen, at])
            for c in (0.1, 10.0, 1000.0)
        ]
        pooled.append(
            max(roc_auc_score(truth[600:900, at], each.decision_function(test)) for each in peers)
        )
    assert np.mean(ours) > np.mean(pooled) - 0.04
