"""Metrics of models of labels, numbers and times, from true values and answers alone. Point values are
those of scikit-learn, statsmodels and scikit-survival where these have them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.models.class_metrics import (
    DRAWS,
    Array,
    Bools,
    Drawn,
    Metric,
    Rows,
    averages_of,
    binary_metrics,
    bootstrap_weights,
    measured,
)
from fedsurrogate.common.pages import svg
from fedsurrogate.common.targets.counted import THIRDS

# Specificity at which the sensitivity of a label is stated.
SPECIFICITY = 0.9
# Probabilities are kept this far from zero and one for their log odds.
LEAST_CHANCE = 1e-6
# Log odds of which the middle 95 % are closer together are one probability for all records. A slope
# of hundreds would only say so, and reads as if probabilities were extreme.
LEAST_SPREAD = 0.1
# What is stated of each label, and averaged.
OF_LABELS = {
    "auroc": "auroc",
    "auprc": "average_precision",
    "brier": "brier",
    "sensitivity_at_specificity": "sensitivity_at_specificity",
}
# Of the standard deviation of differences: limits of agreement hold 95 % of normal ones.
WIDTH = 1.96
PURPOSE = "the evaluation of survival times"
# Of the thirds, which people with colour blindness can tell apart (Okabe & Ito).
BY_THIRD = (svg.GREEN, svg.BLUE, svg.ORANGE)


def label_metrics(
    truth: Array,
    answers: Mapping[str, Array],
    plain: Mapping[str, Array],
    present: Mapping[str, Array],
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
) -> dict[str, dict[str, Metric]]:
    """Metrics of every label on the records that are annotated for it, and their means.

    Args:
        truth: (n, L), 1 and 0, and NaN where a record is not annotated.
        answers: probability of each label, (n,).
        plain: the same with the prevalence of the model.
        present: 1 and 0 for each label with a threshold, (n,).
        patients: of each record, if known.
        draws: number of samples.

    Returns:
        By label: "auroc", "average_precision", "brier", "sensitivity_at_specificity" of 0.9,
        "calibration_intercept", "calibration_slope", "calibration_error"; where the prevalence of the
        site differs, what both were before; and with a threshold its sensitivity and specificity.
        Means are over labels with both kinds of records, and their name tells which are left out.

    Raises:
        PackageError: without statsmodels, which fits the calibration.
    """
    weights = bootstrap_weights(len(truth), patients, draws, seed=0)
    found: dict[str, dict[str, Metric]] = {}
    kept: list[dict[str, Drawn]] = []
    left_out = []
    for index, (name, chance) in enumerate(answers.items()):
        known = ~np.isnan(truth[:, index])
        own, drawn = truth[known, index] == 1, weights[:, known]
        owners = None if patients is None else [patients[i] for i in np.flatnonzero(known).tolist()]
        decided = present[name][known] == 1 if name in present else None
        each = binary_metrics(own, chance[known], decided, owners, drawn, SPECIFICITY)
        stated = {shown: each[key] for key, shown in OF_LABELS.items()}
        metric_values = {key: value.metric for key, value in stated.items()}
        metric_values |= _calibration(own, chance[known], owners)
        metric_values["calibration_error"] = each["calibration_error"].metric
        if not np.array_equal(plain[name][known], chance[known]):
            before = binary_metrics(own, plain[name][known], None, owners, drawn)
            for key in ("calibration_error", "brier"):
                metric_values[f"{key}_at_the_prevalence_of_the_model"] = before[key].metric
        for key in ("sensitivity", "specificity") if decided is not None else ():
            metric_values[f"{key}_at_the_threshold"] = each[key].metric
        found[name] = metric_values
        if own.any() and not own.all():
            kept.append(stated)
        else:
            left_out.append(name)
    less = (
        f" but {', '.join(left_out)}, without a positive or without a negative record"
        if left_out
        else ""
    )
    return found | {f"all labels{less}": averages_of(kept)}


def _calibration(truth: Bools, chance: Array, patients: Sequence[str] | None) -> dict[str, Metric]:
    """Slope and intercept of the logistic regression on the log odds, with its own intervals, which
    allow for patients with several records.
    """
    with needed_for("the calibration of labels"):
        from statsmodels.api import Logit, add_constant
        from statsmodels.tools.sm_exceptions import PerfectSeparationError

    names = ("calibration_intercept", "calibration_slope")
    undefined = {name: Metric(None, None, None, len(truth)) for name in names}
    odds = np.clip(chance, LEAST_CHANCE, 1 - LEAST_CHANCE)
    odds = np.log(odds / (1 - odds))
    if not truth.any() or truth.all() or np.ptp(np.quantile(odds, [0.025, 0.975])) < LEAST_SPREAD:
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
    # ZeroDivisionError: the records of one patient alone have no clusters.
    except (PerfectSeparationError, np.linalg.LinAlgError, ZeroDivisionError):
        return undefined
    if not fit.mle_retvals["converged"] or not np.isfinite(fit.params).all():
        return undefined
    return {
        name: Metric(float(value), float(low), float(high), len(truth))
        for name, value, (low, high) in zip(names, fit.params, fit.conf_int(), strict=True)
    }


def number_metrics(
    true: Array,
    predicted: Array,
    limits: Sequence[Array] = (),
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Metric]:
    """Metrics of predicted numbers, with intervals.

    Args:
        true: (n,), in the unit of the number.
        predicted: (n,).
        limits: lower and upper limits of the model's prediction intervals, (n,) each; none without.
        patients: of each record, if known.
        draws: number of samples for the intervals.
        seed: of the samples.

    Returns:
        "mae", "rmse", "r2"; "bias", the mean of predicted minus true; "agreement_low" and
        "agreement_high", the limits of agreement (Bland & Altman 1986); "icc", the agreement of
        both as two raters; and "coverage" of the prediction intervals, where there are any.
    """
    from sklearn import config_context, metrics

    names = ("mae", "rmse", "r2", "bias", "agreement_low", "agreement_high", "icc")

    def points(rows: Rows) -> dict[str, float | None]:
        own, answers = true[rows], predicted[rows]
        values: dict[str, float | None] = dict.fromkeys(names + ("coverage",) * bool(limits))
        if not len(rows):
            return values
        low, bias, high = agreement(own, answers)
        values |= {
            "mae": float(metrics.mean_absolute_error(own, answers)),
            "rmse": float(metrics.root_mean_squared_error(own, answers)),
            "bias": bias,
            "agreement_low": low,
            "agreement_high": high,
            "icc": agreement_of_raters(np.stack([own, answers], 1)),
        }
        if (own != own[0]).any():
            values["r2"] = float(metrics.r2_score(own, answers))
        if limits:
            values["coverage"] = float(((limits[0][rows] <= own) & (own <= limits[1][rows])).mean())
        return values

    # Checks of its arguments would take most of the time.
    with config_context(assume_finite=True, skip_parameter_validation=True):
        return measured(points, len(true), patients, draws, seed, ("coverage",))


def agreement(true: Array, predicted: Array) -> tuple[float | None, float, float | None]:
    """Lower limit of agreement, bias, and upper limit: the mean of predicted minus true, and 1.96
    standard deviations beside it.

    Args:
        true: (n,), with n of one or more.
        predicted: (n,).

    Returns:
        The limits are None for one record.

    Example:
        >>> low, bias, high = agreement(np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 5.0]))
        >>> round(low, 2), bias, round(high, 2)
        (-0.96, 1.0, 2.96)
    """
    apart = predicted - true
    bias = float(apart.mean())
    if len(apart) < 2:
        return None, bias, None
    width = WIDTH * float(apart.std(ddof=1))
    return bias - width, bias, bias + width


def agreement_of_raters(ratings: Array) -> float | None:
    """The intraclass correlation ICC(2,1): two-way random effects, absolute agreement, one rater.

    Args:
        ratings: of n subjects by k raters, (n, k).

    Returns:
        The correlation; None for fewer than two subjects, or where nothing varies.

    Source: Shrout & Fleiss 1979.

    Example:
        >>> table = [[9, 2, 5, 8], [6, 1, 3, 2], [8, 4, 6, 8], [7, 1, 2, 6], [10, 5, 6, 9],
        ...          [6, 2, 4, 7]]
        >>> round(agreement_of_raters(np.array(table, dtype=float)), 2)
        0.29
    """
    subjects, raters = ratings.shape
    if subjects < 2 or not np.ptp(ratings):
        return None
    rows, columns = ratings.mean(1), ratings.mean(0)
    between, of_raters = raters * rows.var(ddof=1), subjects * columns.var(ddof=1)
    left = ratings - rows[:, None] - columns + ratings.mean()
    error = np.square(left).sum() / ((subjects - 1) * (raters - 1))
    below = between + (raters - 1) * error + raters * (of_raters - error) / subjects
    return float((between - error) / below) if below > 0 else None


Curves = tuple[Array, Array]


def time_metrics(
    observed: Any,
    risks: Array,
    horizon: float,
    curves: Curves | None = None,
    patients: Sequence[str] | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Metric]:
    """Metrics of risks, with intervals from samples of patients or records.

    The distribution of censoring, by which some of them weight records, is that of these records.

    Args:
        observed: event and time of n records, as `sksurv.util.Surv` makes them, (n,).
        risks: the larger, the sooner the event, (n,).
        horizon: up to which times are compared.
        curves: times for which survival is predicted, ascending, (m,), and the probability to survive
            each of them, (n, m); None without.
        patients: of each record, if known.
        draws: number of samples.
        seed: of the samples.

    Returns:
        "concordance" (Harrell et al. 1982), "concordance_ipcw" (Uno et al. 2011), "dynamic_auc"
        (mean up to the horizon), and with curves "integrated_brier". The support is the number of
        records; that of the concordances the number of events.

    Raises:
        PackageError: without scikit-survival.
    """

    def points(rows: Rows) -> dict[str, float | None]:
        own = None if curves is None else (curves[0], curves[1][rows])
        return _time_points(observed[rows], risks[rows], horizon, own)

    found = measured(points, len(risks), patients, draws, seed)
    events = int((observed["event"] & (observed["time"] <= horizon)).sum())
    return {
        name: Metric(each.value, each.low, each.high, events if "concord" in name else each.support)
        for name, each in found.items()
    }


def _time_points(
    own: Any, risks: Array, horizon: float, curves: Curves | None
) -> dict[str, float | None]:
    with needed_for(PURPOSE):
        from sksurv import metrics

    names = ("concordance", "concordance_ipcw", "dynamic_auc")
    values: dict[str, float | None] = dict.fromkeys(
        names if curves is None else (*names, "integrated_brier")
    )
    # An event at the horizon is one; scikit-survival compares those before tau.
    after = float(np.nextafter(horizon, np.inf))
    event, time = own["event"] & (own["time"] <= horizon), np.minimum(own["time"], horizon)
    if not event.any():
        return values
    # Ten times between the first and the last decile of the events up to the horizon.
    first, last = np.quantile(own["time"][event], [0.1, 0.9])
    last = min(last, own["time"].max() * (1 - 1e-9))
    grid = np.unique(np.linspace(min(first, last), last, 10))
    wanted: dict[str, Callable[[], Any]] = {
        "concordance": lambda: metrics.concordance_index_censored(event, time, risks)[0],
        "concordance_ipcw": lambda: metrics.concordance_index_ipcw(own, own, risks, tau=after)[0],
        "dynamic_auc": lambda: metrics.cumulative_dynamic_auc(own, own, risks, grid)[1],
    }
    if curves is not None:
        edges, survival = curves
        at = (edges >= grid[0]) & (edges <= grid[-1])
        if at.sum() > 1:
            wanted["integrated_brier"] = lambda: metrics.integrated_brier_score(
                own, own, survival[:, at], edges[at]
            )
    for name, metric in wanted.items():
        # These records may not define it.
        with np.errstate(all="ignore"):
            try:
                value = float(metric())
            except (ValueError, ZeroDivisionError):
                continue
        values[name] = value if np.isfinite(value) else None
    return values


def predicted_against_true(
    figure: Any, true: Array, predicted: Array, limits: Sequence[Array] = ()
) -> None:
    """Draw predictions against true numbers, with the line of equality.

    Args:
        figure: to draw in.
        true: (n,), with n of one or more.
        predicted: (n,).
        limits: of the intervals of predictions, which are drawn where there are any.
    """
    axes = svg.make_axes(figure, left=0.72, right=0.2, top=0.15, bottom=0.55)
    if limits:
        axes.vlines(true, *limits, color=svg.BLUE, alpha=0.15, lw=1, rasterized=True)
    axes.plot(true, predicted, "o", color=svg.BLUE, ms=3, alpha=0.6, rasterized=True)
    both = np.concatenate([true, predicted, *limits])
    ends = np.array([both.min(), both.max()])
    axes.plot(ends, ends, color=svg.LINE, lw=1, ls="--")
    within = ends + (0.03 * np.ptp(ends) or 1.0) * np.array([-1, 1])
    axes.set(xlim=within, ylim=within, xlabel="true", ylabel="predicted")


def bland_altman(figure: Any, true: Array, predicted: Array) -> None:
    """Draw differences of predicted and true numbers against their mean, with bias and limits of
    agreement.

    Args:
        figure: to draw in.
        true: (n,), with n of one or more.
        predicted: (n,).

    Source: Bland & Altman 1986.
    """
    axes = svg.make_axes(figure, left=0.72, right=1.0, top=0.15, bottom=0.55)
    middle, apart = (predicted + true) / 2, predicted - true
    axes.plot(middle, apart, "o", color=svg.BLUE, ms=3, alpha=0.6, rasterized=True)
    axes.axhline(0, color=svg.LINE, lw=1)
    names = ("lower limit", "bias", "upper limit")
    for name, value in zip(names, agreement(true, predicted), strict=True):
        if value is not None:
            axes.axhline(value, color=svg.ORANGE, lw=1, ls="-" if name == "bias" else "--")
            place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
            axes.text(1.01, value, f"{name}\n{value:.3g}", color=svg.ORANGE, **place)
    axes.set(xlabel="mean of predicted and true", ylabel="predicted minus true")


def kaplan_meier_thirds(
    figure: Any, observed: Any, risks: Array, horizon: float, unit: str = ""
) -> None:
    """Draw Kaplan-Meier curves of the thirds of the records by risk, with 95 % intervals and the
    numbers at risk below.

    Args:
        figure: to draw in.
        observed: as in `time_metrics`.
        risks: (n,).
        horizon: end of the axis.
        unit: of the times.

    Raises:
        PackageError: without lifelines.
    """
    with needed_for(PURPOSE):
        from lifelines import KaplanMeierFitter

    figure.set_layout_engine("constrained")
    axes, table = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    ranks = np.argsort(np.argsort(risks, kind="stable"), kind="stable")
    thirds = ranks * 3 // max(1, len(risks))
    ticks = axes.xaxis.get_major_locator().tick_values(0, horizon)
    ticks = ticks[(ticks >= 0) & (ticks <= horizon)]
    for third, (name, colour) in enumerate(zip(THIRDS, BY_THIRD, strict=True)):
        own = observed[thirds == third]
        for tick in ticks:
            count = (own["time"] >= tick).sum()
            table.text(tick, third, f"{count}", ha="center", va="center", fontsize=8, color=colour)
        if len(own):
            line = np.unique([0.0, *own["time"], horizon])
            fit = KaplanMeierFitter().fit(own["time"], own["event"], timeline=line)
            axes.step(line, fit.survival_function_, where="post", color=colour, label=name)
            limits = fit.confidence_interval_.to_numpy().T
            axes.fill_between(line, *limits, step="post", color=colour, alpha=0.12, lw=0)
    axes.set(xlim=(0, horizon), ylim=(0, 1.02), ylabel="survival")
    axes.legend(frameon=False, loc="lower left", fontsize=8)
    table.set_yticks(range(3), THIRDS)
    table.set_ylim(2.6, -0.6)
    table.set_title("number at risk", fontsize=8, loc="left")
    table.tick_params(axis="y", length=0, labelsize=8, pad=14)
    table.set_xticks(ticks)
    table.set_xlabel(f"time [{unit}]" if unit else "time")
    table.spines["left"].set_visible(False)
