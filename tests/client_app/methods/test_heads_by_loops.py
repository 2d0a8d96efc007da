"""Heads that a site trains by itself, and what it sends of them, against plain loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures, load_site
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods import local_training as distillation
from fedsurrogate.client_app.methods.evaluation import _of_all, compare
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.methods.local_training import distil, local_head, own_head
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters

NAMES, D = ("a", "b", "c"), 4
QUICK = {"head.epochs": 1, "head.min-steps": 12}


def run(method: str, **more: Any) -> Run:
    return parse_run({"method": method} | QUICK | more)


def records(labels: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.tensor(labels, dtype=torch.int64)
    x = torch.randn(len(y), D, generator=torch.Generator().manual_seed(seed))
    return x + 2 * torch.eye(3, D)[y], y


def job(config: Run, labels: list[int], least: int = 1, seed: int = 0, **more: Any) -> Job:
    x, y = records(labels, seed)
    part = LabelledFeatures(x, y)
    site = SiteFeatures(part, part, NAMES, "print", 0.0, simulated=False)
    node = NodeConfig(site="north", state_dir="nowhere")
    return Job(config, node, "north", site, SiteLimits(smallest_class=least), **more)


SETS = st.lists(st.integers(0, 2), min_size=3, max_size=24)


@settings(max_examples=10, deadline=None)
@given(labels=SETS, seed=st.integers(0, 9))
def test_a_head_is_of_the_classes_with_enough_records(labels: list[int], seed: int) -> None:
    config = run("ensemble", seed=seed)
    kept = [label for label in range(3) if labels.count(label) >= 3]
    asked = job(config, labels, 3)
    if not kept:
        return
    sent = unpack_parameters(own_head(asked).payload)
    x, _ = records(labels)
    rows = [row for row, label in enumerate(labels) if label in kept]
    y = torch.tensor([kept.index(labels[row]) for row in rows])
    weight, bias = train_on_features(x[rows], y, len(kept), config.settings.head, seed)
    assert sent.header.classes == tuple(NAMES[label] for label in kept)
    assert (sent.records, sent.round) == (len(rows), 1)
    wanted = {"weight": weight, "bias": bias}
    assert sent.tensors.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(sent.tensors[name], tensor, rtol=2e-3, atol=2e-3)


def test_a_head_without_a_federation_is_of_all_classes_of_the_site() -> None:
    config = run("local", seed=4)
    labels = [0, 0, 1, 2, 2, 2, 0]
    found = local_head(job(config, labels))
    weight, bias = train_on_features(*records(labels), 3, config.settings.head, 4)
    assert torch.equal(found.weight, weight)
    assert torch.equal(found.bias, bias)
    assert found.header.classes == NAMES


# Distillation along a chain.


def teacher(config: Run, labels: list[int], **change: Any) -> bytes:
    fields = {"run": config.digest, "fingerprint": "print", "classes": NAMES} | change
    header = Header("kd", fields["run"], "south", fields["fingerprint"], fields["classes"])
    draw = torch.Generator().manual_seed(3)
    count = len(header.classes)
    tensors = {"weight": torch.randn(count, D, generator=draw), "bias": torch.randn(count, generator=draw)}  # fmt: skip
    return pack_parameters(Parameters(header, 1, tensors, len(labels)))


@settings(max_examples=40)
@given(
    temperature=st.floats(0.5, 9),
    count=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_the_loss_is_hinton_and_colleagues(temperature: float, count: int, seed: int) -> None:
    """Half the cross-entropy and half T^2 KL(teacher || own) at temperature T."""
    draw = np.random.default_rng(seed)
    own, taught = draw.normal(size=(2, count, 3)) * 2
    labels = draw.integers(0, 3, count)

    def chances(logits: Any, heat: float) -> Any:
        odds = np.exp(logits / heat)
        return odds / odds.sum()

    total = 0.0
    for logits, lesson, label in zip(own, taught, labels, strict=True):
        p, q = chances(lesson, temperature), chances(logits, temperature)
        total -= np.log(chances(logits, 1.0)[label]) / count / 2
        total += temperature**2 * float((p * np.log(p / q)).sum()) / count / 2
    wanted = torch.from_numpy(np.concatenate([labels[:, None], taught], 1))
    found = distillation._loss(temperature)(torch.from_numpy(own), wanted)
    assert float(found) == pytest.approx(total, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("first", [True, False])
def test_the_first_site_learns_from_its_labels_and_the_others_from_the_received_head_too(
    monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    config, labels = (
        run("kd", seed=6, **{"baseline.temperature": 2.5}),
        [0, 1, 2, 1, 0, 2],
    )
    seen: list[Any] = []

    def trained(*given: Any) -> Any:
        seen.append(given)
        return train_on_features(*given)

    monkeypatch.setattr(distillation, "train_on_features", trained)
    payload = None if first else teacher(config, labels)
    made, head = distil(job(config, labels, payload=payload, info={"classes": json.dumps(NAMES)}))
    ((x, wanted, count, of_head, seed, *loss),) = seen
    own, y = records(labels)
    assert torch.equal(x, own)
    assert (count, of_head, seed) == (3, config.settings.head, 6)
    if first:
        assert loss == [cross_entropy]
        assert torch.equal(wanted, y)
    else:
        tensors = unpack_parameters(payload or b"").tensors
        logits = own @ tensors["weight"].T + tensors["bias"]
        torch.testing.assert_close(wanted, torch.cat([y[:, None].float(), logits], 1))
        some = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
        expected = distillation._loss(2.5)(some, wanted)
        assert float(loss[0](some, wanted)) == float(expected)
    sent = unpack_parameters(made.payload)
    assert (sent.records, sent.round, sent.header.classes) == (6, 1, NAMES)
    torch.testing.assert_close(sent.tensors["weight"], head.weight, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(sent.tensors["bias"], head.bias, rtol=2e-3, atol=2e-3)
    assert head.header == sent.header


@pytest.mark.parametrize(
    "change",
    [
        {"run": "other"},
        {"fingerprint": "other"},
        {"classes": ("a", "c", "b")},
        {"classes": ("a", "b")},
    ],
)
def test_a_teacher_of_something_else_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    config, labels = run("kd"), [0, 1, 2]
    info = {"classes": json.dumps(NAMES)}
    distil(job(config, labels, payload=teacher(config, labels), info=info))
    with pytest.raises(
        SurrogateError, match="another run, of other classes, or for another backbone"
    ):
        distil(job(config, labels, payload=teacher(config, labels, **change), info=info))
    for tensors in (
        {"weight": torch.zeros(3, D + 1)},
        {"bias": torch.zeros(2)},
        {"more": torch.zeros(1)},
    ):
        sent = unpack_parameters(teacher(config, labels))
        odd = pack_parameters(replace(sent, tensors=sent.tensors | tensors))
        with pytest.raises(SurrogateError):
            distil(job(config, labels, payload=odd, info=info))
    with pytest.raises(SurrogateError, match="without the classes"):
        distil(job(config, labels, payload=teacher(config, labels)))


SITES = 3
SETTINGS: dict[str, Any] = {
    "backbone": "pixels", "data": "digits", "head.min-steps": 20, "head.epochs": 1,
    "test-fraction": 0.5, "partition": "dirichlet", "alpha": 0.3,
}  # fmt: skip


def run_baselines(**more: Any) -> Run:
    return parse_run(SETTINGS | more)


def node(folder: Path, site: int = 0) -> NodeConfig:
    return NodeConfig(partition_id=site, num_partitions=SITES, cache_dir=str(folder))


def test_baselines_are_those_of_the_sites_own_records(tmp_path: Path) -> None:
    """For a model that does not know all classes: records of the others are wrong for all."""
    config, known = run_baselines(compare=True), 7
    names = tuple(map(str, range(known)))[::-1]
    own = [load_site(config, node(tmp_path, site), 512.0) for site in range(SITES)]
    every = [label for each in own for label in each.test.labels.tolist()]
    test = torch.cat([each.test.features for each in own]).float()
    truth = [own[0].classes[label] for label in every]

    def accuracy(scores: torch.Tensor) -> float:
        decided = [names[index] for index in scores.argmax(1).tolist()]
        return float(accuracy_score(truth, decided))

    parts = []
    for each in own:
        labels = torch.tensor(
            [names.index(each.classes[k]) if each.classes[k] in names else -1
             for k in each.train.labels.tolist()]
        )  # fmt: skip
        parts.append((each.train.features[labels >= 0], labels[labels >= 0]))
    heads = [
        train_on_features(x, y, known, config.settings.head, config.settings.seed) for x, y in parts
    ]
    means = [torch.stack(each).mean(0) for each in zip(*heads, strict=True)]
    header = Header("fedpft", "r", "coordinator", "f", names)
    model = Head(header, *heads[0])
    found: Any = compare(model, config, node(tmp_path), baselines=True)
    assert found["accuracy.model"] == pytest.approx(accuracy(test @ heads[0][0].T + heads[0][1]))
    largest = max(truth.count(name) for name in names) / len(truth)
    assert found["accuracy.majority"] == pytest.approx(largest)
    assert found["accuracy.average"] == pytest.approx(accuracy(test @ means[0].T + means[1]))
    chances = torch.stack([(test @ w.T + b).softmax(1) for w, b in heads]).mean(0)
    assert found["accuracy.ensemble"] == pytest.approx(accuracy(chances))
    # One head on all records.
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    weight, bias = train_on_features(x, y, known, config.settings.head, config.settings.seed)
    assert found["accuracy.centralized"] == pytest.approx(accuracy(test @ weight.T + bias))
    assert found["accuracy.centralized"] >= found["accuracy.average"]
    numbers = sum(tensor.numel() for head in heads for tensor in head)
    assert found["bytes.ensemble"] == found["bytes.average"] == 2 * numbers
    assert found["bytes.centralized"] == 2 * sum(x.numel() for x, _ in parts)
    shown = torch.tensor([found["points.x"], found["points.y"]])
    assert shown.shape[1] == sum(name in names for name in truth) == len(found["points.label"])
    plane = model.plane()
    assert plane is not None
    places = (test @ plane)[[name in names for name in truth]]
    assert torch.allclose(shown.sort(1).values, places.T.sort(1).values, atol=1e-3)
    assert set(compare(model, config, node(tmp_path), baselines=False)) == {"accuracy.model"}
    alone = compare(model, run_baselines(), node(tmp_path), baselines=True)
    assert not any(key.startswith("bytes") for key in alone)
    assert alone["accuracy.majority"] == found["accuracy.majority"]


@given(st.lists(st.none() | st.lists(st.sampled_from("ab"), max_size=4), max_size=4))
def test_patients_of_two_data_sets_are_two(sets: list[list[str] | None]) -> None:
    """So that an interval takes no two people for one; without IDs somewhere there are none."""
    found = _of_all([None if names is None else tuple(names) for names in sets])
    if None in sets:
        assert found is None
        return
    whole = [(at, name) for at, names in enumerate(sets) for name in names or ()]
    assert found is not None
    assert [found.index(each) for each in found] == [whole.index(each) for each in whole]
