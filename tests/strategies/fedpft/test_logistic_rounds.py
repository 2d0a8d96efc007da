"""A logistic head in rounds of secure aggregation: what a site adds, the coordinator's steps, and runs."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedpft import logistic_rounds
from fedsurrogate.client_app.methods.fedpft.logistic_rounds import (
    bounded_round,
    in_bins,
    residuals,
    with_constant,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.costs import costs
from fedsurrogate.common.errors import ConfigError, RunError, SurrogateError
from fedsurrogate.common.methods.logistic_rounds import BINS, CLIP, CONSTANT, WEIGHT
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import clip, unit_weights
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import coded_statistics
from fedsurrogate.common.wire.model_proto import load_model
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import absorb_total, usual_length
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.grid import Fault, InProcessGrid, events_of, metrics_of, run_federation, sites

CLASSES = ",".join(map(str, range(10)))
BASE: dict[str, Any] = {
    "head.solver": "logistic",
    "secure-aggregation": True,
    "classes": CLASSES,
    "epsilon": 8.0,
    "delta": 1e-5,
}
LARGE = st.floats(-1e4, 1e4)


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 3),))


@pytest.fixture
def public(tmp_path: Path) -> dict[str, Any]:
    """A file of public features, which are no digits."""
    drawn = torch.rand(100, 64, generator=torch.Generator().manual_seed(0))
    save_file({"x": drawn}, tmp_path / "public.safetensors")
    return BASE | {"fedpft.public": str(tmp_path / "public.safetensors")}


def gradient(features: Tensor, labels: Tensor, weights: Tensor, head: Tensor) -> Tensor:
    """What a site adds in a step."""
    rows = with_constant(features)
    (sums,) = coded_statistics(rows, residuals(rows, labels, head), weights, {"sums": 1.0})
    return sums.value


def test_a_step_sums_the_clipped_gradients_of_the_softmax_loss() -> None:
    generator = torch.Generator().manual_seed(1)
    features = clip(torch.randn(70, 5, generator=generator).double(), 0.0)[0]
    labels = torch.randint(3, (70,), generator=generator)
    head = torch.randn(3, 6, generator=generator).double()
    found = gradient(features, labels, torch.ones(70).double(), head)
    weight, bias = head[:, :5], CONSTANT * head[:, 5]
    expected = torch.zeros(3, 6, dtype=torch.float64)
    for x, label in zip(features, labels, strict=True):
        own = torch.cat([weight, bias[:, None]], 1).requires_grad_()
        loss = torch.nn.functional.cross_entropy((own[:, :5] @ x + own[:, 5])[None], label[None])
        (slope,) = torch.autograd.grad(loss, own)
        # The last column is the bias's, which is the residual itself.
        left = -slope[:, 5]
        row = torch.cat([x, torch.tensor([CONSTANT]).double()]) / (1 + CONSTANT**2) ** 0.5
        expected += torch.outer(left / max(CLIP, float(left.norm())), row)
    assert torch.allclose(found, expected, atol=1e-4)


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_unit_more_changes_a_sum_by_one_at_most_whatever_the_coordinator_sends(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 70))
    drawn = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    scale = data.draw(st.sampled_from([1e-8, 1.0, 1e6]))
    features = clip(scale * torch.randn(count, 3, generator=drawn).double(), 0.0)[0]
    labels = torch.randint(2, (count,), generator=drawn)
    head = torch.tensor(data.draw(st.lists(LARGE, min_size=8, max_size=8))).double().reshape(2, 4)
    units = [str(each) for each in torch.randint(0, 5, (count,), generator=drawn).tolist()]
    weights = unit_weights(units, count)
    whole = gradient(features, labels, weights, head)
    kept = torch.tensor([unit != units[0] for unit in units])
    rest = gradient(features[kept], labels[kept], weights[kept], head)
    assert float((whole - rest).norm()) <= 1.0


def test_the_rounds_cost_the_budget_of_the_run(public: dict[str, Any]) -> None:
    for epsilon in (1.0, 8.0):
        run = parse_run(public | {"epsilon": epsilon})
        assert run.mechanism is not None
        events = run.mechanism.events
        accountant = PLDAccountant(value_discretization_interval=1e-3)
        for event in events:
            accountant.compose(GaussianDpEvent(event.noise_multiplier), event.count)
        assert accountant.get_epsilon(1e-5) == pytest.approx(epsilon, rel=2e-3)
        assert sum(event.count for event in events) == run.rounds == 4
        first, each = events
        noise = run.mechanism.noise
        # The statistics of the first round together have its multiplier.
        together = sum((bound / sigma) ** 2 for sigma, bound in (noise["records"], noise["totals"]))
        assert together**-0.5 == pytest.approx(first.noise_multiplier)
        together = sum((bound / sigma) ** 2 for sigma, bound in (noise["sums"], noise["gaps"]))
        assert together**-0.5 == pytest.approx(each.noise_multiplier)
        assert noise["sums"][0] == pytest.approx(each.noise_multiplier / math.sqrt(0.97))
        assert noise["sums"][1] == noise["gaps"][1] == 1.0


def seen_by_bins(length: float) -> int:
    """The column of a length, by a loop over where half octaves end."""
    edges = [2 ** ((column - 32.5) / 2) for column in range(1, 64)]
    return sum(length > edge for edge in edges)


@given(st.lists(st.floats(0, 1e30), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_each_length_counts_once_in_its_half_octave(lengths: list[float]) -> None:
    found = in_bins(torch.tensor([*lengths, math.inf, math.nan]).double())
    expected = [seen_by_bins(each) for each in lengths]
    assert found.argmax(1).tolist() == [*expected, 0, 0]
    assert (found.sum(1) == 1).all()
    assert found.shape[1] == BINS


@given(st.floats(-12, 12), st.floats(0, 0.3), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_the_usual_length_is_that_of_most_features(
    exponent: float, spread: float, seed: int
) -> None:
    drawn = torch.randn(400, generator=torch.Generator().manual_seed(seed)).double()
    lengths = 2**exponent * (1 + spread * drawn).clamp_min(0.1)
    counts = in_bins(lengths).sum(0)
    noise = torch.randn(64, generator=torch.Generator().manual_seed(seed + 1)).double()
    found = usual_length(counts + 2.0 * noise, 2.0)
    assert 0.7 < found / float(lengths.median()) < 1.4


@given(st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_lengths_that_do_not_stand_out_from_the_noise_say_nothing(seed: int) -> None:
    noise = torch.randn(64, generator=torch.Generator().manual_seed(seed)).double()
    assert usual_length(3.0 * noise, 3.0) == 0.0


def request(run: Run, training: Training, features: Tensor, owners: list[str]) -> Job:
    """The next request of a training to a site with records of the first class."""
    labels = torch.zeros(len(features), dtype=torch.int64)
    records = LabelledFeatures(features, labels, tuple(owners))
    classes = run.settings.classes
    site = SiteFeatures(records, records, classes, "f", 0.0, simulated=False)
    info = {"round": training.round + 1}
    return Job(run, NodeConfig(), "north", site, payload=training.payload(), info=info)


ALONE = BASE | {"features.projection": ""}


@given(st.integers(0, 40), st.floats(-6, 6), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_without_public_images_a_site_sums_directions_and_counts_lengths(
    count: int, exponent: float, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    features = 10**exponent * torch.randn(count, 64, generator=drawn)
    features[:1] = torch.tensor([math.nan, *63 * [1.0]])
    owners = [str(each) for each in torch.randint(3, (count,), generator=drawn).tolist()]
    run = parse_run(ALONE)
    training = Training.begin(run, run.settings.classes, "f", 64)
    found = bounded_round(request(run, training, features, owners)).values
    expected = {"records": torch.zeros(1), "totals": torch.zeros(64), "code": torch.zeros(BINS)}
    for row, owner in zip(features.double(), owners, strict=True):
        weight = 1 / owners.count(owner)
        length = float(row.norm())
        expected["records"] += weight
        expected["totals"] += weight * (row / length).nan_to_num(0.0).float()
        expected["code"][seen_by_bins(length) if math.isfinite(length) else 0] += weight
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].float(), value, atol=1e-3), name


def test_a_site_without_records_sends_zeros(public: dict[str, Any]) -> None:
    """A shorter answer, or none, would show that it has none."""
    for chosen in (public, ALONE):
        run = parse_run(chosen)
        training = Training.begin(run, run.settings.classes, "f", 64)
        found = bounded_round(request(run, training, torch.zeros(0, 64), [])).values
        wanted = {each.name for each in run.plan.combination.sums_in(1)}
        assert found.keys() == wanted & {"records", "totals", "code"}
        assert not any(value.any() for value in found.values())


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_features_kept_between_rounds_are_those_of_the_request(data: st.DataObject) -> None:
    """Whatever changed since: a record, a class, whose record it is, the map, or the memory there is."""
    run, known = parse_run(BASE | {"features.dimensions": 8}), dict[str, Job]()
    for changed in ("nothing", "record", "class", "owner", "centre", "order"):
        training = Training.begin(run, run.settings.classes, "f", 64)
        training.round = 1
        features = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
        owners = list("aabbcc")
        if changed == "record":
            features[data.draw(st.integers(0, 5)), data.draw(st.integers(0, 63))] += 1
        if changed == "owner":
            owners[data.draw(st.integers(0, 5))] = "d"
        if changed == "centre":
            training.model["centre"] = torch.ones(64)
        # Rows of zeros are not in the map's digest, so that these are one map to it.
        training.model["projection"][-1] = 0
        if changed == "order":
            training.model["projection"] = training.model["projection"].roll(1, 0)
        training.model["weight"] = torch.arange(80.0).reshape(10, 8)
        known[changed] = job = request(run, training, features, owners)
        if changed == "class":
            labels = torch.zeros(6, dtype=torch.int64)
            labels[data.draw(st.integers(0, 5))] = 1
            found = replace(job.found, train=replace(job.found.train, labels=labels))
            known[changed] = replace(job, found=found)
    fresh = {}
    for changed, job in known.items():
        logistic_rounds._latest.clear()
        fresh[changed] = bounded_round(job).values
    assert not any(
        torch.equal(fresh["nothing"]["sums"], fresh[each]["sums"]) for each in [*fresh][1:]
    )
    logistic_rounds._latest.clear()
    each_bytes = 6 * 9 * 8
    with pytest.MonkeyPatch.context() as patched:
        room = data.draw(st.integers(0, 4))
        patched.setattr(logistic_rounds, "MOST_KEPT", room * each_bytes)
        for changed in data.draw(st.lists(st.sampled_from([*known]), min_size=3, max_size=12)):
            found = bounded_round(known[changed]).values
            assert all(torch.equal(found[name], value) for name, value in fresh[changed].items())
            assert len(logistic_rounds._latest) <= room


@pytest.mark.parametrize(
    ("known", "bound"), [(True, 0.0), (False, 8.0), (True, -8.0), (False, -8.0)]
)
def test_a_bound_that_the_settings_do_not_have_is_refused(
    public: dict[str, Any], known: bool, bound: float
) -> None:
    run = parse_run(public if known else ALONE)
    training = Training.begin(run, run.settings.classes, "f", 64)
    training.model["bound"] = torch.tensor([bound])
    with pytest.raises(SurrogateError, match="a bound of"):
        bounded_round(request(run, training, torch.ones(3, 64), ["a", "b", "c"]))


@pytest.mark.parametrize(
    ("changed", "dimensions"),
    [
        ({}, 280),
        ({"epsilon": 4.0}, 521),
        ({"features.records": 2500}, 140),
        ({"colluding": 0.0, "dropouts": 0.0}, 310),
        ({"features.dimensions": 17}, 17),
    ],
)
def test_without_public_images_dimensions_follow_from_public_numbers(
    changed: dict[str, Any], dimensions: int
) -> None:
    """6 times the root of the records over the noise of one release with the whole budget, of
    which two thirds count."""
    run = parse_run(BASE | {"epsilon": 1.0} | changed)
    assert run.settings.features.dimensions == pytest.approx(dimensions, abs=1)


def total_of(run: Run, training: Training, tensors: dict[str, Tensor]) -> Total:
    sigmas = dict.fromkeys(tensors, 1e-6)
    return Total(training.header(), tensors, sigmas, run.mechanism)


def test_steps_without_noise_reach_the_minimum_of_the_loss(
    public: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the loss whose gradients the sites send; hardly any noise means hardly any ridge."""
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 200),))
    run = parse_run(public | {"classes": "a,b,c"})
    training = Training.begin(run, run.settings.classes, "f", 64)
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(300) % 3
    features = torch.randn(300, 64, generator=generator).double()
    features[torch.arange(300), labels] += 1.0
    features = clip(features, 0.0)[0]
    tensors = {"records": torch.tensor([300.0]), "totals": torch.zeros(64).double()}
    absorb_total(total_of(run, training, tensors), training, ["1", "2"])
    lengths = []
    for _ in range(200):
        model = {name: tensor.double() for name, tensor in training.model.items()}
        head = torch.cat([model["weight"], model["bias"][:, None] / CONSTANT], 1)
        sums = gradient(features, labels, torch.ones(300).double(), head)
        lengths.append(float(sums.norm()))
        sent = {"sums": sums, "gaps": torch.zeros(6).double()}
        absorb_total(total_of(run, training, sent), training, ["1", "2"])
    assert lengths[-1] < 0.1 * lengths[0]


def test_a_run_learns_and_its_model_maps_features_as_the_sites_did(
    tmp_path: Path, public: dict[str, Any]
) -> None:
    rows = torch.eye(64)[:50]
    save_file({"projection": rows}, tmp_path / "rows.safetensors")
    own = {"features.projection": str(tmp_path / "rows.safetensors"), "features.dimensions": 50}
    folder = run_federation(tmp_path, sites(4), **public, **own, colluding=0.0, dropouts=0.0)
    made = metrics_of(folder)
    assert made["accuracy"]["model"] > 0.5
    assert [each["epsilon"] for each in made["rounds"]][-1] == pytest.approx(8.0)
    assert made["privacy"]["mechanism"] == "secure-aggregation"
    model = load_model(folder / "model.safetensors")
    assert isinstance(model, Head)
    assert model.projection is not None
    assert model.centre is not None
    assert (tuple(model.projection.shape), tuple(model.centre.shape)) == ((50, 64), (64,))


def test_a_site_that_misses_a_round_takes_part_in_the_next(
    tmp_path: Path, public: dict[str, Any]
) -> None:
    calls: list[int] = []

    def second_broken(payload: bytes) -> bytes:
        calls.append(len(payload))
        return b"\x0a\x03abc" if len(calls) == 2 else payload

    grid = InProcessGrid(sites(5), {4: Fault(kind="query.sum_shares", payload=second_broken)})
    folder = run_federation(tmp_path, grid, **public, colluding=0.0, dropouts=0.2)
    assert [entry["used"] for entry in metrics_of(folder)["rounds"]] == [5, 4, 5, 5]
    assert [e["site"] for e in events_of(folder) if e["event"] == "rejected"] == ["4"]


@pytest.mark.parametrize("known", [True, False])
def test_planned_bytes_are_those_of_all_rounds_and_the_head_is_learned(
    tmp_path: Path, public: dict[str, Any], known: bool
) -> None:
    chosen = public if known else BASE
    run = parse_run(chosen | {"sites": 4})
    planned = costs(run, 64, 10, 360, 10)[0]
    made = metrics_of(run_federation(tmp_path, sites(4), **chosen))
    assert made["accuracy"]["model"] > 0.5
    assert planned.rounds == 4
    assert made["bytes"]["up"] / 4 == pytest.approx(planned.up, rel=0.3)


def test_the_solver_is_in_the_digest_where_it_decides_what_sites_send(
    public: dict[str, Any],
) -> None:
    other = public | {"head.solver": "auto", "fedpft.covariance": "gram"}
    assert parse_run(public).full_digest != parse_run(other).full_digest


# What only one sum has, or no secure aggregation with a budget.
ONE_SUM: dict[str, Any] = {
    "fedpft.covariance": "gram",
    "fedpft.privacy": "sums",
    "features.ranges": "0 to 1",
    "task": "value",
    "secure-aggregation": False,
    "epsilon": 0.0,
}
# What a logistic head has too.
EITHER: dict[str, Any] = {
    "fedpft.clip": 2.0, "features.projection": "", "features.dimensions": 20,
    "features.records": 500, "colluding": 0.0, "sites": 7, "seed": 3, "head.shrinkage": 0.1,
}  # fmt: skip


@given(
    st.sets(st.sampled_from(sorted(ONE_SUM))),
    st.sets(st.sampled_from(sorted(EITHER))),
    st.sampled_from((0.5, 1.0, 3.0, 20.0)),
)
def test_a_noisy_sum_with_nothing_of_one_sum_set_is_logistic_at_both_sides(
    of_one: set[str], of_both: set[str], epsilon: float
) -> None:
    asked = BASE | {"head.solver": "auto", "epsilon": epsilon}
    asked |= {key: ONE_SUM[key] for key in of_one} | {key: EITHER[key] for key in of_both}
    asked["delta"] = 1e-5 if asked["epsilon"] else 0.0
    if asked.get("task"):
        del asked["classes"]
    try:
        run = parse_run(asked)
    except ConfigError:
        assert of_one
        return
    assert (run.settings.head.solver == "logistic") == (not of_one)
    assert (run.plan.kind == "rounds") == (not of_one)
    # A run folder keeps the settings that the run had, and a later version reads them.
    assert Run.resolve(run.settings).full_digest == run.full_digest
    if not of_one:
        set_by_hand = parse_run(asked | {"head.solver": "logistic"})
        assert set_by_hand.full_digest == run.full_digest


def test_noise_that_a_later_round_has_no_room_for_ends_a_run_before_it_is_charged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At this budget that of the first round fits, and that of gaps does not."""
    monkeypatch.setattr("fedsurrogate.common.methods.logistic_rounds.STEPS", ((float("inf"), 10),))
    grid = InProcessGrid(sites(4))
    with pytest.raises(RunError, match="the noise on gaps does not fit"):
        run_federation(tmp_path, grid, **BASE | {"epsilon": 0.05})
    assert not any(each["event"] == "masked" for each in events_of(next(tmp_path.glob("runs/*"))))


@pytest.mark.parametrize(
    ("own", "kind"),
    [
        ({}, "rounds"),
        ({"fedpft.covariance": "gram"}, "one-shot"),
        ({"fedpft.privacy": "sums"}, "one-shot"),
        ({"features.ranges": "0,1"}, "one-shot"),
        # Several components, or fewer numbers, have no sum.
        ({"fedpft.rank": 64}, ""),
        ({"fedpft.bits": 8}, ""),
        ({"fedpft.components": 2}, ""),
    ],
)
def test_what_is_set_leaves_rounds_or_one_sum(own: dict[str, Any], kind: str) -> None:
    chosen = {name: value for name, value in BASE.items() if name != "head.solver"} | own
    if kind:
        assert parse_run(chosen).plan.kind == kind
    else:
        with pytest.raises(ConfigError):
            parse_run(chosen)


def test_a_sum_with_sites_that_were_lost_in_the_first_round_is_no_false_one() -> None:
    run = parse_run(ALONE | {"secure-aggregation-records": 500})
    assert run.mechanism is not None
    sigmas = {name: sigma for name, (sigma, _) in run.mechanism.noise.items()}
    classes = len(run.settings.classes)
    for length, names, possible in (
        (100.0, "ab", True),
        (900.0, "ab", False),
        (900.0, "abc", False),
        (900.0, "acd", True),
        (1500.0, "acd", False),
    ):
        training = Training.begin(run, run.settings.classes, "f" * 16, 64)
        k = training.model[WEIGHT].shape[1]
        first = {"records": torch.full((1,), 100.0), "totals": torch.zeros(k)}
        absorb_total(Total(training.header(), first, sigmas, run.mechanism), training, "ab")
        gradient = torch.zeros(classes, k + 1).index_fill_(
            0, torch.tensor([0]), length / (k + 1) ** 0.5
        )
        later = Total(
            training.header(), {"sums": gradient, "gaps": torch.zeros(6)}, sigmas, run.mechanism
        )
        if possible:
            absorb_total(later, training, names)
        else:
            with pytest.raises(RunError, match="beyond their number"):
                absorb_total(later, training, names)
