"""Coded sums that no records can have are rejected, whatever a hostile site claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fedsurrogate as fs
from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.targets.target import CODE, PRODUCTS, RECORDS, SQUARES, SUMS, TOTALS
from fedsurrogate.common.wire.model_proto import pack_parameters, unpack_parameters
from fedsurrogate.strategies import stored_strategy
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.targets.strategy import learn_from_sum

Tensors = dict[str, torch.Tensor]
Lie = Callable[[Tensors], Tensors]
PRIVATE: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5}
KINDS: dict[str, dict[str, Any]] = {
    "number": {"target": "number", "target_range": (-4, 4)},
    "labels": {"target": "labels", "label_columns": "edema,nodule"},
    "time": {"target": "time", "horizon": 3.0, "bins": 1},
}


def honest(kind: str, size: int = 200, **more: Any) -> fs.Surrogate:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(size, 3)) + 2
    y = {
        "number": x[:, 0],
        "labels": (x[:, :2] > 2).astype(float),
        "time": np.stack([draw.exponential(2, size), draw.integers(0, 2, size)], 1),
    }[kind]
    return fs.fit(x, y, site="north", **KINDS[kind], **more)


def lied(sent: fs.Surrogate, lie: Lie) -> bytes:
    message = unpack_parameters(sent.payload)
    return pack_parameters(replace(message, tensors=lie(dict(message.tensors))))


def times(name: str, factor: float) -> Lie:
    return lambda tensors: tensors | {name: tensors[name] * factor}


def set_to(name: str, value: float) -> Lie:
    return lambda tensors: tensors | {name: torch.full_like(tensors[name], value)}


EXACT: dict[str, tuple[str, Lie]] = {
    "sums beyond the second moment": ("number", times(SUMS, 100.0)),
    "a code beyond its records": ("number", set_to(CODE, 300.0)),
    "a negative second moment": ("number", times(SQUARES, -1.0)),
    "negative products": ("number", times(PRODUCTS, -1.0)),
    "squares of numbers beyond their records": ("number", set_to(PRODUCTS, 300.0)),
    "no records": ("number", set_to(RECORDS, 0.0)),
    "a label of fewer records than none": ("labels", times(CODE, -1.0)),
    "a label of more records than there are": ("labels", times(CODE, 3.0)),
    "features of a label that are too long": ("labels", times(SUMS, 100.0)),
    "a cell of fewer records than none": ("time", times(CODE, -1.0)),
    "features that are not finite": ("time", set_to(TOTALS, float("inf"))),
}
NOISY: dict[str, tuple[str, Lie]] = {
    "sums beyond the records": ("number", times(SUMS, 1000.0)),
    "totals beyond the records": ("number", set_to(TOTALS, 1e4)),
    "a code beyond its records": ("number", set_to(CODE, 5000.0)),
    "products beyond the records": ("number", set_to(PRODUCTS, 5000.0)),
    "second moments beyond the records": ("number", times(SQUARES, 1000.0)),
    "far fewer records than none": ("number", set_to(RECORDS, -5000.0)),
    "a label of far fewer records than none": ("labels", set_to(CODE, -5000.0)),
    "a negative second moment": ("labels", times(SQUARES, -100.0)),
    "a cell whose features are too long": ("time", set_to(SUMS, 5000.0)),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact_sums_that_no_records_have_are_rejected(name: str) -> None:
    kind, lie = EXACT[name]
    sent = honest(kind)
    strategy = stored_strategy(sent.config)(sent.config)
    assert strategy.unpack(sent.payload).header.site == "north"
    with pytest.raises(SurrogateError):
        strategy.unpack(lied(sent, lie))


@pytest.mark.parametrize("name", NOISY)
def test_noisy_sums_that_no_records_have_are_rejected(name: str) -> None:
    kind, lie = NOISY[name]
    sent = honest(kind, **PRIVATE)
    strategy = stored_strategy(sent.config)(sent.config)
    assert strategy.unpack(sent.payload).header.site == "north"
    with pytest.raises(SurrogateError):
        strategy.unpack(lied(sent, lie))


@pytest.mark.parametrize("name", NOISY)
def test_a_secure_sum_that_no_records_have_ends_the_run(name: str) -> None:
    kind, lie = NOISY[name]
    sent = honest(kind, **PRIVATE)
    message = unpack_parameters(lied(sent, lie))
    claim = sent.config.mechanism
    assert isinstance(claim, Mechanism)
    tensors = {name: tensor.double() for name, tensor in message.tensors.items()}
    sigmas = {name: sigma for name, (sigma, _) in claim.noise.items()}
    with pytest.raises(RunError, match="false numbers"):
        learn_from_sum(Total(message.header, tensors, sigmas, claim), sent.config)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_honest_noise_passes_also_for_few_records(kind: str, seed: int) -> None:
    sent = honest(kind, size=2, **PRIVATE | {"epsilon": 0.5})
    assert stored_strategy(sent.config)(sent.config).unpack(sent.payload).claim is not None
    assert seed >= 0


def test_sums_of_other_rows_are_rejected() -> None:
    sent = honest("labels")
    strategy = stored_strategy(sent.config)(sent.config)
    message = unpack_parameters(sent.payload)
    header = replace(message.header, classes=message.header.classes[::-1])
    with pytest.raises(SurrogateError, match="another order"):
        strategy.unpack(pack_parameters(replace(message, header=header)))
