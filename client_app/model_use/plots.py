"""Plots of models of numbers and times that clinicians know, as matplotlib figures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.targets.counted import THIRDS

from .target_metrics import PURPOSE, Observed, Predictions, agreement, thirds

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
