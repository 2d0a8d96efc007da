"""The coordinator's side of frames: changes between them, hostile ones, and rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedsurrogate as fs
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Ensemble, Head, Network, Quadratic
from fedsurrogate.common.models.networks import fresh, parameters_of
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
)
from fedsurrogate.common.surrogates.mixtures import Frame, common_frame
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import (
    classifier_of,
    file_content,
    pack_classifier,
    unpack_classifier,
)
from fedsurrogate.common.wire.records import pack_surrogate, unpack_surrogate
from tests.data_kinds.scales.affine import RECORDS, records

HEADER = Header("fedpft", "0" * 16, "north", "features-3", ("a", "b"))
ODD = Frame(torch.tensor([1e4, 0.0, -3.0]).double(), torch.tensor([1e-3, 1e6, 0.0]).double())


def covariances() -> list[AnyCovariance]:
    """One of each family, of two components in three dimensions."""
    drawn = torch.Generator().manual_seed(0)
    lower = torch.randn(2, 3, 3, generator=drawn).tril() + 2 * torch.eye(3)
    factor = torch.randn(3, 2, generator=drawn)
    return [
        Diagonal(torch.rand(2, 3, generator=drawn) + 0.5),
        Full(lower),
        LowRank(factor, torch.rand(3, generator=drawn) + 0.5),
        Gram(factor @ factor.T + torch.eye(3)),
        Spherical(torch.tensor([1.0, 2.0])),
    ]


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_refused_and_never_another_error(content: bytes) -> None:
    try:
        frame = Frame.of(content)
    except SurrogateError:
        return
    assert frame.packed() == content
    assert frame.apply(torch.zeros(1, len(frame.offset))).isfinite().any()


def test_few_sites_do_not_decide_the_frame_of_all() -> None:
    own, lie = ODD.packed(), replace(ODD, offset=ODD.offset * 1e9).packed()
    assert common_frame([own, own, own, lie]) == own
    assert common_frame([b"", b"", lie]) == b""
    assert common_frame([b"", own]) == own


@pytest.mark.parametrize(
    "kind", ["short", "nan", "negative", "columns"], ids=lambda each: str(each)
)
def test_a_surrogate_with_a_wrong_frame_is_refused(kind: str) -> None:
    clean, labels = records()
    sites = [fs.fit(clean[i:RECORDS:3] + 1e4, labels[i:RECORDS:3], site=f"s{i}") for i in range(3)]
    sent = unpack_surrogate(sites[0].payload)
    good = sent.header.frame
    nan = torch.tensor([float("nan")]).numpy().astype("<f4").tobytes()
    frame = {
        "short": good[:-4],
        "nan": nan + good[4:],
        "negative": good[:-4] + torch.tensor([-1.0]).numpy().astype("<f4").tobytes(),
        "columns": good + good,
    }[kind]
    wrong = pack_surrogate(replace(sent, header=replace(sent.header, frame=frame)), 16)
    with pytest.raises(SurrogateError):
        fs.learn([replace(sites[0], payload=wrong), *sites[1:]])


@pytest.mark.parametrize("kind", ["head", "ensemble", "quadratic", "network"])
def test_a_model_applies_its_frame_everywhere(kind: str) -> None:
    drawn = torch.Generator().manual_seed(0)
    clean = torch.randn(8, 3, generator=drawn)
    frame = Frame(torch.tensor([1e4, 0.0, -3.0]).double(), torch.tensor([2.0, 1e6, 4.0]).double())
    raw = clean.double() * frame.divisor + frame.offset
    header = replace(HEADER, frame=frame.packed())

    def model(own: Header) -> Any:
        weight, bias = torch.tensor([[1.0, 2.0, 3.0], [0.5, -1.0, 1.0]]), torch.tensor([0.0, 1.0])
        return {
            "head": Head(own, weight, bias),
            "ensemble": Ensemble((Head(own, weight, bias), Head(own, -weight, bias))),
            "quadratic": Quadratic(own, weight, weight.abs(), bias),
            "network": Network(own, "mlp", 3, parameters_of(fresh("mlp", 3, 2, 4, 0))),
        }[kind]

    framed, plain = model(header), model(HEADER)
    close = {"rtol": 2e-2, "atol": 2e-2}
    wanted = plain.scores(frame.apply(raw))
    torch.testing.assert_close(framed.scores(raw.float()), wanted)
    torch.testing.assert_close(
        unpack_classifier(pack_classifier(framed)).scores(raw), wanted, **close
    )
    form, tensors = file_content(framed)
    named = form | {"classes": '["a", "b"]', "fingerprint": "f"}
    torch.testing.assert_close(classifier_of(named, tensors).scores(raw.float()), wanted)
    # Without one, files and messages are as they were.
    assert set(file_content(plain)[1]) == set(plain.arrays())
