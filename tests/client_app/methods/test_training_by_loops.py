"""Training at a site, and what it makes of its own records for itself, against plain loops."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedsurrogate.client_app.methods.fedavg.update import (
    _share,
    nearest_records,
    own_head,
)
from fedsurrogate.client_app.methods.local_training import (
    Variant,
    class_losses,
    mean_square,
    network,
    step_length,
    train,
)
from fedsurrogate.common.models.networks import linear
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.run import parse_run

FEATURES, CLASSES = 3, 3


def records(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    return torch.randn(count, FEATURES, generator=generator) + labels[:, None], labels


def start_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: torch.randn(parameter.shape, generator=generator)
        for name, parameter in linear(FEATURES, CLASSES).named_parameters()
    }


def batches_of(count: int, how: dict[str, Any], seed: int) -> list[list[int]]:
    """The rows of each step."""
    order, found = torch.Generator().manual_seed(seed), []
    for _ in range(how["epochs"] if count else 0):
        rows = torch.randperm(count, generator=order).tolist()
        found += [rows[at : at + how["batch"]] for at in range(0, count, how["batch"])]
    return found[:1] if how["single"] else found


def slopes_of(now: dict[str, Any], x: Tensor, y: Tensor) -> dict[str, Any]:
    """The mean gradient of the cross-entropy of a linear model, record by record."""
    slopes = {name: np.zeros_like(each) for name, each in now.items()}
    for own, label in zip(x.double().numpy(), y.tolist(), strict=True):
        logits = now["weight"] @ own + now["bias"]
        chances = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        chances[label] -= 1
        slopes["weight"] += np.outer(chances, own) / len(x)
        slopes["bias"] += chances / len(x)
    return slopes


HOW = {
    "epochs": st.integers(1, 3),
    "batch": st.sampled_from([1, 4, 50]),
    "momentum": st.sampled_from([0.0, 0.9]),
    "mu": st.sampled_from([0.0, 0.7]),
    "corrected": st.booleans(),
    "single": st.booleans(),
}


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(0, 9),
    how=st.fixed_dictionaries(HOW),
    faster=st.sampled_from([{}, {"weight": 3.0}, {"bias": 0.5}]),
    frozen=st.sampled_from([(), ("bias",)]),
    seed=st.integers(0, 99),
)
def test_training_is_sgd_with_each_term_where_it_belongs(
    count: int, how: dict[str, Any], faster: dict[str, float], frozen: tuple[str, ...], seed: int
) -> None:
    """In double precision, step by step, with the gradient of a linear model written out."""
    x, y = records(count, seed)
    start, rate = start_of(seed), 0.1
    correction = {name: 0.3 * tensor for name, tensor in start_of(seed + 7).items()}
    module = network("linear", FEATURES, CLASSES, start)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    chosen: Any = SimpleNamespace(
        local_epochs=how["epochs"], batch_size=how["batch"], momentum=how["momentum"], augment=""
    )
    terms = correction if how["corrected"] else None
    variant = Variant(how["mu"], terms, how["single"], class_losses, faster)
    steps = train(module, x, y, chosen, rate, torch.Generator().manual_seed(seed), variant)
    now = {name: tensor.double().numpy() for name, tensor in start.items()}
    first = {name: each.copy() for name, each in now.items()}
    speed = {name: np.zeros_like(each) for name, each in now.items()}
    wanted = batches_of(count, how, seed)
    for rows in wanted:
        for name, slope in slopes_of(now, x[rows], y[rows]).items():
            if name in frozen:
                continue
            own = slope + how["mu"] * (now[name] - first[name])
            if how["corrected"]:
                own = own + correction[name].double().numpy()
            speed[name] = how["momentum"] * speed[name] + own
            now[name] = now[name] - rate * faster.get(name, 1.0) * speed[name]
    assert steps == len(wanted)
    for name, parameter in module.named_parameters():
        assert parameter.detach().double().numpy() == pytest.approx(now[name], abs=1e-4)
    for name, tensor in start_of(seed).items():
        assert torch.equal(tensor, start[name]), "what was received stays as it is"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(0, 99), st.sampled_from([0.0, 0.5]))
def test_a_linear_model_steps_by_the_scale_of_its_curvature(
    count: int, seed: int, given_rate: float
) -> None:
    x, _ = records(count, seed)
    square = sum(float(row @ row) for row in x) / count
    assert mean_square(x) == pytest.approx(square, rel=1e-5)
    assert mean_square(torch.zeros(2, 3)) == 1e-12
    flat: dict[str, Any] = {"method": "fedavg"}
    flat |= {"fedavg.learning-rate": given_rate} if given_rate else {}
    chosen = parse_run(flat).settings.fedavg
    plain = chosen.rate(private=False, linear=2.0)
    assert step_length("linear", chosen, x, 2.0) == pytest.approx(plain / square, rel=1e-5)
    assert step_length("mlp", chosen, x, 2.0) == plain


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 16), st.integers(1, 4), st.integers(0, 99))
def test_the_ten_nearest_records_vote_by_their_distance(count: int, asked: int, seed: int) -> None:
    """Of directions: of a record's length nothing is left."""
    x, y = records(count, seed)
    queries, _ = records(asked, seed + 1)
    found = nearest_records(x, y, CLASSES)(queries)

    def unit(row: Tensor) -> np.ndarray:
        own = row.double().numpy()
        return np.asarray(own / max(np.linalg.norm(own), 1e-12))

    table = np.array([[np.linalg.norm(unit(q) - unit(row)) for row in x] for q in queries])
    kept = [sorted(range(count), key=lambda k, r=row: r[k])[:10] for row in table]
    usual = float(np.mean([row[k] for row, own in zip(table, kept, strict=True) for k in own]))
    for row, own, votes in zip(table, kept, found.tolist(), strict=True):
        weights = [math.exp(-row[k] / max(usual, 1e-9)) for k in own]
        wanted = [0.0] * CLASSES
        for k, weight in zip(own, weights, strict=True):
            wanted[int(y[k])] += weight / sum(weights)
        assert votes == pytest.approx(wanted, abs=1e-3)
    assert torch.allclose(nearest_records(5 * x, y, CLASSES)(queries), found, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(0, 999))
def test_the_share_of_the_own_part_is_the_most_accurate_and_then_the_likeliest(
    count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    own, federated = torch.randn(2, count, CLASSES, generator=generator).mul(2).softmax(2)
    labels = torch.randint(0, CLASSES, (count,), generator=generator)
    scores = {}
    for tenth in range(11):
        share = tenth / 10
        mixed = share * own.double() + (1 - share) * federated.double()
        right = float((mixed.argmax(1) == labels).double().mean())
        likely = float(mixed[range(count), labels].clamp_min(1e-6).log().mean())
        scores[tenth] = right + 1e-3 * math.tanh(likely)
    found = _share(own, federated, labels)
    best = max(scores.values())
    assert round(10 * found) / 10 == pytest.approx(found, abs=1e-6)
    assert scores[round(10 * found)] == pytest.approx(best, abs=1e-6)


def test_an_own_head_is_the_one_that_is_trained_on_the_records() -> None:
    x, y = records(30, 0)
    chosen = parse_run({"head.epochs": 2}).settings.head
    weight, bias = train_on_features(x, y, CLASSES, chosen, 5)
    found = own_head(x, y, CLASSES, chosen, 5)(x[:4])
    assert torch.allclose(found, nn.functional.softmax(x[:4] @ weight.T + bias, dim=1))
