"""A site's own version of a model of any target: what each version mends, by which test one is taken, and
what stays of it at the site.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit, log_softmax
from sklearn.model_selection import StratifiedGroupKFold
from torch import Tensor

from fedsurrogate.client_app.model_use.adaptation import (
    CORRECTED,
    MOVED,
    OWN,
    SCALED,
    SHARED,
    Adapted,
    adapt,
    adapted_classifier,
    adapted_file,
    store_adapted,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError, SealError
from fedsurrogate.common.models.class_metrics import bootstrap_weights
from fedsurrogate.common.models.classifiers import Classifier, Head, Quadratic
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.signed_model import make_signed_model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import facts_of
from tests.client_app.model_use.hospitals import federation, site, text

Numbers = NDArray[np.float64]
EDGES, HAZARD = (0.0, 1.0, 2.0, 4.0), (0.3, 0.3, 0.6)
FACTS: dict[str, dict[str, Any]] = {
    "classes": {},
    # Columns in another order than the answers, and one that is no answer.
    "multilabel": {
        "name": "multilabel",
        "columns": ["edema", "lung", "mass"],
        "prevalence": [0.4, 0.3],
    },
    "regression": {
        "name": "regression",
        "columns": ["y", "other", "x"],
        "ranges": [[-9.0, 9.0], [0.0, 1.0], [-200.0, 200.0]],
        "deviation": [9.0, 9.0],
    },
    "survival": {"name": "survival", "columns": ["t", "e"], "edges": EDGES, "hazard": HAZARD},
    "levels": {
        "name": "survival",
        "columns": ["t", "e"],
        "edges": EDGES,
        "levels": [float(np.log(np.expm1(each))) for each in HAZARD],
    },
}
OUTPUTS = {
    "classes": ("a", "b", "c"),
    "multilabel": ("mass", "edema"),
    "regression": ("x", "y"),
    "survival": ("risk",),
    "levels": ("risk",),
}
# Numbers have scales of their own.
SCALES = {"regression": torch.tensor([20.0, 1.0])}


def head(kind: str, dimension: int = 3) -> Head:
    outputs = OUTPUTS[kind]
    drawn = torch.Generator().manual_seed(5)
    weight = torch.randn(len(outputs), dimension, generator=drawn)
    weight, bias = weight * SCALES.get(kind, torch.ones(1))[:, None], torch.zeros(len(outputs))
    target = json.dumps(FACTS[kind]) if FACTS[kind] else ""
    return Head(Header("fedpft", "", "", "f", outputs), weight, bias, target=target)


CHANGES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    SHARED: lambda scores, x: scores,
    MOVED: lambda scores, x: scores + 1.5 * torch.tensor([1.0, -1.0, 0.0])[: scores.shape[1]],
    SCALED: lambda scores, x: 0.2 * scores,
    CORRECTED: lambda scores, x: scores + 2 * x[:, -1:] * torch.tensor([1.0, -1.0, 0.5])[: scores.shape[1]],
}  # fmt: skip


def records(
    kind: str, change: str, count: int, seed: int, copies: int = 1, dimension: int = 3
) -> HeldOut:
    """Records that follow the model, changed; each patient has the same record `copies` times."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(count, dimension, generator=drawn)
    unit = SCALES.get(kind, torch.ones(1))
    scores = unit * CHANGES[change](head(kind, dimension).scores(x) / unit, x)
    chance = torch.rand(count, generator=drawn).double()
    labels, values = torch.zeros(count, dtype=torch.int64), None
    if kind == "classes":
        labels = (chance[:, None] > scores.double().softmax(1).cumsum(1)).sum(1).clamp_max(2)
    elif kind == "multilabel":
        present = (torch.rand(count, 2, generator=drawn) < scores.sigmoid()).double()
        present[torch.rand(count, 2, generator=drawn) < 0.2] = torch.nan
        values = torch.stack([present[:, 1], torch.full((count,), torch.nan), present[:, 0]], 1)
    elif kind == "regression":
        own = (scores + unit * torch.randn(count, 2, generator=drawn)).double()
        values = torch.stack([own[:, 1], torch.zeros(count).double(), own[:, 0]], 1)
    else:
        # The hazard is 0.3 a unit of time; patients leave at random times.
        time = -chance.log() / (0.3 * scores[:, 0].double().exp())
        leaves = 6 * torch.rand(count, generator=drawn).double()
        values = torch.stack([torch.minimum(time, leaves), (time <= leaves).double()], 1)
    rows = torch.arange(count).repeat_interleave(copies)
    patients = tuple(f"p{row}" for row in rows.tolist()) if copies > 1 else None
    own_values = None if values is None else values[rows]
    return HeldOut(x[rows], labels[rows], patients, {}, "own records", values=own_values)


def losses(kind: str, scores: Numbers, held: HeldOut) -> Numbers:
    """Of each record, in plain numpy."""
    if kind == "classes":
        rows = np.arange(len(scores))
        return np.asarray(-log_softmax(scores, 1)[rows, held.labels.numpy()])
    assert held.values is not None
    values = held.values.numpy()
    if kind == "multilabel":
        true = values[:, [2, 0]]
        each = np.logaddexp(0, np.where(true == 1, -scores, scores))
        return np.asarray(np.where(np.isnan(true), 0, each).sum(1))
    if kind == "regression":
        true = numbers(values)
        return np.asarray((((scores - true) / SPREAD[0]) ** 2).mean(1))
    found = []
    for (time, seen), (score,) in zip(values.tolist(), scores.tolist(), strict=True):
        total = 0.0
        for begin, end, hazard in zip(EDGES[:-1], EDGES[1:], HAZARD, strict=True):
            if time <= begin or (seen == 0 and time < (begin + end) / 2):
                break
            whole = hazard * np.exp(score)
            chance = (
                1 - np.exp(-whole)
                if kind == "survival"
                else expit(np.log(np.expm1(hazard)) + score)
            )
            total -= np.log(chance) if time <= end and seen == 1 else np.log(1 - chance)
        found.append(total)
    return np.array(found)


# The standard deviations of the numbers of all records, as units.
SPREAD: list[Numbers] = [np.ones(2)]


def numbers(values: Numbers) -> Numbers:
    return np.stack([values[:, 2].clip(-200, 200), values[:, 0].clip(-9, 9)], 1)


@dataclass
class Plain:
    """A version of scores, fitted by scipy on some records."""

    kind: str
    held: HeldOut
    x: Numbers
    scores: Numbers

    def rows(self, rows: Numbers) -> Plain:
        at = torch.from_numpy(np.flatnonzero(rows))
        held = replace(
            self.held,
            labels=self.held.labels[at],
            values=None if self.held.values is None else self.held.values[at],
        )
        return Plain(self.kind, held, self.x[rows], self.scores[rows])

    def fitted(self, name: str, penalty: float, weights: Numbers) -> Callable[[Plain], Numbers]:
        (n, d), o = self.x.shape, self.scores.shape[1]
        slopes = 0 if name == MOVED else 1 if self.kind == "classes" else o
        middle, centre = weights @ self.scores, weights @ self.x
        alone = name == OWN
        if alone:
            middle = self.scores.mean(0)
        strength = penalty * float(weights @ ((self.x - centre) ** 2).sum(1)) / d
        unit = SPREAD[0] if self.kind == "regression" else np.ones(o)

        def of(flat: Numbers, other: Plain) -> Numbers:
            slope = np.exp(flat[o : o + slopes]) if slopes else np.ones(1)
            made = slope * (0 if alone else other.scores - middle) + middle + unit * flat[:o]
            made = made + np.zeros_like(other.scores)
            if name in (CORRECTED, OWN):
                made = made + unit * ((other.x - centre) @ flat[o + slopes :].reshape(o, d).T)
            return np.asarray(made)

        def loss(flat: Numbers) -> float:
            prior = ((flat[:o] / 3) ** 2).sum() + (flat[o : o + slopes] ** 2).sum()
            prior = prior / n + strength * (flat[o + slopes :] ** 2).sum()
            return float(weights @ losses(self.kind, of(flat, self), self.held) + prior / 2)

        size = o + slopes + (o * d if name in (CORRECTED, OWN) else 0)
        flat = np.asarray(minimize(loss, np.zeros(size), options={"gtol": 1e-5}).x)
        return lambda other: of(flat, other)

    def best(self, name: str, seed: int) -> Callable[[Plain], Numbers]:
        if name == SHARED:
            return lambda other: other.scores
        penalty, whole = 0.0, np.full(len(self.x), 1 / len(self.x))
        if name in (CORRECTED, OWN):
            kept = np.random.default_rng(seed).permutation(len(self.x)) % 3 > 0

            def judged(penalty: float) -> float:
                made = self.fitted(name, penalty, kept / kept.sum())(self)
                return float(losses(self.kind, made, self.held)[~kept].mean())

            penalty = min((0.001, 0.01, 0.1, 1.0, 10.0), key=judged)
        return self.fitted(name, penalty, whole)


@pytest.mark.parametrize(
    ("kind", "change", "copies"),
    [
        ("classes", CORRECTED, 1),
        ("multilabel", MOVED, 2),
        ("regression", SCALED, 1),
        ("survival", CORRECTED, 2),
        ("levels", SHARED, 1),
    ],
)
def test_versions_are_judged_on_what_they_have_not_seen_and_the_best_is_taken(
    kind: str, change: str, copies: int
) -> None:
    """Fold by fold, each version as scipy fits it, and the test of each in numpy."""
    seed = 3
    model, held = head(kind, 2), records(kind, change, 40, seed, copies, 2)
    x, scores = held.features.double().numpy(), model.scores(held.features).double().numpy()
    if kind == "regression":
        assert held.values is not None
        SPREAD[0] = numbers(held.values.numpy()).std(0)
    plain = Plain(kind, held, x, scores)
    groups = np.arange(40).repeat(copies)
    unseen = {name: np.zeros_like(scores) for name in (SHARED, MOVED, SCALED, CORRECTED, OWN)}
    whose = (
        np.arange(len(x))
        if held.patients is None
        else np.unique(held.patients, return_inverse=True)[1]
    )
    for rest, rows in StratifiedGroupKFold(5, shuffle=True, random_state=seed).split(
        x, held.labels, whose
    ):
        assert not set(groups[rest]) & set(groups[rows]), "patients stay whole"
        part, other = (np.isin(np.arange(len(x)), each) for each in (rest, rows))
        for name, made in unseen.items():
            made[rows] = plain.rows(part).best(name, seed)(plain.rows(other))
    lost = {name: losses(kind, made, held) for name, made in unseen.items()}
    weights = bootstrap_weights(len(x), held.patients, 2000, seed)
    gains = {name: weights @ (lost[SHARED] - each) / weights.sum(1) for name, each in lost.items()}
    found = adapt(model, held, seed)
    accuracy = {
        name: float((made.argmax(1) == held.labels.numpy()).mean()) for name, made in unseen.items()
    }
    for each in found.judged:
        wanted = (
            lost[each.name].mean(),
            gains[each.name].mean(),
            *np.quantile(gains[each.name], [0.025, 0.975]),
        )
        seen = (each.loss, (lost[SHARED] - lost[each.name]).mean() - each.gain, each.low, each.high)
        assert seen == pytest.approx((wanted[0], 0, *wanted[2:]), rel=0.02, abs=6e-3), each.name
        if kind == "classes":
            assert each.accuracy == pytest.approx(accuracy[each.name], abs=0.03)
        else:
            assert each.accuracy is None
    sure = [
        each.name
        for each in sorted(found.judged, key=lambda each: each.loss)
        if each.name != SHARED
        and np.quantile(gains[each.name], 0.025 / 5) > 0
        and (kind != "classes" or accuracy[each.name] >= accuracy[SHARED])
    ]
    at_the_limit = any(
        abs(np.quantile(gains[name], 0.025 / 5)) < 6e-3
        or (kind == "classes" and abs(accuracy[name] - accuracy[SHARED]) < 0.03)
        for name in (MOVED, SCALED, CORRECTED, OWN)
    )
    if at_the_limit:
        return
    assert found.chosen == (sure[0] if sure else SHARED)
    assert (found.own is None) == (not sure)
    if found.own is None:
        return
    assert f"by {next(e.gain for e in found.judged if e.name == found.chosen):.3f}" in found.reason
    wanted_scores = plain.best(found.chosen, seed)(plain)
    spread = wanted_scores.std() + 0.1
    np.testing.assert_allclose(
        found.own.scores(held.features) / spread, wanted_scores / spread, atol=0.03
    )
    facts = facts_of(found.own.target)
    changed = {key: value for key, value in facts.items() if value != facts_of(model.target)[key]}
    if kind == "regression":
        errors = numbers(held.values.numpy()) - unseen[found.chosen]  # type: ignore[union-attr]
        assert changed.pop("deviation") == pytest.approx(np.sqrt((errors**2).mean(0)), rel=0.02)
    if kind == "multilabel":
        own = held.values.numpy()[:, [2, 0]]  # type: ignore[union-attr]
        known = (~np.isnan(own)).sum(0)
        wanted_share = (np.nansum(own, 0) + 0.5) / (known + 1)
        assert changed.pop("prevalence") == pytest.approx(wanted_share)
    assert not changed


def test_with_more_dimensions_than_records_a_correction_has_the_least_loss_of_all_weights() -> None:
    """The gradient of the penalised loss is zero there, at one of the penalties."""
    labels = torch.arange(50) % 3
    x32 = 0.4 * torch.randn(50, 60, generator=torch.Generator().manual_seed(1))
    x32[:, :3] += 2 * torch.nn.functional.one_hot(labels, 3)
    held, model = HeldOut(x32, labels, None, {}, "own records"), head("classes", 60)
    model = replace(model, weight=model.weight / 4)
    own = adapt(model, held).own
    assert own is not None
    assert float(own.weight.norm()) > 0.1
    x, scores = held.features.double(), model.scores(held.features).double()
    apart, middle = x - x.mean(0), scores.mean(0)
    alone = float(own.slope.abs().max()) == 0
    weight, slope = own.weight.double(), own.slope.double().clamp_min(1e-30).log()
    offset = own.bias.double() + own.slope.double() * middle + weight @ x.mean(0) - middle
    if alone:
        offset = own.bias.double() + weight @ x.mean(0) - middle
    for each in (weight, slope, offset):
        each.requires_grad_(True)
    found = []
    for penalty in (0.001, 0.01, 0.1, 1.0, 10.0):
        made = middle + offset + apart @ weight.T
        if not alone:
            made = made + slope.exp() * (scores - middle)
        strength = penalty * float(apart.square().sum(1).mean()) / 60
        prior = (offset / 3).square().sum() + (0 if alone else slope.square().sum())
        loss = torch.nn.functional.cross_entropy(made, held.labels) + prior / 100
        loss = loss + strength * weight.square().sum() / 2
        moving = [weight, offset] if alone else [weight, slope, offset]
        found.append(max(float(g.abs().max()) for g in torch.autograd.grad(loss, moving)))
    assert min(found) < 1e-5
    assert sorted(found)[1] > 1e-4


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *((kind, CORRECTED) for kind in FACTS),
        *zip(FACTS, (MOVED, SCALED, MOVED, SCALED, MOVED), strict=True),
    ],
)
def test_the_version_that_mends_the_site_is_chosen(kind: str, change: str) -> None:
    found = adapt(head(kind), records(kind, change, 600, 0))
    assert found.own is not None
    if change == CORRECTED:
        assert found.chosen in (CORRECTED, OWN)
    new, unit = (
        torch.randn(2000, 3, generator=torch.Generator().manual_seed(9)),
        SCALES.get(kind, torch.ones(1)),
    )
    before = head(kind).scores(new) / unit
    true, own = CHANGES[change](before, new), found.own.scores(new) / unit
    if kind == "classes":
        before, true, own = (each.softmax(1) for each in (before, true, own))
    # Levels of an ordinal model are not those hazards.
    limit = 0.55 if kind == "levels" else 0.35
    assert float((own - true).abs().mean()) < limit * float((before - true).abs().mean())


@pytest.mark.parametrize("kind", FACTS)
def test_a_model_that_fits_stays(kind: str) -> None:
    found = adapt(head(kind), records(kind, SHARED, 100, 1))
    assert (found.own, found.chosen) == (None, SHARED)


def few(kind: str, count: int, patients: int = 0, events: int = 9) -> HeldOut:
    held = records(kind, SHARED, 40, 1)
    values = held.values
    if kind == "multilabel":
        # A record with two labels is one record.
        values = torch.full((40, 3), torch.nan).double()
        values[:count, 0] = torch.arange(count).double() % 2
        values[:3, 2] = 1.0
    elif kind == "survival":
        there = (torch.arange(40) < events).double()
        values = torch.stack([torch.linspace(0.1, 3.9, 40).double(), there], 1)
    if kind != "multilabel":
        held = replace(held, features=held.features[:count], labels=held.labels[:count])
        values = None if values is None else values[:count]
    owners = tuple(f"p{at % patients}" for at in range(len(held.labels))) if patients else None
    return replace(held, values=values, patients=owners)


@pytest.mark.parametrize("kind", ["classes", "multilabel", "regression", "survival"])
def test_an_adaptation_needs_twenty_records_of_five_patients(kind: str) -> None:
    assert adapt(head(kind), few(kind, 20, 5)).judged
    with pytest.raises(DataError, match=r"^19 records .*are too few to adapt a model; 20 "):
        adapt(head(kind), few(kind, 19))
    with pytest.raises(DataError, match="records of 4 patients are too few; 5 are needed"):
        adapt(head(kind), few(kind, 20, 4))
    if kind == "classes":
        one = replace(few(kind, 20), labels=torch.zeros(20, dtype=torch.int64))
        with pytest.raises(DataError, match="20 records of 1 classes are too few"):
            adapt(head(kind), one)
    else:
        with pytest.raises(DataError, match=r"^0 records with values are too few"):
            adapt(head(kind), replace(few(kind, 20), values=None))
    if kind == "survival":
        assert adapt(head(kind), few(kind, 20, events=5)).judged
        with pytest.raises(DataError, match=r"^4 records with an event are too few; 5 are needed$"):
            adapt(head(kind), few(kind, 20, events=4))


def test_another_target_is_refused() -> None:
    other = replace(head("survival"), target=json.dumps({"name": "counts"}))
    with pytest.raises(ConfigError, match="classes, numbers, labels and times"):
        adapt(other, records("survival", MOVED, 40, 0))


@pytest.mark.parametrize("kind", ["multilabel", "classes"])
def test_what_is_absent_everywhere_here_has_a_finite_score(kind: str) -> None:
    held = records(kind, MOVED, 200, 0)
    if held.values is not None:
        held = replace(held, values=torch.where(held.values.isnan(), held.values, 0.0))
    else:
        held = replace(held, labels=held.labels.clamp_max(1))
    found = adapt(head(kind), held)
    assert found.own is not None
    scores = found.own.scores(held.features)
    assert bool(scores.isfinite().all())
    chances = scores.softmax(1)[:, 2] if kind == "classes" else scores.sigmoid()
    assert float(chances.mean()) < 0.05


def models() -> dict[str, Classifier]:
    header = Header("fedpft", "", "", "f", ("a", "b", "c"))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=torch.Generator().manual_seed(3)))[0][:4]
    weight = torch.randn(3, 4, generator=torch.Generator().manual_seed(4))
    return {
        "a quadratic": Quadratic(header, torch.zeros(3, 6), torch.ones(3, 6), torch.zeros(3)),
        "projected": Head(header, weight, torch.zeros(3), 0.0, torch.full((6,), 0.1), turn),
    }


@pytest.mark.parametrize("name", models())
def test_a_model_of_any_form_is_adapted(name: str) -> None:
    """As secure aggregation learn it, features are centred, projected and clipped before the head."""
    model, held = models()[name], records("classes", CORRECTED, 400, 0, dimension=6)
    found, new = adapt(model, held), records("classes", CORRECTED, 500, 1, dimension=6)
    assert found.own is not None
    lost = [
        float(torch.nn.functional.cross_entropy(each.scores(new.features), new.labels))
        for each in (found.own, model)
    ]
    assert lost[0] < lost[1]


@pytest.mark.parametrize("kind", FACTS)
def test_a_stored_version_gives_the_same_scores_and_another_file_is_refused(
    kind: str, tmp_path: Path
) -> None:
    node, held = NodeConfig(state_dir=str(tmp_path)), records(kind, CORRECTED, 200, 2)
    signed = make_signed_model(head(kind), parse_run({}), None, "1", 2, bytes(32))
    assert adapted_classifier(node, signed) is None
    own = adapt(signed.classifier, held).own
    assert own is not None
    file = store_adapted(node, signed, own, CORRECTED)
    again = adapted_classifier(node, signed)
    assert isinstance(again, Adapted)
    assert again.target == own.target
    assert torch.equal(again.scores(held.features), own.scores(held.features))
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(content)
    with pytest.raises(SealError, match=r"earlier version .*site adapt"):
        adapted_classifier(node, signed)
    other = make_signed_model(head(kind, 4), parse_run({}), None, "1", 2, bytes(32))
    store_adapted(node, signed, own, CORRECTED)
    adapted_file(node, signed).rename(adapted_file(node, other))
    with pytest.raises(SealError, match="its digest does not fit"):
        adapted_classifier(node, other)


@pytest.mark.slow
def test_the_command_stores_what_it_chose_and_predictions_use_it(tmp_path: Path) -> None:
    nodes, _ = federation(tmp_path)
    node, other = text(nodes[0]), tmp_path / "own"
    for label, folder in (("1", "7"), ("7", "1"), ("2", "2")):
        shutil.copytree(Path(str(nodes[0]["data-dir"])) / label, other / folder)
    assert json.loads(site("adapt", "--node-config", node, "--json").stdout)["records"] == 120
    done = site("adapt", "--node-config", node, "--data-dir", other, "--store", "--json")
    assert done.code == 0, done
    found = json.loads(done.stdout)
    assert found["chosen"] != "shared", found
    assert (found["records"], found["share"]) == (120, 1.0)
    out = tmp_path / "p.csv"
    words = ("--data-dir", nodes[0]["data-dir"], "--out", out, "--node-config", node, "--json")
    done = site("predict", *words)
    assert json.loads(done.stdout)["adapted"] is True, done
    assert site("adapt", "--node-config", node, "--remove").code == 0
    done = site("predict", *words)
    assert "was not begun with this model" in done.stderr
    assert "no version of its own" in site("adapt", "--node-config", node, "--remove").stderr
