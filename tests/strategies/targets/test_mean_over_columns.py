"""Private runs of numbers, labels and times: an offset that all columns share hides nothing, because
features keep little of the mean over their own columns before the clip, as for classes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedsurrogate as fs
from fedsurrogate.common.privacy.shares import ALL, KEPT, KEPT_OF_FEW
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.heads import FEWEST_MEAN, FEWEST_OWN

Array = NDArray[np.float64]
SITES, RECORDS, OFFSET = 3, 800, 1000.0
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
# Settings of each kind of target, and what is at chance in its metric.
TARGETS: dict[str, tuple[dict[str, Any], str, float]] = {
    "regression": ({"target_range": (-4.0, 4.0)}, "r2", 0.0),
    "multilabel": ({"label_columns": "low,high"}, "auroc", 0.5),
    "cells": ({"horizon": 3.0, "time_head": "cells"}, "concordance", 0.5),
    "residuals": ({"horizon": 3.0, "time_head": "residuals"}, "concordance", 0.5),
}


def task_of(name: str) -> str:
    """The setting `task`."""
    return "survival" if name in ("cells", "residuals") else name


def values(name: str, hidden: Array, seed: int) -> Array:
    """What a record's hidden number makes of a target."""
    if name == "regression":
        return hidden.clip(-4, 4)
    if name == "multilabel":
        return np.stack([hidden < 0, hidden > 0.5], 1).astype(float)
    times = np.random.default_rng(seed).exponential(np.exp(-hidden)).clip(1e-3, 3.0)
    return np.stack([times, (times < 3.0).astype(float)], 1)


def site(name: str, seed: int, columns: int) -> tuple[Array, Array]:
    """Records around an offset of all columns; a hidden number moves them along one direction."""
    drawn = np.random.default_rng(seed)
    hidden = drawn.standard_normal(RECORDS)
    way = np.random.default_rng(99).standard_normal(columns)
    apart = 3 * hidden[:, None] * way / np.linalg.norm(way)
    features = OFFSET + apart + drawn.standard_normal((RECORDS, columns))
    return features, values(name, hidden, seed)


def run(name: str, folder: Path, columns: int = 64, **more: Any) -> fs.Result:
    """A simulated run of three sites."""
    sites = [site(name, seed, columns) for seed in range(SITES)]
    settings = PRIVATE | TARGETS[name][0] | more
    return fs.simulate(sites, task=task_of(name), output_dir=str(folder), **settings)


def score(result: fs.Result, metric: str) -> float:
    """The mean of a metric over the outputs."""
    rows = result.metrics["metric_values"]["all"].values()
    return float(np.mean([row[metric] for row in rows]))


@pytest.mark.slow
@pytest.mark.parametrize("secure", [False, True], ids=["messages", "secure aggregation"])
@pytest.mark.parametrize("name", TARGETS)
def test_an_offset_of_all_columns_hides_no_target(name: str, secure: bool, tmp_path: Path) -> None:
    _, metric, chance = TARGETS[name]
    more = {"secure_aggregation": True} if secure else {}
    now = score(run(name, tmp_path / "now", **more), metric)
    # What noise leaves is right or wrong by chance; one run may be far from it.
    more["features__projection"] = ""
    before = [score(run(name, tmp_path / str(turn), **more), metric) for turn in range(4)]
    assert now > max(chance + 0.15, float(np.mean(before)) + 0.05)


@pytest.mark.parametrize("name", TARGETS)
def test_a_run_says_what_features_keep(name: str) -> None:
    flat: dict[str, Any] = {"task": task_of(name), **PRIVATE}
    flat |= {key.replace("_", "-"): value for key, value in TARGETS[name][0].items()}
    flat |= {"target-range": "-4,4"} if name == "regression" else {}
    here, other = parse_run(flat), parse_run(flat | {"features.projection": ""})
    exact = parse_run({key: value for key, value in flat.items() if key not in PRIVATE})
    assert here.digest != other.digest
    for plan, columns, kept in (
        (here.plan, FEWEST_OWN, KEPT),
        (here.plan, FEWEST_OWN - 1, KEPT_OF_FEW),
        (here.plan, FEWEST_MEAN, KEPT_OF_FEW),
        (here.plan, FEWEST_MEAN - 1, ALL),
        (other.plan, FEWEST_OWN, ALL),
        (exact.plan, FEWEST_OWN, ALL),
    ):
        assert plan.mean_over_columns_weight(columns) == kept
