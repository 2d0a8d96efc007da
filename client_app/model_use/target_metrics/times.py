"""Measures of predicted risks and survival curves. Point values are scikit-survival's and
lifelines'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.models.intervals import Array, Measure, Rows, measured

# Samples for intervals: a concordance index takes the time of all pairs of records.
DRAWS = 200
THIRDS = ("low risk", "medium risk", "high risk")
PURPOSE = "the evaluation of survival times"


@dataclass(frozen=True, eq=False)
class Observed:
    """Records with a time, and what a model answers.

    Attributes:
        times: of the event, or when a record was last seen, (n,).
        events: whether the event was seen, (n,), bool.
        risks: the larger, the sooner the event, (n,).
        patients: of each record, if known.
    """

    times: Array
    events: NDArray[np.bool_]
    risks: Array
    patients: Sequence[str] | None = None

    @property
    def structured(self) -> Any:
        """Event and time, as scikit-survival takes them, (n,)."""
        pairs = np.empty(len(self.times), dtype=[("event", bool), ("time", float)])
        pairs["event"], pairs["time"] = self.events, self.times
        return pairs


@dataclass(frozen=True, eq=False)
class Survival:
    """Predicted survival at some times.

    Attributes:
        times: ascending, (m,).
        chances: probability to survive each of them, (n, m).
    """

    times: Array
    chances: Array


def time_measures(
    records: Observed,
    horizon: float,
    survival: Survival | None = None,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Measure]:
    """Measures of risks, with intervals from samples of patients or records.

    The distribution of censoring, by which some of them weight records, is that of these records.

    Args:
        records: n of them.
        horizon: up to which times are compared.
        survival: predicted curves; None leaves out what needs them.
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
        return _points(records, rows, horizon, survival)

    found = measured(points, len(records.times), records.patients, draws, seed)
    events = int((records.events & (records.times <= horizon)).sum())
    return {
        name: Measure(
            each.value, each.low, each.high, events if "concord" in name else each.support
        )
        for name, each in found.items()
    }


def _points(
    records: Observed, rows: Rows, horizon: float, survival: Survival | None
) -> dict[str, float | None]:
    with needed_for(PURPOSE):
        from sksurv import metrics

    names = ("concordance", "concordance_ipcw", "dynamic_auc")
    values: dict[str, float | None] = dict.fromkeys(names)
    if survival is not None:
        values["integrated_brier"] = None
    own, risks = records.structured[rows], records.risks[rows]
    # An event at the horizon is one; scikit-survival compares those before tau.
    after = float(np.nextafter(horizon, np.inf))
    beyond = own["time"] > horizon
    cut = own.copy()
    cut["event"], cut["time"] = own["event"] & ~beyond, np.minimum(own["time"], horizon)
    if not cut["event"].any():
        return values
    values["concordance"] = _defined(
        lambda: metrics.concordance_index_censored(cut["event"], cut["time"], risks)[0]
    )
    values["concordance_ipcw"] = _defined(
        lambda: metrics.concordance_index_ipcw(own, own, risks, tau=after)[0]
    )
    grid = _grid(own, horizon)
    values["dynamic_auc"] = _defined(
        lambda: metrics.cumulative_dynamic_auc(own, own, risks, grid)[1]
    )
    if survival is not None:
        inside = (survival.times >= grid[0]) & (survival.times <= grid[-1])
        if inside.sum() > 1:
            chances, at = survival.chances[rows][:, inside], survival.times[inside]
            values["integrated_brier"] = _defined(
                lambda: metrics.integrated_brier_score(own, own, chances, at)
            )
    return values


def _defined(measure: Any) -> float | None:
    """The measure; None where these records do not define it."""
    try:
        with np.errstate(all="ignore"):
            value = float(measure())
    except (ValueError, ZeroDivisionError):
        return None
    return value if np.isfinite(value) else None


def _grid(own: Any, horizon: float) -> Array:
    """Ten times between the first and the last decile of the events up to the horizon."""
    times = own["time"][own["event"] & (own["time"] <= horizon)]
    last = min(float(np.quantile(times, 0.9)), float(own["time"].max()) * (1 - 1e-9))
    return np.unique(np.linspace(min(float(np.quantile(times, 0.1)), last), last, 10))


def thirds(risks: Array) -> NDArray[np.int64]:
    """The third of each record by its risk, from 0 for low to 2 for high, (n,).

    Example:
        >>> thirds(np.array([0.3, 0.1, 0.2])).tolist()
        [2, 0, 1]
    """
    ranks = np.argsort(np.argsort(risks, kind="stable"), kind="stable")
    return (ranks * 3 // max(1, len(risks))).astype(np.int64)
