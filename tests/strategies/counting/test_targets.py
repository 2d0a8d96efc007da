"""Surveys and evaluations of labels, numbers and times: against the records of all hospitals, from one
message to the page.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.common.targets.counted import COUNTED, THIRD
from fedsurrogate.common.targets.metrics import answers_of, facts_of
from fedsurrogate.server_app.counting import counting_budget, evaluation_settings, survey_settings
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.strategies.counting.strategy import payload_of
from fedsurrogate.strategies.targets.time import Cells, kaplan_meier, log_rank
from tests.grid import FAST, NodeConfig, metrics_of
from tests.strategies.counting.hospitals import allow, counted, entries, evaluated, renewed
from tests.strategies.counting.targets import KINDS, Tables, hospitals, learned, records, write

Json = dict[str, Any]
SIZES = (400, 300, 200)
ALL = 'mechanisms = ["*"]\nexact-counts = ["evaluation", "survey"]\nsmallest-cell = 1\nshow-evaluation = true\n'
SUM: Json = {"secure-aggregation": True, "dropouts": 0.0}
BOUNDS = {
    "survey": {"labels": 2**0.5, "number": 1.0, "time": 1.0},
    "evaluation": {"labels": 2**0.5, "number": 100 * 7**0.5, "time": 1.0},
}


@pytest.fixture(scope="module", params=list(KINDS))
def at_hospitals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp(str(request.param))
    nodes = hospitals(home, SIZES)
    return request.param, home, nodes, learned(home, nodes, request.param)


@pytest.fixture
def fresh(
    at_hospitals: tuple[str, Path, list[NodeConfig], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[str, list[NodeConfig], Path]:
    """A kind of target, hospitals with new ledgers and policies in `tmp_path`, and the run."""
    monkeypatch.setattr("fedsurrogate.strategies.base.collection.POLL_SECONDS", 0.01)
    kind, _, nodes, run = at_hospitals
    return kind, renewed(tmp_path, nodes, ALL), run


def surveyed(home: Path, nodes: list[NodeConfig], kind: str, epsilon: float, **more: Any) -> Json:
    budget = counting_budget(epsilon, 1e-5)
    folder = counted(home, nodes, survey_settings((), budget) | KINDS[kind] | more)
    found: Json = json.loads((folder / "survey.json").read_text())
    return found


def together(first: int, sizes: tuple[int, ...]) -> Tables:
    """The records of all hospitals, trained on (first 0) or held out (50)."""
    parts = [records(size, first + number) for number, size in enumerate(sizes)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def held_out() -> Tables:
    return together(50, tuple(size // 2 for size in SIZES))


def true_cells(kind: str) -> list[int]:
    """What a survey counts, from all training records."""
    of = together(0, SIZES)
    if kind == "labels":
        found = []
        for name in ("edema", "mass"):
            values = of[name]
            found += [(values == 1).sum(), (values == 0).sum(), np.isnan(values).sum()]
        return [int(each) for each in found]
    if kind == "number":
        values = of["fraction"].clip(0, np.nextafter(100, 0))
        return [int(each) for each in np.histogram(values, np.linspace(0, 100, 17))[0]]
    return [int(each) for each in np.bincount(time_cells(of), minlength=9)]


def time_cells(of: Any) -> Any:
    """Events in bins that hold their later edge; other records at the nearest edge."""
    places = np.digitize(of["months"], [3, 6, 9, 12], right=True)
    nearest = np.digitize(of["months"], [1.5, 4.5, 7.5, 10.5])
    return np.where((of["died"] == 1) & (places < 4), places, nearest + 4)


def test_an_exact_survey_counts_all_records(
    fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    kind, nodes, _ = fresh
    result = surveyed(tmp_path, nodes, kind, 0.0)
    assert [round(row["value"]) for row in result["classes"].values()] == true_cells(kind)
    assert result["records"]["value"] == sum(SIZES)
    assert len(result["per_site"]) == 3


def test_an_exact_sum_of_a_survey_counts_the_records_that_train(
    fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """As for classes: the others would follow from the sum of a run. A later exact sum of a run, of
    which other numbers of records may leave, is refused.
    """
    kind, nodes, _ = fresh
    sets = "; ".join(f"clinic-{k}=edema,mass" for k in range(3))
    more = SUM | ({"label-sets": sets} if kind == "labels" else {})
    result = surveyed(tmp_path, nodes, kind, 0.0, **more)
    cells = [row["value"] for row in result["classes"].values()]
    assert np.abs(np.array(cells) - 0.8 * np.array(true_cells(kind))).max() < 12
    assert "per_site" not in result
    for k in range(3):
        allow(tmp_path, k, "without-dp = true\nsmallest-class = 1\nexact-sums-at-models = true\n")
    with pytest.raises(RunError, match="the site's policy does not allow"):
        counted(tmp_path, nodes, FAST | KINDS[kind] | more)


@pytest.mark.parametrize("more", [{}, SUM], ids=["messages", "sum"])
def test_a_noisy_survey_is_charged_and_near_the_records(
    more: Json, fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    kind, nodes, _ = fresh
    result = surveyed(tmp_path, nodes, kind, 4.0, **more)
    cells = [row["value"] for row in result["classes"].values()]
    assert np.abs(np.array(cells) - true_cells(kind)).max() < 40
    assert cells != true_cells(kind)
    for node in nodes:
        (entry,) = entries(node)
        assert (entry["method"], entry["epsilon"]) == ("survey", 4.0)
        assert entry["sensitivities"]["records"] == pytest.approx(BOUNDS["survey"][kind], rel=1e-3)


def test_a_site_counts_only_labels_that_settings_say_it_annotates(tmp_path: Path) -> None:
    """Others would change whose counts the difference of two surveys shows."""
    nodes = hospitals(tmp_path, (60, 50))
    for k in range(2):
        allow(tmp_path, k, ALL)
    sets = {"label-sets": "clinic-0=edema; clinic-1=edema,mass"}
    counts = surveyed(tmp_path, nodes, "labels", 0.0, **sets)["per_site"]
    assert counts["clinic-0"][3:] == [0, 0, 60]
    assert sum(counts["clinic-0"][:2]) == 60
    assert sum(counts["clinic-1"][3:5]) > 20


def test_names_of_labels_are_no_markup_on_the_page(tmp_path: Path) -> None:
    hostile = "<b>x</b>&"
    own = records(60, 0)
    tables = {"x": own["x"], hostile: own["edema"], "mass": own["mass"]}
    nodes = hospitals(tmp_path, (60, 50))
    for k, node in enumerate(nodes):
        allow(tmp_path, k, ALL)
        folder = write(tmp_path / f"hostile-{k}", tables)
        node |= {"data-dir": str(folder), "target-columns": f"{hostile},mass"}
    settings = {"task": "multilabel", "label-columns": f"{hostile},mass"}
    budget = counting_budget(0.0, 1e-5)
    folder = counted(tmp_path, nodes, survey_settings((), budget) | settings)
    page = write_report(folder).read_text()
    assert hostile not in page
    assert "&lt;b&gt;x&lt;/b&gt;&amp;" in page


def answers(run: Path) -> tuple[Any, dict[str, np.ndarray], Tables]:
    """The model as sites receive it, and what it answers about all held-out records."""
    model = read_signed_model(run / "model.fedsurrogate").classifier
    of = held_out()
    scores = model.scores(torch.from_numpy(of["x"].astype(np.float32)))
    found = answers_of(target_of_model(model), model.header.classes, scores)
    return model, {name: each.numpy() for name, each in found.items()}, of


@pytest.mark.parametrize("more", [{}, SUM], ids=["messages", "sum"])
def test_an_exact_evaluation_is_that_of_all_held_out_records(
    more: Json, fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """The model travels at 16 bits, so single records may be decided otherwise."""
    kind, nodes, run = fresh
    if kind == "labels" and more:
        more = more | {"label-sets": "; ".join(f"clinic-{k}=edema,mass" for k in range(3))}
    model, found, of = answers(run)
    _, result = evaluated(tmp_path, nodes, run, epsilon=0.0, **more)
    assert result["model"] == payload_of(model)[1]
    assert len(nodes) == result["sites"]
    for name, own in result["outputs"].items():
        value = {key: each["value"] for key, each in own.items()}
        if kind == "labels":
            known = ~np.isnan(of[name])
            true, chance = of[name][known] == 1, found[name][known]
            area = roc_auc_score(true, chance)
            assert own["auroc"]["low"] <= area <= own["auroc"]["high"]
            assert value["auroc"] == pytest.approx(area, abs=0.03)
            assert value["records"] == known.sum()
            assert value["present"] == true.sum()
            decided = chance > 0.5
            assert value["sensitivity"] == pytest.approx(decided[true].mean(), abs=0.02)
            assert value["specificity"] == pytest.approx(1 - decided[~true].mean(), abs=0.02)
        elif kind == "number":
            true, predicted = of[name].clip(0, 100), found[name].clip(0, 100)
            error = predicted - true
            within = (of[name] >= found[f"{name} low"]) & (of[name] <= found[f"{name} high"])
            assert value["records"] == len(true)
            assert value["mae"] == pytest.approx(np.abs(error).mean(), abs=0.05)
            assert value["rmse"] == pytest.approx((error**2).mean() ** 0.5, abs=0.1)
            assert value["bias"] == pytest.approx(error.mean(), abs=0.05)
            assert value["r2"] == pytest.approx(1 - (error**2).mean() / true.var(), abs=0.01)
            assert value["coverage"] == pytest.approx(within.mean(), abs=0.01)
    if kind == "time":
        spread = float(facts_of(target_of_model(model))["spread"])
        third = np.digitize(found["risk"], [-THIRD * spread, THIRD * spread])
        cell = time_cells(of)
        groups = [
            Cells.of(torch.from_numpy(np.bincount(cell[third == each], minlength=9)).double())
            for each in range(3)
        ]
        for group, (name, own) in zip(groups, result["outputs"].items(), strict=True):
            assert own["records"]["value"] == pytest.approx(float(group.counts.sum()), abs=4)
            curve = kaplan_meier(group).survival.tolist()
            assert result["curves"][name]["survival"] == pytest.approx(curve, abs=0.03)
        test = log_rank(groups)
        assert result["log_rank"]["statistic"] == pytest.approx(test["statistic"], rel=0.1)
        values = [own["survival"]["value"] for own in result["outputs"].values()]
        assert values == sorted(values, reverse=True)
    assert ("per_site" in result) == (not more)
    if not more:
        assert result["per_site"].keys() == {f"clinic-{k}" for k in range(3)}


@pytest.mark.parametrize("more", [{}, SUM], ids=["messages", "sum"])
def test_a_noisy_evaluation_is_charged_and_its_page_names_every_output(
    more: Json, fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    kind, nodes, run = fresh
    folder, result = evaluated(tmp_path, nodes, run, epsilon=4.0, **more)
    (table,) = result["noise"]
    for node in nodes:
        (entry,) = entries(node)
        assert (entry["method"], entry["epsilon"]) == ("evaluation", 4.0)
        assert entry["sensitivities"] == {
            table: pytest.approx(BOUNDS["evaluation"][kind], rel=1e-3)
        }
    assert metrics_of(folder)["privacy"]["epsilon"] == 4.0
    write_report(folder)
    page = (folder / "report.html").read_text()
    for name, own in result["outputs"].items():
        assert name in page
        shown = [each["value"] for each in own.values() if each["value"] is not None]
        assert len(shown) >= 2
    assert ("per_site" in result) == (not more)


def test_a_small_cell_leaves_no_trace_in_exact_counts(
    fresh: tuple[str, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """Of two questions, both count all records: a cell that is missing alone would follow."""
    kind, nodes, run = fresh
    least = {"labels": 45, "number": 20, "time": 25}[kind]
    for k in range(3):
        allow(tmp_path, k, ALL.replace("smallest-cell = 1", f"smallest-cell = {least}"))
    result = surveyed(tmp_path, nodes, kind, 0.0)
    left = 0
    for counts in result["per_site"].values():
        assert all(each == 0 or each >= least for each in counts)
        assert any(counts)
        if kind == "labels":
            totals = {sum(counts[:3]), sum(counts[3:])} - {0}
            assert len(totals) <= 1
        left += sum(each == 0 for each in counts)
    assert left
    # No label, number or time of the smallest hospital has so many held-out records of each kind.
    allow(tmp_path, 2, ALL.replace("smallest-cell = 1", "smallest-cell = 101"))
    for k in range(2):
        allow(tmp_path, k, ALL)
    _, judged = evaluated(tmp_path, nodes, run, epsilon=0.0)
    assert judged["sites"] == 2


def test_a_target_that_nothing_counts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(COUNTED, "survival")
    with pytest.raises(
        ConfigError, match="'survival' is not counted; sites can count multilabel, regression"
    ):
        parse_run({"counting.kind": "survey"} | KINDS["time"])


def test_an_evaluation_knows_the_scale_of_the_errors(
    fresh: tuple[str, list[NodeConfig], Path],
) -> None:
    kind, _, run = fresh
    settings, _ = evaluation_settings(run, counting_budget(1.0, 1e-5))
    facts = facts_of(target_of_model(read_signed_model(run / "model.fedsurrogate").classifier))
    wanted = 4 * facts["deviation"][0] / 100 if kind == "number" else 1.0
    assert settings["counting.largest-error"] == pytest.approx(min(1.0, wanted))
