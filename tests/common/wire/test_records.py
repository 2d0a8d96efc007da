"""Canonical bytes: the range of half precision loses nothing, and hostile messages are refused."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.mixtures import MixtureSettings, fit
from fedsurrogate.common.surrogates.surrogates import Header, Surrogate, without_classes
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier
from fedsurrogate.common.wire.records import (
    from_record,
    pack_surrogate,
    to_record,
    unpack_surrogate,
)
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate
from tests.common.surrogates.test_mixtures import covariances
from tests.likelihood import log_likelihood

FAMILIES = ("full", "diag", "spherical", "lowrank")
CLASSES = ("cat", "dog", "red panda")
HEADER = Header("fedpft", "0123456789abcdef", "site-3", "f" * 16, CLASSES)
COMPONENTS, DIMENSION, RANK = 3, 8, 2

Edit = Callable[[pb.Surrogate], None]


def records(factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Correlated features (300, d) of three classes with three blobs each; dimensions have unequal
    spread.
    """
    rng = torch.Generator().manual_seed(1)
    y, blob = torch.arange(300) % 3, torch.arange(300) % 9
    mixing = torch.randn(DIMENSION, DIMENSION, generator=rng) / DIMENSION**0.5 + torch.eye(
        DIMENSION
    )
    centres = 10 * torch.randn(9, DIMENSION, generator=rng)
    x = torch.randn(300, DIMENSION, generator=rng) @ mixing + centres[blob]
    return x * torch.logspace(-0.3, 0.3, DIMENSION) * factor, y


@cache
def surrogate(family: str, factor: float = 1.0) -> Surrogate:
    x, y = records(factor)
    chosen = MixtureSettings(family, COMPONENTS, RANK)
    return Surrogate(HEADER, fit(x, y, 3, chosen, torch.Generator().manual_seed(0)))


def expectation(family: str, **more: object) -> Expectation:
    return replace(
        Expectation(
            HEADER.method, HEADER.run, family, COMPONENTS, RANK, CLASSES, HEADER.fingerprint
        ),
        **more,
    )


def receive(payload: bytes, expected: Expectation) -> Surrogate:
    """Unpack and check a payload as the coordinator does."""
    found = unpack_surrogate(payload)
    check_surrogate(found, expected)
    return found


def tampered(family: str, edit: Edit) -> bytes:
    message = pb.Surrogate.FromString(pack_surrogate(surrogate(family)))
    edit(message)
    return message.SerializeToString()


def worst_entry(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference between two covariances, each entry relative to the standard deviations of
    its dimensions.
    """
    deviation = theirs.diagonal(dim1=1, dim2=2).sqrt()
    return float(((ours - theirs) / deviation[:, :, None] / deviation[:, None, :]).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_everything_within_half_precision(family: str) -> None:
    sent = surrogate(family)
    got = receive(pack_surrogate(sent), expectation(family))
    ours, theirs = got.mixtures, sent.mixtures
    assert got.header == sent.header
    assert ours.family == family
    assert torch.equal(ours.counts, theirs.counts)
    assert torch.equal(ours.labels, theirs.labels)
    assert ours.means.dtype == torch.float32
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-3, atol=0)
    assert (ours.means - theirs.means).abs().max() < 1e-3 * theirs.means.abs().max()
    assert worst_entry(covariances(ours), covariances(theirs)) < 5e-3
    x, y = records()
    assert log_likelihood(ours, x, y) == pytest.approx(log_likelihood(theirs, x, y), abs=2e-3)


def passes_or_is_refused(payload: bytes, family: str) -> None:
    """For any bytes there is no other error, and an accepted surrogate can be used for learning."""
    try:
        mixtures = receive(payload, expectation(family, classes=(), fingerprint="")).mixtures
    except SurrogateError:
        return
    streams = [torch.Generator().manual_seed(i) for i in range(len(mixtures.counts))]
    drawn, _ = mixtures.draw([5] * len(streams), streams)
    mean, variance = mixtures.moments()
    assert drawn.isfinite().all()
    assert mean.isfinite().all()
    assert variance.isfinite().all()
    assert (variance >= 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_truncation_is_refused(family: str) -> None:
    payload = pack_surrogate(surrogate(family))
    for length in range(len(payload)):
        with pytest.raises(SurrogateError):
            receive(payload[:length], expectation(family))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
@pytest.mark.slow
def test_mutated_bytes_pass_or_are_refused(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))
    payload = bytearray(pack_surrogate(surrogate(family)))
    # A payload is mostly numbers, and its structure is in the first bytes, so half of the changes
    # are there.
    anywhere = st.one_of(st.integers(0, 200), st.integers(0, len(payload) - 1))
    for at, value in data.draw(
        st.lists(st.tuples(anywhere, st.integers(0, 255)), min_size=1, max_size=4)
    ):
        payload[at] = value
    at = data.draw(anywhere)
    match data.draw(st.sampled_from(["keep", "insert", "delete"])):
        case "insert":
            payload[at:at] = data.draw(st.binary(max_size=8))
        case "delete":
            del payload[at : at + data.draw(st.integers(1, 8))]
    passes_or_is_refused(bytes(payload), family)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_any_numbers_pass_or_are_refused(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILIES))

    def edit(message: pb.Surrogate) -> None:
        body = message.mixtures
        tables = [body.weights, body.means, *body.spread]
        table = tables[data.draw(st.integers(0, len(tables) - 1))]
        match data.draw(
            st.sampled_from(["scale", "values", "logarithm", "shape", "counts", "components"])
        ):
            case "scale":
                table.scale = data.draw(
                    st.sampled_from([0.0, -1.0, 1e-45, 1e-30, 1e18, 1e30, 3e38, np.inf, np.nan])
                )
            case "values":
                half = data.draw(st.floats(width=16))
                table.data = np.full(len(table.data) // 2, half, "<f2").tobytes()
            case "logarithm":
                table.logarithm = not table.logarithm
            case "shape":
                table.shape[:] = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
            case "counts":
                body.counts[:] = data.draw(st.lists(st.integers(0, 2**64 - 1), max_size=4))
            case "components":
                body.components[:] = data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=4))

    passes_or_is_refused(tampered(family, edit), family)


def numbers(table: pb.Halves, value: float, at: int = 0) -> None:
    """Put one 16-bit number into a packed table."""
    halves = np.frombuffer(table.data, "<f2").copy()
    halves[at] = value
    table.data = halves.tobytes()


def components_of(message: pb.Surrogate, wanted: list[int]) -> None:
    message.mixtures.components[:] = wanted


def classes_of(message: pb.Surrogate, wanted: tuple[str, ...]) -> None:
    message.header.classes[:] = wanted


REFUSALS: dict[str, tuple[str, Edit, str]] = {
    "infinite variance": (
        "diag",
        lambda m: numbers(m.mixtures.spread[0], 6e4),
        "variances hold a number that is not finite",
    ),
    "infinite loading": (
        "lowrank",
        lambda m: numbers(m.mixtures.spread[1], np.inf),
        "factor hold a number that is not fin",
    ),
    "infinite ratio": (
        "full",
        lambda m: numbers(m.mixtures.spread[1], np.inf),
        "cholesky hold a number that is not finite",
    ),
    "plain variances": (
        "diag",
        lambda m: setattr(m.mixtures.spread[0], "logarithm", False),
        "must travel as logarithms",
    ),
    "wrong shape": ("diag", lambda m: m.mixtures.means.shape.append(1), r"means of shape \(9, 8, 1\)"),
    "means of fewer components": (
        "diag",
        lambda m: m.mixtures.means.shape.__setitem__(0, 8),
        r"means of shape \(8, 8\)",
    ),
    "variances of another dimension": (
        "diag",
        lambda m: m.mixtures.spread[0].shape.__setitem__(1, 7),
        r"variances of shape",
    ),
    "negative count": (
        "diag",
        lambda m: m.mixtures.counts.__setitem__(0, 2**64 - 1),
        "a class of 18446744073709551615 records",
    ),
    "zero count": ("diag", lambda m: m.mixtures.counts.__setitem__(1, 0), "a class of 0 records"),
    "missing count": ("diag", lambda m: m.mixtures.counts.pop(), "3 classes with 2 counts"),
    "class without component": ("diag", lambda m: components_of(m, [0, 3, 6]), "for 9 components"),
    "nameless class": ("diag", lambda m: classes_of(m, ("cat", "", "dog")), "without a name"),
    "class named twice": ("diag", lambda m: classes_of(m, ("cat", "dog", "cat")), "named twice"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_with_the_reason(case: str) -> None:
    family, edit, reason = REFUSALS[case]
    receive(pack_surrogate(surrogate(family)), expectation(family))
    with pytest.raises(SurrogateError, match=reason):
        receive(tampered(family, edit), expectation(family))


def test_a_surrogate_without_mixtures_is_refused() -> None:
    for header in (pb.Header(schema=1), pb.Header(schema=1, classes=CLASSES)):
        with pytest.raises(SurrogateError, match="classes with 0 counts"):
            unpack_surrogate(pb.Surrogate(header=header).SerializeToString())


def test_a_small_payload_cannot_ask_for_much_memory() -> None:
    dimension = 1_000_000

    def edit(message: pb.Surrogate) -> None:
        halves = np.zeros(dimension, "<f2").tobytes()
        table = pb.Halves(shape=[1, dimension], scale=1, data=halves)
        message.header.classes[:] = ["cat"]
        body = pb.Mixtures(
            covariance="full", counts=[1], components=[1], means=table, spread=[table, table]
        )
        body.weights.CopyFrom(pb.Halves(shape=[1], scale=1, data=np.ones(1, "<f2").tobytes()))
        body.spread[0].logarithm = True
        message.mixtures.CopyFrom(body)

    with pytest.raises(SurrogateError, match="ratios of shape"):
        receive(tampered("full", edit), expectation("full"))
    for wanted in ([2**32 - 1] * 3, [2**31, 1, 1]):
        with pytest.raises(SurrogateError, match="weights of shape"):
            receive(
                tampered("full", lambda m, wanted=wanted: components_of(m, wanted)),
                expectation("full"),
            )


def test_payload_is_what_was_announced_and_within_the_limit() -> None:
    payload = pack_surrogate(surrogate("diag"))
    got, info = from_record(
        to_record(payload, {"bytes": len(payload), "site": "3", "note": ""}), len(payload)
    )
    assert got == payload
    assert info == {"bytes": len(payload), "site": "3"}
    with pytest.raises(SurrogateError, match=f"at most {len(payload) - 1} are allowed"):
        from_record(to_record(payload, {"bytes": len(payload)}), len(payload) - 1)
    assert from_record(to_record(None, {"status": "ok"}), 10) == (None, {"status": "ok"})


@pytest.mark.parametrize("family", FAMILIES)
def test_left_out_classes_leave_the_others_as_they_are(family: str) -> None:
    sent = surrogate(family)
    kept = without_classes(sent, ["red panda", "cat", "yeti"])
    assert kept is not None
    check_surrogate(kept, expectation(family))
    assert kept.header.classes == ("cat", "red panda")
    assert kept.mixtures.labels.tolist() == [0, 0, 0, 1, 1, 1]
    x, y = records()
    rows = y != 1
    assert log_likelihood(kept.mixtures, x[rows], y[rows] // 2) == pytest.approx(
        log_likelihood(sent.mixtures, x[rows], y[rows]), abs=1e-5
    )
    assert without_classes(sent, ["yeti"]) is None


def head(factor: float = 1.0) -> Head:
    rng = torch.Generator().manual_seed(0)
    return Head(
        HEADER, torch.randn(3, DIMENSION, generator=rng) * factor, torch.randn(3, generator=rng)
    )


HEAD_REFUSALS: dict[str, tuple[Callable[[pb.Head], object], str]] = {
    "NaN": (lambda m: numbers(m.weight, np.nan), "not finite"),
    "infinite bias": (lambda m: numbers(m.bias, np.inf), "not finite"),
    "no class": (lambda m: m.header.ClearField("classes"), "a head for 0 classes"),
    "one class less": (lambda m: m.header.classes.pop(), "head weights of shape"),
    "weights that are no matrix": (lambda m: m.weight.shape.pop(), "weights of shape"),
    "bias of another size": (lambda m: m.bias.shape.append(1), "head bias of shape"),
}


@pytest.mark.parametrize("case", HEAD_REFUSALS)
def test_broken_head_is_refused(case: str) -> None:
    edit, reason = HEAD_REFUSALS[case]
    message = pb.Classifier.FromString(pack_classifier(head()))
    edit(message.head)
    with pytest.raises(SurrogateError, match=reason):
        unpack_classifier(message.SerializeToString())
