"""Measures equal scikit-learn's on the same arrays, bootstrap samples included; intervals cover
what they promise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, t
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve

from fedsurrogate.common.models.class_metrics import (
    Judged,
    binary_metrics,
    bootstrap_weights,
    calibration_error,
    curves_of,
    interval,
    ranking_samples,
    report,
    wilson,
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


def expected_error(truth: Any, chance: Any) -> float:
    """The expected calibration error by its definition: ten bins (0, 0.1], (0.1, 0.2], ..., the
    first with its lower end, weighted by their records.
    """
    total = 0.0
    for k, edge in enumerate(np.linspace(0, 1, 11)[:-1]):
        inside = (chance <= np.linspace(0, 1, 11)[k + 1]) & ((chance > edge) | (k == 0))
        if inside.any():
            total += inside.sum() * abs(truth[inside].mean() - chance[inside].mean())
    return float(total / len(truth))


@given(st.integers(0, 10**6), st.integers(1, 80), st.sampled_from([1, 2, 6]))
@settings(max_examples=60)
def test_the_calibration_error_is_that_of_its_definition(
    seed: int, count: int, digits: int
) -> None:
    generator = np.random.default_rng(seed)
    # With one digit every probability lies on the edge of a bin.
    chance = np.round(generator.random(count), digits)
    truth = generator.random(count) < chance
    wanted = expected_error(truth, chance)
    assert calibration_error(truth, chance) == pytest.approx(wanted, abs=1e-12)


@given(st.integers(5, 60), st.floats(0.1, 10), st.floats(-5, 5))
@settings(max_examples=15)
def test_the_interval_of_a_mean_is_that_of_student(units: int, spread: float, mean: float) -> None:
    """Hesterberg 2015, section 4.1: the expanded percentile interval gives a mean of n normal
    records the t interval, which plain percentiles miss by sqrt((n - 1) / n) and the tails of t.
    """
    error = spread / np.sqrt(units)
    # The bootstrap's distribution of the mean: with n in place of n - 1.
    samples = mean + error * np.sqrt((units - 1) / units) * norm.ppf(
        (np.arange(100_000) + 0.5) / 100_000
    )
    found = interval(samples, units)
    assert found is not None
    half = error * t.ppf(0.975, units - 1)
    assert found == pytest.approx((mean - half, mean + half), abs=0.01 * half)
    plain = np.quantile(samples, [0.025, 0.975])
    assert found[0] < plain[0] - 1e-9
    assert found[1] > plain[1] + 1e-9


def test_point_values_are_those_of_scikit_learn() -> None:
    found = judged()
    made = report(found, CLASSES, draws=50)
    truth, scores, decided = found.labels, found.probabilities, found.decisions
    assert (np.array(made.confusion) == sk.confusion_matrix(truth, decided)).all()
    for k, row in enumerate(made.per_class):
        values = {key: metric.value for key, metric in row.metric_values.items()}
        tn, fp, fn, tp = sk.confusion_matrix(truth == k, decided == k).ravel()
        wanted: dict[str, Any] = {
            "sensitivity": tp / (tp + fn), "specificity": tn / (tn + fp), "ppv": tp / (tp + fp), "npv": tn / (tn + fn),
            "f1": sk.f1_score(truth == k, decided == k), "auroc": sk.roc_auc_score(truth == k, scores[:, k]),
            "auprc": sk.average_precision_score(truth == k, scores[:, k]),
            "brier": sk.brier_score_loss(truth == k, scores[:, k]),
        }  # fmt: skip
        wanted["calibration_error"] = expected_error(truth == k, scores[:, k])
        assert values == pytest.approx(wanted)


def test_every_bootstrap_sample_has_the_value_of_scikit_learn() -> None:
    found = judged(120)
    weights = bootstrap_weights(120, None, 20, 3)
    truth, chance = found.labels == 1, found.probabilities[:, 1]
    parts = ranking_samples(truth, chance, weights, 0.8)
    for row, area, precision, reached in zip(weights, *parts, strict=True):
        false, true, _ = sk.roc_curve(truth, chance, sample_weight=row, drop_intermediate=False)
        assert reached == pytest.approx(true[false <= 0.2 + 1e-9].max())
        assert area == pytest.approx(sk.roc_auc_score(truth, chance, sample_weight=row))
        assert precision == pytest.approx(
            sk.average_precision_score(truth, chance, sample_weight=row)
        )


@pytest.mark.slow
def test_intervals_cover_the_true_value_in_about_95_percent_of_500_draws() -> None:
    apart, covered = 1.2, {"auroc": 0, "sensitivity": 0}
    true = {"auroc": norm.cdf(apart / np.sqrt(2)), "sensitivity": norm.sf(0.5 - apart)}
    truth = np.repeat([False, True], [120, 80])
    for seed in range(500):
        normal = np.random.default_rng(10_000 + seed).normal(size=200) + apart * truth
        made = binary_metrics(
            truth, norm.cdf(normal), normal >= 0.5, None, bootstrap_weights(200, None, 200, seed)
        )
        for key, value in true.items():
            found = interval(made[key].samples, 80)
            assert found is not None
            covered[key] += found[0] <= value <= found[1]
    assert {key: 0.925 <= count / 500 <= 0.975 for key, count in covered.items()} == dict.fromkeys(
        covered, True
    ), covered


@st.composite
def records(draw: st.DrawFn) -> Judged:
    """Classes of 0 to 50 records, with ties, right and wrong decisions, and patients."""
    sizes = draw(
        st.lists(st.sampled_from([0, 1, 2, 9, 10, 11, 50]), min_size=2, max_size=5).filter(any)
    )
    generator = np.random.default_rng(draw(st.integers(0, 9999)))
    labels = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    count = len(labels)
    chance = generator.dirichlet(np.ones(len(sizes)), count).round(draw(st.integers(1, 3)))
    if draw(st.booleans()):
        # Never for the last class.
        chance[:, -1] = 0
    right = generator.random(count) < draw(st.sampled_from([0.0, 0.6, 1.0]))
    decisions = np.where(right, labels, chance.argmax(1))
    patients = None
    if draw(st.booleans()):
        patients = [f"p{each}" for each in generator.integers(0, 1 + count // 2, count)]
    return Judged(labels, chance, decisions, patients)


@given(records())
@settings(max_examples=80, deadline=None)
def test_averages_are_those_of_scikit_learn_over_all_classes_with_a_record(found: Judged) -> None:
    labels, decisions, chance = found.labels, found.decisions, found.probabilities
    names = tuple("abcde"[: chance.shape[1]])
    made = report(found, names, draws=30)
    present = np.unique(labels)
    assert made.left_out == tuple(n for k, n in enumerate(names) if k not in present)
    assert [row.few for row in made.per_class] == [
        (labels == k).sum() < 10 for k in range(len(names))
    ]
    values = {name: each.value for name, each in made.averages.items()}
    both = {"labels": present, "average": "macro", "zero_division": np.nan}
    areas = (
        [sk.roc_auc_score(labels == k, chance[:, k]) for k in present] if len(present) > 1 else []
    )
    expected = {
        "accuracy": sk.accuracy_score(labels, decisions),
        "balanced_accuracy": sk.recall_score(labels, decisions, **both),
        "macro_sensitivity": sk.recall_score(labels, decisions, **both),
        "macro_f1": sk.f1_score(labels, decisions, **both),
        "macro_auroc": np.mean(areas) if areas else None,
        "macro_auprc": np.mean(
            [sk.average_precision_score(labels == k, chance[:, k]) for k in present]
        ),
        "macro_brier": np.mean([sk.brier_score_loss(labels == k, chance[:, k]) for k in present]),
    }
    # scikit-learn gives zero where nothing is decided for a class.
    if set(present) <= set(decisions):
        expected["macro_ppv"] = sk.precision_score(labels, decisions, **both)
    else:
        assert values["macro_ppv"] is None
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["balanced_accuracy"] == pytest.approx(
        sk.balanced_accuracy_score(labels, decisions)
    )
    for key in made.per_class[0].metric_values:
        of_classes = [made.per_class[k].metric_values[key].value for k in present]
        macro = made.averages[f"macro_{key}"]
        if None in of_classes:
            assert (macro.value, macro.low, macro.high) == (None, None, None)
        else:
            assert macro.value == pytest.approx(np.mean(of_classes))
    for metric in [
        *made.averages.values(),
        *(m for r in made.per_class for m in r.metric_values.values()),
    ]:
        if metric.low is not None and metric.high is not None and metric.value is not None:
            assert metric.low <= metric.value <= metric.high


def expected_interval(
    value: float, samples: np.ndarray, units: int
) -> tuple[float | None, float | None]:
    """The expanded percentile interval of a share for so many units; Wilson's where no sample differs from a
    value of 0 or 1; none where it would not hold the value.
    """
    known = samples[np.isfinite(samples)]
    if units < 2 or not len(known) or len(known) < len(samples) / 2:
        return None, None
    tail = norm.cdf(-np.sqrt(units / (units - 1)) * t.ppf(0.975, units - 1))
    low, high = np.quantile(known, [tail, 1 - tail])
    if low == high and value in (0, 1):
        limits = binomtest(round(value * units), units).proportion_ci(method="wilson")
        low, high = limits.low, limits.high
    return (low, high) if low - 1e-9 <= value <= high + 1e-9 else (None, None)


@given(records())
@settings(max_examples=40, deadline=None)
def test_each_metric_has_the_records_and_the_interval_of_its_own_group(found: Judged) -> None:
    names, draws = tuple("abcde"[: found.probabilities.shape[1]]), 25
    made, everyone = report(found, names, draws=draws), np.arange(len(found.labels))
    weights = bootstrap_weights(len(everyone), found.patients, draws, 0)
    patients = everyone if found.patients is None else np.array(found.patients)
    for index, row in enumerate(made.per_class):
        truth, decided = found.labels == index, found.decisions == index
        groups = {
            "sensitivity": (truth, decided),
            "specificity": (~truth, ~decided),
            "ppv": (decided, truth),
            "npv": (~decided, ~truth),
        }
        for name, (group, hit) in groups.items():
            metric = row.metric_values[name]
            assert metric.support == group.sum()
            if not group.any():
                assert metric.value is None
                continue
            below = weights @ group
            drawn = np.divide(
                weights @ (group & hit), below, out=np.full(draws, np.nan), where=below > 0
            )
            limits = expected_interval(hit[group].mean(), drawn, len(set(patients[group])))
            assert (metric.low, metric.high) == pytest.approx(limits, abs=1e-12), name
        area = row.metric_values["auroc"]
        if area.value is not None:
            units = min(len(set(patients[group])) for group in (truth, ~truth))
            samples = ranking_samples(truth, found.probabilities[:, index], weights)[0]
            limits = expected_interval(area.value, samples, units)
            assert (area.low, area.high) == pytest.approx(limits, abs=1e-9)
        error = row.metric_values["calibration_error"]
        assert (error.low, error.high, error.support) == (None, None, len(everyone))


@given(st.integers(0, 10**6), st.integers(2, 200), st.sampled_from([1, 6]))
@settings(max_examples=60)
def test_curves_are_those_of_scikit_learn_and_points_of_reliability_have_all_records(
    seed: int, count: int, digits: int
) -> None:
    generator = np.random.default_rng(seed)
    chance = np.round(generator.random(count), digits)
    labels = (generator.random(count) < chance).astype(int)
    found = Judged(labels, np.stack([1 - chance, chance], 1), (chance > 0.5).astype(int))
    curves = curves_of(found.labels == 1, chance)
    drawn = curves["reliability"]
    if labels.all() or not labels.any():
        assert drawn is None
        return
    assert np.array_equal(curves["roc"], sk.roc_curve(labels, chance)[:2])
    precision, recall, _ = sk.precision_recall_curve(labels, chance)
    assert np.array_equal(curves["precision_recall"], (recall, precision))
    share, mean = calibration_curve(labels, chance, n_bins=10)
    assert np.allclose(drawn[0], mean)
    assert np.allclose(drawn[1], share)
    assert sum(drawn[2]) == count
    assert np.dot(drawn[1], drawn[2]) == pytest.approx(labels.sum())


@given(st.integers(1, 10**6), st.floats(0, 1))
@settings(max_examples=60)
def test_wilsons_interval_is_that_of_scipy(units: int, share: float) -> None:
    count = round(share * units)
    limits = binomtest(count, units).proportion_ci(method="wilson")
    assert wilson(count, units) == pytest.approx((limits.low, limits.high), abs=1e-12)


@pytest.mark.parametrize(
    ("known", "units_", "exists"),
    [(10, 2, True), (5, 2, True), (4, 2, False), (10, 1, False), (10, 0, False), (0, 5, False)],
)
def test_an_interval_needs_two_units_and_half_of_the_samples(
    known: int, units_: int, exists: bool
) -> None:
    samples = np.array([0.1 * k for k in range(known)] + [math.nan] * (10 - known))
    assert (interval(samples, units_) is not None) == exists


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 12), st.integers(1, 5), st.integers(0, 99))
def test_samples_draw_as_many_units_as_there_are_each_alike(
    patients: int, images: int, seed: int
) -> None:
    names = [f"p{at % patients}" for at in range(patients * images)]
    weights = bootstrap_weights(len(names), names, 300, seed)
    first = weights[:, :patients]
    assert (weights == np.tile(first, images)).all(), "a patient is drawn with all of the images"
    assert (first.sum(1) == patients).all()
    # Six standard deviations of a multinomial share.
    assert np.abs(first.mean(0) - 1).max() < 6 * math.sqrt(1 / 300) + 1e-9
    plain = bootstrap_weights(len(names), None, 300, seed)
    assert (plain.sum(1) == len(names)).all()
    assert (bootstrap_weights(len(names), names, 300, seed) == weights).all()
    assert (
        bootstrap_weights(0, [], 3, seed).shape
        == bootstrap_weights(0, None, 3, seed).shape
        == (3, 0)
    )
