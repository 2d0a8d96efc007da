"""A record's result in a batch is bit-identical to its result alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedsurrogate.client_app.methods.dp import record_gradients
from fedsurrogate.client_app.methods.dp.record_gradients import (
    BLOCK,
    WideLinear,
    _lengths,
    norms_of,
    per_record,
    way_of,
)
from fedsurrogate.client_app.methods.fedpft import surrogate as private_surrogate
from fedsurrogate.client_app.methods.job import Clipped


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
        labels = torch.zeros(len(some), dtype=torch.int64)
        data = Clipped(some, labels, torch.ones(len(some)).double())
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
            torch.testing.assert_close(norms(rows), rows.double().norm(dim=1), rtol=1e-5, atol=0)
        assert width > BLOCK or set(here.widths) == {width}, "a processor keeps its bits"
    torch.testing.assert_close(
        nn.functional.pad(rows, (0, -width % 16)).double().norm(dim=1), rows.double().norm(dim=1)
    )


EXPONENTS = st.sampled_from([-149, -140, -127, -76, -75, -64, -63, -20, 0, 20, 63, 64, 100, 127])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3 * BLOCK + 1), st.lists(EXPONENTS, min_size=1, max_size=3), st.integers(0, 9)
)
def test_no_norm_is_below_the_exact_one(d: int, exponents: list[int], seed: int) -> None:
    """A gradient is shortened by its norm, so a norm that is rounded down would let it be longer than
    the clip. Entries of all magnitudes: their squares vanish, or overflow.
    """
    random = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(exponents)[torch.randint(len(exponents), (4, d), generator=random)]
    rows = torch.ldexp(torch.rand(4, d, generator=random).double(), sizes).float()
    rows[1] = rows[1, 0]
    rows[2, 1:] = 0
    for row, norm in zip(rows.tolist(), _lengths(rows).tolist(), strict=True):
        exact = sum(Fraction(entry) ** 2 for entry in row)
        assert exact <= (Fraction(norm) * (1 + Fraction(1, 10**12))) ** 2
        most = Fraction(1 + 1e-5) ** 2 * exact
        assert norm <= math.sqrt(most) * (1 + 1e-9) + math.sqrt(d) * 2.0**-62


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3 * BLOCK + 1) | st.sampled_from([BLOCK, 2 * BLOCK, 10 * BLOCK]),
    st.integers(1, 40),
    st.integers(0, 39),
    st.sampled_from(["rows", "columns", "part of wider rows"]),
)
def test_a_norm_is_the_same_alone_and_among_others(d: int, n: int, first: int, layout: str) -> None:
    """Otherwise a record that is taken away would change what others add."""
    rows = torch.randn(40, d, generator=torch.Generator().manual_seed(d))
    alone = torch.cat([_lengths(row[None]) for row in rows])
    if layout == "columns":
        rows = rows.T.contiguous().T
    elif layout == "part of wider rows":
        wider = torch.randn(40, d + 3)
        wider[:, 1 : d + 1] = rows
        rows = wider[:, 1 : d + 1]
    assert torch.equal(_lengths(rows[first : first + n]), alone[first : first + n])


def test_a_norm_that_would_be_rounded_down_is_not() -> None:
    """Squares of these entries lose nearly half a last digit each, and so do their sums."""
    entry = 1 + 2.0**-12 - 2.0**-23
    rows = torch.full((1, 40 * BLOCK), entry)
    single = float(torch.linalg.vector_norm(rows.view(40, BLOCK), dim=1).double().norm())
    exact = math.sqrt(40 * BLOCK) * float(rows[0, 0])
    assert exact <= float(_lengths(rows)) <= exact * (1 + 1e-5)
    assert abs(single - exact) < 1e-5 * exact
