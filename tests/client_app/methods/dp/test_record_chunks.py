"""A record's result in a batch is bit-identical to its result alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import (
    WideLinear,
    _lengths,
    norms_of,
    per_record,
    way_of,
)
from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("into", "out"), [(10, 3), (3, 10), (16, 32), (1, 1), (74, 2)])
def test_a_widened_layer_and_its_gradients_are_those_of_the_layer(
    bias: bool, into: int, out: int
) -> None:
    layer, found = nn.Linear(into, out, bias=bias).double(), []
    values = torch.randn(5, into, dtype=torch.float64, requires_grad=True)
    for wide in (False, True):
        if wide:
            with WideLinear():
                made = layer(values)
        else:
            made = layer(values)
        assert made.shape == (5, out)
        found.append(
            [made, *torch.autograd.grad(made.square().sum(), [values, *layer.parameters()])]
        )
    for plain, widened in zip(*found, strict=True):
        torch.testing.assert_close(plain, widened)


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
    monkeypatch.setattr(record_gradients, "_known", {})
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


def test_a_widened_layer_takes_arguments_by_name() -> None:
    values, weight = torch.randn(5, 3), torch.randn(2, 3)
    with WideLinear():
        found = nn.functional.linear(input=values, weight=weight)
    torch.testing.assert_close(found, values @ weight.T)


class Norms(TorchDispatchMode):
    """Writes down the widths of rows whose norms are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket is torch.ops.aten.linalg_vector_norm and list(args[2]) == [1]:
            self.widths.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("width", [1, 10, 16, 1290, 5000])
def test_a_gpu_gets_only_rows_that_begin_at_even_addresses(width: int) -> None:
    """On an H100, norms of rows of 1,290 numbers depended on the place of the row, and those of
    1,296 did not: without this, records went through DP-CVAE's networks one at a time.
    """
    rows = torch.randn(64, width)
    for norms in (_lengths, lambda rows: norms_of([rows])):
        with Norms() as there:
            norms(rows.to("meta"))
        assert there.widths
        assert all(each % record_gradients.WIDTH == 0 for each in there.widths)
        with Norms() as here:
            torch.testing.assert_close(norms(rows), rows.double().norm(dim=1))
        assert set(here.widths) == {width}, "a processor keeps its bits"
    torch.testing.assert_close(
        nn.functional.pad(rows, (0, -width % 16)).double().norm(dim=1), rows.double().norm(dim=1)
    )
