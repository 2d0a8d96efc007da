"""Faults that an audit must find: each replaces one function of the site's code, or of the
mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from common.secure_sum import noise


def _normals(factor: float) -> Any:
    def weaker(shape: Sequence[int]) -> Tensor:
        return factor * torch.randn(tuple(shape), dtype=torch.float64)

    return weaker


def _repeated(shape: Sequence[int]) -> Tensor:
    """Noise of a generator that begins anew with the same state each time."""
    return torch.randn(
        tuple(shape), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


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


def _weaker_integers(variance: int, count: int, *source: Any) -> Any:
    # A quarter of the noise.
    return _integers(max(1, variance // 16), count, *source)


_integers = noise.discrete_gaussian
_SITE = "client_app.methods"


def planted(fault: str) -> AbstractContextManager[Any]:
    """A context in which this fault is in the code."""
    target, replacement = {
        "half of the noise": ("common.privacy.gaussian_mechanism.system_normals", _normals(0.5)),
        "a third of the noise": (
            "common.privacy.gaussian_mechanism.system_normals",
            _normals(1 / 3),
        ),
        "the state of the noise is used again": (
            "common.privacy.gaussian_mechanism.system_normals",
            _repeated,
        ),
        "a quarter of the noise": ("common.secure_sum.noise.discrete_gaussian", _weaker_integers),
        "hardly any noise": (f"{_SITE}.fedpft.private_surrogate.system_normals", _normals(1 / 64)),
        "features not clipped": ("client_app.features.on_disk.clip", _as_they_are),
        "embeddings not clipped": (f"{_SITE}.dpcvae.training.clip", _as_they_are),
        "gradients not clipped": (f"{_SITE}.dp.linear_clipping.clip_factors", _whole),
        "clip forgotten": (f"{_SITE}.dp.record_gradients.clip_factors", _whole),
        "all records instead of a sample": (f"{_SITE}.dp.dp_sgd.poisson_sample", _all),
        "one sample for all steps": (f"{_SITE}.dp.dp_sgd.poisson_sample", _Once()),
        "each record counts, not each patient": (
            f"{_SITE}.fedpft.private_surrogate.unit_weights",
            lambda units, count: torch.ones(count, dtype=torch.float64),
        ),
    }[fault]
    return patch(target, replacement)
