"""A run whose model may be no better than chance has no green card, wherever a person meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.server_app.cli.control import show_result
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.runs.metrics import missing_line, run_card
from fedsurrogate.server_app.runs.scores import answers_at_chance, may_be_chance
from fedsurrogate.strategies.base.outcome import ALIKE, Site
from tests.client_app.model_use import test_targets_at_work as at_work
from tests.client_app.model_use.hospitals import PRIVATE as DEPLOYED
from tests.client_app.model_use.hospitals import hospital, rows_of_classes
from tests.grid import FAST, InProcessGrid, metrics_of, run_federation

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


TASKS: dict[str, dict[str, Any]] = {
    "multilabel": {},
    "regression": {"target_range": "20,80"},
    "survival": {"horizon": 3.0},
}


def values(task: str, hidden: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """What follows from a hidden number of each record."""
    if task == "multilabel":
        return np.stack([hidden > 0, hidden > 1], 1).astype(float)
    if task == "regression":
        return np.asarray(50 + 10 * hidden)[:, None]
    event, seen = random.exponential(np.exp(-hidden)), random.exponential(2, len(hidden))
    return np.stack([np.minimum(event, seen).round(1), event <= seen], 1).astype(float)


@pytest.mark.parametrize("task", TASKS)
def test_answers_that_follow_chance_are_seldom_called_better(task: str) -> None:
    random, kind, better = np.random.default_rng(3), TARGETS[task], 0
    for _ in range(80):
        hidden = random.normal(size=120)
        table = torch.from_numpy(values(task, hidden, random))
        # With ties; of numbers, around their mean and of any spread.
        scores = torch.from_numpy(random.normal(size=120).round(1))
        scores = 50 + random.uniform(0, 4) * scores if task == "regression" else scores
        columns = table.unbind(1) if task == "multilabel" else [table.squeeze(1)]
        found = {
            str(at): {"records": 120.0} | kind.metrics(kind.measured(scores.roll(at), column))
            for at, column in enumerate(columns)
        }
        better += not answers_at_chance(task, found)
    # By chance in 2.5 of a hundred cases: 2, and with four standard deviations 8.
    assert better <= 8


@pytest.mark.parametrize(
    ("task", "answers"),
    [
        ("multilabel", {"a": {"records": 9.0, "positive": 0.0, "brier": 0.1}}),
        ("regression", {"age": {"records": 1.0, "mae": 2.0}}),
        ("survival", {"risk": {"records": 5.0, "events": 0.0}}),
        ("class", {"risk": {"auroc": 0.5}}),
        ("multilabel", {"a": {"records": 9.0, "positive": 9.0, "auroc": 0.1}}),
        ("multilabel", {"a": {"auroc": 0.1}}),
        ("regression", {}),
    ],
)
def test_what_nothing_measured_is_not_called_chance(task: str, answers: Any) -> None:
    assert answers_at_chance(task, answers) == ""


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("task", TASKS)
def test_a_model_of_another_target_at_chance_has_no_green_card(
    task: str, learns: bool, tmp_path: Path
) -> None:
    random, sites = np.random.default_rng(5), []
    for _ in range(3):
        hidden = random.normal(size=1000)
        x = random.normal(size=(1000, 64)) + 5 + hidden[:, None] * learns
        sites.append((x, values(task, hidden, random)))
    own: dict[str, Any] = {"task": task, "epsilon": 8.0, "delta": 1e-5, "output_dir": tmp_path}
    run = fs.simulate(sites[:2], test=sites[2], **own, **TASKS[task])
    card, page = run.metrics["card"], write_report(run.folder).read_text()
    assert (card["state"], card["at_chance"]) == (("green", False) if learns else ("amber", True))
    assert ("may be no better than chance: its answer" in page) == (not learns)


@pytest.mark.parametrize("alike", [True, False])
def test_a_private_run_that_nothing_measured_says_where_its_class_means_are_alike(
    alike: bool, tmp_path: Path
) -> None:
    """As in a deployment: its sites may measure no accuracy."""
    rows, random, nodes = rows_of_classes(), np.random.default_rng(0), []
    for k in range(2):
        node = hospital(tmp_path, f"clinic-{k}", rows[k:240:2])
        files = sorted(Path(str(node["data-dir"])).rglob("*.png"))
        for file in files if alike else ():
            file.rename(file.parents[1] / str(random.choice(["1", "2", "7"])) / file.name)
        nodes.append(node)
    # One run in forty looks better than it is by its noise; three in a row do not.
    for number in range(3):
        folder = run_federation(tmp_path, InProcessGrid(nodes, run_id=number), **(FAST | DEPLOYED))
        metrics = metrics_of(folder)
        assert metrics["accuracy"] == {"per_site": {}}
        if metrics["card"]["at_chance"] == alike:
            break
    assert metrics["card"]["state"] == ("amber" if alike else "green")
    page = " ".join(write_report(folder).read_text().split())
    assert ("chance: nothing measured it, and the noisy class means" in page) == alike


DEPLOYMENTS: dict[str, dict[str, Any]] = {
    "once": {},
    "mixtures": {"fedpft.privacy": "theorem-4.1"},
    "logistic rounds": {"head.solver": "logistic"},
    "one sum": {"secure-aggregation": True, "dropouts": 0.0, "fedpft.covariance": "gram"},
    "dp-fedavg": {"method": "dp-fedavg", "fedavg.rounds": 1},
    "dpcvae": {"method": "dpcvae", "dpcvae.rounds": 2},
    "fedlap": {"method": "fedlap", "fedlap.rounds": 1, "fedlap.width": 8, "fedlap.image-steps": 4,
               "fedlap.server-steps": 4, "fedlap.images-per-class": 2, "image-size": 16},
}  # fmt: skip


def unmeasured_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The card is green only where class means differ; else it and the report name the command that measures."""
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["privacy"]
    assert metrics["accuracy"] == {"per_site": {}}
    assert "metric_values" not in metrics
    differ = metrics.get("learning", {}).get(ALIKE) is False
    card, green = metrics["card"], not metrics["card"]["without_records"]
    assert card["at_chance"] is (False if differ else None)
    assert (card["state"] == "green") == (differ and green)
    show_result(folder, folder.parent, False, False)
    printed = " ".join(capsys.readouterr().out.split())
    page = " ".join(write_report(folder).read_text().split())
    for text in (printed, page):
        assert ("obody has measured this model" in text) == (not differ)
        assert ("coordinator evaluate RUN" in text) == (not differ)
    # Once sites have evaluated it, what they found stands there.
    found = {"kind": "evaluation", "sites": 2, "records": None, "classes": {"1": {}, "2": {}}}
    (folder / "evaluation.json").write_text(json.dumps(found))
    page = " ".join(write_report(folder).read_text().split())
    assert "has measured this model" not in page


@pytest.mark.parametrize("way", DEPLOYMENTS)
def test_no_green_card_of_a_private_deployment_that_nobody_measured(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of_classes()
    nodes = [hospital(tmp_path, f"clinic-{k}", rows[k:360:3]) for k in range(3)]
    policy = tmp_path / "policy.toml"
    policy.write_text(policy.read_text() + "mechanisms = ['*']\n")
    settings = FAST | DEPLOYED | DEPLOYMENTS[way]
    if way == "logistic rounds":
        del settings["fedpft.covariance"]
    folder = run_federation(tmp_path, InProcessGrid(nodes), **settings)
    differ = metrics_of(folder).get("learning", {}).get(ALIKE) is False
    assert differ == (way in ("once", "one sum"))
    unmeasured_says_so(folder, capsys)


@pytest.mark.parametrize("kind", at_work.KINDS)
def test_no_green_card_of_another_target_that_nobody_measured(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = at_work.RUN | at_work.KINDS[kind] | at_work.PRIVATE
    folder = run_federation(tmp_path, InProcessGrid(at_work.hospitals(tmp_path)), **settings)
    unmeasured_says_so(folder, capsys)


@given(
    st.lists(st.tuples(st.integers(0, 500), st.sampled_from(["used", "rejected", "dropped"]))),
    st.lists(st.text(min_size=1), max_size=2),
    st.sampled_from([True, False, None]),
)
def test_only_a_model_that_is_known_to_be_better_than_chance_has_a_green_card(
    sites: list[tuple[int, Any]], absent: list[str], chance: bool | None
) -> None:
    own = [Site(str(at), fate, "", records=n) for at, (n, fate) in enumerate(sites)]
    card = run_card(own, 0, missing=(tuple(absent), "unknown"), at_chance=chance)
    whole = all(fate == "used" for _, fate in sites)
    assert (card["state"] == "green") == (whole and not absent and chance is False)
    assert (card["state"] == "green") == (missing_line(card) == "")
    assert ("nobody has measured" in missing_line(card)) == (chance is None)
