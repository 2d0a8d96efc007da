"""The model that sites receive for an evaluation: sites accept it, and it decides like the model of
the run.
"""

from __future__ import annotations

import pytest
import torch

from fedsurrogate.common.errors import LARGEST_PRIVATE
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import unpack_classifier
from fedsurrogate.strategies.counting.strategy import bounded, payload_of

HEADER = Header("fedpft", "run", "coordinator", "f", ("no", "yes", "perhaps"))


def head(size: float) -> Head:
    generator = torch.Generator().manual_seed(0)
    return Head(
        HEADER,
        size * torch.randn(3, 20, generator=generator),
        4 * size * torch.randn(3, generator=generator),
    )


@pytest.mark.parametrize("size", [1.0, 9e3, 3e4, 1e9])
def test_a_head_with_large_weights_decides_the_same_within_the_limit_of_sites(size: float) -> None:
    """A private run leaves such weights where the noise that is subtracted is nearly all of a
    variance.
    """
    honest = head(size)
    sent = bounded(honest)
    x = torch.randn(2000, 20, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sent.predict(x), honest.predict(x))
    assert all(each.abs().max() < LARGEST_PRIVATE for each in sent.arrays().values())
    assert (sent is honest) == (size == 1.0)
    apart = [model.scores(x).double() for model in (sent, honest)]
    assert torch.equal(*((scores[:, 1] - scores[:, 0]).argsort(stable=True) for scores in apart))


def test_what_is_sent_is_the_same_when_it_is_read_again() -> None:
    payload, digest = payload_of(head(3e4))
    received = unpack_classifier(payload)
    assert all(each.abs().max() < LARGEST_PRIVATE for each in received.arrays().values())
    assert payload_of(received)[1] == digest


@pytest.mark.parametrize("size", [float("inf"), float("nan")])
def test_numbers_that_are_not_finite_are_left_for_the_checks(size: float) -> None:
    broken = head(size)
    assert bounded(broken) is broken
