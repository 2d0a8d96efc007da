"""A class with few test records counts like the others, through every entrance; scikit-learn is the
oracle.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

import fedsurrogate as fs
from fedsurrogate.client_app.model_use.calibration import Wish
from fedsurrogate.client_app.model_use.evaluation import evaluate
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import make_signed_model
from fedsurrogate.server_app.report.build import write_report
from fedsurrogate.server_app.report.counts_view import view_of
from fedsurrogate.strategies.counting.results import PooledCounts, evaluation_result
from tests.client_app.model_use.test_decisions import KEY, head, records


def drawn(sizes: dict[str, int], seed: int, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    y = random.permutation(np.repeat(list(sizes), list(sizes.values())))
    x = random.normal(size=(len(y), 6))
    for place, name in enumerate(sizes):
        x[y == name, place] += apart
    return x.astype(np.float32), y


@pytest.mark.parametrize("rare", [1, 9, 10])
def test_a_run_and_its_entrances_count_a_rare_class(tmp_path: Path, rare: int) -> None:
    train = drawn({"ill": 60, "well": 540}, 0)
    x, y = drawn({"ill": rare, "well": 120}, 1)
    result = fs.simulate([train], test=(x, y), output_dir=tmp_path)
    decided = result.model.predict(x)
    chance = result.model.predict_proba(x)
    balanced = sk.balanced_accuracy_score(y, decided)
    averages = json.loads((result.folder / "metrics.json").read_text())["quality"]["averages"]
    expected = {
        "balanced_accuracy": balanced,
        "accuracy": sk.accuracy_score(y, decided),
        "macro_f1": sk.f1_score(y, decided, average="macro"),
        "macro_auroc": sk.roc_auc_score(y == "ill", chance[:, 0]),
        "macro_auprc": np.mean(
            [
                sk.average_precision_score(y == c, chance[:, k])
                for k, c in enumerate(("ill", "well"))
            ]
        ),
    }
    assert {name: averages[name]["value"] for name in expected} == pytest.approx(expected, abs=2e-6)
    found = (result.auroc, result.balanced_accuracy, result.accuracy, result.majority)
    wanted = (expected["macro_auroc"], balanced, expected["accuracy"], 120 / (120 + rare))
    assert found == pytest.approx(wanted, abs=2e-6)
    assert repr(result).startswith(f"Result(fedpft, 1 sites, AUROC {result.auroc:.4f}, balanced")
    page = write_report(result.folder).read_text()
    assert f"{balanced:.3f}" in page
    assert "ill is the positive class" in page
    assert "an AUROC of" in page


@pytest.mark.parametrize("rare", [1, 5, 60])
def test_records_of_a_class_that_no_site_has_are_wrong_in_every_score(
    tmp_path: Path, rare: int
) -> None:
    """The model gives it a probability of zero, as one whose class noise has hidden."""
    train, (x, y) = drawn({"ill": 40, "well": 40}, 0), drawn({"ill": 50, "well": 50}, 1)
    y[:rare] = "rare"
    result = fs.simulate([train], test=(x, y), output_dir=tmp_path)
    decided, classes = result.model.predict(x), ["ill", "well", "rare"]
    chance = np.hstack([result.model.predict_proba(x), np.zeros((len(x), 1))])
    quality = result.metrics["quality"]
    assert (quality["records"], quality["classes"]) == (100, classes)
    expected = {
        "balanced_accuracy": sk.balanced_accuracy_score(y, decided),
        "accuracy": sk.accuracy_score(y, decided),
        "macro_f1": sk.f1_score(y, decided, average="macro"),
        "macro_auroc": np.mean(
            [sk.roc_auc_score(y == c, chance[:, k]) for k, c in enumerate(classes)]
        ),
    }
    for name, value in expected.items():
        assert quality["averages"][name]["value"] == pytest.approx(value, abs=2e-6)
    scores = (result.auroc, result.balanced_accuracy, result.accuracy, result.majority)
    wanted = [expected[name] for name in ("macro_auroc", "balanced_accuracy", "accuracy")]
    assert scores == pytest.approx(
        (*wanted, np.unique(y, return_counts=True)[1].max() / 100), abs=2e-6
    )
    assert "rare" in write_report(result.folder).read_text()


def test_an_undefined_score_is_refused_with_its_name(tmp_path: Path) -> None:
    result = fs.simulate(
        [drawn({"ill": 60, "well": 60}, 0)], test=drawn({"well": 30}, 1), output_dir=tmp_path
    )
    with pytest.raises(RunError, match=r"AUROC of the run .* is undefined"):
        _ = result.auroc
    assert result.balanced_accuracy == pytest.approx(result.accuracy, abs=1e-6)
    page = write_report(result.folder).read_text()
    assert "undefined" in page
    assert "no test record is of them, and in no average: ill" in page
    # Records of one class show of no model that it tells two apart.
    assert result.metrics["card"]["state"] == "amber"
    assert "may be no better than chance: its test records are of one class" in page


@pytest.mark.parametrize("rare", [0, 1, 9, 10])
def test_site_evaluate_counts_a_rare_class(tmp_path: Path, rare: int) -> None:
    model = make_signed_model(head(1), parse_run({}), None, "1", 2, KEY)
    classes = model.manifest.classes
    x, labels = records(4, 300)
    rows = torch.cat([(labels != 1).nonzero().flatten(), (labels == 1).nonzero().flatten()[:rare]])
    x, labels = x[rows], labels[rows]
    held = HeldOut(x, labels, None, {}, "own records")
    found = evaluate(model, held, wish=Wish(draws=30))
    assert found.report is not None
    chance = model.classifier.scores(x).double().softmax(1).numpy()
    truth, decided = labels.numpy(), chance.argmax(1)
    value = found.report.averages["balanced_accuracy"].value
    assert value == pytest.approx(sk.balanced_accuracy_score(truth, decided))
    present = np.unique(truth)
    assert found.report.averages["macro_f1"].value == pytest.approx(
        sk.f1_score(truth, decided, labels=present, average="macro")
    )
    facts, page = found.write(tmp_path)
    written = json.loads(facts.read_text())["report"]["averages"]["balanced_accuracy"]["value"]
    assert written == value
    assert ("Classes without a record" in page.read_text()) == (rare == 0)
    assert found.report.left_out == ((classes[1],) if rare == 0 else ())


@given(st.lists(st.integers(0, 50), min_size=2, max_size=4).filter(any), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_a_federated_evaluation_has_the_balanced_accuracy_of_all_records(
    sizes: list[int], seed: int
) -> None:
    random, count = np.random.default_rng(seed), len(sizes)
    truth = np.repeat(np.arange(count), sizes)
    decided = random.integers(0, count, len(truth))
    table = torch.from_numpy(sk.confusion_matrix(truth, decided, labels=range(count))).double()
    scores = torch.ones(1 if count == 2 else count, 2, 4)
    names = "abcd"[:count]
    found: Any = evaluation_result(
        PooledCounts({"decisions": table, "scores": scores}, {"decisions": 0.0, "scores": 0.0}),
        names,
    )
    balanced = found["balanced_accuracy"]
    assert balanced["value"] == pytest.approx(sk.balanced_accuracy_score(truth, decided))
    assert balanced["low"] <= balanced["value"] <= balanced["high"]
    assert found["without_records"] == [n for n, size in zip(names, sizes, strict=True) if not size]
    noisy: Any = evaluation_result(
        PooledCounts({"decisions": table, "scores": scores}, {"decisions": 1e6, "scores": 0.0}),
        names,
    )
    assert noisy["balanced_accuracy"] == {"value": None, "low": None, "high": None}


@given(
    st.lists(st.integers(0, 400), min_size=2, max_size=4),
    st.sampled_from([1.0, 9.0, 400.0]),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_no_class_is_said_to_have_no_record_where_noise_may_hide_it(
    sizes: list[int], variance: float, seed: int
) -> None:
    """Balanced accuracy is that of all classes of the run, or undefined; noise shows of no class that it is
    empty.
    """
    random, count = np.random.default_rng(seed), len(sizes)
    truth = np.repeat(np.arange(count), sizes)
    decided = random.integers(0, count, len(truth))
    exact = sk.confusion_matrix(truth, decided, labels=range(count)) if sum(sizes) else 0.0
    table = torch.from_numpy(exact + random.normal(0, variance**0.5, (count, count)))
    scores = torch.ones(1 if count == 2 else count, 2, 4)
    variances = {"decisions": variance, "scores": variance}
    found: Any = evaluation_result(
        PooledCounts({"decisions": table, "scores": scores}, variances), "abcd"[:count]
    )
    assert found["without_records"] == []
    # By the noisy counts alone, as a reader has them: a row that does not stand out has no rate.
    seen = table.sum(1) >= max(1.0, 3 * (variance * count) ** 0.5)
    recall = (table.diagonal() / table.sum(1)).clamp(0, 1)
    wanted = float(recall.mean()) if seen.all() else None
    assert found["balanced_accuracy"]["value"] == (
        None if wanted is None else pytest.approx(wanted)
    )


@given(
    st.lists(st.integers(60, 200), min_size=2, max_size=4),
    st.booleans(),
    st.sampled_from([0.0, 4.0]),
)
@settings(max_examples=25, deadline=None)
def test_an_evaluation_at_chance_says_so(sizes: list[int], learns: bool, variance: float) -> None:
    """Decisions and scores that do not depend on the class, or that nearly always follow it."""
    count, total = len(sizes), sum(sizes)
    right = torch.diag(torch.tensor(sizes)).double()
    alike = torch.tensor(sizes).double()[:, None] / count * torch.ones(1, count)
    order = torch.tensor([[[30.0, 2.0], [2.0, 30.0]]]) if learns else torch.ones(1, 2, 2)
    scores = (order * total / 64).repeat(1 if count == 2 else count, 1, 1).double()
    tables = {"decisions": 0.9 * right + 0.1 * alike if learns else alike, "scores": scores}
    found = evaluation_result(PooledCounts(tables, dict.fromkeys(tables, variance)), "abcd"[:count])
    view = view_of({"kind": "evaluation", "sites": 2} | found)
    assert view is not None
    said = [words for words in view.words if "may be no better than chance" in words]
    assert len(said) == (not learns)
