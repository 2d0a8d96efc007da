"""What the report says of a model of another target than classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedsurrogate as fs


@pytest.mark.parametrize("outputs", [1, 3])
def test_the_page_has_what_the_run_measured_and_its_score_first(
    outputs: int, tmp_path: Path
) -> None:
    drawn = np.random.default_rng(0)
    x = drawn.normal(size=(300, 4)).astype("float32")
    names = [f"age {each}" for each in range(outputs)]
    y = x[:, :1] * np.arange(1, outputs + 1) + drawn.normal(size=(300, outputs))
    run = fs.simulate(
        [(x[::2], y[::2]), (x[1::2], y[1::2])],
        task="regression",
        target_range=(-9, 9),
        value_columns=",".join(names),
        output_dir=tmp_path,
    )
    page = run.report().read_text()
    mean = sum(own["r2"] for own in run.metric_values.values()) / outputs
    score = f"R² {mean:.3f}" if outputs == 1 else f"a mean R² of {mean:.3f} over 3 answers"
    heading = " ".join(page.partition("<h1>")[2].partition("</h1>")[0].split())
    assert f"reaches {score} on test records" in heading
    assert "not measured" not in page
    for name, own in run.metric_values.items():
        assert f'>all sites</td><td class="name" data-name="answer">{name}</td>' in page
        assert f">{own['mae']:.4g}</td>" in page
    sites = page.partition("<h2>Sites</h2>")[2]
    trained = run.metrics["card"]["records"].values()
    assert all(f'data-name="records">{records}</td>' in sites for records in trained)
    assert "whether each class" not in sites
