"""The report of a model on labelled records: support, intervals and averages of every class, with
plain loops over generated records, patients and classes of nine to eleven records.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest

from fedsurrogate.common.models.class_measures import (
    Judged,
    Measure,
    bootstrap_weights,
    interval,
    points_of,
    report,
    samples_of,
)

CLASSES = ("a", "b", "c")
DRAWS = 40


@st.composite
def records(draw: st.DrawFn) -> Judged:
    sizes = draw(
        st.lists(st.sampled_from([0, 1, 9, 10, 11, 25]), min_size=3, max_size=3).filter(sum)
    )
    generator = np.random.default_rng(draw(st.integers(0, 9999)))
    labels = generator.permutation(np.repeat(np.arange(3), sizes))
    count = len(labels)
    right = draw(st.sampled_from([0.6, 1.0]))
    decisions = np.where(generator.random(count) < right, labels, generator.integers(0, 3, count))
    chance = generator.dirichlet(np.ones(3), count).round(2)
    patients = None
    if draw(st.booleans()):
        patients = [f"p{each}" for each in generator.integers(0, max(1, count // 3), count)]
    return Judged(labels, chance, decisions, patients)


def units(judged: Judged, rows: list[int]) -> int:
    """Records, or patients if they are known."""
    return len(rows) if judged.patients is None else len({judged.patients[row] for row in rows})


def measure(value: float | None, samples: np.ndarray, support: int, smaller: int) -> Measure:
    """With the interval of Wilson where neither records nor samples have an error."""
    ends = None if value is None else interval(samples, smaller)
    if ends is not None and ends[0] == ends[1] and value in (0.0, 1.0):
        limits = binomtest(int(value * smaller), smaller).proportion_ci(method="wilson")
        ends = (limits.low, limits.high)
    return Measure(value, *(ends or (None, None)), support)


def same(found: Measure, wanted: Measure) -> bool:
    pairs = zip(vars(found).values(), vars(wanted).values(), strict=True)
    return all(
        one is other or (None not in (one, other) and one == pytest.approx(other, abs=1e-9))
        for one, other in pairs
    )


@settings(max_examples=10, deadline=None)
@given(records(), st.integers(0, 3))
def test_every_measure_has_its_support_and_an_interval_of_the_smaller_group(
    judged: Judged, seed: int
) -> None:
    labels, decisions = judged.labels.tolist(), judged.decisions.tolist()
    count, sizes = len(labels), Counter(labels)
    weights = bootstrap_weights(count, judged.patients, DRAWS, seed)
    made = report(judged, CLASSES, DRAWS, seed)
    assert (made.classes, made.records) == (CLASSES, count)
    assert made.units == (0 if judged.patients is None else len(set(judged.patients)))
    assert made.left_out == tuple(name for at, name in enumerate(CLASSES) if sizes[at] < 10)
    for true in range(3):
        for decided in range(3):
            pairs = list(zip(labels, decisions, strict=True))
            assert made.confusion[true, decided] == pairs.count((true, decided))
    least, values, drawn = count, dict[str, list[Any]](), dict[str, list[np.ndarray]]()
    for at, row in enumerate(made.per_class):
        truth = judged.labels == at
        own = [k for k in range(count) if labels[k] == at]
        others = [k for k in range(count) if labels[k] != at]
        smaller = min(units(judged, own), units(judged, others))
        assert (row.name, row.support, row.few) == (CLASSES[at], len(own), len(own) < 10)
        parts = (truth, judged.decisions == at, judged.probabilities[:, at])
        points, samples = points_of(*parts), samples_of(*parts, weights)
        supports = {
            "sensitivity": len(own), "f1": len(own), "specificity": len(others),
            "ppv": decisions.count(at), "npv": count - decisions.count(at), "auroc": count,
            "auprc": count, "brier": count, "calibration_error": count,
        }  # fmt: skip
        assert row.measures.keys() == supports.keys() == points.keys()
        for key, found in row.measures.items():
            assert same(found, measure(points[key], samples[key], supports[key], smaller)), key
            if not row.few:
                values.setdefault(key, []).append(points[key])
                drawn.setdefault(key, []).append(samples[key])
        least = least if row.few else min(least, smaller)
    _averages(judged, made.averages, weights, (values, drawn, least))


def _averages(
    judged: Judged,
    averages: Any,
    weights: np.ndarray,
    of_classes: tuple[dict[str, list[Any]], dict[str, list[np.ndarray]], int],
) -> None:
    """Over the classes of ten records or more; the interval is that of the smallest group."""
    (values, drawn, least), count = of_classes, len(judged.labels)
    kept = sum(size for size in Counter(judged.labels.tolist()).values() if size >= 10)
    wanted = {}
    for key, own in values.items():
        mean = None if None in own else sum(own) / len(own)
        wanted[f"macro_{key}"] = measure(mean, np.mean(drawn[key], 0), kept, least)
    if values:
        wanted["balanced_accuracy"] = wanted["macro_sensitivity"]
    right = (judged.labels == judged.decisions).astype(float)
    share = weights @ right / weights.sum(1)
    wanted["accuracy"] = measure(
        float(right.mean()), share, count, units(judged, list(range(count)))
    )
    assert averages.keys() == wanted.keys()
    for key, found in averages.items():
        assert same(found, wanted[key]), key


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
