"""Own versions of a model of numbers, fold by fold in plain numpy: what each version answers about
records that it has not seen, and by which test one of them is taken.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fedsurrogate.client_app.model_use.adapted_numbers import adapt_numbers
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.intervals import bootstrap_weights
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import facts_of

Array = NDArray[np.float64]
RANGES = {"x": (-20.0, 20.0), "y": (0.0, 5.0)}
NAMES = ("shared", "moved", "scaled", "corrected by a ridge")


def head(outputs: tuple[str, ...]) -> Head:
    facts = {"name": "number", "columns": list(RANGES), "ranges": list(RANGES.values())}
    target = json.dumps(facts | {"deviation": [9.0] * len(outputs)})
    weight = torch.tensor([[2.0, -1.0, 0.0, 0.5], [0.1, 0.3, -0.2, 0.0]])[: len(outputs)]
    header = Header("fedpft", "", "", "f", outputs)
    return Head(header, weight, torch.tensor([1.0, 2.5])[: len(outputs)], target=target)


def ridge(x: Array, rest: Array, penalty: float) -> tuple[Array, Array]:
    """Weights and intercept of what the model leaves, the penalty as a multiple of the mean square."""
    centred, apart = x - x.mean(0), rest - rest.mean(0)
    strength = penalty * float((centred**2).sum(1).mean())
    change = np.linalg.solve(centred.T @ centred + strength * np.eye(x.shape[1]), centred.T @ apart)
    return change, rest.mean(0) - x.mean(0) @ change


def answers(
    name: str, data: tuple[Array, Array, Array], x: Array, plain: Array, seed: int
) -> Array:
    """Of a version that is fitted on features, shared answers and values, about other records."""
    own, scores, values = data
    if name == "shared":
        return plain
    if name == "moved":
        return plain + (values - scores).mean(0)
    if name == "scaled":
        columns = []
        for at in range(values.shape[1]):
            slope, start = np.polyfit(scores[:, at], values[:, at], 1)
            columns.append(slope * plain[:, at] + start)
        return np.stack(columns, 1)
    kept = np.random.default_rng(seed).permutation(len(values)) % 3 > 0
    spread, errors = values.var(0), {}
    for penalty in (0.01, 0.1, 1.0, 10.0, 100.0):
        change, start = ridge(own[kept], (values - scores)[kept], penalty)
        rest = values[~kept] - scores[~kept] - own[~kept] @ change - start
        errors[penalty] = float((rest**2 / spread).mean())
    change, start = ridge(own, values - scores, min(errors, key=errors.__getitem__))
    return plain + x @ change + start


@st.composite
def hospitals(draw: st.DrawFn) -> tuple[Head, HeldOut]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9999)))
    outputs = draw(st.sampled_from([("x",), ("y", "x"), ("x", "y")]))
    count, own = draw(st.integers(20, 60)), head(outputs)
    x = torch.randn(count, 4, generator=generator)
    change = draw(st.sampled_from(["nothing", "offset", "slope", "other"]))
    scores = own.scores(x).double()
    made = {
        "nothing": scores,
        "offset": scores + 3,
        "slope": 0.2 * scores - 1,
        "other": scores + 3 * x[:, 2:3],
    }[change]
    made = made + torch.randn(made.shape, generator=generator).double()
    # Columns are in the order of the target, and one may be no output of the model.
    columns = {name: made[:, at] for at, name in enumerate(outputs)}
    values = torch.stack([columns.get(name, torch.zeros(count).double()) for name in RANGES], 1)
    patients = None
    if draw(st.booleans()):
        patients = tuple(f"p{at // 2}" for at in range(count))
    zeros = torch.zeros(count, dtype=torch.int64)
    return own, HeldOut(x, zeros, patients, {}, "own records", values=values)


@settings(max_examples=12, deadline=None)
@given(hospitals(), st.integers(0, 3))
def test_versions_are_judged_on_what_they_have_not_seen(
    hospital: tuple[Head, HeldOut], seed: int
) -> None:
    model, held = hospital
    assert held.values is not None
    limits = [RANGES[name] for name in model.header.classes]
    places = [list(RANGES).index(name) for name in model.header.classes]
    values = held.values.numpy()[:, places].clip(*np.array(limits).T)
    x, scores = held.features.double().numpy(), model.scores(held.features).double().numpy()
    groups = np.arange(len(x))
    if held.patients is not None:
        groups = np.unique(held.patients, return_inverse=True)[1]
    folds = (np.random.default_rng(seed).permutation(groups.max() + 1) % 5)[groups]
    errors = {name: np.zeros_like(values) for name in NAMES}
    for fold in range(5):
        rest, rows = folds != fold, folds == fold
        data = x[rest], scores[rest], values[rest]
        for name in NAMES:
            errors[name][rows] = values[rows] - answers(name, data, x[rows], scores[rows], seed)
    losses = {name: (each**2 / values.var(0)).mean(1) for name, each in errors.items()}
    weights = bootstrap_weights(len(x), held.patients, 2000, seed)
    found = adapt_numbers(model, held, seed)
    assert [each.name for each in found.judged] == list(NAMES)
    gains: dict[str, Array] = {}
    for each in found.judged:
        apart = losses["shared"] - losses[each.name]
        gains[each.name] = weights @ apart / weights.sum(1)
        numbers = (each.loss, each.gain, each.low, each.high)
        wanted = (
            losses[each.name].mean(),
            apart.mean(),
            *np.quantile(gains[each.name], [0.025, 0.975]),
        )
        assert numbers == pytest.approx(wanted, rel=1e-3, abs=1e-4), each.name
        assert each.share == (each.name != "shared")
    # The best one whose gain is beyond chance, four candidates being tried.
    order = sorted(NAMES, key=lambda name: float(losses[name].mean()))
    better = order[: order.index("shared")]
    sure = [name for name in better if np.quantile(gains[name], 0.025 / 4) > 0]
    chosen = sure[0] if sure else "shared"
    assert (found.chosen, found.share) == (chosen, float(bool(sure)))
    if not sure:
        assert found.own is None
        return
    assert isinstance(found.own, Head)
    wanted = answers(chosen, (x, scores, values), x, scores, seed)
    np.testing.assert_allclose(found.own.scores(held.features), wanted, rtol=1e-3, atol=1e-3)
    facts = facts_of(found.own.target)
    assert facts["deviation"] == pytest.approx(np.sqrt((errors[chosen] ** 2).mean(0)), rel=1e-3)
    assert facts | {"deviation": 0} == facts_of(model.target) | {"deviation": 0}


@pytest.mark.parametrize(
    ("count", "patients", "fine"),
    [(20, 20, True), (19, 19, False), (40, 5, True), (40, 4, False), (0, 0, False)],
)
def test_an_adaptation_needs_twenty_records_of_five_patients(
    count: int, patients: int, fine: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, model = torch.randn(count, 4, generator=generator), head(("x",))
    values = torch.cat([model.scores(x).double(), torch.zeros(count, 1)], 1)
    owners = tuple(f"p{at % max(1, patients)}" for at in range(count))
    zeros = torch.zeros(count, dtype=torch.int64)
    held: Any = HeldOut(x, zeros, owners, {}, "own records", values=values)
    if fine:
        assert adapt_numbers(model, held).chosen == "shared"
    else:
        with pytest.raises(DataError, match="too few"):
            adapt_numbers(model, held)
