"""Training in rounds of other targets than classes: oracles through site, message and coordinator, and
what one record can change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression, LogisticRegression
from statsmodels.api import Logit
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.release import site_function
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.fedavg.update import gradient_sums
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import ConfigError, DataError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.networks import of_target
from fedsurrogate.common.models.parameters import flat
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.metrics import answers_of
from fedsurrogate.common.targets.target import Objective
from fedsurrogate.common.targets.time import Time
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.tensors import Expectation, check_reply
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg import absorb, with_memory
from fedsurrogate.strategies.robustness.defence import defend_updates

KINDS: dict[str, dict[str, Any]] = {
    "number": {"task": "regression", "target-range": "-10,20; -5,5", "value-columns": "age,dose"},
    "labels": {"task": "multilabel", "label-columns": "edema,fracture,nodule"},
    "time": {"task": "survival", "horizon": 4.0, "bins": 4},
}
DISTRIBUTED = {"method": "dp-fedavg", "epsilon": 4.0, "delta": 1e-5, "secure-aggregation": True}
D = 3
searched = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def records(kind: str, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Features (n, 3) and values whose targets follow from them."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(size, D))
    signal = x[:, 0] - 0.5 * x[:, 1]
    if kind == "number":
        y = np.stack([5 + 2 * signal, x[:, 2]], 1) + 0.3 * draw.normal(size=(size, 2))
    elif kind == "labels":
        y = (signal[:, None] + draw.normal(size=(size, 3)) > [0.3, 0.6, 0.9]).astype(float)
        y[draw.random((size, 3)) < [0.1, 0.4, 0.7]] = np.nan
    else:
        event = draw.exponential(3 * np.exp(-signal))
        seen = draw.uniform(0.5, 6, size)
        y = np.stack([np.minimum(event, seen), event <= seen], 1)
    return torch.from_numpy(x).float(), torch.from_numpy(y).double()


def job(run: Run, folder: Path, site: str, own: tuple[Tensor, Tensor], training: Training) -> Job:
    features, values = own
    train = LabelledFeatures(features, torch.zeros(len(features)).long(), values=values)
    found = SiteFeatures(train, train, run.settings.classes, "f", 0.0, simulated=False)
    node = NodeConfig(state_dir=str(folder))
    info = {
        "round": training.round + 1,
        "lineage": training.lineage,
        "confirmed": training.confirmed.get(site, 0),
    }
    return Job(run, node, site, found, payload=training.payload(), info=info)


def trained(run: Run, folder: Path, sites: Sequence[tuple[Tensor, Tensor]]) -> Training:
    """The model after all rounds, with the checks and the payloads of the real path."""
    training = with_memory(Training.begin(run, run.settings.classes, "f", D))
    for _ in range(run.settings.fedavg.rounds):
        updates = []
        for at, own in enumerate(sites):
            asked = job(run, folder, f"s{at}", own, training)
            made = site_function(run.plan.combination)(asked)
            for file, content in made.keep.items():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(content)
            update = unpack_parameters(made.payload)
            expected = Expectation.of(run, training.classes, "f", D)
            check_reply(update, run.plan.messages, expected)
            updates.append(update)
        absorb(training, updates, len(sites))
    return training


def full_batch(kind: str, method: str = "fedavg", **more: Any) -> Run:
    own = {"method": method, "fedavg.rounds": 3, "fedavg.batch-size": 10_000}
    usual: dict[str, Any] = {"fedavg.local-epochs": 400, "defence": "none"}
    return parse_run(KINDS[kind] | own | usual | more)


@pytest.fixture
def _small_cells_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small cells of time and event leave in sums only; these tests look at the training."""
    monkeypatch.setattr(Time, "large_enough", lambda self, code, least, summed: (code, ""))


def head_of(training: Training) -> Head:
    head = training.classifier()
    assert isinstance(head, Head)
    return head


@pytest.mark.parametrize("sites", [1, 3])
def test_numbers_end_at_least_squares(tmp_path: Path, sites: int) -> None:
    x, y = records("number", 240)
    parts = list(zip(x.tensor_split(sites), y.tensor_split(sites), strict=True))
    run = full_batch("number", **{"fedavg.rounds": 4, "fedavg.local-epochs": 150})
    head = head_of(trained(run, tmp_path, parts))
    oracle = LinearRegression().fit(x, y)
    # Sites that each reach their own optimum drift apart; one site does not.
    least = 1e-3 if sites == 1 else 0.05
    assert np.abs(head.weight.numpy() - oracle.coef_).max() < least * np.abs(oracle.coef_).max()
    assert np.abs(head.bias.numpy() - oracle.intercept_).max() < least * 5


def test_each_label_ends_at_the_logistic_regression_of_its_annotated_records(
    tmp_path: Path,
) -> None:
    x, y = records("labels", 300)
    head = head_of(trained(full_batch("labels"), tmp_path, [(x, y)]))
    assert head.header.classes == ("edema", "fracture", "nodule")
    for at in range(3):
        known = ~y[:, at].isnan()
        oracle = LogisticRegression(C=1e9, tol=1e-10, max_iter=1000).fit(x[known], y[known, at])
        assert np.abs(head.weight[at].numpy() - oracle.coef_[0]).max() < 2e-3
        assert abs(float(head.bias[at]) - oracle.intercept_[0]) < 2e-3


def person_periods(x: Tensor, y: Tensor, bins: int) -> tuple[Any, Any]:
    """A row for each record and bin in which it is at risk: until the edge nearest to where it is last
    seen.
    """
    rows, events = [], []
    for features, (time, event) in zip(x.tolist(), y.tolist(), strict=True):
        for place in range(bins):
            if (event and place and time <= place) or (not event and time < place + 0.5):
                break
            rows.append([float(place == each) for each in range(bins)] + features)
            events.append(float(bool(event) and time <= place + 1))
    return np.array(rows), np.array(events)


def test_times_end_at_the_logistic_regression_of_person_periods(tmp_path: Path) -> None:
    x, y = records("time", 400)
    training = trained(full_batch("time"), tmp_path, [(x, y)])
    rows, events = person_periods(x, y, 4)
    oracle = Logit(events, rows).fit(disp=0).params
    head = head_of(training)
    levels = training.model["levels.weight"].flatten().numpy()
    assert np.abs(head.weight[0].numpy() - oracle[4:]).max() < 2e-3
    assert np.abs(levels - oracle[:4]).max() < 2e-3
    answers = answers_of(head.target, head.header.classes, head.scores(x))
    hazards = 1 / (1 + np.exp(-(oracle[:4] + x.numpy() @ oracle[4:][:, None])))
    expected = np.cumprod(1 - hazards, 1)
    for at in range(4):
        assert np.abs(answers[f"survival {at + 1}"].numpy() - expected[:, at]).max() < 2e-3


@pytest.mark.usefixtures("_small_cells_leave")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["fedavg", "fedprox", "scaffold", "fedyogi", "fedsgd", "dsfl"])
def test_every_method_in_rounds_lowers_the_loss_of_all_records(
    kind: str, method: str, tmp_path: Path
) -> None:
    # Sites differ in what they annotate and in size.
    sites = [records(kind, size, seed) for seed, size in enumerate((120, 60, 30))]
    if kind == "labels":
        sites[0][1][:, 2] = torch.nan
        sites[1][1][:, 0] = torch.nan
    run = full_batch(kind, method, **{"fedavg.rounds": 8, "fedavg.local-epochs": 5})
    training = trained(run, tmp_path, sites)
    before = Training.begin(run, run.settings.classes, "f", D)
    x, y = (torch.cat(part) for part in zip(*sites, strict=True))
    assert mean_loss(run, training, x, y) < 0.9 * mean_loss(run, before, x, y)


def mean_loss(run: Run, training: Training, x: Tensor, y: Tensor) -> float:
    objective = run.objective
    assert objective is not None
    assert run.target is not None
    module = of_target(objective, D)
    module.load_state_dict(dict(training.model))
    return float(objective.losses(module(x), run.target.code(y)).mean())


@pytest.mark.usefixtures("_small_cells_leave")
@pytest.mark.parametrize("kind", KINDS)
def test_one_step_at_five_sites_is_one_step_on_all_records(kind: str, tmp_path: Path) -> None:
    """Also where each site annotates other labels: all records have the same weight."""
    sites = [records(kind, 40, seed) for seed in range(5)]
    # The length of a step is over the mean squared norm of a site's features.
    sites = [(torch.nn.functional.normalize(x), y) for x, y in sites]
    if kind == "labels":
        for at, (_, y) in enumerate(sites):
            y[:, at % 3] = torch.nan
    run = full_batch(kind, **{"fedavg.rounds": 1, "fedavg.local-epochs": 1})
    apart = trained(run, tmp_path, sites)
    whole = tuple(torch.cat(part) for part in zip(*sites, strict=True))
    together = trained(run, tmp_path, [(whole[0], whole[1])])
    before = Training.begin(run, run.settings.classes, "f", D)
    for name, start in before.model.items():
        step = together.model[name] - start
        assert float(step.norm()) > 0
        assert float((apart.model[name] - start - step).norm()) < 2e-3 * float(step.norm())


CELLS = {
    "number": st.tuples(*2 * [st.floats(-1e6, 1e6)]),
    "labels": st.tuples(*3 * [st.sampled_from([0.0, 1.0, math.nan])]),
    "time": st.tuples(st.floats(0, 9), st.sampled_from([0.0, 1.0])),
}


def objective_of(kind: str) -> Objective:
    objective = full_batch(kind).objective
    assert objective is not None
    return objective


def summed(kind: str, x: Tensor, values: Tensor, clip: float, way: str) -> Tensor:
    """The sum of clipped gradients, at a model that a coordinator may send."""
    run = full_batch(kind)
    assert run.target is not None
    objective = objective_of(kind)
    module = of_target(objective, D)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
    given = x, run.target.code(values), clip, objective.losses
    if way == "linear layers":
        return flat(record_gradients.clipped_gradients(module, *given))
    made = LandscapeRecords.evenly(x, run.target.code(values))
    at = dict(module.named_parameters())
    total, _ = record_gradients.clipped_sum(module, at, made, clip, losses=objective.losses)
    return flat({name: part.value for name, part in total.items()})


WAYS = ["linear layers", "single gradients"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_clipped_gradients_are_those_of_one_record_after_another(kind: str, way: str) -> None:
    x, values = records(kind, 70)
    run = full_batch(kind)
    assert run.target is not None
    objective, total = objective_of(kind), 0.0
    for row in range(len(x)):
        module = of_target(objective, D)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))
        code = run.target.code(values[row : row + 1])
        objective.losses(module(x[row : row + 1]), code).sum().backward()  # type: ignore[no-untyped-call]
        gradient = flat({n: p.grad.double() for n, p in module.named_parameters()})  # type: ignore[union-attr]
        total = total + gradient * min(1.0, 0.7 / max(1e-12, float(gradient.norm())))
    assert torch.allclose(summed(kind, x, values, 0.7, way), torch.as_tensor(total), atol=1e-4)


ODD = st.one_of(
    st.floats(-1e6, 1e6, width=32), st.sampled_from([math.nan, math.inf, -1e38, 1e38, 1e-38])
)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
@searched
@given(data=st.data())
def test_one_outlier_record_changes_the_sum_by_the_clip_at_most(
    kind: str, way: str, data: st.DataObject
) -> None:
    record = st.tuples(st.tuples(ODD, ODD, ODD), CELLS[kind])
    rows = data.draw(st.lists(record, min_size=1, max_size=4))
    x = torch.tensor([features for features, _ in rows])
    values = torch.tensor([cells for _, cells in rows], dtype=torch.float64)
    whole = summed(kind, x, values, 0.5, way)
    without = summed(kind, x[1:], values[1:], 0.5, way)
    assert whole.isfinite().all()
    assert float((whole - without).norm()) <= 0.5


@pytest.mark.parametrize("kind", KINDS)
@searched
@given(data=st.data())
def test_in_a_distributed_sum_one_outlier_record_changes_what_a_site_adds_by_its_bound(
    kind: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Through the site's own function, which also scales features to norm one."""
    run = parse_run(KINDS[kind] | DISTRIBUTED)
    record = st.tuples(st.tuples(ODD, ODD, ODD), CELLS[kind])
    rows = data.draw(st.lists(record, min_size=1, max_size=4))
    x = torch.tensor([features for features, _ in rows])
    values = torch.tensor([cells for _, cells in rows], dtype=torch.float64)
    training = Training.begin(run, run.settings.classes, "f", D)
    folder = tmp_path_factory.mktemp("site")
    made = gradient_sums(job(run, folder, "s", (x, values), training))
    whole, claim = made.values, made.claim
    without = gradient_sums(job(run, folder, "s", (x[1:], values[1:]), training)).values
    assert claim is not None
    assert float((whole["gradients"] - without["gradients"]).norm()) <= 1
    assert float((whole["records"] - without["records"]).norm()) <= 1


@pytest.mark.usefixtures("_small_cells_leave")
@pytest.mark.parametrize("kind", KINDS)
def test_a_site_refuses_a_model_of_another_shape(kind: str, tmp_path: Path) -> None:
    run = full_batch(kind)
    training = Training.begin(run, run.settings.classes, "f", D)
    name = max(training.model)
    more = {**training.model, name: torch.cat([training.model[name]] * 2)}
    asked = job(run, tmp_path, "s", records(kind, 60), replace(training, model=more))
    with pytest.raises(SurrogateError, match="not the run's"):
        site_function(run.plan.combination)(asked)


def test_sites_that_annotate_other_labels_are_no_suspects(tmp_path: Path) -> None:
    """Of five sites each annotates one or two labels: their updates have different directions."""
    run = full_batch("labels", **{"fedavg.rounds": 1, "fedavg.local-epochs": 5})
    training = Training.begin(run, run.settings.classes, "f", D)
    updates = []
    for at in range(5):
        x, y = records("labels", 100, at)
        y[:, at % 3] = torch.nan
        if at < 2:
            y[:, (at + 1) % 3] = torch.nan
        made = site_function(run.plan.combination)(job(run, tmp_path, f"s{at}", (x, y), training))
        updates.append(unpack_parameters(made.payload))
    defended = defend_updates(updates, "screen", 0.0, 0.0)
    assert len(defended.kept) == 5


def test_a_label_of_few_records_does_not_move_its_row(tmp_path: Path) -> None:
    """A site's policy is for updates too: the sum of few records' gradients shows their features."""
    run = full_batch("labels", **{"fedavg.rounds": 1, "fedavg.local-epochs": 1})
    training = Training.begin(run, run.settings.classes, "f", D)
    x, y = records("labels", 100)
    y[:, 1] = 0
    y[3, 1] = 1
    asked = replace(job(run, tmp_path, "s", (x, y), training), limits=SiteLimits(smallest_class=5))
    update = unpack_parameters(site_function(run.plan.combination)(asked).payload)
    assert update.tensors["weight"][1].abs().max() == 0
    assert update.tensors["weight"][0].abs().max() > 0


def test_cells_of_one_record_stay_at_the_site(tmp_path: Path) -> None:
    """A coordinator chooses the model, and gradients at chosen hazards give the sum of any cell."""
    run = full_batch("time")
    training = Training.begin(run, run.settings.classes, "f", D)
    x, y = records("time", 40)
    y[:, 0], y[:, 1] = 0.5, 1.0
    y[0] = torch.tensor([2.5, 1.0])
    with pytest.raises(DataError, match="one shows its record"):
        site_function(run.plan.combination)(job(run, tmp_path, "s", (x, y), training))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"fedavg.model": "mlp"}, "has linear heads only; remove fedavg.model = 'mlp'"),
        ({"method": "fedrep"}, "learns classes only"),
        ({"method": "fedlambda"}, "learns classes only"),
        ({"method": "scaffold", "fedavg.momentum": 0.5}, "assume no momentum"),
        ({"method": "dp-fedavg"}, "needs a budget"),
        ({"epsilon": 1.0, "delta": 1e-5}, "does not support it"),
    ],
)
def test_what_cannot_be_is_refused_before_the_start(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_run({"method": "fedavg"} | KINDS["labels"] | more)


def test_a_target_without_a_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "objective", lambda self: None)
    with pytest.raises(ConfigError, match="is learned from sums only; use method = 'fedpft'"):
        parse_run({"method": "fedavg"} | KINDS["labels"])


def test_training_under_privacy_has_the_exact_code_of_labels() -> None:
    """The code that needs less noise in sums leaves annotations out."""
    sets = {"label-sets": "a=edema,fracture; b=nodule"}
    budget: dict[str, Any] = {"epsilon": 4.0, "delta": 1e-5}
    run, sums = (
        parse_run({"method": method} | KINDS["labels"] | sets | budget)
        for method in ("dp-fedavg", "fedpft")
    )
    assert run.target is not None
    assert sums.target is not None
    values = torch.tensor([[1.0, 0.0, math.nan]], dtype=torch.float64)
    assert run.target.code(values).tolist() == [[1.0, 0.0, 0.0, 1.0, 0.0, 0.0]]
    assert sums.target.code(values).shape != (1, 6)
    assert not run.target.choices


def test_a_site_trains_only_labels_that_the_run_says_it_annotates(tmp_path: Path) -> None:
    sets = {"label-sets": "s=edema,fracture; t=nodule"}
    run = full_batch("labels", **{"fedavg.rounds": 1, "fedavg.local-epochs": 1} | sets)
    training = Training.begin(run, run.settings.classes, "f", D)
    made = site_function(run.plan.combination)(
        job(run, tmp_path, "s", records("labels", 60), training)
    )
    moved = unpack_parameters(made.payload).tensors["weight"].abs().amax(1)
    assert moved[2] == 0
    assert moved[:2].min() > 0
