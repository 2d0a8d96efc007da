"""Results of counts by loops over their cells; what is kept, shown and refused of each site, without a run."""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.time import Time
from fedsurrogate.common.wire.model_proto import save_model
from fedsurrogate.common.wire.surrogate_proto import Counts
from fedsurrogate.strategies.base.one_shot import OneShot
from fedsurrogate.strategies.base.outcome import Site
from fedsurrogate.strategies.counting.results import (
    PooledCounts,
    auroc,
    evaluation_result,
    pooled,
    rate,
    records_counted,
    result_of,
    summed_result,
    total,
)
from fedsurrogate.strategies.counting.strategy import (
    Counting,
    evaluated_payload,
    payload_of,
    read_model,
)
from fedsurrogate.strategies.pooling.site_weights import Total
from tests.strategies.base.test_courses_of_a_run import Kept

few = settings(max_examples=25, deadline=None)
NAMES = ("a", "b", "c")
SEEDS = st.integers(0, 9999)


def run_of(kind: str, **more: Any) -> Run:
    run = parse_run({"counting.kind": "survey", "classes": "a,b,c"} | more)
    counting = run.settings.counting.model_copy(update={"kind": kind, "digest": "d" * 64})
    return replace(run, settings=run.settings.model_copy(update={"counting": counting}))


def header(site: str) -> Header:
    return Header("counting", "r", site, "f", NAMES)


def claim(**sigmas: float) -> Mechanism:
    noise = {name: (sigma, 1.0) for name, sigma in sigmas.items()}
    return Mechanism("counts", 1.0, 1e-5, "record", 1.0, 0.0, noise)


@few
@given(SEEDS, st.sampled_from([2, 3]), st.sampled_from([0.0, 2.0]), st.sampled_from([0.0, 3.0]))
def test_an_evaluation_counts_cell_by_cell(seed: int, classes: int, v: float, w: float) -> None:
    draw = np.random.default_rng(seed)
    decisions = draw.integers(20, 90, (classes, classes)).astype(float)
    scores = draw.integers(0, 60, (1 if classes == 2 else classes, 2, 5)).astype(float)
    tables = {"decisions": torch.from_numpy(decisions), "scores": torch.from_numpy(scores)}
    found = evaluation_result(PooledCounts(tables, {"decisions": v, "scores": w}), NAMES[:classes])
    everything = range(classes)

    def share(inside: list[tuple[int, int]], outside: list[tuple[int, int]]) -> Any:
        cells = [torch.tensor([decisions[at] for at in each]) for each in (inside, outside)]
        return asdict(rate(*cells, v))

    right = [(k, k) for k in everything]
    wrong = [(k, o) for k in everything for o in everything if k != o]
    assert found["records"] == asdict(total(torch.from_numpy(decisions), v))
    assert found["accuracy"] == pytest.approx(share(right, wrong))
    assert found["decisions"] == decisions.astype(int).tolist()
    assert found["noise"] == {"decisions": math.sqrt(v), "scores": math.sqrt(w)}
    assert list(found["classes"]) == list(NAMES[:classes])
    for k in everything:
        own = found["classes"][NAMES[k]]
        others = [o for o in everything if o != k]
        assert own["records"] == asdict(total(torch.from_numpy(decisions[k]), v))
        assert own["sensitivity"] == pytest.approx(share([(k, k)], [(k, o) for o in others]))
        negative = [(o, p) for o in others for p in others], [(o, k) for o in others]
        assert own["specificity"] == pytest.approx(share(*negative))
        # Of two classes both have the area of the second.
        area = auroc(torch.from_numpy(scores[0 if classes == 2 else k]), w)
        assert own["auroc"] == asdict(area)


@few
@given(SEEDS, st.integers(1, 3))
def test_tables_and_variances_of_sites_add_up_and_a_survey_shows_each_site(
    seed: int, sites: int
) -> None:
    draw = np.random.default_rng(seed)
    sent, tables, noise = [], [], []
    for at in range(sites):
        tables.append(draw.integers(0, 40, 3))
        noise.append(float(draw.choice([0.0, 1.5, 4.0])))
        own = claim(records=noise[-1]) if noise[-1] else None
        sent.append(Counts(header(f"s{at}"), {"records": torch.from_numpy(tables[-1])}, own))
    variances = [sigma**2 + 1 / 12 if sigma else 0.0 for sigma in noise]
    together = pooled(sent)
    assert together.tables["records"].tolist() == sum(tables).tolist()  # type: ignore[attr-defined]
    assert together.tables["records"].dtype == torch.float64
    assert together.variances == {"records": pytest.approx(sum(variances))}
    strategy = Counting(run_of("survey"), Kept())
    found = strategy._result(sent)
    cells = torch.from_numpy(sum(tables)).double()  # type: ignore[arg-type]
    assert found == {
        "records": asdict(total(cells, sum(variances))),
        "classes": {
            name: asdict(total(cells[k : k + 1], sum(variances))) for k, name in enumerate(NAMES)
        },
        "noise": {f"s{at}": pytest.approx(math.sqrt(each)) for at, each in enumerate(variances)},
        "per_site": {f"s{at}": table.tolist() for at, table in enumerate(tables)},
    }


@few
@given(SEEDS, st.integers(0, 3))
def test_records_with_a_target_are_the_most_of_any_label_or_number(seed: int, scale: int) -> None:
    draw = np.random.default_rng(seed)
    labels, number = Labels(("x", "y")), Number(("u", "v"), ((0.0, 1.0),))
    time = Time(("t", "e"), (0.0, 1.0, 2.0))
    for target, kind, name, shape in (
        (labels, "evaluation", "answers", (2, 2, 4)),
        (time, "evaluation", "answers", (3, 2, 4)),
        (number, "evaluation", "errors", (2, 7)),
        (labels, "survey", "records", (6,)),
    ):
        table = draw.integers(-2, 30, shape) * scale
        found = records_counted(
            {name: torch.from_numpy(table)}, run_of(kind).settings.counting, target
        )
        if name == "errors":
            most = max(round(each[0] / 100) for each in table)
        elif name == "records":
            most = max(int(table[:3].sum()), int(table[3:].sum()))
        else:
            most = max(int(each.sum()) for each in table)
        assert found == max(0, most)
    many = torch.zeros(2, 7).long()
    many[1, 0] = 1249
    errors = run_of("evaluation").settings.counting
    assert records_counted({"errors": many}, errors, number) == 12


BROKEN = ["no json", "[]", "3", '{"a": "b"}', '{"a": {"b": 1}}', '{"a": [[1], 2]}', 9000 * "["]


@pytest.mark.parametrize("text", BROKEN)
def test_exact_counts_that_cannot_be_read_are_refused(text: str) -> None:
    strategy = Counting(run_of("evaluation"), Kept())
    found = strategy._exact_tables('{"a": [1, 2], "b": [[3]]}')
    assert {name: table.tolist() for name, table in found.items()} == {"a": [1, 2], "b": [[3]]}
    assert {table.dtype for table in found.values()} == {torch.float64}
    with pytest.raises(SurrogateError, match="exact counts that cannot be read"):
        strategy._exact_tables(text)


@pytest.mark.parametrize("kind", ["survey", "evaluation"])
def test_only_a_site_that_allows_it_is_kept_and_shown_alone(
    monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    strategy, recorder = Counting(run_of(kind), Kept()), Kept()
    strategy.recorder = recorder
    monkeypatch.setattr(strategy, "_node", lambda reply: reply.node)
    monkeypatch.setattr(OneShot, "_receive", lambda self, reply, late: None)
    for at, show in enumerate((True, False, 1, "y", None)):
        strategy._received[at] = object()  # type: ignore[assignment]
        strategy.outcome.sites[at] = Site(f"s{at}", "used", "", records=5)
        recorder.surrogates[f"s{at}"] = b"sent"
        content = SimpleNamespace(config_records={"info": {"show": show}})
        strategy._receive(SimpleNamespace(node=at, content=content))  # type: ignore[arg-type]
    alone = range(1 if kind == "evaluation" else 5)
    assert sorted(recorder.surrogates) == [f"s{at}" for at in alone]
    records = [site.records for site in strategy.outcome.sites.values()]
    assert records == [5 * (at in alone) for at in range(5)]


def test_secure_aggregation_of_counts_says_so_and_false_ones_end_the_run() -> None:
    run = run_of("survey")
    table = torch.tensor([5.0, 0.0, 3.0]).double()
    summed = Total(header("coordinator"), {"records": table}, {"records": 2.0})
    exact = result_of(PooledCounts({"records": table}, {"records": 4.0}), run.settings.counting, NAMES)  # fmt: skip
    assert summed_result(summed, run) == exact | {"secure_aggregation": True}
    plain = summed_result(replace(summed, sigmas={}), run)
    assert plain["noise"] == {"records": 0.0}
    false = replace(summed, tensors={"records": -100 * torch.ones(3).double()})
    with pytest.raises(RunError, match=r"below zero .* so some site has added false numbers"):
        summed_result(false, run)


def test_a_model_that_is_evaluated_is_kept_where_it_is_the_one_of_the_settings(
    tmp_path: Path,
) -> None:
    model = Head(header("coordinator"), torch.ones(3, 2), torch.zeros(3))
    save_model(model, tmp_path / "model.safetensors")
    payload, digest = payload_of(read_model(tmp_path / "model.safetensors"))
    assert hashlib.sha256(payload).hexdigest() == digest
    settings = run_of("evaluation").settings.counting
    own = settings.model_copy(
        update={"model": str(tmp_path / "model.safetensors"), "digest": digest}
    )
    kept = Kept()
    assert evaluated_payload(own, kept) == payload
    assert kept.surrogates == {"file evaluated.pb": payload}
    (tmp_path / "evaluated.pb").write_bytes(payload)
    again = own.model_copy(update={"model": str(tmp_path / "evaluated.pb")})
    assert evaluated_payload(again, Kept()) == payload
    assert evaluated_payload(own.model_copy(update={"kind": "survey"}), Kept()) is None
    other = own.model_copy(update={"digest": "e" * 64})
    with pytest.raises(RunError, match=r"is not the model that counting.digest names"):
        evaluated_payload(other, kept)
    with pytest.raises(RunError, match="cannot be read"):
        evaluated_payload(own.model_copy(update={"model": str(tmp_path / "none.pb")}), kept)
