"""A run whose model may be no better than chance has no green card, wherever a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedsurrogate as fs
from fedsurrogate.server_app.cli.control import show_result
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.scores import may_be_chance

PRIVATE = {"epsilon": 1.0, "delta": 1e-5}


def records(seed: int, shares: tuple[float, ...], apart: float) -> tuple[np.ndarray, np.ndarray]:
    """Features of 600 records, and their classes, which differ by so much in one column each."""
    random = np.random.default_rng(seed)
    y = random.choice(len(shares), 600, p=shares)
    x = random.normal(size=(600, 8))
    x[np.arange(600), y] += apart
    return x, y


@pytest.mark.parametrize(
    ("shares", "own"),
    [
        ((0.5, 0.5), PRIVATE),
        ((0.9, 0.1), PRIVATE),
        ((0.9, 0.1), PRIVATE | {"secure_aggregation": True}),
        ((0.25, 0.25, 0.25, 0.25), {}),
    ],
)
def test_a_model_at_chance_has_no_green_card(
    shares: tuple[float, ...],
    own: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = own | {"classes": ",".join(map(str, range(len(shares))))}
    for apart, state in ((0.0, "amber"), (5.0, "green")):
        sites = [records(seed, shares, apart) for seed in range(2)]
        run = fs.simulate(sites, test=records(9, shares, apart), output_dir=tmp_path, **own)
        # Labels that features say nothing of may look better than chance on a few hundred records.
        if apart == 0 and abs(run.auroc - 0.5) > 0.05:
            continue
        metrics = json.loads((run.folder / "metrics.json").read_text())
        assert metrics["card"]["state"] == state
        assert metrics["card"]["at_chance"] == (state == "amber")
        show_result(run.folder, tmp_path, False, False)
        printed = capsys.readouterr()
        said = " ".join((printed.out + printed.err).split())
        assert ("amber: the model may be no better than chance" in said) == (state == "amber")
        page = write_report(run.folder).read_text()
        assert ("The model may be no better than chance" in page) == (state == "amber")


@pytest.mark.parametrize(
    ("accuracy", "counts", "classes", "found"),
    [
        # Measured at the sites alone, as in a deployment.
        ({"per_site": {"a": 0.8, "b": 0.9}}, [{"x": 80, "y": 20}, {"x": 90, "y": 10}], 2, True),
        ({"per_site": {"a": 0.9, "b": 1.0}}, [{"x": 80, "y": 20}, {"x": 90, "y": 10}], 2, False),
        ({"model": 0.85}, [{"x": 80, "y": 20}, {"x": 90, "y": 10}], 2, True),
        # Secure aggregation: no site has reported records.
        ({"per_site": {"a": 0.26, "b": 0.22}}, [], 4, True),
        ({"per_site": {"a": 0.5, "b": 0.4}}, [], 4, False),
        # Nothing was measured.
        ({"per_site": {}}, [{"x": 80, "y": 20}], 2, False),
    ],
)
def test_without_metrics_an_accuracy_is_compared_with_the_majority_baseline(
    accuracy: dict[str, Any], counts: list[dict[str, float]], classes: int, found: bool
) -> None:
    assert may_be_chance(None, accuracy, counts, classes) == found
