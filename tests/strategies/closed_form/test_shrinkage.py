"""The shrinkage from a reduced covariance is that from all eigenvectors, at a fraction of the work."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.strategies.closed_form import solvers as shrinkage
from fedsurrogate.strategies.closed_form.solvers import SHRINKAGES, chosen_with_accuracy, lda, ridge
from fedsurrogate.strategies.closed_form.statistics import Statistics, Tridiagonal
from tests.examples import statistics_of


def statistics(n: int, d: int, classes: int, decay: float = 1.0, seed: int = 0) -> Statistics:
    """Statistics of n records whose variances fall by `decay` from the first dimension to the last."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    turn = torch.linalg.qr(torch.randn(d, d, generator=generator))[0]
    means = torch.randn(classes, d, generator=generator) / 3
    x = (
        (means[labels] + torch.randn(n, d, generator=generator)) * torch.logspace(0, -decay, d)
    ) @ turn
    return statistics_of(x, labels, classes)


CASES = [
    (3000, 200, 10, 1.0),
    (150, 200, 10, 1.0),
    (1200, 200, 4, 3.0),
    (4000, 64, 100, 1.0),
    (4000, 12, 30, 0.5),
    (90, 8, 2, 0.0),
]
# Large enough for the projection onto a Krylov space; the last but one has less records than
# dimensions.
LARGE = [
    (4000, 400, 4, 0.5),
    (4000, 400, 4, 2.0),
    (1200, 480, 8, 1.0),
    (300, 400, 4, 1.0),
    (20_000, 400, 4, 3.0),
]


@pytest.mark.parametrize("case", CASES)
def test_the_chosen_values_are_those_of_all_eigenvectors(
    case, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    found = statistics(*case)
    fast = lda(found), ridge(found)
    monkeypatch.setattr("fedsurrogate.strategies.closed_form.statistics.FEWEST", 10**9)
    slow = lda(found), ridge(found)
    for ours, exact in zip(fast, slow, strict=True):
        assert ours.shrinkage == pytest.approx(exact.shrinkage, abs=1e-6)
        torch.testing.assert_close(
            ours.weight, exact.weight, rtol=1e-5, atol=1e-5 * float(exact.weight.abs().max())
        )


@pytest.mark.parametrize("case", LARGE)
def test_the_values_chosen_in_a_krylov_space_are_those_of_all_eigenvectors(
    case, monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    found = statistics(*case)
    fast = chosen_with_accuracy(found)[0]
    monkeypatch.setattr("fedsurrogate.strategies.closed_form.statistics.MOST_PROJECTED", 0)
    assert fast == pytest.approx(chosen_with_accuracy(found)[0], abs=1e-6)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from([9, 60, 360, 500]), st.integers(1, 5), st.floats(1e-3, 1e3))
def test_sums_over_eigenvalues_are_exact_where_no_projection_is_asked_for(
    d: int, classes: int, shift: float
) -> None:
    found = statistics(2 * d, d, classes)
    reduced = Tridiagonal.of(found.matrix, found.means.T)
    values = torch.linalg.eigvalsh(found.matrix)
    of, of_all = (each / (each + shift) for each in (reduced.values, values))
    assert reduced.sum_of(of) == pytest.approx(float(of_all.sum()), rel=1e-4)
    logs = [(each.clamp_min(0) + shift).log() for each in (reduced.values, values)]
    assert reduced.sum_of(logs[0]) == pytest.approx(float(logs[1].sum()), rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("d", [3, 8, 9, 60])
def test_shifted_systems_are_those_of_the_matrix(d: int) -> None:
    found = statistics(500, d, 4)
    matrix, columns = found.matrix, found.means.T
    reduced = Tridiagonal.of(matrix, columns)
    mean = float(matrix.diagonal().mean())
    torch.testing.assert_close(
        reduced.values, torch.linalg.eigvalsh(matrix), rtol=1e-4, atol=1e-5 * mean
    )
    exact = torch.linalg.solve(
        0.9 * matrix + 0.1 * mean * torch.eye(d, dtype=torch.float64), columns
    )
    ours = reduced.solved(0.9, 0.1 * mean)
    close(ours.T @ reduced.columns, exact.T @ columns)
    close(ours.T @ reduced.times(ours), exact.T @ matrix @ exact)


def close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("case", [(400, 200, 2), (2000, 60, 3), (150, 140, 3), (6000, 12, 20)])
def test_the_estimated_accuracies_are_those_on_new_records(
    case: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    records, d, classes = case
    generator = torch.Generator().manual_seed(0)
    means = 2.4 / d**0.5 * torch.randn(classes, d, generator=generator, dtype=torch.float64)
    scale = torch.logspace(0, -1, d, dtype=torch.float64)
    often = torch.arange(1, classes + 1).double()

    def drawn(n: int) -> tuple[Tensor, Tensor]:
        labels = torch.multinomial(often, n, True, generator=generator)
        noise = torch.randn(n, d, generator=generator, dtype=torch.float64)
        return (means[labels] + noise) * scale, labels

    x, labels = drawn(records)
    found = statistics_of(x, labels, classes)
    estimated: list[float] = []
    right = shrinkage._right

    def noted(noise: Tensor, scores: Tensor, judged: Tensor) -> Tensor:
        shares = right(noise, scores, judged)
        estimated.append(float(found.priors[judged] @ shares))
        return shares

    monkeypatch.setattr(shrinkage, "_right", noted)
    assert chosen_with_accuracy(found)[0] > 0
    x, labels = drawn(10_000)
    for value, estimate in zip(SHRINKAGES, estimated, strict=True):
        head = lda(found, value)
        accuracy = float(((x @ head.weight.T + head.bias).argmax(1) == labels).double().mean())
        assert estimate == pytest.approx(accuracy, abs=0.04), value
    assert sorted(set(SHRINKAGES)) == list(SHRINKAGES)


@pytest.mark.parametrize(
    ("d", "columns", "whole", "projected", "values"),
    [
        # Twelve products with the columns and ten probes, in half of the dimensions.
        (288, 2, False, True, 144),
        (287, 2, False, True, 287),
        (312, 3, False, True, 156),
        (288, 2, True, True, 288),
        (288, 2, False, False, 288),
    ],
)
def test_a_covariance_is_projected_where_it_is_asked_for_and_large(
    d: int, columns: int, whole: bool, projected: bool, values: int
) -> None:
    draw = torch.Generator().manual_seed(d)
    matrix = (torch.rand(d, generator=draw).double() + 0.5).diag()
    right = torch.randn(d, columns, generator=draw, dtype=torch.float64)
    reduced = Tridiagonal.of(matrix, right, whole=whole, projected=projected)
    assert len(reduced.values) == values
    assert reduced.sum_of(torch.ones(values).double()) == pytest.approx(d)
    assert reduced.sum_of(reduced.values) == pytest.approx(float(matrix.trace()), rel=1e-5)
    solution = reduced.solved(0.8, 0.3)
    ours = float((reduced.columns * solution).sum())
    theirs = torch.linalg.solve(0.8 * matrix + 0.3 * torch.eye(d).double(), right)
    assert ours == pytest.approx(float((right * theirs).sum()), rel=1e-4)
