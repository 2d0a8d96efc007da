"""A site's own model: chosen only where it is better beyond chance, and never worse than the better
of the two.
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.special
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor

from fedsurrogate.client_app.model_use.adaptation import (
    CLOSED,
    FOLDS,
    MIXED,
    NEAREST,
    OWN,
    PENALTIES,
    SHARED,
    STEPS,
    Adaptation,
    _choice,
    _closed,
    _correction,
    _folds,
    _judgement,
    _loss,
    _mixed,
    _nearest,
    _stepped,
    _tempered,
    _unseen,
    adapt,
)
from fedsurrogate.client_app.model_use.adapted import (
    Adapted,
    adapted_classifier,
    adapted_file,
    store_adapted,
)
from fedsurrogate.client_app.model_use.held_out import HeldOut
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, SealError
from fedsurrogate.common.models.classifiers import Classifier, Head, Quadratic
from fedsurrogate.common.models.intervals import bootstrap_weights
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.signed_models.making import make_signed_model
from fedsurrogate.common.signed_models.signed_model import SignedModel
from fedsurrogate.common.surrogates.surrogates import Header
from tests.client_app.model_use.hospitals import federation, site, text

HEADER = Header("fedpft", "run", "coordinator", "f" * 64, ("a", "b", "c"))
# Less training than by default, as 20 dimensions need.
SETTINGS = parse_run({"head.epochs": 20, "head.min-steps": 60}).settings.head
DIMENSION = 20


def records(count: int, seed: int, turned: float = 0.0) -> tuple[Tensor, Tensor]:
    """Three classes; `turned` moves the class means of this site away from those of the others."""
    generator = torch.Generator().manual_seed(99)
    means, moved = 1.2 * torch.randn(2, 3, DIMENSION, generator=generator)
    means = (1 - turned) * means + turned * moved
    own = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=own)
    return means[labels] + 1.5 * torch.randn(count, DIMENSION, generator=own), labels


def shared_head() -> Head:
    """A good head for sites that are not turned."""
    from fedsurrogate.common.models.head_training import train_on_features

    x, y = records(4000, 1)
    return Head(HEADER, *train_on_features(x, y, 3, SETTINGS, 0))


def held(count: int, seed: int, turned: float = 0.0, patients: bool = False) -> HeldOut:
    x, y = records(count, seed, turned)
    return HeldOut(x, y, tuple(f"p{k // 3}" for k in range(count)) if patients else None, {}, "")


def adapted(shared: Head, found: Adaptation) -> Classifier:
    return shared if found.own is None else Adapted(shared, found.own, found.share)


def loss(model: Classifier, x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(model.scores(x), y))


@pytest.fixture(scope="module")
def shared() -> Head:
    return shared_head()


def gained(
    shared: Head, count: int, seed: int, turned: float
) -> tuple[Adaptation, float, float, float]:
    """Accuracy on many new records of the site: shared, own alone, adapted."""
    found = adapt(shared, held(count, seed, turned), SETTINGS, seed)
    from fedsurrogate.common.models.head_training import train_on_features

    x, y = records(count, seed, turned)
    own = Head(HEADER, *train_on_features(x, y, 3, SETTINGS, seed))
    new, truth = records(5000, 10_000 + seed, turned)
    right = [
        float((each.predict(new) == truth).float().mean())
        for each in (shared, own, adapted(shared, found))
    ]
    return found, right[0], right[1], right[2]


def test_at_a_site_like_the_others_the_shared_model_stays(shared: Head) -> None:
    found, before, _, after = gained(shared, 60, 3, 0.0)
    assert after >= before - 0.01
    assert found.chosen == "shared" or found.judged[0].loss > 0


def test_at_a_site_unlike_the_others_the_model_gets_better(shared: Head) -> None:
    found, before, own, after = gained(shared, 400, 4, 0.9)
    assert found.chosen != "shared"
    assert after > before + 0.1
    assert after > own - 0.02


@pytest.mark.slow
@pytest.mark.parametrize("count", [40])
@pytest.mark.parametrize("turned", [0.0, 0.4, 1.0])
def test_it_is_never_worse_than_the_shared_model_beyond_chance(
    shared: Head, count: int, turned: float
) -> None:
    apart = []
    for seed in range(6):
        _, before, _, after = gained(shared, count, 20 + seed, turned)
        apart.append(after - before)
    assert min(apart) > -0.05
    assert sum(apart) / len(apart) > -0.01


def test_patients_are_not_divided_between_folds() -> None:
    found = held(120, 0, patients=True)
    folds = _folds(found, 0)
    assert set(folds.tolist()) == set(range(FOLDS))
    assert (folds.reshape(-1, 3) == folds.reshape(-1, 3)[:, :1]).all()


def test_too_few_records_are_refused(shared: Head) -> None:
    with pytest.raises(DataError, match="too few to adapt"):
        adapt(shared, held(12, 0), SETTINGS)
    x, _ = records(50, 0)
    with pytest.raises(DataError, match="of 1 classes are too few"):
        adapt(shared, HeldOut(x, torch.zeros(50, dtype=torch.int64), None, {}, ""), SETTINGS)


def test_a_model_that_is_no_head_is_mixed_too() -> None:
    quadratic = Quadratic(
        HEADER, torch.zeros(3, DIMENSION), torch.ones(3, DIMENSION), torch.zeros(3)
    )
    found = adapt(quadratic, held(200, 1), SETTINGS)
    assert found.chosen != "shared"
    assert "closed form" not in {each.name for each in found.judged}


@pytest.mark.parametrize("chosen", ["own head", "nearest records"])
def test_a_stored_model_gives_the_same_scores_and_a_changed_file_is_refused(
    shared: Head, chosen: str, tmp_path: Path
) -> None:
    from fedsurrogate.client_app.model_use.adaptation import _head, _nearest

    x, y = records(60, 2)
    own = _head(shared, x, y, SETTINGS, 0) if chosen == "own head" else _nearest(shared, x, y)
    node = NodeConfig(state_dir=str(tmp_path))
    signed: SignedModel = make_signed_model(shared, parse_run({}), None, "1", 2, bytes(32))
    assert adapted_classifier(node, signed) is None
    store_adapted(node, signed, own, 0.25, chosen)
    again = adapted_classifier(node, signed)
    assert again is not None
    new = records(30, 5)[0]
    wanted = 0.25 * own.scores(new).softmax(1) + 0.75 * signed.classifier.scores(new).softmax(1)
    assert torch.allclose(again.scores(new).softmax(1).float(), wanted, atol=1e-5)
    file = adapted_file(node, signed)
    content = bytearray(file.read_bytes())
    content[-2] ^= 64
    file.write_bytes(content)
    with pytest.raises(SealError, match="site adapt"):
        adapted_classifier(node, signed)


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
    assert found["records"] == 120
    out = tmp_path / "p.csv"
    words = ("--data-dir", nodes[0]["data-dir"], "--out", out, "--node-config", node, "--json")
    done = site("predict", *words)
    assert json.loads(done.stdout)["adapted"] is True, done
    assert site("adapt", "--node-config", node, "--remove").code == 0
    done = site("predict", *words)
    assert "was not begun with this model" in done.stderr
    assert "no version of its own" in site("adapt", "--node-config", node, "--remove").stderr


def test_a_model_with_a_projection_and_a_centre_is_adapted_in_its_own_dimensions() -> None:
    """As secure sums learn it: features are centred, projected and clipped before the head."""
    from fedsurrogate.common.models.head_training import train_on_features

    turn = torch.linalg.qr(
        torch.randn(DIMENSION, DIMENSION, generator=torch.Generator().manual_seed(3))
    )[0][:12]
    base = Head(
        HEADER, torch.zeros(3, 12), torch.zeros(3), 0.0, torch.full((DIMENSION,), 0.1), turn
    )
    x, y = records(2000, 1)
    weight, bias = train_on_features(base.prepare(x).float(), y, 3, SETTINGS, 0)
    shared = Head(HEADER, weight, bias, base.clip, base.centre, base.projection)
    found = adapt(shared, held(300, 8, turned=1.0), SETTINGS)
    x, y = records(500, 9, turned=1.0)
    assert loss(adapted(shared, found), x, y) < loss(shared, x, y)


@settings(max_examples=30)
@given(
    st.integers(0, 10**6),
    st.integers(6, 40),
    st.sampled_from([1, 4, 30]),
    st.floats(0.01, 100),
    st.floats(0.01, 100),
)
def test_the_closed_form_is_ridge_regression_on_what_the_shared_head_leaves(
    seed: int, count: int, d: int, penalty: float, scale: float
) -> None:
    """Scikit-learn's, with the mean squared length of a centred record as the unit of the penalty:
    features in another unit give the same scores.
    """
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, d, generator=generator) + scale
    y = torch.randint(0, 3, (count,), generator=generator)
    shared = Head(HEADER, torch.randn(3, d, generator=generator) / scale, torch.zeros(3))
    left = torch.eye(3)[y] - shared.scores(x).softmax(1)
    lengths = (x - x.mean(0)).double().square().sum(1)
    ridge = Ridge(penalty * float(lengths.mean())).fit(x.double().numpy(), left.double().numpy())
    weight, bias = _correction(shared, x, y, penalty)
    np.testing.assert_allclose(weight * scale, ridge.coef_ * scale, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(bias, ridge.intercept_, rtol=1e-4, atol=1e-4)
    stepped = _stepped(shared, (weight, bias), 2.0)
    added = torch.from_numpy(ridge.predict(x.double().numpy()))
    wanted = shared.scores(x).double() + 2 * added
    np.testing.assert_allclose(stepped.scores(x), wanted, rtol=1e-3, atol=1e-3)


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 25), st.integers(1, 12))
def test_the_nearest_records_are_those_of_scikit_learn(seed: int, count: int, asked: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, new = (torch.randn(n, 4, generator=generator) for n in (count, asked))
    y = torch.randint(0, 3, (count,), generator=generator)

    def weights(distances: Any) -> Any:
        return np.exp(-distances / max(distances.mean(), 1e-9))

    unit = torch.nn.functional.normalize(x, dim=1)
    model = _nearest(Head(HEADER, torch.zeros(3, 4), torch.zeros(3)), x, y)
    known = KNeighborsClassifier(min(model.count, count), weights=weights).fit(unit, y)
    chances = np.full((asked, 3), 1e-6)
    chances[:, known.classes_] = known.predict_proba(torch.nn.functional.normalize(new, dim=1))
    # In single precision, the distance of a record from itself is not zero.
    np.testing.assert_allclose(model.scores(new).exp(), chances.clip(1e-6), rtol=0.02, atol=2e-3)


@settings(max_examples=20)
@given(st.lists(st.integers(0, FOLDS - 1), min_size=FOLDS, max_size=30))
def test_no_part_is_judged_on_a_record_that_it_was_trained_on(folds: list[int]) -> None:
    """Each record is its own number; a part knows those that it has got."""
    count = len(folds)
    own = HeldOut(torch.arange(count)[:, None].float(), torch.arange(count) % 3, None, {}, "")

    def fit(features: Tensor, labels: Tensor) -> Any:
        known = dict(zip(features[:, 0].tolist(), labels.tolist(), strict=True))

        def scores(new: Tensor) -> Tensor:
            assert not known.keys() & set(new[:, 0].tolist())
            assert known == {n: n % 3 for n in range(count) if folds[n] != folds[int(new[0, 0])]}
            return torch.nn.functional.one_hot(new[:, 0].long() % 3, 3).float()

        return SimpleNamespace(scores=lambda new: scores(new) if len(new) else new.expand(0, 3))

    found = _unseen(fit, own, np.array(folds), 3)
    assert found.argmax(1).tolist() == own.labels.tolist()


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.integers(20, 60))
def test_what_is_judged_on_a_fold_is_chosen_on_the_others(seed: int, count: int) -> None:
    """The mixture, the temperature and the closed form are each the candidate with the smallest loss
    on the other folds; what is kept has the smallest loss on all.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    folds = np.random.default_rng(seed).permutation(np.arange(count) % FOLDS)
    own, base = (
        (torch.randn(count, 3, generator=generator) + np.random.default_rng(seed + k).integers(0, 3)
         * torch.eye(3)[labels]).double().softmax(1)
        for k in (1, 2)
    )  # fmt: skip

    def of(chances: Tensor, rows: Any) -> float:
        return float(-chances[rows, labels[rows]].log().mean())

    # Own records help in the first fold alone: what is best on all folds is not best without it.
    first = torch.from_numpy(folds == 0)
    own[first] = 0.97 * torch.eye(3, dtype=torch.float64)[labels[first]] + 0.01
    rows = [np.flatnonzero(folds == k) for k in range(FOLDS)]
    rest = [np.flatnonzero(folds != k) for k in range(FOLDS)]
    mixed, share = _mixed(own, base, labels, folds)
    every = {s: s * own + (1 - s) * base for s in np.linspace(0, 1, 21)}
    assert of(every[share], np.arange(count)) == min(
        of(each, np.arange(count)) for each in every.values()
    )
    for mine, others in zip(rows, rest, strict=True):
        best = min(every.values(), key=lambda each: of(each, others))
        torch.testing.assert_close(mixed[mine], best[mine])
    logits = base.log()
    tempered = _tempered(logits, labels, folds)
    for mine, others in zip(rows, rest, strict=True):
        # One temperature, at which no other one has a smaller loss on the other folds.
        ratio = (logits[mine, 0] - logits[mine, 1]) / (
            tempered[mine, 0].log() - tempered[mine, 1].log()
        )
        assert float(ratio.max() - ratio.min()) < 1e-6 * float(ratio.max())
        loss_at = [of((logits / (ratio[0] * by)).softmax(1), others) for by in (0.97, 1.0, 1.03)]
        assert loss_at[1] <= min(loss_at) + 1e-9 or not 0.02 < float(ratio[0]) < 54, "a limit"
    x = torch.randn(count, 5, generator=generator)
    shared = Head(HEADER, torch.randn(3, 5, generator=generator), torch.zeros(3))
    found, chosen = _closed(shared, HeldOut(x, labels, None, {}, ""), folds)
    grid = {}
    for penalty, step in itertools.product(PENALTIES, STEPS):
        unseen = torch.zeros(count, 3, dtype=torch.float64)
        for mine, others in zip(rows, rest, strict=True):
            change = _correction(shared, x[others], labels[others], penalty)
            unseen[mine] = _stepped(shared, change, step).scores(x[mine]).double().softmax(1)
        grid[penalty, step] = unseen.clamp_min(1e-6)
    best_loss = min(of(each, np.arange(count)) for each in grid.values())
    assert of(grid[chosen], np.arange(count)) == best_loss
    for mine, others in zip(rows, rest, strict=True):
        best = min(grid.values(), key=lambda each: of(each, others))
        torch.testing.assert_close(found[mine].clamp_min(1e-6), best[mine])


@pytest.mark.parametrize(
    ("shared", "own", "mixed", "wanted"),
    [
        # (accuracy, probability of the decision) of each.
        ((0.5, 0.6), (0.6, 0.6), (0.95, 0.9), "mixture"),  # the best in both
        ((0.5, 0.6), (0.9, 0.99), (0.7, 0.8), "own head"),  # likely, but certainly less accurate
        ((0.9, 0.9), (0.5, 0.5), (0.5, 0.5), "shared"),  # nothing is better
        ((0.8, 0.4), (0.6, 0.6), (0.6, 0.9), "shared"),  # less accurate than the shared model
    ],
)
def test_a_candidate_is_chosen_where_it_is_likelier_and_not_certainly_less_accurate(
    shared: tuple[float, float], own: tuple[float, float], mixed: tuple[float, float], wanted: str
) -> None:
    count = 300
    labels = torch.arange(count) % 3
    table, losses = {}, {}
    for seed, (name, (right, sure)) in enumerate(
        zip(("shared", "own head", "mixture"), (shared, own, mixed), strict=True)
    ):
        hit = torch.from_numpy(np.random.default_rng(seed).permutation(count) < right * count)
        decided = torch.where(hit, labels, (labels + 1) % 3)
        chances = torch.full((count, 3), (1 - sure) / 2, dtype=torch.float64)
        chances[torch.arange(count), decided] = sure
        table[name], losses[name] = (chances, 0.5), _loss(chances, labels)
    weights = bootstrap_weights(count, None, 400, 0)
    judged = [_judgement(name, *table[name], labels, losses, weights) for name in table]
    for each, (right, _) in zip(judged, (shared, own, mixed), strict=True):
        assert each.accuracy == pytest.approx(right)
        gains = losses["shared"] - losses[each.name]
        assert each.gain == pytest.approx(gains.mean())
        error = 1.96 * gains.std() / np.sqrt(count)
        assert (each.low, each.high) == pytest.approx(
            (each.gain - error, each.gain + error), abs=0.2 * error + 1e-12
        )
    assert _choice(judged, table, labels, losses, weights)[0] == wanted


# Accuracy, and probability of the decision; the last two are likely, and then certainly less accurate.
QUALITIES = [
    (0.5, 0.6),
    (0.6, 0.6),
    (0.95, 0.9),
    (0.7, 0.8),
    (0.9, 0.99),
    (0.75, 0.75),
    (0.6, 0.75),
    # Too sure of itself, and nearly as accurate but well calibrated.
    (0.75, 0.99),
    (0.73, 0.75),
]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from(QUALITIES), min_size=5, max_size=5), st.integers(0, 99))
@example([(0.5, 0.6), (0.95, 0.6), (0.85, 0.85), (0.5, 0.6), (0.5, 0.6)], 0)
@example([(0.5, 0.99), (0.48, 0.5), (0.6, 0.95), (0.3, 0.6), (0.3, 0.6)], 0)
@example([(0.75, 0.99), (0.73, 0.75), (0.5, 0.6), (0.5, 0.6), (0.5, 0.6)], 0)
@example([(0.9, 0.6), (0.7, 0.7), (0.95, 0.9), (0.8, 0.75), (0.6, 0.6)], 3)
def test_the_chosen_candidate_is_the_likeliest_of_those_that_pass(
    qualities: list[tuple[float, float]], seed: int
) -> None:
    """Each candidate is judged by itself, in plain loops: one that fails ends nothing."""
    count, names = 120, (SHARED, OWN, MIXED, NEAREST, CLOSED)
    labels = torch.arange(count) % 3
    table, losses, right = {}, {}, {}
    generator = np.random.default_rng(seed)
    for name, (share, sure) in zip(names, qualities, strict=True):
        hit = torch.from_numpy(generator.permutation(count) < share * count)
        decided = torch.where(hit, labels, (labels + 1) % 3)
        chances = torch.full((count, 3), (1 - sure) / 2, dtype=torch.float64)
        chances[torch.arange(count), decided] = sure
        table[name], losses[name] = (chances, 0.5), _loss(chances, labels)
        right[name] = hit.double().numpy()
    weights = bootstrap_weights(count, None, 200, seed)
    judged = [_judgement(name, *table[name], labels, losses, weights) for name in names]

    def quantile(values: Any, level: float) -> float:
        means = [sum(own * values) / sum(own) for own in weights]
        return float(np.quantile(means, level))

    def passes(name: str) -> bool:
        more_accurate = OWN if right[OWN].mean() > right[SHARED].mean() else SHARED
        return (
            quantile(losses[SHARED] - losses[name], 0.025 / 5) > 0
            and right[name].mean() >= right[SHARED].mean()
            and (name == more_accurate or quantile(right[name] - right[more_accurate], 0.95) >= 0)
            and quantile(losses[OWN] - losses[name], 0.95) >= 0
        )

    better = [each for each in judged[1:] if each.loss < judged[0].loss and passes(each.name)]
    wanted = min(better, key=lambda each: each.loss).name if better else SHARED
    chosen, reason = _choice(judged, table, labels, losses, weights)
    assert chosen == wanted
    gain = next(each.gain for each in judged if each.name == chosen)
    assert (f"by {gain:.3f} a record" in reason) == (chosen != SHARED)


@pytest.mark.parametrize("sharp", [8.0, 3000.0])
def test_the_shared_model_is_judged_at_its_best_temperature(shared: Head, sharp: float) -> None:
    """Fold by fold, at the temperature that is best on the other folds, by a plain search."""
    model = Head(HEADER, sharp * shared.weight, sharp * shared.bias)
    own = held(60, 6, 0.3)
    little = parse_run({"head.epochs": 1, "head.min-steps": 1}).settings.head
    found, folds, y = adapt(model, own, little, 2), _folds(own, 2), own.labels.numpy()
    chances = model.scores(own.features).double().softmax(1).numpy().clip(1e-30)

    def losses(rows: Any, heat: float) -> Any:
        warm = scipy.special.log_softmax(np.log(chances[rows]) / heat, 1)
        return np.minimum(-warm[np.arange(len(warm)), y[rows]], -np.log(1e-6))

    def mean(log_heat: float, rows: Any) -> float:
        warm = scipy.special.log_softmax(np.log(chances[rows]) / np.exp(log_heat), 1)
        return -float(warm[np.arange(len(warm)), y[rows]].mean())

    each = np.zeros(60)
    for fold in range(5):
        best = minimize_scalar(mean, (-4, 4), (-4, 4), (folds != fold,), "bounded").x
        each[folds == fold] = losses(folds == fold, np.exp(best))
    judged = {one.name: one for one in found.judged}
    assert judged[SHARED].loss == pytest.approx(each.mean(), rel=1e-3)
    assert (judged[SHARED].gain, judged[SHARED].low, judged[SHARED].high) == (0, 0, 0)
    for one in found.judged:
        assert one.gain == pytest.approx(each.mean() - one.loss, rel=1e-3, abs=1e-3)
