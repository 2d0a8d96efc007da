"""Class sums as the Gaussians that the defence compares, and back, by their definitions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.class_sums import fold, unfold
from fedsurrogate.common.surrogates.covariances import Diagonal
from fedsurrogate.common.surrogates.shared_covariances import Gram
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.robustness.closed_form_sums import gaussians, with_gaussians

CLASSES, D = ("a", "b", "c"), 3
few = settings(max_examples=40, deadline=None)


def sums_of(seed: int, there: tuple[bool, ...], squares: bool) -> Parameters:
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 20, 3) * np.array(there) * 1.0
    means = draw.normal(size=(3, D)) + 2
    root = draw.normal(size=(D, D))
    tensors = {"counts": counts, "sums": counts[:, None] * means}
    if squares:
        tensors["squares"] = fold(torch.from_numpy(root @ root.T)).numpy()
        tensors["variances"] = draw.uniform(0.1, 1, (3, D))
    header = Header("afl", "r", "s", "f", CLASSES)
    floats = {name: torch.from_numpy(table).float() for name, table in tensors.items()}
    return Parameters(header, 1, floats, int(counts.sum()))


THERE = st.tuples(st.booleans(), st.booleans(), st.booleans()).filter(any)


@few
@given(st.integers(0, 9999), THERE, st.booleans())
def test_each_class_with_records_is_one_gaussian(
    seed: int, there: tuple[bool, ...], squares: bool
) -> None:
    sent = sums_of(seed, there, squares)
    found = gaussians(sent)
    present = [at for at in range(3) if there[at]]
    assert found.header == sent.header
    table = found.mixtures
    assert table.labels.tolist() == present
    assert table.weights.tolist() == [1.0] * len(present)
    assert table.counts.tolist() == [int(n) for n in sent.tensors["counts"].tolist()]
    for row, at in enumerate(present):
        mean = sent.tensors["sums"][at] / sent.tensors["counts"][at]
        torch.testing.assert_close(table.means[row], mean)
    if not squares:
        assert isinstance(table.covariance, Diagonal)
        assert table.covariance.variances.tolist() == [[1.0] * D] * len(present)
        return
    assert isinstance(table.covariance, Gram)
    n = float(sent.tensors["counts"].sum())
    whole = unfold(sent.tensors["squares"].double(), D) / n
    torch.testing.assert_close(table.covariance.matrix.double(), whole)
    variances = table.covariance.variances_per_dimension().double().flatten()
    torch.testing.assert_close(variances, whole.diagonal())


@few
@given(st.integers(0, 9999), THERE, st.booleans(), st.sampled_from([1.0, 0.25]), st.booleans())
def test_sums_of_moved_gaussians_have_their_means_and_covariance(
    seed: int, there: tuple[bool, ...], squares: bool, scale: float, moved: bool
) -> None:
    sent = sums_of(seed, there, squares)
    before = gaussians(sent)
    table = before.mixtures
    draw = torch.Generator().manual_seed(seed)
    moves = torch.randn(len(table.labels), D, generator=draw) * moved
    covariance = table.covariance if scale == 1 else table.covariance.scaled(scale**0.5)
    after = Surrogate(
        before.header, replace(table, means=table.means + moves, covariance=covariance)
    )
    found = with_gaussians(sent, before, after)
    if scale == 1 and not moved:
        assert found is sent
        return
    wanted = sent.tensors["sums"].clone()
    for row, at in enumerate(table.labels.tolist()):
        wanted[at] += sent.tensors["counts"][at] * moves[row]
    torch.testing.assert_close(found.tensors["sums"], wanted, rtol=1e-5, atol=1e-4)
    assert torch.equal(found.tensors["counts"], sent.tensors["counts"])
    assert found.tensors.keys() == sent.tensors.keys()
    for name in {"squares", "variances"} & set(sent.tensors):
        torch.testing.assert_close(found.tensors[name], scale * sent.tensors[name])
    assert {tensor.dtype for tensor in found.tensors.values()} == {torch.float32}
    assert (found.header, found.records) == (sent.header, sent.records)
