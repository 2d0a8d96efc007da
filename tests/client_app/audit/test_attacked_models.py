"""Attacks on a model by loss and by gradient: models that remember, models that never saw, and the shared
models of runs in rounds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fedsurrogate.client_app.audit.membership import attack_model, model_scores
from fedsurrogate.common.models.classifiers import Classifier, Ensemble, Head, Network
from fedsurrogate.common.models.networks import build, fresh, parameters_of, split_input
from fedsurrogate.common.settings import Model
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from tests.client_app.model_use.hospitals import site

CLASSES, D = ("a", "b", "c"), 64
HEADER = Header("fedavg", "", "", "", CLASSES)
LOSS, NORM = "loss (black box)", "norm of the gradient (white box)"
Records = tuple[Tensor, Tensor]


def records(seed: int, count: int = 100, d: int = D) -> Records:
    """Noise, with labels that nothing but memory can tell."""
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(count, d, generator=drawn), torch.randint(3, (count,), generator=drawn)


def network(kind: Model, learned: Records, steps: int) -> Network:
    """A network after so many steps of full descent on records."""
    features, labels = learned
    module = fresh(kind, features.shape[1], len(CLASSES), 64, seed=0)
    optimiser = torch.optim.Adam(module.parameters(), lr=0.01)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(module(features), labels).backward()
        optimiser.step()
    return Network(HEADER, kind, features.shape[1], parameters_of(module))


def head(weight: Tensor, clip: float | None = 0.0) -> Head:
    return Head(HEADER, weight, torch.zeros(len(CLASSES)), clip)


@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_a_network_that_remembers_is_found_and_one_that_never_saw_is_not(kind: Model) -> None:
    mine, others, third = records(1), records(2), records(3)
    for learned, known in ((mine, True), (third, False)):
        found = attack_model(network(kind, learned, 150), mine, others)
        assert found.keys() == {LOSS, NORM}
        for each in found.values():
            assert each.low <= each.auc <= each.high
            assert each.auc > 0.98 if known else each.low < 0.5 < each.high


def test_a_head_of_other_labels_than_the_true_ones_is_found_below_a_guess() -> None:
    """Which way the scores point: a model that is wrong on the records has large losses there."""
    (x, y), others = records(1), records(2)
    shown = torch.nn.functional.normalize(x)
    weight = torch.linalg.pinv(shown) @ torch.nn.functional.one_hot(y, 3).float() * 10
    assert attack_model(head(weight.T), (x, y), others)[LOSS].auc > 0.8
    assert attack_model(head(-weight.T), (x, y), others)[LOSS].high < 0.5
    nothing = attack_model(head(torch.zeros(3, D)), (x, y), others)
    assert nothing[LOSS].auc == 0.5
    assert nothing[NORM].low < 0.5 < nothing[NORM].high


def by_autograd(model: Classifier, features: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The same scores, record by record."""
    found: dict[str, list[float]] = {LOSS: [], NORM: []}
    for x, y in zip(features, labels, strict=True):
        if isinstance(model, Head):
            at = {"weight": model.weight.double(), "bias": model.bias.double()}
            body: Any = torch.nn.Linear(D, len(CLASSES)).double()
            value = model.prepare(x[None]).double()
        else:
            assert isinstance(model, Network)
            at = {name: each.double() for name, each in model.tensors.items()}
            module = build(model.kind, model.inputs, len(CLASSES), model.tensors)
            body, value = split_input(module.double(), x[None].double())
        at = {name: each.detach().requires_grad_() for name, each in at.items()}
        loss = torch.nn.functional.cross_entropy(functional_call(body, at, (value,)), y[None])
        slopes = torch.autograd.grad(loss, list(at.values()))
        found[LOSS].append(-float(loss.detach()))
        found[NORM].append(-float(sum(each.square().sum() for each in slopes) ** 0.5))
    return found


@pytest.mark.parametrize("kind", ["head", "mlp", "convnet"])
@pytest.mark.parametrize("count", [1, 7, 251])
def test_scores_are_those_of_each_record_alone(kind: str, count: int) -> None:
    features, labels = records(count, count)
    drawn = torch.randn(3, D, generator=torch.Generator().manual_seed(count))
    model: Classifier = head(3 * drawn, clip=1.5)
    if kind == "mlp":
        model = network("mlp", (features, labels), 2)
    elif kind == "convnet":
        model = network("convnet", (features, labels), 2)
    found, expected = model_scores(model, features, labels), by_autograd(model, features, labels)
    for name, each in expected.items():
        assert found[name].tolist() == pytest.approx(each, rel=1e-4, abs=1e-6), name


def test_other_models_are_attacked_by_loss_alone() -> None:
    features, labels = records(1)
    both = Ensemble((head(torch.zeros(3, D)), head(torch.ones(3, D))))
    assert model_scores(both, features, labels).keys() == {LOSS}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedlap"])
def test_a_site_attacks_the_shared_model_of_a_run_in_rounds(tmp_path: Path, method: str) -> None:
    settings: dict[str, Any] = {"method": method, f"{method}.model": "mlp", f"{method}.rounds": 1}
    settings |= {"output-dir": str(tmp_path / "runs"), "device": "cpu"}
    run = simulate_here(2, settings, lambda event: None, report=False)
    done = site("evaluate", run, "--out", tmp_path / "e", "--attack")
    assert done.code == 0, done.stderr
    assert f"attack by {NORM}: AUC 0." in done.stdout
    found = json.loads((tmp_path / "e" / "evaluation.json").read_text())["membership"]
    assert found.keys() == {LOSS, NORM}
    assert f"attack by {NORM}" in (tmp_path / "e" / "evaluation.html").read_text()
    done = site("evaluate", run, "--out", tmp_path / "plain")
    assert "membership" not in json.loads((tmp_path / "plain" / "evaluation.json").read_text())
