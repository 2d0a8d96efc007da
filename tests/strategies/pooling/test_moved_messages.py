"""Messages in another frame are those of the moved records, whatever they hold: heads, class sums,
moments of features.
"""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common.methods.heads import HEAD
from fedsurrogate.common.methods.method import Field, fields_of
from fedsurrogate.common.methods.sums import MOMENTS
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
)
from fedsurrogate.common.surrogates.mixtures import Frame, Mixtures
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate
from fedsurrogate.strategies.pooling.class_means import moved_parameters, moved_surrogate

D, C = 3, 2
FEATURES = (Field("mean", "d"), Field("deviation", "d", 0, degree=1))
FIELDS = (*HEAD, *FEATURES, *fields_of(MOMENTS[:2]))
few = settings(max_examples=40, deadline=None)


def frame(seed: int) -> Frame:
    """With one column that is only shifted, sometimes."""
    draw = np.random.default_rng(seed)
    scale = draw.choice([0.0, 0.25, 3.0, 40.0], D)
    return Frame(torch.from_numpy(draw.normal(size=D).round(2)), torch.from_numpy(scale))


def bytes_of(which: int | None) -> bytes:
    return b"" if which is None else frame(which).packed()


def seen(raw: Tensor, which: int | None) -> Tensor:
    """Records in a frame; as they are without one."""
    if which is None:
        return raw
    own = Frame.of(frame(which).packed())
    return (raw - own.offset) / own.divisor


FRAMES = st.none() | st.integers(0, 99)


def message(x: Tensor, y: Tensor, head: Tensor, frame_: bytes) -> Parameters:
    """All that sites send of records (n, d)."""
    counts = torch.bincount(y, minlength=C).double()
    sums = torch.zeros(C, D).double().index_add_(0, y, x)
    tensors = {
        "weight": head[:, :-1],
        "bias": head[:, -1],
        "mean": x.mean(0),
        "deviation": x.std(0, correction=0),
        "sums": sums,
        "counts": counts,
    }
    return Parameters(Header("fedpft", "r", "s", "f", ("a", "b"), frame_), 1, tensors, len(x))


@few
@given(st.integers(0, 9999), FRAMES, FRAMES)
def test_all_sums_are_those_of_the_moved_records_and_heads_decide_the_same(
    seed: int, first: int | None, last: int | None
) -> None:
    draw = torch.Generator().manual_seed(seed)
    raw = 2 * torch.randn(20, D, generator=draw).double() + 1
    y = torch.arange(20) % C
    head = torch.randn(C, D + 1, generator=draw).double()
    before, after = seen(raw, first), seen(raw, last)
    sent = message(before, y, head, bytes_of(first))
    moved = moved_parameters(sent, FIELDS, bytes_of(last))
    wanted = message(after, y, head, bytes_of(last))
    assert moved.header == wanted.header
    if bytes_of(first) == bytes_of(last):
        assert moved is sent
        return
    for name in ("mean", "deviation", "sums", "counts"):
        torch.testing.assert_close(
            moved.tensors[name].double(), wanted.tensors[name], rtol=1e-4, atol=1e-4
        )
    scores = before @ head[:, :-1].T + head[:, -1]
    own = after @ moved.tensors["weight"].double().T + moved.tensors["bias"].double()
    torch.testing.assert_close(own, scores, rtol=1e-4, atol=1e-3)
    assert {tensor.dtype for tensor in moved.tensors.values()} == {torch.float64}


def covariance_of(kind: str, draw: torch.Generator) -> AnyCovariance:
    root = torch.randn(2, D, D, generator=draw)
    if kind == "spherical":
        return Spherical(torch.rand(2, generator=draw) + 0.1)
    if kind == "diag":
        return Diagonal(torch.rand(2, D, generator=draw) + 0.1)
    if kind == "full":
        return Full(root.tril() + 2 * torch.eye(D))
    if kind == "lowrank":
        return LowRank(root[0, :, :2], torch.rand(D, generator=draw) + 0.1)
    return Gram(root[0] @ root[0].T + torch.eye(D))


def dense(covariance: AnyCovariance, at: int) -> Tensor:
    match covariance:
        case Full(cholesky):
            return (cholesky[at] @ cholesky[at].T).double()
        case LowRank(factor, variances):
            return (factor @ factor.T + variances.diag()).double()
        case Gram() as gram:
            return gram.matrix.double()
        case Spherical(variances):
            return float(variances[at]) * torch.eye(D).double()
        case Diagonal(variances):
            return variances[at].double().diag()
    raise AssertionError(covariance)


@few
@given(
    st.integers(0, 9999),
    st.sampled_from(["spherical", "diag", "full", "lowrank", "gram"]),
    FRAMES,
    FRAMES,
)
def test_gaussians_move_with_their_records(
    seed: int, kind: str, first: int | None, last: int | None
) -> None:
    draw = torch.Generator().manual_seed(seed)
    covariance, means = covariance_of(kind, draw), torch.randn(2, D, generator=draw)
    table = Mixtures(torch.tensor([3, 4]), torch.tensor([0, 1]), torch.ones(2), means, covariance)
    sent = Surrogate(Header("fedpft", "r", "s", "f", ("a", "b"), bytes_of(first)), table)
    moved = moved_surrogate(sent, bytes_of(last))
    if bytes_of(first) == bytes_of(last):
        assert moved is sent
        return
    assert isinstance(moved, Surrogate)
    zero, one = torch.zeros(1, D).double(), torch.ones(1, D).double()
    raw = means.double()
    if first is not None:
        raw = raw * Frame.of(bytes_of(first)).divisor + Frame.of(bytes_of(first)).offset
    torch.testing.assert_close(moved.mixtures.means.double(), seen(raw, last), rtol=1e-4, atol=1e-4)
    before, after = (seen(one, which) - seen(zero, which) for which in (first, last))
    factor = (after / before)[0]
    for at in range(2):
        wanted = dense(covariance, at) * factor * factor[:, None]
        if kind == "spherical":
            wanted = wanted.trace() / D * torch.eye(D).double()
        torch.testing.assert_close(
            dense(moved.mixtures.covariance, at), wanted, rtol=1e-4, atol=1e-5
        )
    assert moved.mixtures.counts.tolist() == [3, 4]
    assert moved.header == Header("fedpft", "r", "s", "f", ("a", "b"), bytes_of(last))
