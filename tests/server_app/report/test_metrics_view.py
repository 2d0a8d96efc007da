"""What the report says of a model of another target than classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import fedsurrogate as fs
from fedsurrogate.common.signed_models.signed_model import SUFFIX, read_signed_model
from fedsurrogate.server_app.export.model_card import model_card
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.metrics import RANKS_WITHIN
from tests.client_app.model_use import test_targets_at_work as at_work
from tests.grid import InProcessGrid, metrics_of, run_federation


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


def test_ranks_of_sites_that_test_alone_are_called_so(tmp_path: Path) -> None:
    """The AUROC over sites is that of the pairs within sites; one over all records may differ."""
    nodes = at_work.hospitals(tmp_path, count=2)
    settings = at_work.RUN | at_work.KINDS["labels"]
    folder = run_federation(tmp_path, InProcessGrid(nodes), **settings)
    found = metrics_of(folder)["metric_values"]
    assert found["ranks"] == RANKS_WITHIN
    for label in ("even", "large"):
        rows = [own[label] for own in found["per_site"].values()]
        pairs = [row["positive"] * (row["records"] - row["positive"]) for row in rows]
        within = np.average([row["auroc"] for row in rows], weights=pairs)
        assert found["all"][label]["auroc"] == pytest.approx(within)
    heading = write_report(folder).read_text().partition("<h1>")[2].partition("</h1>")[0]
    assert "a mean AUROC within sites of" in " ".join(heading.split())
    (signed,) = folder.glob(f"*{SUFFIX}")
    card = model_card(read_signed_model(signed), folder).replace("\\", "")
    assert f"test records of each site. {RANKS_WITHIN}" in card


def test_ranks_of_a_simulation_with_test_records_compare_all_of_them(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    parts = []
    for shift in (0.0, 3.0, 1.0):
        x = random.normal(size=(200, 4)) + shift
        parts.append((x, (x[:, :1] + random.normal(size=(200, 1)) > shift).astype(float)))
    run = fs.simulate(parts[:2], test=parts[2], task="multilabel", output_dir=tmp_path)
    assert run.metrics["metric_values"]["ranks"] == ""
    x, y = parts[2]
    ((name, own),) = run.metric_values.items()
    assert own["auroc"] == pytest.approx(roc_auc_score(y[:, 0], run.model.answers(x)[name]))
    assert "within sites" not in run.report().read_text().partition("</h1>")[0]
