"""Federations as estimators of scikit-learn: sites are an argument of `fit`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_consistent_length, check_is_fitted, validate_data

from fedsurrogate._arrays import Array, names_of, refuse_times
from fedsurrogate._inputs import class_names, flat_settings
from fedsurrogate._model import Model
from fedsurrogate._simulation import simulate
from fedsurrogate._surrogate import fit, learn
from fedsurrogate._targets import sent_at_once, table_of
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import target_of_model
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.targets.metrics import facts_of

# Settings that say which records a site has, which `fit` decides here.
OF_RECORDS = ("data", "data_dir", "dataset", "partition", "test_fraction", "output_dir", "bags")

Floats = NDArray[np.float64]
# Score of a class that nobody has seen: its probability is zero.
LOWEST = float(np.finfo(np.float32).min)


@dataclass(eq=False, repr=False, kw_only=True)
class Federation(BaseEstimator):  # type: ignore[misc]
    """What estimators share: parameters become settings, and records are divided among sites."""

    epsilon: float | None = None
    delta: float | None = None
    random_state: Any = 0
    settings: Mapping[str, Any] | None = None

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        # Noise comes from the operating system, whatever the random state is.
        tags.non_deterministic = bool(self.epsilon)
        return tags

    def _learned(
        self,
        features: Array,
        targets: Array,
        sites: Array | None,
        patients: Array | None,
        own: Mapping[str, Any],
    ) -> Model:
        """Divide records among their sites, and learn from what the sites send.

        Args:
            features: (n, d).
            targets: (n,) or (n, k).
            sites: (n,), or None.
            patients: (n,), or None.
            own: settings of the run that the parameters of one estimator give.

        Raises:
            ConfigError: for a setting that is given twice, or that `fit` decides.
            FedSurrogateError: for what cannot be used, or a run that fails.
        """
        seed = self.random_state
        if not isinstance(seed, int | np.integer) or isinstance(seed, bool):
            seed = check_random_state(seed).randint(2**31 - 1)
        own = {**own, "seed": int(seed)}
        if self.epsilon:
            own |= {"epsilon": self.epsilon, "delta": self.delta or 0.0}
        for name in self.settings or ():
            if name in {*own, *self.get_params(deep=False), "task"}:
                raise ConfigError(f"settings has {name!r}; give it as a parameter of the estimator")
            if name in OF_RECORDS:
                raise ConfigError(f"settings has {name!r}, but the records are those of fit")
        settings = {**(self.settings or {}), **own}
        count = features.shape[0]
        names = ["site"] * count if sites is None else names_of(sites, count, "site").names
        units = None if patients is None else names_of(patients, count, "patient").names
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            rows.setdefault(name, []).append(row)
        self.sites_ = np.array(list(rows))
        run = parse_run(flat_settings(self.method, sent_at_once(settings)))
        if run.plan.answers_files:
            sent = [
                fit(
                    features[own],
                    targets[own],
                    site=str(number),
                    patients=None if units is None else [units[row] for row in own],
                    method=self.method,
                    **settings,
                )
                # Numbers, as in a simulation: a user's names need be no names of messages.
                for number, own in enumerate(rows.values())
            ]
            sizes = [len(each.payload) for each in sent]
            self.bytes_ = dict(zip(rows, sizes, strict=True))
            return learn(sent)
        if units is not None:
            raise ConfigError(
                f"patients is for methods that send once, and method = {self.method!r} does not"
            )
        with TemporaryDirectory(prefix="fedsurrogate-") as folder:
            # Test records are given so that none are taken from the sites.
            result = simulate(
                [(features[own], targets[own]) for own in rows.values()],
                method=self.method,
                test=(features, targets),
                output_dir=folder,
                **settings,
            )
            sizes = result.metrics["bytes"]["up_per_site"]
            # A site alone has no number as its name.
            self.bytes_ = {
                name: int(sizes[str(at)]) if len(rows) > 1 else result.bytes
                for at, name in enumerate(rows)
            }
            return result.model

    def predict(self, X: Array) -> Any:
        """The number of each record, (n,); of times the risk: the larger, the sooner the event, a log
        hazard relative to a record with mean features.

        Args:
            X: features (n, d).
        """
        return self._scores(X)[:, 0]

    def _scores(self, X: Array) -> Floats:
        """Scores (n, o) of features (n, d), in double precision."""
        check_is_fitted(self)
        scores: Floats = self.model_.decision_function(self._numbers(X, reset=False)).astype(float)
        return scores

    def _numbers(self, X: Array, *y: Array, **options: Any) -> Any:
        """Features (n, d), and targets if there are any, as scikit-learn checks them."""
        refuse_times(X, "features")
        for each in y:
            refuse_times(each, "classes or values of y")
        return validate_data(self, X, *y, accept_sparse="csr", dtype=np.float32, **options)


@dataclass(eq=False, repr=False)
class FederatedClassifier(ClassifierMixin, Federation):  # type: ignore[misc]
    """A classifier that is learned from the surrogates of sites, as an estimator of scikit-learn.

    Pipelines, `cross_val_score`, `GridSearchCV` and `clone` take it. No gate and no ledger is
    involved: nothing counts how often records are released. Each fold and each candidate of a search
    under `epsilon` is a release of its own, and their budgets add up. A step before it in a pipeline
    sees the records of all sites together, so take steps that learn nothing, such as `Normalizer`.

    Args:
        method: its name; any method that gives one model for all sites.
        epsilon: of each fit; None or 0 without privacy.
        delta: of each fit; not used without epsilon.
        covariance: of mixtures, such as "spherical"; "auto" follows from public numbers.
        classes: all classes; None for those of y. Under privacy name them: a list that is read from
            data shows which classes are there.
        random_state: of all but privacy noise, which is drawn by the operating system.
        settings: others, by name as in `fedsurrogate.fit`, such as {"head__epochs": 5}.

    Attributes:
        classes_: in order, as of `predict_proba`.
        model_: the learned `fedsurrogate.Model`.
        sites_: names of the sites.
        bytes_: that each site sent, by name.
        n_features_in_: number of features.
        feature_names_in_: their names, where X has names.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.model_selection import GroupKFold, cross_val_score
        >>> x, y = load_iris(return_X_y=True)
        >>> sites = ["north", "south", "west"] * 50
        >>> scores = cross_val_score(FederatedClassifier(), x, y, groups=sites,
        ...     cv=GroupKFold(3), params={"sites": sites})
        >>> bool(scores.min() > 0.9)
        True
    """

    method: str = "fedpft"
    _: KW_ONLY
    covariance: str = "auto"
    classes: Sequence[object] | None = None

    def fit(
        self, X: Array, y: Array, *, sites: Array | None = None, patients: Array | None = None
    ) -> FederatedClassifier:
        """Learn from the records of all sites.

        Args:
            X: features (n, d).
            y: class of each record, (n,).
            sites: name of the site of each record, (n,); None for one site.
            patients: whose record each is, (n,); with `epsilon` they are the unit of privacy.

        Returns:
            The estimator.

        Raises:
            ValueError: for X and y that scikit-learn refuses.
            FedSurrogateError: for settings that do not agree, names that cannot be used, or a run
                that fails.
        """
        X, y = self._numbers(X, y)
        check_classification_targets(y)
        classes = np.unique(y if self.classes is None else np.asarray([*self.classes]))
        names = class_names(classes.tolist())
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(f"two classes are both named {twice[0]!r}; rename one")
        own = {} if self.covariance == "auto" else {"covariance": self.covariance}
        self.model_ = self._learned(X, y, sites, patients, {**own, "classes": classes.tolist()})
        learned = self.model_.classifier.header.classes
        # Columns of the model in the order of scikit-learn, which sorts by value; None for a class
        # that noise hid.
        self._columns = [learned.index(name) if name in learned else None for name in names]
        self.classes_ = classes
        return self

    def decision_function(self, X: Array) -> Any:
        """Scores of the classes.

        Args:
            X: features (n, d).

        Returns:
            (n, C), of which the largest is the class; (n,) for two classes, positive for the second.
        """
        scores = self._of_classes(X)
        return scores[:, 1] - scores[:, 0] if len(self.classes_) == 2 else scores

    def predict(self, X: Array) -> Any:
        """Class of each record, (n,).

        Args:
            X: features (n, d).
        """
        scores = self._of_classes(X)
        return self.classes_[scores.argmax(1)]

    def predict_proba(self, X: Array) -> Any:
        """Probabilities of the classes, (n, C); each row sums to one.

        Args:
            X: features (n, d).
        """
        return torch.from_numpy(self._of_classes(X)).softmax(1).numpy()

    def _of_classes(self, X: Array) -> Floats:
        """Scores (n, C) in the order of `classes_`, finite: metrics take no infinity."""
        scores = self._scores(X)
        none = np.full((len(scores), 1), LOWEST)
        # The last column is that of classes that the model does not know.
        columns = [-1 if column is None else column for column in self._columns]
        found: Floats = np.maximum(np.hstack([scores, none])[:, columns], LOWEST)
        return found


@dataclass(eq=False, repr=False)
class FederatedRegressor(RegressorMixin, Federation):  # type: ignore[misc]
    """A linear model of a number that is learned from sums of sites, as an estimator of
    scikit-learn.

    Args:
        method: its name; "fedpft" sends once.
        epsilon: of each fit; None or 0 without privacy.
        delta: of each fit; not used without epsilon.
        target_range: lowest and highest value, (low, high), known in public: values beyond it count
            as its ends. None for those of y, which with `epsilon` is refused.
        random_state: of all but privacy noise, which is drawn by the operating system.
        settings: others, by name as in `fedsurrogate.fit`.

    Attributes:
        model_: the learned `fedsurrogate.Model`.
        sites_: names of the sites.
        bytes_: that each site sent, by name.
        n_features_in_: number of features.
        feature_names_in_: their names, where X has names.

    Example:
        >>> from sklearn.datasets import load_diabetes
        >>> x, y = load_diabetes(return_X_y=True)
        >>> model = FederatedRegressor(target_range=(0, 400)).fit(x, y, sites=["a", "b"] * 221)
        >>> model.score(x, y) > 0.5
        True
    """

    method: str = "fedpft"
    _: KW_ONLY
    target_range: Sequence[float] | None = None

    def fit(
        self, X: Array, y: Array, *, sites: Array | None = None, patients: Array | None = None
    ) -> FederatedRegressor:
        """Learn from the records of all sites; arguments as in `FederatedClassifier.fit`, but y are
        numbers (n,).

        Returns:
            The estimator.

        Raises:
            ValueError: for X and y that scikit-learn refuses.
            FedSurrogateError: for settings that do not agree, names that cannot be used, or a run
                that fails.
        """
        X, y = self._numbers(X, y, y_numeric=True, ensure_min_samples=2)
        if np.iscomplexobj(y):
            raise DataError("y holds complex numbers; give real ones")
        y = np.asarray(y, dtype=np.float64)
        if self.target_range is None and self.epsilon:
            raise ConfigError(
                "target_range = None with epsilon: the ends of y would show the records that have "
                "them; give the lowest and highest value that are known in public"
            )
        ends = (y.min(), y.max()) if self.target_range is None else self.target_range
        try:
            low, high = map(float, ends)
        except (TypeError, ValueError):
            raise ConfigError(
                f"target_range = {ends!r}; give two numbers, such as (0, 100)"
            ) from None
        own = {"target_range": f"{low!r},{high!r}", "task": "regression"}
        self.model_ = self._learned(X, y, sites, patients, own)
        return self


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
        X = self._numbers(X, ensure_min_samples=2)
        table = self._times(X, y)
        if self.horizon is None and self.epsilon:
            raise ConfigError(
                "horizon = None with epsilon: the largest of y would show the record that has it; "
                "give the time up to which all sites follow their records"
            )
        known = table[np.isfinite(table[:, 0]), 0]
        # What is missing or infinite is refused with its record.
        horizon = float(known.max(initial=0.0) or 1.0) if self.horizon is None else self.horizon
        if self.horizon is None and not table[:, 0].any():
            raise DataError(
                "all times of y are 0; give horizon, the time up to which records are followed"
            )
        own = {"horizon": horizon, "time_unit": self.time_unit, "time_head": self.time_head}
        own |= {**COLUMNS, "task": "survival"}
        self.model_ = self._learned(X, table, sites, patients, own)
        facts = facts_of(target_of_model(self.model_.classifier))
        self.unique_times_ = np.array(facts["edges"][1:])
        return self

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
        found = self.model_.answers(x := self._numbers(X, reset=False))
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
        x = self._numbers(X, reset=False)
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
