"""A federation that learns the time to an event, as an estimator with the conventions of
scikit-survival.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedsurrogate._arrays import Array, refuse_times
from fedsurrogate._estimators import Federation
from fedsurrogate._targets import table_of
from fedsurrogate.common.errors import ConfigError, DataError

Floats = NDArray[np.float64]
# Names of the columns of y, which settings ask for.
COLUMNS = {"time_column": "time", "event_column": "event"}
SURVIVAL = "survival "


@dataclass(eq=False, repr=False)
class FederatedSurvival(Federation):
    """A model of the time to an event that is learned from sums of sites, as an estimator with the
    conventions of scikit-survival: y is structured, `predict` gives risks, and `score` is the
    concordance index.

    Args:
        time_head: how risks are learned: "residuals" in two rounds, or "cells" in one round, for
            which each cell of time and event needs two records at each site.
        epsilon: of each fit; None or 0 without privacy.
        delta: of each fit; not used without epsilon.
        horizon: times beyond it count as outlived, known in public; None for the largest of y, which
            with `epsilon` is refused.
        time_unit: of the times, in words.
        random_state: of all but privacy noise, which is drawn by the operating system.
        settings: others, by name as in `fedsurrogate.fit`, such as {"bins": 8}.

    Attributes:
        unique_times_: times of `predict_survival_function`, (B,): ends of the run's bins.
        model_: the learned `fedsurrogate.Model`.
        sites_: names of the sites.
        bytes_: that each site sent, by name.
        n_features_in_: number of features.
        feature_names_in_: their names, where X has names.

    Example:
        >>> random = np.random.default_rng(0)
        >>> x = random.normal(size=(300, 3))
        >>> times = random.exponential(np.exp(-x[:, 0]))
        >>> y = np.array([(True, time) for time in times], [("event", bool), ("time", float)])
        >>> model = FederatedSurvival(horizon=3.0).fit(x, y, sites=["a", "b", "c"] * 100)
        >>> model.score(x, y) > 0.65
        True
        >>> model.predict_survival_function(x[:2], times=[0.5, 1.0]).shape
        (2, 2)
    """

    method: ClassVar[str] = "fedpft"
    time_head: Literal["residuals", "cells"] = "residuals"
    _: KW_ONLY
    horizon: float | None = None
    time_unit: str = "units"

    def fit(
        self, X: Array, y: Array, *, sites: Array | None = None, patients: Array | None = None
    ) -> FederatedSurvival:
        """Learn from the records of all sites.

        Args:
            X: features (n, d).
            y: structured (n,) with an event of True or False and a time, as of
                `sksurv.util.Surv`; or (n, 2), time before event.
            sites: name of the site of each record, (n,); None for one site.
            patients: whose record each is, (n,), with `time_head="cells"` only.

        Returns:
            The estimator.

        Raises:
            ValueError: for X that scikit-learn refuses.
            FedSurrogateError: for y, settings or names that cannot be used, or a run that fails.
        """
        refuse_times(X, "features")
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float32, ensure_min_samples=2)
        table = self._times(X, y)
        if self.horizon is None and self.epsilon:
            raise ConfigError(
                "horizon = None with epsilon: the largest of y would show the record that has it; "
                "give the time up to which all sites follow their records"
            )
        horizon = float(table[:, 0].max()) if self.horizon is None else self.horizon
        own = {"horizon": horizon, "time_unit": self.time_unit, "time_head": self.time_head}
        settings = self._own_settings({**own, **COLUMNS})
        self.model_ = self._learned(X, table, sites, patients, {**settings, "target": "time"})
        named = [name for name in self.model_.answers(X[:1]) if name.startswith(SURVIVAL)]
        self.unique_times_ = np.array([float(name.removeprefix(SURVIVAL)) for name in named])
        return self

    def predict(self, X: Array) -> Any:
        """The risk of each record, (n,): the larger, the sooner the event; a log hazard, relative to
        a record with mean features.

        Args:
            X: features (n, d).
        """
        return self._scores(X)[:, 0]

    def predict_survival_function(self, X: Array, times: Array | None = None) -> Any:
        """The probability of being without the event, (n, T).

        Args:
            X: features (n, d).
            times: (T,), from 0 to the last of `unique_times_`; None for these. Between them the
                hazard is constant.

        Raises:
            DataError: for a time beyond.
        """
        check_is_fitted(self)
        x = validate_data(self, X, accept_sparse=True, dtype=np.float32, reset=False)
        found = self.model_.answers(x)
        curve = np.stack([v for name, v in found.items() if name.startswith(SURVIVAL)], 1)
        if times is None:
            return curve
        wished = np.atleast_1d(np.asarray(times, dtype=float))
        knots = np.append(0.0, self.unique_times_)
        if not ((wished >= 0) & (wished <= knots[-1])).all():
            raise DataError(
                f"times from {wished.min():g} to {wished.max():g}; this model answers from 0 to its "
                f"horizon, {knots[-1]:g}"
            )
        logs = np.log(np.clip(np.insert(curve, 0, 1.0, axis=1), 1e-300, None))
        return np.exp([np.interp(wished, knots, row) for row in logs]).reshape(len(x), -1)

    def score(self, X: Array, y: Array) -> float:
        """The concordance index of the risks: of two records of which it is known who had the event
        first, the share of pairs in which the risk of that one is larger.

        Args:
            X: features (n, d).
            y: as in `fit`.

        Source: Harrell et al. 1982; scikit-survival's `concordance_index_censored`.
        """
        check_is_fitted(self)
        x = validate_data(self, X, accept_sparse=True, dtype=np.float32, reset=False)
        return float(self.model_.score(x, self._times(x, y)))

    def _times(self, X: Array, y: Array) -> Floats:
        """Time and event of each record, (n, 2). Raises DataError, or ValueError for another length."""
        table = table_of(y, [*COLUMNS.values()])
        if table.shape[1] != 2:
            raise DataError(
                f"y of shape {np.shape(y)}; times need a structured array of event and time, as of "
                "sksurv.util.Surv, or (n, 2) with the time before the event"
            )
        check_consistent_length(X, table)
        return table
