"""Faults that an audit must find: each replaces one function of the site's code, or of the
mechanism.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fedsurrogate.common.privacy.exact_sums import ExactSum
from fedsurrogate.common.privacy.gaussian_mechanism import discrete_gaussian, seeded


def _integers(parts: int) -> Any:
    """Noise whose variance is divided by this number."""

    def weaker(variance: int, count: int, *source: Any) -> Any:
        return discrete_gaussian(max(1, variance // parts), count, *source)

    return weaker


def _repeated(variance: int, count: int) -> Any:
    """Noise of a generator that begins anew with the same state each time."""
    return discrete_gaussian(variance, count, seeded(bytes(32)))


def _as_they_are(features: Tensor, norm: float) -> tuple[Tensor, float]:
    return features.double(), 0.0


def _whole(norms: Tensor, clip: float) -> Tensor:
    return torch.ones_like(norms)


def _all(count: int, rate: float) -> Tensor:
    return torch.arange(count)


class _Once:
    """The first sample is used in every step."""

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}

    def __call__(self, count: int, rate: float) -> Tensor:
        # Runs have different numbers of records.
        return self._kept.setdefault(count, (torch.rand(count) < rate).nonzero()[:, 0])


_NOISE = "fedsurrogate.common.privacy.gaussian_mechanism.discrete_gaussian"
_SITE = "fedsurrogate.client_app.methods"


def _unbounded(sum_: ExactSum, norms: Tensor, weights: Tensor | None) -> None:
    """No contribution is shortened."""


def planted(fault: str) -> AbstractContextManager[Any]:
    """A context in which this fault is in the code. The mechanism shortens nothing there: it would keep
    the bound that a method has not kept.
    """
    target, replacement = {
        "half of the noise": (_NOISE, _integers(4)),
        "a third of the noise": (_NOISE, _integers(9)),
        "the state of the noise is used again": (_NOISE, _repeated),
        "a quarter of the noise": (
            "fedsurrogate.common.secure_aggregation.protocol.discrete_gaussian",
            _integers(16),
        ),
        "hardly any noise": (_NOISE, _integers(64**2)),
        "features not clipped": ("fedsurrogate.client_app.features.extraction.clip", _as_they_are),
        "embeddings not clipped": (f"{_SITE}.dpcvae.training.clip", _as_they_are),
        "gradients not clipped": (f"{_SITE}.dp.record_gradients.clip_factors", _whole),
        "clip forgotten": (f"{_SITE}.dp.record_gradients.clip_factors", _whole),
        "a name may stand twice": (
            "fedsurrogate.common.wire.surrogate_proto.distinct_names",
            lambda names, what: tuple(names),
        ),
        "all records instead of a sample": (f"{_SITE}.dp.record_gradients.poisson_sample", _all),
        "one sample for all steps": (f"{_SITE}.dp.record_gradients.poisson_sample", _Once()),
        "each image counts, not each bag": (
            "fedsurrogate.client_app.datasets.dataset.pooled",
            lambda images, *rules: images,
        ),
        "each gradient counts, not each patient": (
            f"{_SITE}.dp.record_gradients.unit_weights",
            lambda units, count: torch.ones(count, dtype=torch.float64),
        ),
        "each record counts, not each patient": (
            f"{_SITE}.job.unit_weights",
            lambda units, count: torch.ones(count, dtype=torch.float64),
        ),
    }[fault]
    with ExitStack() as stack:
        stack.enter_context(patch.object(ExactSum, "_factors", _unbounded))
        stack.enter_context(patch(target, replacement))
        # A fault that cannot be planted leaves nothing behind.
        return stack.pop_all()
