"""What a site counts of a received model on its held-out records, record by record; and which models
it refuses.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods import evaluation
from fedsurrogate.client_app.methods.counting import counts, summed_counts
from fedsurrogate.client_app.methods.evaluation import (
    checked_classifier,
    of_target,
    received_classifier,
    received_target_model,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.classifiers import Head, Quadratic
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.metrics import METRIC_VALUES, measured, packed
from fedsurrogate.common.wire.model_proto import pack_classifier
from fedsurrogate.common.wire.surrogate_proto import unpack_counts

NAMES, OWN, D = ("a", "b", "c"), ("c", "x", "a", "b"), 3


def head(
    seed: int, classes: tuple[str, ...] = NAMES, d: int = D, run: str = "r", fingerprint: str = "f"
) -> Head:
    draw = torch.Generator().manual_seed(seed)
    weight, bias = (
        torch.randn(len(classes), d, generator=draw),
        torch.randn(len(classes), generator=draw),
    )
    return Head(Header("fedpft", run, "coordinator", fingerprint, classes), weight, bias)


def counting(kind: str, payload: bytes, **more: Any) -> Run:
    digest = hashlib.sha256(payload).hexdigest()
    flat = {
        "counting.kind": kind,
        "counting.digest": digest,
        "classes": ",".join(NAMES),
        "counting.bins": 4,
    }
    return parse_run(flat | more)


def job(
    run: Run, rows: list[tuple[int, bool]], payload: bytes | None, least: int, **more: Any
) -> Job:
    """Held-out records, by class of the site and whether their features are finite."""
    x = torch.randn(len(rows), D, generator=torch.Generator().manual_seed(len(rows)))
    for row, (_, finite) in enumerate(rows):
        if not finite:
            x[row, 1] = torch.nan
    labels = torch.tensor([label for label, _ in rows], dtype=torch.int64)
    test = LabelledFeatures(x, labels)
    train = LabelledFeatures(x[:0], labels[:0])
    site = SiteFeatures(train, test, OWN, "f", 0.0, **{"simulated": False} | more)
    limits = SiteLimits(smallest_class=9, smallest_cell=least, show_evaluation=False)
    return Job(run, NodeConfig(site="north"), "north", site, limits, payload=payload)


ROWS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([True, True, True, False])), max_size=14
)


@settings(max_examples=30, deadline=None)
@given(
    rows=ROWS,
    least=st.integers(1, 4),
    summed=st.booleans(),
    simulated=st.booleans(),
    seed=st.integers(0, 9),
)
def test_an_evaluation_counts_records_of_large_classes_with_finite_scores(
    rows: list[tuple[int, bool]], least: int, summed: bool, simulated: bool, seed: int
) -> None:
    """In secure aggregation, a class is large by its records, whatever the model gives them."""
    model = head(seed)
    payload = pack_classifier(model)
    run = counting(
        "evaluation", payload, **{"secure-aggregation": True, "sites": 9} if summed else {}
    )
    asked = job(run, rows, payload, least, simulated=simulated)
    own = received_classifier(payload, "")
    known = [OWN[label] in NAMES for label, _ in rows]
    counted = [known[row] and (summed or rows[row][1]) for row in range(len(rows))]
    sizes = {
        name: sum(c and OWN[label] == name for c, (label, _) in zip(counted, rows, strict=True))
        for name in NAMES
    }
    decisions, scores = np.zeros((3, 3), int), np.zeros((3, 2, 4), int)
    for row, (label, finite) in enumerate(rows):
        if not (counted[row] and finite and sizes[OWN[label]] >= least):
            continue
        logits = own.scores(asked.found.test.features[row][None])[0].double().numpy()
        truth = NAMES.index(OWN[label])
        decisions[truth, int(logits.argmax())] += 1
        for k in range(3):
            others = np.log(sum(np.exp(logits[j]) for j in range(3) if j != k))
            at = int(np.clip(np.floor((logits[k] - others + 8) / 4), 0, 3))
            scores[k, int(truth == k), at] += 1
    wanted = {"decisions": decisions.tolist(), "scores": scores.tolist()}
    if summed:
        made = summed_counts(asked)
        found, claim = made.values, made.claim
        assert claim is None
        assert {name: table.tolist() for name, table in found.items()} == wanted
        return
    if not decisions.any():
        with pytest.raises(
            DataError, match=f"smallest-cell = {least}: no class has so many records"
        ):
            counts(asked)
        return
    made = counts(asked)
    sent = unpack_counts(made.payload)
    assert {name: table.tolist() for name, table in sent.tables.items()} == wanted
    assert sent.claim is None
    assert made.answer == ({"exact": json.dumps(wanted)} if simulated else {})
    shown = replace(asked, limits=replace(asked.limits, show_evaluation=True))
    assert counts(shown).answer["show"] is True


def test_only_the_named_model_for_the_runs_classes_is_evaluated() -> None:
    payload = pack_classifier(head(0))
    rows = [(0, True)] * 5
    counts(job(counting("evaluation", payload), rows, payload, 1))
    other = pack_classifier(head(1))
    for came in (other, None):
        with pytest.raises(SurrogateError, match=r"not the one that counting\.digest names"):
            counts(job(counting("evaluation", payload), rows, came, 1))
    for classes in (("a", "c", "b"), ("a", "b")):
        odd = pack_classifier(head(0, classes))
        with pytest.raises(SurrogateError, match="other classes than the run, or in another order"):
            counts(job(counting("evaluation", odd), rows, odd, 1))
    private = {"epsilon": 1.0, "delta": 1e-5}
    for size, fine in ((9900.0, True), (-9900.0, True), (10100.0, False), (-10100.0, False)):
        model = head(0)
        model.bias[1] = size
        made = pack_classifier(model)
        asked = job(counting("evaluation", made, **private), rows, made, 1)
        if fine:
            assert unpack_counts(counts(asked).payload).claim is not None
        else:
            with pytest.raises(SurrogateError, match="which private runs refuse"):
                counts(asked)


def test_a_model_of_another_run_backbone_or_dimension_is_refused() -> None:
    run = parse_run({"classes": "a,b,c"})
    with pytest.raises(SurrogateError, match="without a model"):
        received_classifier(None, "r")
    payload = pack_classifier(head(0, run="other"))
    assert received_classifier(payload, "").header.run == "other"
    assert received_classifier(payload, "other").header.run == "other"
    with pytest.raises(SurrogateError, match="of run 'other', but these settings are run 'r'"):
        received_classifier(payload, "r")
    for model, words in (
        (head(0, run=run.digest), ""),
        (head(0), f"these settings are run '{run.digest}'"),
        (head(0, run=run.digest, fingerprint="g"), "for backbone 'g', this site has 'f'"),
        (head(0, run=run.digest, d=4), "of dimension 4, this site has 3"),
    ):
        asked = job(run, [(0, True)], pack_classifier(model), 1)
        if not words:
            assert checked_classifier(asked).header == model.header
            rows = [(2, True), (3, True), (0, True), (1, True)]
            result = evaluation.received_model(
                replace(asked, found=job(run, rows, None, 1).found), None
            )  # type: ignore[arg-type]
            assert result["tested"] == 4
            continue
        with pytest.raises(SurrogateError, match=words):
            checked_classifier(asked)


NUMBER = parse_run({"task": "regression", "target-range": "-3,3", "value-columns": "size"})


def of_number(target: dict[str, Any] | None = None) -> Head:
    facts = NUMBER.target.public | {"deviation": [1.0]} if NUMBER.target else {}
    made = head(0, ("size",), run=NUMBER.digest)
    return replace(made, target=json.dumps(facts if target is None else target))


def test_a_model_of_another_target_is_refused_whatever_differs() -> None:
    target = NUMBER.target
    assert target is not None
    good = of_number()
    assert of_target(good, target) is good
    facts = json.loads(good.target)
    for key in target.public:
        for changed in (facts | {key: "other"}, {k: v for k, v in facts.items() if k != key}):
            with pytest.raises(SurrogateError, match="a model of another target"):
                of_target(of_number(changed), target)
    # How it was learned says nothing of what it answers.
    for key in ("sets", "code", "moments", "head", "steps", "names"):
        of_target(of_number(facts | {key: "anything"}), target)
    with pytest.raises(SurrogateError, match="a model of another target"):
        of_target(replace(good, target=""), target)
    for model, own in (
        (good, None),
        (Quadratic(good.header, torch.zeros(1, 3), torch.ones(1, 3), torch.zeros(1)), target),
    ):
        with pytest.raises(SurrogateError, match="answers no target of this run"):
            of_target(model, own)


@pytest.mark.parametrize("there", ["all", "no values", "no records"])
def test_a_model_of_numbers_is_measured_on_records_with_values(there: str) -> None:
    payload = pack_classifier(of_number())
    asked = job(NUMBER, [(0, True)] * (0 if there == "no records" else 6), payload, 1)
    x = asked.found.test.features
    values = None if there == "no values" else torch.linspace(-2, 2, len(x))[:, None].double()
    found = replace(asked.found, test=replace(asked.found.test, values=values))
    result = received_target_model(replace(asked, found=found), None)  # type: ignore[arg-type]
    if there != "all":
        assert result == {"correct": 0, "tested": 0}
        return
    own = received_classifier(payload, "")
    assert isinstance(own, Head)
    assert values is not None
    sums = measured(own.target, ("size",), own.scores(x), values)
    assert result == {"correct": 0, "tested": 6, METRIC_VALUES: packed(sums)}
