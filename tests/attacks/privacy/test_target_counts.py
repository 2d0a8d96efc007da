"""Counts about labels, numbers and times: what a patient changes, models made to break them, lying
hospitals, and small cells.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.methods.counting import (
    count_answers,
    count_cells,
    large_cells,
    large_topics,
)
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.counted import CountedTarget, counted
from fedsurrogate.common.wire.model_proto import pack_classifier, save_model
from fedsurrogate.common.wire.records import INFO, to_record
from fedsurrogate.strategies.counting.strategy import read_model
from tests.attacks.privacy.neighbours import Record
from tests.attacks.privacy.test_counts import lying, named, rejected
from tests.attacks.privacy.visits import PRIVATE, TARGETS, Hospital
from tests.grid import Fault, NodeConfig
from tests.strategies.counting.hospitals import allow, entries, evaluated
from tests.strategies.counting.targets import hospitals, learned

KINDS: dict[str, dict[str, Scalar]] = {
    "labels": {"task": "multilabel", "label-columns": "edema,mass,nodule"},
    "number": {"task": "regression", "target-range": "-1,1;0,5", "value-columns": "age,dose"},
    "time": {"task": "survival", "horizon": 3.0, "bins": 3},
}
CELLS: dict[str, st.SearchStrategy[tuple[float, ...]]] = {
    "labels": st.tuples(*[st.sampled_from([0.0, 1.0, float("nan")])] * 3),
    "number": st.tuples(st.floats(-9, 9), st.floats(-9, 9)),
    "time": st.tuples(st.floats(0, 5), st.sampled_from([0.0, 1.0])),
}
FACTS = {"number": {"deviation": [0.1, 0.4]}, "time": {"spread": 0.7}, "labels": {}}
searched = settings(
    max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def run_of(kind: str, counting: str, **more: Scalar) -> Run:
    flat = KINDS[kind] | {"counting.kind": counting, "counting.digest": "0" * 64} | more
    return parse_run(flat | {"epsilon": 1.0, "delta": 1e-5})


def how_of(run: Run) -> CountedTarget:
    assert run.target is not None
    return counted(run.target, run.settings.counting)


def model_of(run: Run, kind: str, **facts: Any) -> Head:
    """A model of this many outputs; its weights do not matter here."""
    assert run.target is not None
    names = run.target.outputs
    header = Header("fedpft", "", "", "f", names)
    text = json.dumps({**run.target.public, **FACTS[kind], **facts})
    return Head(header, torch.zeros(len(names), 2), torch.zeros(len(names)), target=text)


def tables(kind: str, rows: list[Any], units: list[str]) -> dict[str, tuple[Tensor, float]]:
    """The tables of a survey and an evaluation, each with the bound that its mechanism has."""
    values = torch.tensor([cells for cells, _ in rows], dtype=torch.float64)
    weights = unit_weights(tuple(units), len(rows))
    survey, judging = run_of(kind, "survey"), run_of(kind, "evaluation")
    scores = torch.tensor([own for _, own in rows], dtype=torch.float64)
    scores = scores[:, : len(judging.settings.classes)]
    how = how_of(judging)
    topics = torch.ones(how.table.shape[0], dtype=torch.bool)
    judged = count_answers(how, model_of(judging, kind), scores, values, weights, topics)
    made = {"survey": (survey, count_cells(how_of(survey), values, weights))}
    made["evaluation"] = (judging, judged)
    found = {}
    for name, (run, table) in made.items():
        assert run.mechanism is not None
        ((_, bound),) = run.mechanism.noise.values()
        found[name] = (table.value, bound)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_reached(kind: str) -> None:
    """Otherwise there is more noise than needed."""
    value = {"labels": (1.0, 0.0, 1.0), "number": (-1.0, 0.0), "time": (2.0, 1.0)}[kind]
    for name, (table, bound) in tables(kind, [(value, (1e3, 1e3, 1e3))], ["one"]).items():
        least = 0.8 if (kind, name) == ("number", "evaluation") else 1 - 1e-9
        assert float(table.norm()) >= least * bound, name


@pytest.mark.parametrize("kind", KINDS)
@searched
@given(data=st.data(), least=st.integers(1, 6))
def test_no_count_below_the_smallest_cell_follows_from_exact_counts(
    kind: str, data: st.DataObject, least: int
) -> None:
    """Nor by a difference: with several questions, all of them count the same records."""
    rows = data.draw(st.lists(CELLS[kind], min_size=1, max_size=12))
    how = how_of(run_of(kind, "survey", **{"counting.bins": 4}))
    values = torch.tensor(rows, dtype=torch.float64)
    exact = count_cells(how, values, torch.ones(len(rows), dtype=torch.float64)).value
    left = large_cells(how, exact, least)
    assert bool(((left == 0) | (left >= least)).all())
    sizes = [len(each) for each in how.questions.values()]
    if len(sizes) > 1:
        for part, true in zip(torch.split(left, sizes), torch.split(exact, sizes), strict=True):
            assert torch.equal(part, true) or not part.any()


@pytest.mark.parametrize("kind", KINDS)
@searched
@given(data=st.data(), least=st.integers(1, 5))
def test_exact_answers_are_about_enough_records_of_each_kind(
    kind: str, data: st.DataObject, least: int
) -> None:
    rows = data.draw(st.lists(CELLS[kind], min_size=1, max_size=12))
    run = run_of(kind, "evaluation")
    how, values = how_of(run), torch.tensor(rows, dtype=torch.float64)
    topics = large_topics(how, values, torch.ones(len(rows), dtype=torch.bool), least)
    scores = torch.zeros(len(rows), len(run.settings.classes), dtype=torch.float64)
    weights = torch.ones(len(rows), dtype=torch.float64)
    table = count_answers(how, model_of(run, kind), scores, values, weights, topics).value
    for topic, kinds in enumerate(how.kinds(values).T):
        sizes = [int((kinds == each).sum()) for each in (0, 1)]
        enough = all(size == 0 or size >= least for size in sizes) and sum(sizes) > 0
        assert bool(table[topic].any()) == enough


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("time", {"spread": float("nan")}),
        ("time", {"spread": -1.0}),
        ("time", {"spread": "wide"}),
        ("number", {"deviation": [0.1]}),
        ("number", {"deviation": "wide"}),
    ],
)
@pytest.mark.parametrize("count", [0, 2])
def test_a_model_that_cannot_be_counted_is_refused_whatever_the_records_are(
    kind: str, facts: dict[str, Any], count: int
) -> None:
    run = run_of(kind, "evaluation")
    model, how = model_of(run, kind, **facts), how_of(run)
    scores = torch.zeros(count, len(model.header.classes), dtype=torch.float64)
    values, weights = torch.zeros(count, 2, dtype=torch.float64), torch.ones(count).double()
    topics = torch.ones(how.table.shape[0], dtype=torch.bool)
    with pytest.raises(SurrogateError, match="cannot be counted"):
        count_answers(how, model, scores, values, weights, topics)


@pytest.mark.parametrize(("kind", "fact"), [("number", "deviation"), ("time", "spread")])
def test_a_model_from_rounds_that_does_not_know_its_error_is_counted(kind: str, fact: str) -> None:
    """Nothing lies within an interval that it has not; thirds are those of a spread of one."""
    run = run_of(kind, "evaluation")
    known, how = model_of(run, kind, **{fact: [1.0, 1.0] if kind == "number" else 1.0}), how_of(run)
    facts = {key: value for key, value in json.loads(known.target).items() if key != fact}
    unknown = replace(known, target=json.dumps(facts))
    values = torch.tensor([[0.2, 1.0], [0.9, 0.0], [2.5, 1.0]], dtype=torch.float64)
    scores = torch.tensor([[-2.0, 0.5], [0.1, 0.5], [2.0, 0.5]], dtype=torch.float64)
    own = scores[:, : len(known.header.classes)]
    ones, topics = torch.ones(3, dtype=torch.float64), torch.ones(how.table.shape[0]).bool()
    first, second = (
        count_answers(how, model, own, values, ones, topics).value for model in (known, unknown)
    )
    if kind == "number":
        assert torch.equal(first[:, :-1], second[:, :-1])
        assert float(first[:, -1].sum()) > float(second[:, -1].sum()) == 0
    else:
        assert torch.equal(first, second)
        assert first[0].sum(1).tolist() == [1, 1, 1]


@pytest.fixture(scope="module", params=["labels", "number", "time"])
def at_hospitals(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[NodeConfig], Path]:
    home = tmp_path_factory.mktemp(str(request.param))
    nodes = hospitals(home, (120, 100, 80))
    return str(request.param), home, nodes, learned(home, nodes, str(request.param))


def each(change: Callable[[Tensor], Tensor]) -> Fault:
    """A site that changes each of its tables."""
    return lying(lambda tables: {name: change(table) for name, table in tables.items()})


LIES: dict[str, Callable[[Tensor], Tensor]] = {
    "negative": lambda table: table - 100_000,
    "another shape": lambda table: table[..., :-1],
    "transposed": lambda table: table.transpose(0, -1).contiguous().reshape(-1),
    "huge": lambda table: table + 2_000_000_000,
}


@pytest.mark.parametrize("name", LIES)
def test_counts_that_no_records_give_are_refused_and_the_others_used(
    name: str, at_hospitals: tuple[str, Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    _, _, nodes, run = at_hospitals
    fresh, faults = moved(nodes, tmp_path), {1: each(LIES[name])}
    folder, result = evaluated(tmp_path, fresh, run, epsilon=1.0, faults=faults)
    assert result["sites"] == 2
    assert rejected(folder) == ["clinic-1"]


def moved(nodes: list[NodeConfig], home: Path) -> list[NodeConfig]:
    """The hospitals with new ledgers."""
    found = []
    for number, node in enumerate(nodes):
        allow(home, number, "")
        own = {
            "policy": str(home / f"policy-{number}.toml"),
            "state-dir": str(home / f"state-{number}"),
            "check-log-dir": str(home / f"check-log-{number}"),
        }
        found.append(node | own)
    return found


def test_errors_beyond_their_records_are_refused(
    at_hospitals: tuple[str, Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """A site cannot make a model of numbers look worse than all of its records allow."""
    kind, _, nodes, run = at_hospitals

    def more(table: Tensor) -> Tensor:
        if kind == "number":
            table[:, 1] = 3 * table[:, 0] + 30_000
        return table

    fresh, faults = moved(nodes, tmp_path), {0: each(more)}
    folder, result = evaluated(tmp_path, fresh, run, epsilon=4.0, faults=faults)
    refused = rejected(folder)
    assert refused == (["clinic-0"] if kind == "number" else [])
    assert result["sites"] == 3 - len(refused)


def test_a_model_of_another_target_is_refused_before_a_charge(
    at_hospitals: tuple[str, Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    """Another range, label or horizon than the settings name, or a class."""
    kind, _, nodes, run = at_hospitals
    head = read_model(run / "model.safetensors")
    assert isinstance(head, Head)
    facts = json.loads(head.target)
    other = {"labels": "columns", "number": "ranges", "time": "unit"}[kind]
    changed = json.dumps(
        facts | {other: {"columns": ["edema", "x"], "ranges": [[0, 50]]}.get(other, "days")}
    )
    for number, target in enumerate((changed, "")):
        file = tmp_path / f"other-{number}.safetensors"
        save_model(Head(head.header, head.weight, head.bias, head.clip, target=target), file)
        fresh = moved(nodes, tmp_path)
        with pytest.raises(RunError, match="quorum"):
            evaluated(tmp_path, fresh, run, **named(file))
        assert not any(entries(node) for node in fresh), kind


@pytest.mark.parametrize("bins", [16, 256])
def test_a_head_that_answers_a_label_many_times_is_refused_before_a_charge(
    tmp_path: Path, bins: int
) -> None:
    """It would put a record in all bins of its label, where the noise is for one."""
    settings = PRIVATE | TARGETS["labels"] | {"counting.kind": "evaluation", "counting.bins": bins}
    site = Hospital(tmp_path / "clinic", "table", (Record("a", "1"), Record("b", "2", grey=30)))
    header = Header("fedpft", "", "coordinator", site.place[0], ("edema",) * bins)
    place = (torch.arange(bins) + 0.5) * 16 / bins - 8
    facts = json.dumps({"name": "multilabel", "columns": ["edema"]})
    head = Head(header, torch.zeros(bins, site.place[1]), place, 0.0, target=facts)

    def asked(model: bytes) -> object:
        run = settings | {"counting.digest": sha256(model).hexdigest()}
        info = {"run": parse_run(run).digest, "round": 1, "confirmed": 0, "lineage": "abc"}
        reply = site.ask("train", run, to_record(model, info | {"bytes": len(model)}))
        return reply.config_records[INFO]["status"]

    assert asked(pack_classifier(head)) == "surrogate"
    assert not site.entries()
    once = replace(
        head, header=replace(header, classes=("edema",)), weight=head.weight[:1], bias=place[:1]
    )
    assert asked(pack_classifier(once)) == "ok"
    assert site.entries()[-1]["sensitivities"]["labels"] == pytest.approx(1)


def test_the_mechanism_shortens_what_such_a_head_would_add() -> None:
    """Without the check of names, the charged bound holds as well."""
    run = run_of("labels", "evaluation", **{"counting.bins": 16})
    assert run.mechanism is not None
    head = model_of(run, "labels")
    repeated = replace(head, header=replace(head.header, classes=run.settings.classes[:1] * 64))
    scores = torch.linspace(-8, 8, 64, dtype=torch.float64)[None]
    values, topics = torch.ones(1, 3, dtype=torch.float64), torch.ones(3, dtype=torch.bool)
    one = torch.ones(1, dtype=torch.float64)
    table = count_answers(how_of(run), repeated, scores, values, one, topics).value
    ((_, bound),) = run.mechanism.noise.values()
    assert bool((table[0, 1] > 0).all())
    assert float(table.norm()) <= bound
