"""Mathematics that takes tensors of a device: the result is there, and is the processor's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks._gpu_parity import pooled
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit_streamed
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.strategies.closed_form import solvers
from fedsurrogate.strategies.closed_form.statistics import Factored, Statistics, sum_of
from tests.device.machine import Machine


def placed(value: Any, device: str) -> Any:
    """The same with every tensor on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list | tuple):
        return type(value)(placed(each, device) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(
            **{each.name: placed(getattr(value, each.name), device) for each in fields(value)}
        )
    return value


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in tensors(each)]
    if is_dataclass(value):
        return [tensor for each in fields(value) for tensor in tensors(getattr(value, each.name))]
    return [torch.tensor(float(value))] if isinstance(value, float) else []


def agree(work: Callable[[Any], Any], given: Any) -> None:
    """Work on a device gives what it gives on a processor, and leaves it on the device."""
    here = tensors(work(given))
    with Machine():
        made = tensors(work(placed(given, "cuda")))
        assert all(each.is_cuda for each in made if each.dim()), [each.device for each in made]
        there = [each.cpu() for each in made]
    assert here
    for mine, other in zip(there, here, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-7)


def statistics(d: int = 12, classes: int = 3) -> Statistics:
    return pooled(classes, d, "cpu")


def factored(d: int = 12, rank: int = 2) -> Statistics:
    known = statistics(d)
    factor = torch.randn(d, rank, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    variances = torch.linspace(0.5, 2, d, dtype=torch.float64)
    return Statistics(known.counts, known.means, Factored(factor, variances))


def alike() -> Statistics:
    known = statistics()
    return Statistics(known.counts, known.means, torch.zeros_like(known.covariance))


SOLVERS = {
    "lda": solvers.lda,
    "lda, given shrinkage": partial(solvers.lda, shrinkage=0.1),
    "naive Bayes": solvers.naive_bayes,
    "ridge": solvers.ridge,
    "balanced ridge": solvers.balanced_ridge,
    "between": Statistics.between,
    "whole": Statistics.whole,
}
KINDS: dict[str, Callable[[], Statistics]] = {
    "a matrix": statistics,
    # Above the size from which LAPACK's own reduction is used on a processor; the whole one.
    "few dimensions": partial(statistics, 6),
    "factors": factored,
    "records that are all alike": alike,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_a_head_in_closed_form_is_solved_where_its_statistics_are(solver: str, kind: str) -> None:
    agree(SOLVERS[solver], KINDS[kind]())


def test_quadratic_discriminants_are_solved_where_their_statistics_are() -> None:
    each = [
        Statistics(torch.full((1,), 40.0, dtype=torch.float64), known.means[:1], known.covariance)
        for known in (statistics(), statistics(classes=1))
    ]
    header = Header("fedpft", "r", "s", "f", ("a", "b"))
    agree(partial(solvers.qda, header=header), each)
    agree(partial(solvers.qda, header=header, shrinkage=0.2), [factored_class()])


def factored_class() -> Statistics:
    known = factored()
    return Statistics(known.counts[:1], known.means[:1], known.covariance, sampled=False)


@pytest.mark.parametrize(
    "parts", [[statistics, statistics], [factored, statistics], [factored] * 2]
)
def test_sums_of_sites_stay_where_their_statistics_are(
    parts: list[Callable[[], Statistics]],
) -> None:
    agree(sum_of, [part() for part in parts])
    agree(lambda given: sum_of(given).matrix, [part() for part in parts])


def test_a_streamed_fit_leaves_the_records_of_a_file_where_they_are() -> None:
    x, y = torch.randn(90, 5, generator=torch.Generator().manual_seed(1)), torch.arange(90) % 2

    def fitted() -> Tensor:
        settings = MixtureSettings("diag", 2)
        return fit_streamed(x, y, 2, settings, torch.Generator().manual_seed(0)).means

    with Machine() as machine:
        there = fitted()
    assert torch.equal(there, fitted())
    assert machine.copies == {"to": 0, "from": 0}
