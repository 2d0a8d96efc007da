"""Sums over test records that measure a model: any division over sites gives what scikit-learn says
of all records, and no text or number of a site ends a run.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics

from fedsurrogate.common.targets.metrics import (
    LONGEST,
    added,
    answers_of,
    checked_target,
    is_metric,
    measured,
    metrics_of,
    packed,
)
from fedsurrogate.common.targets.registry import TARGETS
from fedsurrogate.strategies.base.outcome import metric_values_in

SEEDS = st.integers(0, 10_000)


def by_sites(
    facts: dict[str, object], outputs: tuple[str, ...], scores: np.ndarray, values: np.ndarray
) -> dict[str, dict[str, float]]:
    """Metrics of sums that three sites send, one of them without records."""
    text, cut = json.dumps(facts), len(scores) // 3
    rows = [
        measured(text, outputs, torch.from_numpy(scores[part]), torch.from_numpy(values[part]))
        for part in (slice(cut), slice(cut, None), slice(0))
    ]
    for row in rows:
        assert metric_values_in({"metric_values": packed(row)}) == row
    return metrics_of(added(rows))


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(6, 40))
def test_numbers_of_sites_are_measured_as_those_of_all_records(seed: int, n: int) -> None:
    random = np.random.default_rng(seed)
    values = random.normal(3, 2, (n, 2))
    scores = values[:, ::-1] + random.normal(0, 1, (n, 2))
    facts: dict[str, object] = {"name": "regression", "columns": ["b", "a"]}
    found = by_sites(facts, ("a", "b"), scores, values)
    for at, name in enumerate(("a", "b")):
        true = values[:, 1 - at]
        assert found[name] == pytest.approx(
            {
                "records": n,
                "mae": metrics.mean_absolute_error(true, scores[:, at]),
                "rmse": metrics.root_mean_squared_error(true, scores[:, at]),
                "r2": metrics.r2_score(true, scores[:, at]),
            }
        )


@settings(max_examples=50, deadline=None)
@given(SEEDS, st.integers(6, 200), st.floats(0, 12))
def test_a_share_that_is_explained_is_that_of_scikit_learn_or_undefined(
    seed: int, n: int, power: float
) -> None:
    """Sums of squares of numbers far from zero lose the little by which these differ."""
    random = np.random.default_rng(seed)
    values = 10**power + random.normal(0, 1, (n, 1))
    scores = values + random.normal(0, 0.5, (n, 1))
    found = by_sites({"name": "regression", "columns": ["a"]}, ("a",), scores, values)["a"]
    if power < 5:
        assert "r2" in found
    if "r2" in found:
        unexplained = 1 - metrics.r2_score(values[:, 0], scores[:, 0])
        assert 1 - found["r2"] == pytest.approx(unexplained, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(SEEDS, st.integers(3, 40), st.booleans())
def test_labels_are_measured_over_annotated_records(seed: int, n: int, gaps: bool) -> None:
    random = np.random.default_rng(seed)
    scores = random.integers(-3, 4, (n, 1)).astype(float)
    values = random.integers(0, 2, (n, 1)).astype(float)
    values[:2, 0] = (0, 1)
    if gaps:
        values[2:, 0][random.random(n - 2) < 0.3] = np.nan
    text = json.dumps({"name": "multilabel", "columns": ["edema"]})
    own = measured(text, ("edema",), torch.from_numpy(scores), torch.from_numpy(values))
    found, known = metrics_of(own)["edema"], ~np.isnan(values[:, 0])
    true, chances = values[known, 0], 1 / (1 + np.exp(-scores[known, 0]))
    assert found == pytest.approx(
        {
            "records": known.sum(),
            "positive": true.sum(),
            "brier": np.square(true - chances).mean(),
            "auroc": metrics.roc_auc_score(true, chances),
        }
    )
    answers = answers_of(text, ("edema",), torch.from_numpy(scores[known]))
    np.testing.assert_allclose(answers["edema"].numpy(), chances)


@settings(max_examples=40, deadline=None)
@given(SEEDS, st.integers(1, 12))
def test_concordance_is_that_of_each_pair_of_which_one_is_known_to_be_sooner(
    seed: int, n: int
) -> None:
    random = np.random.default_rng(seed)
    times, events = random.integers(1, 6, n).astype(float), random.integers(0, 2, n).astype(float)
    risks = random.integers(0, 4, n).astype(float)
    pairs = concordant = 0.0
    for i in range(n):
        for j in range(n):
            later = times[j] > times[i] or (times[j] == times[i] and not events[j])
            if events[i] and later:
                pairs += 1
                concordant += 1 if risks[j] < risks[i] else 0.5 if risks[j] == risks[i] else 0
    text = json.dumps({"name": "survival", "columns": ["t", "e"]})
    values = torch.from_numpy(np.stack([times, events], 1))
    own = measured(text, ("risk",), torch.from_numpy(risks)[:, None], values)
    wanted = {"records": n, "events": events.sum()}
    if pairs:
        wanted["concordance"] = concordant / pairs
    assert metrics_of(own)["risk"] == pytest.approx(wanted)


def test_an_interval_of_a_number_holds_95_of_100_normal_records() -> None:
    from statistics import NormalDist

    text = json.dumps({"name": "regression", "columns": ["a", "b"], "deviation": [2.0, 3.0]})
    found = answers_of(text, ("a", "b"), torch.tensor([[1.0, 5.0]]))
    for name, middle, deviation in (("a", 1.0, 2.0), ("b", 5.0, 3.0)):
        normal = NormalDist(middle, deviation)
        assert float(found[name]) == middle
        assert normal.cdf(float(found[f"{name} low"])) == pytest.approx(0.025)
        assert normal.cdf(float(found[f"{name} high"])) == pytest.approx(0.975)


NAMES = st.builds(
    "{}.{}.{}.{}".format,
    st.sampled_from([*TARGETS, "class", ""]),
    st.sampled_from(["0", "12", "-1", ""]),
    st.sampled_from(["age", "a.b", "", "x" * 200, "x" * 201, "a\nb"]),
    st.sampled_from(["records", "pairs", "energy", "value", "squared", "absolute", "positive", "brier", "R", ""]),
)  # fmt: skip
REPORTED = st.one_of(st.floats(), st.integers(), st.booleans(), st.none(), st.text(max_size=2))


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(NAMES | st.text(max_size=9), REPORTED, max_size=9))
def test_whatever_a_site_reports_gives_metrics_or_nothing(reported: dict[str, object]) -> None:
    read = metric_values_in({"metric_values": json.dumps(reported)})
    assert all(is_metric(name) and math.isfinite(value) for name, value in read.items())
    if all(isinstance(each, int | float) and math.isfinite(each) for each in reported.values()):
        assert set(read) == set(filter(is_metric, reported))
    for name in reported:
        kind, _, rest = name.partition(".")
        at, _, rest = rest.partition(".")
        output, dot, metric = rest.rpartition(".")
        right = (
            kind in TARGETS
            and at.isdecimal()
            and dot == "."
            and 0 < len(output) <= 200
            and metric.isascii()
            and metric.isalpha()
            and metric.islower()
        )
        assert is_metric(name) == right
    for own in metrics_of(read).values():
        assert own["records"] >= 0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=120, unique=True))
def test_outputs_stand_in_their_own_order_after_a_message(outputs: list[str]) -> None:
    target = json.dumps({"name": "multilabel", "columns": outputs})
    values = torch.zeros(2, len(outputs))
    text = packed(measured(target, tuple(outputs), values, values))
    assert list(metrics_of(added([json.loads(text)]))) == outputs


@pytest.mark.parametrize("number", [None, 3, b"multilabel.0.a.records"])
def test_what_is_no_text_names_no_sum(number: object) -> None:
    assert not is_metric(number)


@pytest.mark.parametrize(
    "text", ["{", "3", "[1]", "[" * 5000, '{"multilabel.0.a.records": 1e999}', '{"a": "' + "x" * LONGEST]
)  # fmt: skip
def test_a_text_that_is_no_sums_counts_as_none(text: str) -> None:
    assert metric_values_in({"metric_values": text}) == {}


SUMS = [
    "records", "absolute", "squared", "value", "energy", "positive", "brier", "pairs", "concordant", "events",
]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    kind=st.sampled_from(sorted(TARGETS)),
    sums=st.dictionaries(
        st.sampled_from(SUMS),
        st.sampled_from([-1.0, 0.0, 1e-320, 3.0, 1e200, 1.7e308]),
    ),
)
def test_sums_that_no_records_have_end_nothing(kind: str, sums: dict[str, float]) -> None:
    found = metrics_of({f"{kind}.0.x.{name}": value for name, value in sums.items()})
    records = max(0.0, sums.get("records", 0.0))
    assert all(own["records"] == records for own in found.values())


@pytest.mark.parametrize(
    ("old", "kind"), [("labels", "multilabel"), ("number", "regression"), ("time", "survival")]
)
def test_a_model_of_an_earlier_version_answers_as_one_of_today(old: str, kind: str) -> None:
    columns = ["t", "e"] if old == "time" else ["x"]
    facts: dict[str, object] = {"columns": columns, "edges": [0.0, 1.0], "hazard": [0.5]}
    scores = torch.tensor([[0.3], [-1.0]]).double()
    earlier, now = (json.dumps({"name": name, **facts}) for name in (old, kind))
    assert checked_target(earlier, ("x",)) == earlier
    found, wanted = (answers_of(text, ("x",), scores) for text in (earlier, now))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
