"""A federation as an estimator of scikit-learn learns what sites and a coordinator would, and all
that scikit-learn does with estimators works.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import sklearn
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.datasets import load_diabetes, load_digits, load_iris
from sklearn.metrics import accuracy_score
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer
from sklearn.utils.estimator_checks import check_estimator

import fedsurrogate as fs
import fedsurrogate._estimators
from fedsurrogate.common.errors import ConfigError, DataError, FedSurrogateError, RunError

X, Y = load_digits(return_X_y=True)
X = X / 16
X, Y, TEST = X[:600], Y[:600], (X[600:], Y[600:])
SITES = np.array(["north", "south", "west"])[np.arange(600) % 3]
ROWS, LABELS = load_iris(return_X_y=True)
PLACES = np.array([2, 0, 1])[np.arange(150) % 3]
Classifier = fs.FederatedClassifier

# Those that scikit-learn itself skips.
SKIPPED = {"check_array_api_input": "it needs SCIPY_ARRAY_API in the environment"}


@pytest.mark.parametrize("kind", [Classifier, fs.FederatedRegressor])
def test_scikit_learn_finds_no_fault(kind: type[Any]) -> None:
    """Not even in the answers for a record in batches of other sizes, where 1e-7 is allowed."""
    found = check_estimator(kind(), on_skip=None, on_fail="raise")
    assert len(found) > 45
    outcome = {each["check_name"]: each["status"] for each in found}
    assert {name for name, status in outcome.items() if status == "skipped"} <= set(SKIPPED)


def test_an_estimator_learns_what_a_coordinator_learns_from_the_sites() -> None:
    model = Classifier().fit(X, Y, sites=SITES)
    sent = [
        fs.fit(X[site == SITES], Y[site == SITES], site=str(number), classes=range(10))
        for number, site in enumerate(model.sites_)
    ]
    alone = fs.learn(sent)
    assert np.allclose(model.predict_proba(TEST[0]), alone.predict_proba(TEST[0]), atol=1e-5)
    assert list(model.bytes_.items()) == [
        (site, len(each.payload)) for site, each in zip(model.sites_, sent, strict=True)
    ]
    assert model.score(*TEST) == alone.score(*TEST) > 0.9
    assert isinstance(model.model_, fs.Model)


def test_the_names_of_sites_decide_who_sends_what() -> None:
    by_site = Classifier().fit(X, Y, sites=np.char.add(SITES, " of St. Mary's"))
    assert list(by_site.sites_) == [f"{each} of St. Mary's" for each in ("north", "south", "west")]
    assert len(by_site.bytes_) == 3
    alone = Classifier().fit(X, Y)
    assert (list(alone.sites_), len(alone.bytes_)) == (["site"], 1)


@pytest.mark.parametrize("method", ["fedavg", "ensemble"])
def test_methods_in_rounds_and_those_that_send_once_take_all_records(
    method: str,
) -> None:
    model = Classifier(method, settings={"rounds": 2} if method == "fedavg" else None)
    model.fit(ROWS, LABELS, sites=PLACES)
    assert model.score(ROWS, LABELS) > 0.6
    assert list(model.bytes_) == ["2", "0", "1"]
    assert min(model.bytes_.values()) > 0


def test_columns_are_those_of_classes_also_where_noise_hid_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under privacy a model lacks classes that do not stand out from the noise."""
    some = LABELS != 1
    short = fs.learn([fs.fit(ROWS[some], LABELS[some], classes=[2, 0])])
    monkeypatch.setattr(fedsurrogate._estimators, "learn", lambda sent: short)
    model = Classifier().fit(ROWS, LABELS, sites=PLACES)
    assert short.classifier.header.classes == ("2", "0")
    assert model.classes_.tolist() == [0, 1, 2]
    assert (model.predict_proba(ROWS)[:, 1] == 0).all()
    assert np.isfinite(model.decision_function(ROWS)).all()
    assert model.score(ROWS[some], LABELS[some]) == 1


def test_a_method_without_a_model_for_all_sites_says_so() -> None:
    with pytest.raises(RunError, match="no model for all sites"):
        Classifier("local").fit(ROWS, LABELS, sites=PLACES)


@pytest.mark.parametrize("routing", [False, True])
def test_sites_reach_fit_through_cross_validation_and_pipelines(
    routing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three folds by site, so each fit has the records of the other two."""
    seen: list[list[int]] = []
    real = fedsurrogate._estimators.learn
    monkeypatch.setattr(
        fedsurrogate._estimators,
        "learn",
        lambda sent: seen.append([each.records for each in sent]) or real(sent),
    )
    by_site: dict[str, Any] = {"cv": GroupKFold(3)}
    with sklearn.config_context(enable_metadata_routing=routing):
        model = Classifier().set_fit_request(sites=True) if routing else Classifier()
        given = {"sites": SITES, "groups": SITES} if routing else {"sites": SITES}
        rest = by_site if routing else {**by_site, "groups": SITES}
        scores = cross_val_score(model, X, Y, params=given, **rest)
        if routing:
            line = make_pipeline(Normalizer(), model).fit(X, Y, sites=SITES)
        else:
            line = make_pipeline(Normalizer(), model).fit(X, Y, federatedclassifier__sites=SITES)
    assert scores.min() > 0.85
    *folds, whole = seen
    assert folds == [[200, 200]] * 3
    assert whole == [200, 200, 200]
    assert line.score(*TEST) > 0.85


def test_a_search_over_epsilon_and_covariance_prefers_no_noise() -> None:
    x, y = (np.concatenate(each) for each in zip((X, Y), TEST, strict=True))
    grid = {"epsilon": [0.0, 0.2, 1e4], "covariance": ["spherical", "diag"]}
    search = GridSearchCV(Classifier(delta=1e-5, classes=range(10)), grid, cv=2, error_score=0.0)
    search.fit(x, y, sites=np.arange(len(y)) % 3)
    scores = {
        (each["epsilon"], each["covariance"]): score
        for each, score in zip(
            search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True
        )
    }
    assert len(scores) == 6
    for kind in grid["covariance"]:
        assert scores[0.2, kind] < min(scores[0.0, kind], scores[1e4, kind])
    assert search.best_params_["epsilon"] != 0.2
    assert search.best_estimator_.score(x, y) > 0.8


def test_a_pickle_a_clone_and_a_page_of_an_estimator() -> None:
    frame = pd.DataFrame(ROWS, columns=["a", "b", "c", "d"])
    model = Classifier(settings={"head__shrinkage": 0.5}).fit(frame, LABELS, sites=PLACES)
    assert list(model.feature_names_in_) == ["a", "b", "c", "d"]
    assert model.n_features_in_ == 4
    again = pickle.loads(pickle.dumps(model))
    assert (again.predict_proba(frame) == model.predict_proba(frame)).all()
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert not hasattr(copy, "model_")
    page = model._repr_html_()
    assert "FederatedClassifier" in page
    assert "covariance" in page
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["b", "a", "c", "d"]])


TYPES: dict[str, Callable[[int], Any]] = {
    "texts": lambda number: f"class {9 - number}",
    "numbers": lambda number: 7 - 3 * number,
    "numbers beyond ten": lambda number: 8 + number,
    "floating point": lambda number: float(number) - 1,
    "truth": lambda number: number == 0,
}


@settings(max_examples=12, deadline=None)
@given(
    kind=st.sampled_from(sorted(TYPES)),
    places=st.lists(st.integers(0, 3), min_size=20, max_size=20),
    order=st.permutations(range(60)),
    sparse=st.booleans(),
    absent=st.booleans(),
)
def test_classes_of_any_type_and_any_division_follow_the_conventions(
    kind: str, places: list[int], order: list[int], sparse: bool, absent: bool
) -> None:
    """Classes are sorted by value as scikit-learn sorts them, and columns, scores and predictions
    agree with them; the order of records changes nothing.
    """
    chosen = np.concatenate([np.arange(20) + 50 * k for k in range(3)])
    labels = np.array([TYPES[kind](int(each)) for each in LABELS[chosen]])
    sites = np.array(places * 3)
    listed = None
    if absent and kind != "truth":
        listed = [*np.unique(labels).tolist(), TYPES[kind](4)]
    rows = ROWS[chosen]
    model = Classifier(classes=listed).fit(csr_array(rows) if sparse else rows, labels, sites=sites)
    assert (model.classes_ == np.unique(labels if listed is None else listed)).all()
    proba, scores = model.predict_proba(rows), model.decision_function(rows)
    assert proba.shape == (60, len(model.classes_))
    assert np.allclose(proba.sum(1), 1)
    assert (model.classes_[proba.argmax(1)] == model.predict(rows)).all()
    best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(1)
    assert (best == proba.argmax(1)).all()
    assert accuracy_score(labels, model.predict(rows)) > 0.8
    other = Classifier(classes=listed).fit(rows[order], labels[order], sites=sites[order])
    assert np.allclose(proba, other.predict_proba(rows), atol=0.02)


def test_under_privacy_a_fit_has_noise_of_the_system_and_patients_are_the_unit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    private = Classifier(epsilon=8.0, delta=1e-5, covariance="spherical", classes=range(10))
    first, second = (clone(private).fit(X, Y, sites=SITES) for _ in range(2))
    assert not np.allclose(first.predict_proba(X), second.predict_proba(X))
    given = []
    real = fedsurrogate._estimators.fit

    def kept(*arguments: Any, **options: Any) -> fs.Surrogate:
        given.append(options)
        return real(*arguments, **options)

    monkeypatch.setattr(fedsurrogate._estimators, "fit", kept)
    private.fit(X, Y, sites=SITES, patients=np.arange(600) // 6)
    assert [each["epsilon"] for each in given] == [8.0] * 3
    assert [each["patients"][:3] for each in given] == [["0", "0", "1"]] * 3
    assert [each["classes"] for each in given] == [list(range(10))] * 3


def test_cross_val_predict_fills_columns_of_classes_that_a_fold_lacks() -> None:
    """Folds by class: each fit lacks one, and the classes that are named keep their columns."""
    model = Classifier(classes=[0, 1, 2])
    found = cross_val_predict(
        model, ROWS, LABELS, cv=GroupKFold(3), groups=LABELS, method="predict_proba"
    )
    assert found.shape == (150, 3)
    assert np.allclose(found[np.arange(150), LABELS], 0), "nobody has seen the class"


def test_numbers_are_learned_from_sums_of_sites() -> None:
    rows, numbers = load_diabetes(return_X_y=True)
    sites = np.arange(len(rows)) % 4
    model = fs.FederatedRegressor(target_range=(0, 400)).fit(rows, numbers, sites=sites)
    assert model.score(rows, numbers) > 0.5
    assert len(model.bytes_) == 4
    assert cross_val_score(model, rows, numbers, cv=3, params={"sites": sites}).min() > 0.35
    private = fs.FederatedRegressor(epsilon=8.0, delta=1e-5, target_range=[0, 400])
    assert private.fit(rows, numbers, sites=sites).predict(rows).shape == (442,)


WRONG: dict[type[FedSurrogateError], list[tuple[Callable[[], Any], str]]] = {
    ConfigError: [
        (lambda: Classifier("fedpt").fit(ROWS, LABELS), "fedpft"),
        (lambda: Classifier(epsilon=1.0).fit(ROWS, LABELS), "delta"),
        (lambda: Classifier(epsilon=-1.0).fit(ROWS, LABELS), "epsilon"),
        (lambda: Classifier(covariance="round").fit(ROWS, LABELS), "covariance"),
        (lambda: Classifier(settings={"epsilon": 1.0}).fit(ROWS, LABELS), "as a parameter"),
        (lambda: Classifier(settings={"data": "x"}).fit(ROWS, LABELS), "of fit"),
        (lambda: Classifier(settings={"rnk": 2}).fit(ROWS, LABELS), "rnk"),
        (lambda: Classifier().fit(ROWS[:2], ["a", "a "]), "two classes are both named 'a'"),
        (lambda: Classifier("fedavg").fit(ROWS, LABELS, patients=LABELS), "patients is for methods that send once"),
        (lambda: fs.FederatedRegressor(epsilon=1.0, delta=1e-5).fit(ROWS, LABELS), "known in public"),
        (lambda: fs.FederatedRegressor(target_range=(1,)).fit(ROWS, LABELS), "give two numbers"),
        (lambda: fs.FederatedRegressor(target_range="0,10").fit(ROWS, LABELS), "target_range"),
        (lambda: fs.FederatedRegressor().fit(ROWS, np.ones(150)), "target-range"),
    ],
    DataError: [
        (lambda: Classifier(classes=[0, 1]).fit(ROWS, LABELS), "'2' is not among"),
        (lambda: Classifier().fit(ROWS, LABELS, sites=["a"]), "1 sites for 150"),
        (lambda: Classifier().fit(ROWS, LABELS, sites=[None] * 150), "no site"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [(call, error, why) for error, rows in WRONG.items() for call, why in rows],
)
def test_wrong_parameters_are_named(
    call: Callable[[], Any], error: type[FedSurrogateError], why: str
) -> None:
    with pytest.raises(error, match=why):
        call()
