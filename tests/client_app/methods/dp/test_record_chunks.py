"""A record's result in a batch is bit-identical to its result alone."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp import record_chunks
from fedsurrogate.client_app.methods.dp.record_chunks import (
    TOGETHER,
    Way,
    per_record,
    way_of,
)
from fedsurrogate.client_app.methods.fedpft import private_surrogate


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("into", "out"), [(10, 3), (3, 10), (16, 32), (1, 1), (74, 2)])
@pytest.mark.parametrize("way", [Way(5, wide=True), Way(5, alone=True)])
def test_a_layer_in_another_way_and_its_gradients_are_those_of_the_layer(
    bias: bool, into: int, out: int, way: Way
) -> None:
    layer, found = nn.Linear(into, out, bias=bias).double(), []
    values = torch.randn(5, into, dtype=torch.float64, requires_grad=True)
    for each in (Way(5), way):
        with each.open():
            made = layer(values)
        assert made.shape == (5, out)
        found.append(
            [made, *torch.autograd.grad(made.square().sum(), [values, *layer.parameters()])]
        )
    for plain, widened in zip(*found, strict=True):
        torch.testing.assert_close(plain, widened)


@pytest.mark.parametrize("classes", [2, 3, 5, 10])
@pytest.mark.parametrize("dimension", [3, 10, 64])
def test_narrow_models_take_many_records_at_a_time(classes: int, dimension: int) -> None:
    model = nn.Sequential(nn.Linear(dimension + classes, 10), nn.ReLU(), nn.Linear(10, classes))
    parameters = list(model.parameters())

    def inputs_gradient(values: Tensor) -> list[Tensor]:
        values = values.clone().requires_grad_()
        (found,) = torch.autograd.grad(model(values).square().sum(), [values])
        return [found]

    values = torch.randn(150, dimension + classes) * 1e3
    if platform.machine() in ("x86_64", "AMD64"):
        assert way_of(inputs_gradient, [values], model, parameters).rows == TOGETHER
    (together,) = (
        torch.cat(parts)
        for parts in zip(*per_record(inputs_gradient, [values], model, parameters), strict=True)
    )
    order = torch.randperm(150)
    moved = torch.cat(
        [part for (part,) in per_record(inputs_gradient, [values[order]], model, parameters)]
    )
    assert torch.equal(together[order], moved)
    alone = torch.cat(
        [part for (part,) in per_record(inputs_gradient, [values[[7]]], model, parameters)]
    )
    assert torch.equal(alone[0], together[7])


def test_records_go_one_at_a_time_where_nothing_else_helps() -> None:
    def by_place(values: Tensor) -> list[Tensor]:
        return [values + torch.arange(len(values))[:, None]]

    assert way_of(by_place, [torch.zeros(3, 4)], "by place", []).rows == 1
    found = torch.cat(
        [part for (part,) in per_record(by_place, [torch.zeros(3, 4)], "by place", [])]
    )
    assert torch.equal(found, torch.zeros(3, 4))


@pytest.mark.parametrize("variance", [1.0, 1e-6, 1e-8])
@pytest.mark.parametrize(("d", "k"), [(65, 5), (121, 10), (225, 10)])
def test_shares_of_components_depend_on_no_other_record(
    monkeypatch: pytest.MonkeyPatch, d: int, k: int, variance: float
) -> None:
    monkeypatch.setattr(record_chunks, "_known", {})
    generator, shares = torch.Generator().manual_seed(3), list[list[Tensor]]()
    features = torch.nn.functional.normalize(
        torch.randn(200, d, generator=generator, dtype=torch.float64)
    )
    means = torch.randn(1, k, d, generator=generator, dtype=torch.float64) * variance**0.5

    def watched(*arguments: object) -> Iterator[list[Tensor]]:
        for found in per_record(*arguments):  # type: ignore[arg-type]
            shares[-1].append(found[0])
            yield found

    monkeypatch.setattr(private_surrogate, "per_record", watched)
    for some in (features, features[1:]):
        shares.append([])
        data = private_surrogate.Clipped(
            some, torch.zeros(len(some), dtype=torch.int64), torch.ones(len(some)).double(), 0.0
        )
        private_surrogate._expected(
            data, means, torch.ones(1, k).double(), torch.tensor([variance]).double()
        )
    with_it, without = (torch.cat(parts) for parts in shares)
    assert torch.equal(with_it[1:], without)


@pytest.mark.parametrize("way", [Way(5, wide=True), Way(5, alone=True)])
@pytest.mark.parametrize("shape", [(5, 3), (4, 5, 3), (3,)])
def test_a_layer_in_another_way_takes_arguments_by_name_and_any_shape(
    way: Way, shape: tuple[int, ...]
) -> None:
    values, weight = torch.randn(shape), torch.randn(2, 3)
    with way.open():
        found = nn.functional.linear(input=values, weight=weight)
    torch.testing.assert_close(found, values @ weight.T)


def test_products_of_their_own_spare_records_from_going_one_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device, such as a GPU, on which the last digits of a product depend on the place of a row,
    however wide it is.
    """
    layer, calls = nn.Linear(24, 8), []

    def products(values: Tensor) -> list[Tensor]:
        calls.append(len(values))
        made = layer(values)
        if not isinstance(way, record_chunks.LinearAlone):
            made = made * (1 + 1e-6 * torch.arange(len(values)))[:, None]
        return [made]

    way: object = None
    opened = Way.open

    def watched(self: Way) -> object:
        nonlocal way
        way = opened(self)
        return way

    monkeypatch.setattr(Way, "open", watched)
    values = torch.randn(3 * TOGETHER, 24)
    found = way_of(products, [values], "places matter", list(layer.parameters()))
    assert found == Way(TOGETHER, alone=True)
    calls.clear()
    parts = per_record(products, [values], "places matter", list(layer.parameters()))
    (together,) = (torch.cat(each) for each in zip(*parts, strict=True))
    assert calls == 3 * [TOGETHER]
    torch.testing.assert_close(together, layer(values))
