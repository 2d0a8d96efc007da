"""Own versions of a model of labels or times on few records, where the priors count: their parameters
are those at which scipy finds the least penalised loss.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedsurrogate.client_app.model_use import adapted_scores
from fedsurrogate.client_app.model_use.adapted_scores import Seen, adapt_target
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import facts_of

Numbers = NDArray[np.float64]
NAMES, EDGES, HAZARD = ("mass", "edema"), (0.0, 1.0, 2.0, 4.0), (0.3, 0.0, 0.6)
FACTS: dict[str, Any] = {
    "name": "labels",
    "columns": ["edema", "lung", "mass"],
    "prevalence": [0.4, 0.3],
}
few = settings(max_examples=12, deadline=None)


class Records:
    """A few records with two labels, of which some are not annotated, and a model of them."""

    def __init__(self, seed: int, count: int = 9) -> None:
        drawn = np.random.default_rng(seed)
        self.x = drawn.normal(size=(count, 3))
        weight, bias = drawn.normal(size=(2, 3)), drawn.normal(size=2)
        self.scores = self.x @ weight.T + bias
        values = (drawn.random((count, 2)) < 0.5).astype(float)
        values[drawn.random(values.shape) < 0.2] = np.nan
        self.values = values
        header = Header("fedpft", "", "", "f", NAMES)
        tensors = [torch.from_numpy(each).float() for each in (weight, bias)]
        self.head = Head(header, *tensors, target=json.dumps(FACTS))

    def losses(self, scores: Numbers) -> Numbers:
        """Minus the log likelihood of what is annotated of each record."""
        each = np.logaddexp(0, np.where(self.values == 1, -scores, scores))
        return np.asarray(np.nansum(np.where(np.isnan(self.values), np.nan, each), axis=1))

    @property
    def seen(self) -> Seen:
        there = torch.from_numpy(~np.isnan(self.values))
        present = torch.from_numpy(np.nan_to_num(self.values))

        def loss(scores: torch.Tensor) -> torch.Tensor:
            each = torch.nn.functional.binary_cross_entropy_with_logits
            return (each(scores, present, reduction="none") * there).sum(1)

        return Seen(torch.from_numpy(self.x), torch.from_numpy(self.scores), loss)


def least(loss: Callable[[Numbers], float], size: int) -> Numbers:
    return np.asarray(minimize(loss, np.zeros(size), method="BFGS", options={"gtol": 1e-8}).x)


def answers(made: Head, x: Numbers) -> Numbers:
    assert made.weight.dtype == made.bias.dtype == torch.float32
    return np.asarray(made.weight.double().numpy() @ x.T + made.bias.double().numpy()[:, None]).T


@few
@given(st.integers(0, 10**6))
def test_offsets_have_a_prior_of_deviation_three(seed: int) -> None:
    own = Records(seed)
    wanted = least(
        lambda b: own.losses(own.scores + b).mean() + ((b / 3) ** 2).sum() / 2 / len(own.x), 2
    )
    made = adapted_scores._moved(own.head, own.seen)
    assert answers(made, own.x) == pytest.approx(own.scores + wanted, abs=1e-3)


@few
@given(st.integers(0, 10**6))
def test_logarithms_of_slopes_have_a_prior_of_deviation_one(seed: int) -> None:
    own = Records(seed)
    middle = own.scores.mean(0)

    def scaled(both: Numbers) -> Numbers:
        return np.asarray(np.exp(both[2:]) * (own.scores - middle) + middle + both[:2])

    def loss(both: Numbers) -> float:
        prior = ((both[:2] / 3) ** 2).sum() + (both[2:] ** 2).sum()
        return float(own.losses(scaled(both)).mean() + prior / 2 / len(own.x))

    made = adapted_scores._scaled(own.head, own.seen)
    assert answers(made, own.x) == pytest.approx(scaled(least(loss, 4)), abs=2e-3)


def corrected(own: Records, penalty: float, weights: Numbers) -> Numbers:
    """Scores with weights of a penalty in mean squares of a feature, and an offset of the records'
    weighted middle.
    """
    apart = own.x - weights @ own.x
    strength = penalty * float(weights @ (apart**2).sum(1)) / 3

    def scores(flat: Numbers) -> Numbers:
        return np.asarray(own.scores + apart @ flat[:6].reshape(2, 3).T + flat[6:])

    def loss(flat: Numbers) -> float:
        prior = strength * (flat[:6] ** 2).sum() + ((flat[6:] / 3) ** 2).sum() / len(own.x)
        return float(weights @ own.losses(scores(flat)) + prior / 2)

    return scores(least(loss, 8))


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 10**6))
def test_corrected_weights_have_the_penalty_that_is_best_on_a_third(seed: int) -> None:
    own = Records(seed, 12)
    kept = np.random.default_rng(seed).permutation(12) % 3 > 0
    assert int(kept.sum()) == 8
    judged = {}
    for penalty in (0.01, 0.1, 1.0, 10.0, 100.0):
        scores = corrected(own, penalty, kept / kept.sum())
        judged[penalty] = own.losses(scores)[~kept].mean()
    best = min(judged, key=judged.__getitem__)
    made = adapted_scores._corrected(own.head, own.seen, seed)
    wanted = corrected(own, best, np.full(12, 1 / 12))
    assert answers(made, own.x) == pytest.approx(wanted, abs=3e-3)


@pytest.mark.parametrize("kind", ["hazard", "levels"])
def test_the_odds_of_an_event_in_a_bin_are_those_of_its_hazard(kind: str) -> None:
    """Also for scores that no float holds as a hazard: these stay within thirty powers of e."""
    scores = np.array([-1e4, -40.0, -30.0, -5.0, 0.0, 3.0, 30.0, 31.0, 1e4])
    facts: dict[str, Any] = {"name": "time", "edges": EDGES, kind: list(HAZARD)}
    found = adapted_scores._outputs(facts, torch.from_numpy(scores)[:, None]).numpy()
    if kind == "levels":
        assert found == pytest.approx(np.array(HAZARD) + scores[:, None])
        return
    hazard = np.maximum(HAZARD, 1e-9) * np.exp(np.clip(scores, -30, 30))[:, None]
    hazard = np.maximum(hazard, 1e-12)
    # The logarithm of (1 - e^-h) / e^-h.
    wanted = hazard + np.log(-np.expm1(-hazard))
    assert np.isfinite(found).all()
    assert found == pytest.approx(wanted, rel=1e-9)


def held(values: Numbers) -> HeldOut:
    count = len(values)
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(count))
    zeros = torch.zeros(count, dtype=torch.int64)
    return HeldOut(x, zeros, None, {}, "own records", values=torch.from_numpy(values))


def test_twenty_annotated_records_are_enough_and_nineteen_too_few() -> None:
    own, values = Records(1), np.full((30, 3), np.nan)
    values[:20, 0] = np.arange(20) % 2
    # A record with two labels is one record.
    values[5:10, 1] = 1.0
    assert adapt_target(own.head, held(values)).judged
    values[0, 0] = np.nan
    with pytest.raises(DataError, match=r"^19 records with values are too few.*; 20 needed$"):
        adapt_target(own.head, held(values))
    without = HeldOut(torch.ones(3, 3), torch.zeros(3, dtype=torch.int64), None, {}, "own")
    with pytest.raises(DataError, match=r"^0 records with values are too few"):
        adapt_target(own.head, without)


def test_five_events_are_enough_and_four_too_few() -> None:
    facts = {"name": "time", "columns": ["t", "e"], "edges": EDGES, "hazard": [0.3, 0.3, 0.6]}
    model = Head(
        Header("fedpft", "", "", "f", ("risk",)),
        torch.tensor([[0.3, -0.1, 0.0]]),
        torch.tensor([0.2]),
        target=json.dumps(facts),
    )
    values = np.stack([np.linspace(0.1, 3.9, 25), (np.arange(25) < 5).astype(float)], 1)
    assert adapt_target(model, held(values)).judged
    values[0, 1] = 0.0
    with pytest.raises(DataError, match=r"^4 records with an event are too few; 5 are needed$"):
        adapt_target(model, held(values))


def test_a_models_prevalence_becomes_that_of_the_site_where_labels_are_annotated() -> None:
    """With half a record of each kind more; a label without annotations keeps what was learned."""
    own, values = Records(1), np.full((6, 3), np.nan)
    values[:4, 2] = [1, 1, 1, 0]
    made = adapted_scores._as_learned_here(own.head, FACTS, torch.from_numpy(values))
    assert facts_of(made.target) == FACTS | {"prevalence": [pytest.approx(3.5 / 5), 0.3]}
    unknown = {key: value for key, value in FACTS.items() if key != "prevalence"}
    made = adapted_scores._as_learned_here(own.head, unknown, torch.from_numpy(values))
    assert facts_of(made.target)["prevalence"] == [pytest.approx(3.5 / 5), 0.5]
    times = {"name": "time"}
    assert adapted_scores._as_learned_here(own.head, times, torch.from_numpy(values)) is own.head
