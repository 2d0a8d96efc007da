"""Measures of the probabilities of labels of which each record has some. Point values are
scikit-learn's and statsmodels'.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.models.class_measures import FEWEST, ranking_samples
from fedsurrogate.common.models.intervals import (
    DRAWS,
    Array,
    Measure,
    averaged,
    bootstrap_weights,
    means_of,
    units_of,
    with_interval,
)

Bools = NDArray[np.bool_]
# Specificity at which the sensitivity is stated.
SPECIFICITY = 0.9
# Probabilities are kept this far from zero and one for their log odds.
LEAST_CHANCE = 1e-6
# Log odds of which the middle 95 % are closer together are one probability for all records. A slope
# of hundreds would only say so, and reads as if probabilities were extreme.
LEAST_SPREAD = 0.1


@dataclass(frozen=True)
class LabelMeasures:
    """Measures of one label, on the records that are annotated for it.

    Attributes:
        name: of the label.
        annotated: number of annotated records.
        positive: number of positive ones among them.
        few: whether there are fewer than ten positive or ten negative ones.
        measures: by name: "auroc", "average_precision", "brier", "sensitivity" at a fixed
            specificity, "calibration_slope", "calibration_intercept". Their support is the number
            of annotated records; that of the sensitivity the number of positive ones.
    """

    name: str
    annotated: int
    positive: int
    few: bool
    measures: Mapping[str, Measure]


@dataclass(frozen=True)
class LabelReport:
    """Measures of all labels.

    Attributes:
        labels: one for each label.
        averages: means over labels with both classes, by name.
        left_out: labels without a positive or without a negative record, of which averages have
            nothing.
    """

    labels: tuple[LabelMeasures, ...]
    averages: Mapping[str, Measure]
    left_out: tuple[str, ...]


def label_report(
    truth: Array,
    chance: Array,
    names: Sequence[str],
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    specificity: float = SPECIFICITY,
) -> LabelReport:
    """Measures of every label, with 95 % intervals from samples of patients or records.

    Args:
        truth: (n, L), 1 and 0, and NaN where a record is not annotated.
        chance: probabilities, (n, L).
        names: of the labels.
        patients: of each record, if known.
        draws: number of samples.
        specificity: at which the sensitivity is stated.

    Raises:
        PackageError: without statsmodels, which fits the calibration.
    """
    weights = bootstrap_weights(len(truth), patients, draws, seed=0)
    rows: list[LabelMeasures] = []
    drawn: dict[str, list[Array]] = {}
    least: dict[str, int] = {}
    for index, name in enumerate(names):
        known = ~np.isnan(truth[:, index])
        own, of = truth[known, index] == 1, np.clip(chance[known, index], 0, 1)
        owners = None if patients is None else [patients[i] for i in np.flatnonzero(known).tolist()]
        positive = int(own.sum())
        units = {
            "auroc": min(units_of(own, owners), units_of(~own, owners)),
            "average_precision": units_of(own, owners),
            "brier": units_of(np.ones_like(own), owners),
            "sensitivity": units_of(own, owners),
        }
        samples = _samples(own, of, weights[:, known], specificity)
        values = _points(own, of, specificity)
        measures = {
            key: with_interval(
                value,
                samples[key],
                positive if key == "sensitivity" else len(own),
                units[key],
                True,
            )
            for key, value in values.items()
        }
        measures |= _calibration(own, of, owners)
        few = min(positive, len(own) - positive) < FEWEST
        rows.append(LabelMeasures(name, len(own), positive, few, measures))
        if 0 < positive < len(own):
            for key, sample in samples.items():
                drawn.setdefault(key, []).append(sample)
                least[key] = min(least.get(key, units[key]), units[key])
    kept = [each for each in rows if 0 < each.positive < each.annotated]
    averages = {
        f"macro_{key}": averaged(
            own := [each.measures[key] for each in kept],
            samples,
            sum(each.support for each in own),
            least[key],
        )
        for key, samples in drawn.items()
    }
    left_out = tuple(each.name for each in rows if each not in kept)
    return LabelReport(tuple(rows), averages, left_out)


def _points(truth: Bools, chance: Array, specificity: float) -> dict[str, float | None]:
    from sklearn import metrics

    if not len(truth):
        return dict.fromkeys(("auroc", "average_precision", "brier", "sensitivity"))
    brier = float(metrics.brier_score_loss(truth, chance, pos_label=True))
    if truth.all() or not truth.any():
        return {"auroc": None, "average_precision": None, "brier": brier, "sensitivity": None}
    false, true, _ = metrics.roc_curve(truth, chance, drop_intermediate=False)
    return {
        "auroc": float(metrics.roc_auc_score(truth, chance)),
        "average_precision": float(metrics.average_precision_score(truth, chance)),
        "brier": brier,
        "sensitivity": float(true[false <= 1 - specificity + 1e-12].max()),
    }


def _samples(truth: Bools, chance: Array, weights: Array, specificity: float) -> dict[str, Array]:
    """The same measures for each sample."""
    samples: dict[str, Array] = {}
    if not len(truth):
        nothing = np.full(len(weights), np.nan)
        return dict.fromkeys(("auroc", "average_precision", "brier", "sensitivity"), nothing)
    samples["auroc"], samples["average_precision"] = ranking_samples(truth, chance, weights)
    samples["brier"] = means_of(np.square(chance - truth), weights)
    samples["sensitivity"] = _sensitivities(truth, chance, weights, specificity)
    return samples


def _sensitivities(truth: Bools, chance: Array, weights: Array, specificity: float) -> Array:
    """The largest sensitivity at this specificity for each sample."""
    order = np.argsort(-chance, kind="stable")
    ordered = chance[order]
    ends = np.append(np.flatnonzero(np.diff(ordered)), len(ordered) - 1)
    found = []
    for each in weights:
        part = each[order]
        true, false = np.cumsum(part * truth[order]), np.cumsum(part * ~truth[order])
        if true[-1] == 0 or false[-1] == 0:
            found.append(np.nan)
            continue
        allowed = false[ends] <= (1 - specificity + 1e-12) * false[-1]
        found.append(float(true[ends][allowed].max(initial=0.0) / true[-1]))
    return np.array(found)


def _calibration(truth: Bools, chance: Array, patients: Sequence[str] | None) -> dict[str, Measure]:
    """Slope and intercept of the logistic regression on the log odds, with its own intervals, which
    allow for patients with several records.
    """
    with needed_for("the calibration of labels"):
        from statsmodels.api import Logit, add_constant
        from statsmodels.tools.sm_exceptions import PerfectSeparationError

    names = ("calibration_intercept", "calibration_slope")
    undefined = {name: Measure(None, None, None, len(truth)) for name in names}
    kept = np.clip(chance, LEAST_CHANCE, 1 - LEAST_CHANCE)
    odds = np.log(kept / (1 - kept))
    low, high = np.quantile(odds, [0.025, 0.975]) if len(odds) else (0.0, 0.0)
    if not truth.any() or truth.all() or high - low < LEAST_SPREAD:
        return undefined
    clusters = {}
    if patients is not None and len(set(patients)) < len(truth):
        _, owner = np.unique(np.asarray(patients), return_inverse=True)
        clusters = {"cov_type": "cluster", "cov_kwds": {"groups": owner}}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = Logit(truth.astype(float), add_constant(odds, prepend=True))
            fit = model.fit(disp=0, maxiter=100, **clusters)
    except (PerfectSeparationError, np.linalg.LinAlgError):
        return undefined
    if not fit.mle_retvals["converged"] or not np.isfinite(fit.params).all():
        return undefined
    limits = fit.conf_int()
    return {
        name: Measure(float(value), float(low), float(high), len(truth))
        for name, value, (low, high) in zip(names, fit.params, limits, strict=True)
    }
