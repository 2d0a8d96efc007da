"""Plots of models of numbers, labels and times that clinicians know, as matplotlib figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.client_app.model_use.target_metrics.numbers import Predictions, agreement
from fedsurrogate.client_app.model_use.target_metrics.times import (
    PURPOSE,
    THIRDS,
    Observed,
    thirds,
)
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.models.class_measures import BINS, bins_of, reliability
from fedsurrogate.common.models.intervals import Array, Measure
from fedsurrogate.common.pages.svg import INK

# Colours that people with colour blindness can tell apart (Okabe & Ito).
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
BY_THIRD = (GREEN, BLUE, ORANGE)
DRAWING = "the plots of an evaluation"
# Of lines of reference.
FAINT = "#8a8f98"


def _figure(width: float, height: float) -> Any:
    with needed_for(DRAWING):
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)


def forest(groups: Mapping[str, Mapping[str, Measure]], title: str, neutral: float) -> Any:
    """A forest plot: estimates with 95 % intervals, one line each, in groups.

    Args:
        groups: by the name of a group, such as a label: the measure of each line, such as a site.
        title: of the measure, such as "AUROC".
        neutral: value without effect: 0.5 for AUROC.

    Returns:
        The figure. A measure without a value has a line that says so.
    """
    lines = [
        (group, name, measure) for group, own in groups.items() for name, measure in own.items()
    ]
    figure = _figure(8.0, 1.1 + 0.28 * (len(lines) + len(groups)))
    axes = figure.add_subplot()
    place, ticks, names = 0.0, [], []
    text = {"va": "center", "fontsize": 8, "color": INK}
    for group, own in groups.items():
        ticks.append(place)
        names.append(group)
        place += 1
        for name, measure in own.items():
            ticks.append(place)
            names.append(f"{name}, n = {measure.support}")
            _estimate(axes, place, measure)
            at = axes.get_yaxis_transform()
            axes.text(1.02, place, _stated(measure), transform=at, **text)
            place += 1
    axes.axvline(neutral, color=FAINT, lw=1, ls="--")
    axes.set_yticks(ticks, names)
    for tick, name in zip(axes.get_yticklabels(), names, strict=True):
        tick.set_fontweight("bold" if name in groups else "normal")
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_ylim(place - 0.4, -0.6)
    axes.set_xlabel(f"{title} with 95 % interval")
    _plain(axes)
    axes.spines["left"].set_visible(False)
    return figure


def _estimate(axes: Any, place: float, measure: Measure) -> None:
    if measure.value is None:
        return
    if measure.low is not None and measure.high is not None:
        axes.plot([measure.low, measure.high], [place, place], color=BLUE, lw=1.5)
    axes.plot([measure.value], [place], "s", color=BLUE, ms=5)


def _stated(measure: Measure) -> str:
    if measure.value is None:
        return "not defined"
    if measure.low is None or measure.high is None:
        return f"{measure.value:.2f}"
    return f"{measure.value:.2f} ({measure.low:.2f} to {measure.high:.2f})"


def predicted_against_true(records: Predictions, unit: str = "") -> Any:
    """Predictions against true numbers, with the line of equality.

    Args:
        records: the records; intervals of predictions are drawn where there are any.
        unit: of the number.

    Returns:
        The figure.
    """
    figure = _figure(5.0, 5.0)
    axes = figure.add_subplot()
    if records.low is not None and records.high is not None:
        axes.vlines(records.true, records.low, records.high, color=BLUE, alpha=0.15, lw=1)
    axes.plot(records.true, records.predicted, "o", color=BLUE, ms=3, alpha=0.6)
    parts = (records.true, records.predicted, records.low, records.high)
    both = np.concatenate([each for each in parts if each is not None])
    ends = (float(both.min()), float(both.max())) if len(both) else (0.0, 1.0)
    axes.plot(ends, ends, color=FAINT, lw=1, ls="--")
    margin = 0.03 * (ends[1] - ends[0]) or 1.0
    axes.set(xlim=(ends[0] - margin, ends[1] + margin), ylim=(ends[0] - margin, ends[1] + margin))
    axes.set_xlabel(_with_unit("true", unit))
    axes.set_ylabel(_with_unit("predicted", unit))
    axes.set_box_aspect(1)
    _plain(axes)
    return figure


def bland_altman(records: Predictions, unit: str = "") -> Any:
    """Differences of predicted and true numbers against their mean, with bias and limits of
    agreement.

    Args:
        records: one or more.
        unit: of the number.

    Returns:
        The figure.

    Source: Bland & Altman 1986.
    """
    figure = _figure(6.4, 4.2)
    axes = figure.add_subplot()
    apart, middle = records.predicted - records.true, (records.predicted + records.true) / 2
    axes.plot(middle, apart, "o", color=BLUE, ms=3, alpha=0.6)
    axes.axhline(0, color=FAINT, lw=1)
    low, bias, high = agreement(records.true, records.predicted)
    for value, name in ((high, "upper limit"), (bias, "bias"), (low, "lower limit")):
        if value is None:
            continue
        axes.axhline(value, color=ORANGE, lw=1, ls="-" if name == "bias" else "--")
        place = {"transform": axes.get_yaxis_transform(), "va": "center", "fontsize": 8}
        axes.text(1.01, value, f"{name}\n{value:.3g}", color=ORANGE, **place)
    axes.set_xlabel(_with_unit("mean of predicted and true", unit))
    axes.set_ylabel(_with_unit("predicted minus true", unit))
    _plain(axes)
    return figure


def calibration(truth: Array, chance: Array, names: Sequence[str]) -> Any:
    """Observed share against predicted probability in ten bins, one panel for each label.

    Args:
        truth: (n, L), 1, 0, and NaN where not annotated.
        chance: (n, L).
        names: of the labels.

    Returns:
        The figure; bins have the Wilson interval of their share, and the number of records in them.
    """
    return _panels(names, lambda axes, index: _reliability(axes, truth[:, index], chance[:, index]))


def precision_recall(truth: Array, chance: Array, names: Sequence[str]) -> Any:
    """Precision against recall, one panel for each label, with the prevalence.

    Args:
        truth: as for `calibration`.
        chance: (n, L).
        names: of the labels.

    Returns:
        The figure.
    """
    from sklearn.metrics import precision_recall_curve

    def draw(axes: Any, index: int) -> None:
        known = ~np.isnan(truth[:, index])
        own = truth[known, index] == 1
        axes.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="recall", ylabel="precision")
        if own.any():
            precision, recall, _ = precision_recall_curve(own, chance[known, index])
            axes.step(recall, precision, where="post", color=BLUE, lw=1.5)
            axes.axhline(float(own.mean()), color=FAINT, lw=1, ls="--")

    return _panels(names, draw)


def _panels(names: Sequence[str], draw: Any) -> Any:
    """One square panel for each name, at most four in a row."""
    columns = min(4, max(1, len(names)))
    rows = -(-len(names) // columns)
    figure = _figure(0.6 + 2.6 * columns, 0.4 + 2.7 * max(1, rows))
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        axes.set_title(name, fontsize=9, pad=12)
        draw(axes, index)
        axes.tick_params(labelsize=8)
        _plain(axes)
    return figure


def _reliability(axes: Any, truth: Array, chance: Array) -> None:
    from scipy.stats import binomtest

    known = ~np.isnan(truth)
    axes.plot([0, 1], [0, 1], color=FAINT, lw=1, ls="--")
    if known.any():
        found = reliability(truth[known] == 1, chance[known])
        most = found[2].max()
        middles = (bins_of(found[0]) + 0.5) / BINS
        columns = (each.tolist() for each in (middles, *found))
        for middle, predicted, share, size in zip(*columns, strict=True):
            axes.bar(middle, 0.15 * size / most, 0.9 / BINS, color=FAINT, alpha=0.35)
            axes.text(middle, 1.04, f"{size}", ha="center", fontsize=6, color=FAINT)
            limits = binomtest(round(share * size), size).proportion_ci(method="wilson")
            axes.plot([predicted, predicted], [limits.low, limits.high], color=BLUE, lw=1)
            axes.plot([predicted], [share], "o", color=BLUE, ms=4)
    axes.set(xlim=(0, 1), ylim=(-0.02, 1.02), xlabel="predicted", ylabel="observed")


def kaplan_meier_thirds(records: Observed, horizon: float, unit: str = "") -> Any:
    """Kaplan-Meier curves of the thirds of the records by risk, with 95 % intervals and the numbers
    at risk below.

    Args:
        records: the records.
        horizon: end of the axis.
        unit: of the times.

    Returns:
        The figure.

    Raises:
        PackageError: without lifelines.
    """
    with needed_for(PURPOSE):
        from lifelines import KaplanMeierFitter

    figure = _figure(6.4, 5.0)
    axes, table = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    own = thirds(records.risks)
    ticks = _ticks(horizon)
    for third, (name, colour) in enumerate(zip(THIRDS, BY_THIRD, strict=True)):
        at = own == third
        counts = [int((records.times[at] >= tick).sum()) for tick in ticks]
        for tick, count in zip(ticks, counts, strict=True):
            table.text(tick, third, f"{count}", ha="center", va="center", fontsize=8, color=colour)
        if not at.any():
            continue
        fit = KaplanMeierFitter().fit(records.times[at], records.events[at])
        times = np.append(fit.survival_function_.index.to_numpy(), horizon)
        values = fit.survival_function_.to_numpy()[:, 0]
        low, high = fit.confidence_interval_.to_numpy().T
        steps = {"step": "post", "color": colour, "alpha": 0.12, "lw": 0}
        axes.step(times, np.append(values, values[-1]), where="post", color=colour, label=name)
        axes.fill_between(times, np.append(low, low[-1]), np.append(high, high[-1]), **steps)
    axes.set(xlim=(0, horizon), ylim=(0, 1.02), ylabel="survival")
    axes.legend(frameon=False, loc="lower left", fontsize=8)
    _plain(axes)
    table.set_yticks(range(3), THIRDS)
    table.set_ylim(2.6, -0.6)
    table.set_title("number at risk", fontsize=8, loc="left")
    table.tick_params(axis="y", length=0, labelsize=8, pad=14)
    table.set_xticks(ticks)
    table.set_xlabel(_with_unit("time", unit))
    table.spines[["top", "right", "left"]].set_visible(False)
    return figure


def _ticks(horizon: float) -> NDArray[np.float64]:
    with needed_for(DRAWING):
        from matplotlib.ticker import MaxNLocator

    found = np.asarray(MaxNLocator(6).tick_values(0, horizon))
    return found[(found >= 0) & (found <= horizon)]


def _with_unit(name: str, unit: str) -> str:
    return f"{name} [{unit}]" if unit else name
