"""A site's own version of a model of labels or times: what each version mends, and when none is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsurrogate.client_app.model_use import adapted_scores
from fedsurrogate.client_app.model_use.adapted_numbers import CORRECTED, MOVED, SCALED
from fedsurrogate.client_app.model_use.adapted_scores import adapt_target
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.common.errors import ConfigError, DataError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.answers import answers_of, facts_of

Change = Callable[[Tensor, Tensor], Tensor]
EDGES, HAZARD = (0.0, 1.0, 2.0, 4.0), (0.3, 0.3, 0.6)
FACTS: dict[str, dict[str, Any]] = {
    "labels": {"name": "labels", "columns": ["mass", "edema"], "prevalence": [0.5]},
    "time": {"name": "time", "columns": ["t", "e"], "edges": EDGES, "hazard": HAZARD},
    "levels": {
        "name": "time",
        "columns": ["t", "e"],
        "edges": EDGES,
        "levels": [float(np.log(np.expm1(each))) for each in HAZARD],
    },
}
CHANGES: dict[str, Change] = {
    MOVED: lambda scores, x: scores + 1.5,
    SCALED: lambda scores, x: 0.3 * scores - 1,
    CORRECTED: lambda scores, x: scores + 1.5 * x[:, 2:3] - 1.2 * x[:, 3:4],
}


def head(kind: str) -> Head:
    """A model of the second of two labels, or of a risk."""
    outputs = ("edema",) if kind == "labels" else ("risk",)
    weight = torch.tensor([[1.2, -1.0, 0.0, 0.4]])
    bias, target = torch.tensor([0.2]), json.dumps(FACTS[kind])
    return Head(Header("fedpft", "", "", "f", outputs), weight, bias, target=target)


def records(kind: str, change: Change, count: int = 600, seed: int = 0) -> HeldOut:
    """Records for which the log odds, or log hazards, are those of the model, changed."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=draw)
    score = change(head(kind).scores(x), x).double()[:, 0]
    chance = torch.rand(count, generator=draw).double()
    if kind == "labels":
        present = (chance < score.sigmoid()).double()
        present[torch.rand(count, generator=draw) < 0.3] = torch.nan
        values = torch.stack([torch.full_like(present, torch.nan), present], 1)
    else:
        # The hazard is 0.3 a unit of time; patients leave at random times.
        time = -chance.log() / (0.3 * score.exp())
        seen = 6 * torch.rand(count, generator=draw).double()
        values = torch.stack([torch.minimum(time, seen), (time <= seen).double()], 1)
    zeros = torch.zeros(count, dtype=torch.int64)
    return HeldOut(x, zeros, None, {}, "own records", values=values)


def apart(model: Head, kind: str, change: Change) -> float:
    """Mean error of what a model answers, against what is true for other records."""
    x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(99))
    true = change(head(kind).scores(x), x)
    columns = [
        next(reversed(answers_of(json.dumps(FACTS[kind]), model.header.classes, each).values()))
        for each in (model.scores(x), true)
    ]
    return float((columns[0] - columns[1]).abs().mean())


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("name", CHANGES)
def test_the_version_that_mends_the_site_is_chosen(name: str, kind: str) -> None:
    found = adapt_target(head(kind), records(kind, CHANGES[name]))
    assert isinstance(found.own, Head)
    if name == CORRECTED:
        assert found.chosen == CORRECTED
    error = apart(found.own, kind, CHANGES[name])
    assert error < 0.06
    assert error < 0.5 * apart(head(kind), kind, CHANGES[name])
    gains = {each.name: each.gain for each in found.judged}
    assert (gains["shared"], found.share) == (0, 1.0)
    assert gains[found.chosen] > 0


@pytest.mark.parametrize("kind", FACTS)
@pytest.mark.parametrize("seed", range(4))
def test_a_model_that_fits_stays(kind: str, seed: int) -> None:
    found = adapt_target(head(kind), records(kind, lambda scores, x: scores, 100, seed))
    assert found.own is None
    assert found.chosen == "shared"


def test_labels_are_moved_and_scaled_as_by_logistic_regression() -> None:
    from statsmodels.api import Logit, add_constant

    held = records("labels", CHANGES[SCALED], count=4000, seed=3)
    found = adapt_target(head("labels"), held)
    assert found.chosen == SCALED
    assert isinstance(found.own, Head)
    assert held.values is not None
    known = ~held.values[:, 1].isnan()
    scores = head("labels").scores(held.features[known])[:, 0].double().numpy()
    fit = Logit(held.values[known, 1].numpy(), add_constant(scores)).fit(disp=0)
    own = found.own.scores(held.features[known])[:, 0].double().numpy()
    assert np.abs(own - (fit.params[0] + fit.params[1] * scores)).max() < 0.02
    share = float(held.values[known, 1].mean())
    assert facts_of(found.own.target)["prevalence"] == [pytest.approx(share, abs=1e-3)]


def test_times_are_moved_as_by_a_regression_of_the_events_in_each_bin() -> None:
    """Complementary log-log on a table of bins at risk, until the edge nearest to where a patient
    leaves.
    """
    import statsmodels.api as sm

    every = records("time", CHANGES[MOVED], count=4000, seed=3)
    assert every.values is not None
    # statsmodels keeps probabilities from one, where the largest hazards are.
    kept = head("time").scores(every.features)[:, 0] < 1
    held = replace(every, features=every.features[kept], values=every.values[kept])
    assert held.values is not None
    scores = head("time").scores(held.features)[:, 0].double().tolist()
    event, at = [], []
    for (time, seen), score in zip(held.values.tolist(), scores, strict=True):
        for begin, end, hazard in zip(EDGES[:-1], EDGES[1:], HAZARD, strict=True):
            if time <= begin or (seen == 0 and time < (begin + end) / 2):
                break
            event.append(float(time <= end and seen == 1))
            at.append(np.log(hazard) + score)
    family = sm.families.Binomial(link=sm.families.links.CLogLog())
    ones = np.ones((len(event), 1))
    fit = sm.GLM(event, ones, family=family, offset=np.array(at)).fit()
    facts = FACTS["time"]
    target, objective = adapted_scores._target_of(facts, ("risk",))
    code = target.code(held.values)
    own = adapted_scores.Seen(
        held.features.double(),
        head("time").scores(held.features).double(),
        lambda scores: objective.losses(adapted_scores._outputs(facts, scores), code),
    )
    offset = float(adapted_scores._moved(head("time"), own).bias[0] - head("time").bias[0])
    assert offset == pytest.approx(float(fit.params[0]), abs=2e-3)
    assert offset == pytest.approx(1.5, abs=0.1)


def test_what_cannot_be_adapted_is_refused() -> None:
    held = records("labels", CHANGES[MOVED], count=12)
    with pytest.raises(DataError, match=r"records with values are too few.*20 needed"):
        adapt_target(head("labels"), held)
    times = records("time", CHANGES[MOVED])
    assert times.values is not None
    nothing = replace(times, values=times.values * torch.tensor([1.0, 0.0], dtype=torch.float64))
    with pytest.raises(DataError, match="0 records with an event are too few; 5 are needed"):
        adapt_target(head("time"), nothing)
    other = replace(head("time"), target=json.dumps({"name": "counts"}))
    with pytest.raises(ConfigError, match="classes, numbers, labels and times"):
        adapt_target(other, times)


def test_a_label_that_is_absent_everywhere_here_has_a_finite_offset() -> None:
    held = records("labels", lambda scores, x: scores - 50)
    found = adapt_target(head("labels"), held)
    assert isinstance(found.own, Head)
    assert bool(found.own.scores(held.features).isfinite().all())
    assert float(found.own.scores(held.features).sigmoid().mean()) < 0.02
