"""Sums of sites, by the code that sites and coordinator run, give the model of all records together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_diabetes
from sklearn.linear_model import Ridge
from torch import Tensor

import fedsurrogate as fs
from fedsurrogate.common.costs import payload_bytes
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.strategies.closed_form.statistics import Statistics
from fedsurrogate.strategies.targets import sums as received
from fedsurrogate.strategies.targets.number import number_head
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.time import risk_head
from tests.strategies.targets.test_label_codes import total

NUMBER: dict[str, Scalar] = {"task": "regression", "target-range": "0,400"}
TIME: dict[str, Scalar] = {"task": "survival", "horizon": 3.0, "bins": 6}


def dealt(count: int, sites: int, seed: int) -> list[Tensor]:
    """Rows of each site, by Dirichlet(0.1), none empty."""
    draw = np.random.default_rng(seed)
    of = draw.choice(sites, count, p=draw.dirichlet([0.1] * sites) * 0.5 + 0.5 / sites)
    of[:sites] = range(sites)
    return [torch.from_numpy((of == site).nonzero()[0]) for site in range(sites)]


def added(run: Run, x: Tensor, y: Tensor, parts: Sequence[Tensor]) -> CodedSums:
    """The sums of all sites, in double precision: without rounding of a message or of steps."""
    return total(run, [(x[part], y[part]) for part in parts])


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(received, "HALF", 0.0)


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("sites", [1, 5, 50])
def test_numbers_are_a_ridge_of_all_records(sites: int, secure: bool) -> None:
    x, y = map(torch.from_numpy, load_diabetes(return_X_y=True))
    run = parse_run(NUMBER | {"secure-aggregation": secure})
    sums = added(run, x, y[:, None], dealt(len(x), sites, 0))
    head = number_head(sums, [0.0], [400.0])
    alpha = float(head.strength[0]) * len(x)
    oracle = Ridge(alpha=alpha).fit(x.numpy(), y.numpy())
    answers = x @ head.weight[0] + head.bias[0]
    assert np.abs(oracle.predict(x.numpy()) / answers.numpy() - 1).max() < 1e-9


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("secure", [False, True])
def test_cells_of_sites_are_those_of_all_records(secure: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(400, 4, generator=draw, dtype=torch.float64) + 1
    values = torch.stack([4 * torch.rand(400, generator=draw), (x[:, 0] > 1).float()], 1).double()
    run = parse_run(TIME)
    one = added(run, x, values, [torch.arange(400)])
    summed = parse_run(TIME | {"secure-aggregation": secure})
    many = added(summed, x, values, dealt(400, 50, 0))
    heads = [risk_head(each) for each in (one, many)]
    assert torch.allclose(heads[0].weight, heads[1].weight, rtol=1e-9, atol=1e-9)
    assert isinstance(many.moment, Statistics)


def test_constant_features_do_not_spoil_an_exact_secure_aggregation(tmp_path: Path) -> None:
    """Their variance is that of rounding to whole steps, which a ridge must not take for theirs."""
    draw = np.random.default_rng(0)
    constant = np.tile(draw.random(60), (600, 1)) + 1e-4 * draw.normal(size=(600, 60))
    x = np.c_[draw.normal(size=(600, 4)), constant]
    sites = [(x[part::3], x[part::3, 0] + 0.1 * draw.normal(size=200)) for part in range(3)]
    settings: dict[str, Any] = {
        "secure_aggregation": True,
        "dropouts": 0.0,
        "target_range": (-4, 4),
    }
    run = fs.simulate(sites, task="regression", output_dir=tmp_path, **settings)
    assert run.metrics["metric_values"]["all"]["value"]["r2"] > 0.95


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "regression", "target_range": (0, 9)},
        {"task": "multilabel", "label_columns": "a,b"},
        {"task": "survival", "horizon": 3.0, "bins": 1},
    ],
)
@pytest.mark.parametrize("private", [{}, {"epsilon": 2.0, "delta": 1e-5}])
def test_a_message_has_the_planned_size(settings: dict[str, Any], private: dict[str, Any]) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(200, 40))
    y = {
        "regression": x[:, 0],
        "multilabel": (x[:, :2] > 0).astype(float),
        "survival": np.stack([4 * draw.random(200), draw.integers(0, 2, 200)], 1),
    }[settings["task"]]
    sent = fs.fit(x, y, **settings, **private)
    planned = payload_bytes(sent.config, 40, len(sent.classes), 200)
    assert abs(len(sent.payload) - planned) < 300
