"""Measures equal scikit-learn's on the same arrays, bootstrap samples included; intervals cover
what they promise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import norm
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from client_app.model_use.metrics import (
    Judged,
    bootstrap_weights,
    interval,
    points_of,
    ranking_samples,
    report,
    samples_of,
)

CLASSES = ("a", "b", "c")


def judged(count: int = 400, seed: int = 0, patients: bool = False) -> Judged:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, 3, count)
    logits = generator.normal(size=(count, 3)) + 1.5 * np.eye(3)[labels]
    # Rounded, so that there are ties.
    probabilities = np.round(np.exp(logits) / np.exp(logits).sum(1, keepdims=True), 2)
    names = [f"p{k // 4}" for k in range(count)] if patients else None
    return Judged(labels, probabilities, probabilities.argmax(1), names)


def test_point_values_are_those_of_scikit_learn() -> None:
    found = judged()
    made = report(found, CLASSES, draws=50)
    truth, scores, decided = found.labels, found.probabilities, found.decisions
    assert made.averages["accuracy"].value == pytest.approx(sk.accuracy_score(truth, decided))
    assert made.averages["balanced_accuracy"].value == pytest.approx(
        sk.balanced_accuracy_score(truth, decided)
    )
    assert made.averages["macro_f1"].value == pytest.approx(
        sk.f1_score(truth, decided, average="macro")
    )
    macro = [sk.roc_auc_score(truth == k, scores[:, k]) for k in range(3)]
    assert made.averages["macro_auroc"].value == pytest.approx(np.mean(macro))
    assert (made.confusion == sk.confusion_matrix(truth, decided)).all()
    for k, row in enumerate(made.per_class):
        values = {key: measure.value for key, measure in row.measures.items()}
        tn, fp, fn, tp = sk.confusion_matrix(truth == k, decided == k).ravel()
        wanted: dict[str, Any] = {
            "sensitivity": tp / (tp + fn), "specificity": tn / (tn + fp), "ppv": tp / (tp + fp), "npv": tn / (tn + fn),
            "f1": sk.f1_score(truth == k, decided == k), "auroc": sk.roc_auc_score(truth == k, scores[:, k]),
            "auprc": sk.average_precision_score(truth == k, scores[:, k]),
            "brier": sk.brier_score_loss(truth == k, scores[:, k]),
        }  # fmt: skip
        wanted["calibration_error"] = values["calibration_error"]
        assert values == pytest.approx(wanted)
        share, mean = calibration_curve(truth == k, scores[:, k], n_bins=10)
        sizes, _ = np.histogram(scores[:, k], bins=10, range=(0, 1))
        rough = np.abs(share - mean) @ sizes[sizes > 0] / len(truth)
        assert values["calibration_error"] == pytest.approx(rough, abs=0.03)


def test_every_bootstrap_sample_has_the_value_of_scikit_learn() -> None:
    found = judged(120)
    weights = bootstrap_weights(120, None, 20, 3)
    truth, chance = found.labels == 1, found.probabilities[:, 1]
    areas, precisions = ranking_samples(truth, chance, weights)
    for row, area, precision in zip(weights, areas, precisions, strict=True):
        assert area == pytest.approx(sk.roc_auc_score(truth, chance, sample_weight=row))
        assert precision == pytest.approx(
            sk.average_precision_score(truth, chance, sample_weight=row)
        )


def test_patients_are_drawn_whole() -> None:
    found = judged(patients=True)
    assert found.patients is not None
    weights = bootstrap_weights(len(found.labels), found.patients, 30, 0)
    assert (weights.reshape(30, -1, 4) == weights.reshape(30, -1, 4)[:, :, :1]).all()
    assert (weights[:, ::4].sum(1) == 100).all()
    assert report(found, CLASSES, draws=20).units == 100


def test_copies_of_a_patients_images_do_not_narrow_the_interval() -> None:
    found = judged(100)
    rows = np.repeat(np.arange(100), 10)
    copies = Judged(
        found.labels[rows],
        found.probabilities[rows],
        found.decisions[rows],
        [f"p{row}" for row in rows],
    )
    one, many = (report(each, CLASSES).averages["accuracy"] for each in (found, copies))
    assert one.low is not None
    assert one.high is not None
    assert many.low == pytest.approx(one.low, abs=0.03)
    assert many.high == pytest.approx(one.high, abs=0.03)


@pytest.mark.slow
def test_intervals_cover_the_true_value_in_about_95_percent_of_500_draws() -> None:
    apart, covered = 1.2, {"auroc": 0, "sensitivity": 0}
    true = {"auroc": norm.cdf(apart / np.sqrt(2)), "sensitivity": norm.sf(0.5 - apart)}
    truth = np.repeat([False, True], [120, 80])
    for seed in range(500):
        normal = np.random.default_rng(10_000 + seed).normal(size=200) + apart * truth
        samples = samples_of(
            truth, normal >= 0.5, norm.cdf(normal), bootstrap_weights(200, None, 400, seed)
        )
        for key, value in true.items():
            found = interval(samples[key], 80)
            assert found is not None
            covered[key] += found[0] <= value <= found[1]
    assert {key: 0.925 <= count / 500 <= 0.975 for key, count in covered.items()} == dict.fromkeys(
        covered, True
    ), covered


def test_classes_under_ten_records_are_marked_and_not_averaged() -> None:
    found = judged(300)
    rare = np.concatenate(
        [np.flatnonzero(found.labels != 2), np.flatnonzero(found.labels == 2)[:2]]
    )
    made = report(found.take(rare), CLASSES, draws=50)
    assert [row.few for row in made.per_class] == [False, False, True]
    assert made.left_out == ("c",)
    values = [made.per_class[k].measures["auroc"].value for k in (0, 1)]
    assert made.averages["macro_auroc"].value == pytest.approx(
        np.mean([value or 0 for value in values])
    )


def test_without_an_error_the_interval_is_not_of_width_zero() -> None:
    labels = np.repeat([0, 1], 20)
    made = report(Judged(labels, np.eye(2)[labels], labels), ("n", "y"), draws=50)
    measure = made.per_class[1].measures["sensitivity"]
    assert (measure.value, measure.high) == (1.0, 1.0)
    assert measure.low == pytest.approx(0.839, abs=0.01), "Wilson's interval for 20 of 20"


def test_undefined_measures_are_none_not_zero() -> None:
    truth, decided = np.zeros(5, bool), np.zeros(5, bool)
    found = points_of(truth, decided, np.linspace(0, 1, 5))
    assert (found["sensitivity"], found["ppv"], found["auroc"], found["f1"]) == (
        None,
        None,
        None,
        None,
    )
    assert found["specificity"] == 1.0
