"""A site's gradient under differential privacy: every record's clipped, noise once on their sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from client_app.methods.dp.record_chunks import per_record
from common.models.augmentation import Change
from common.models.loss_landscape import LandscapeRecords
from common.models.parameters import Tensors
from common.privacy.exact_sums import ExactSum
from common.privacy.gaussian_mechanism import Statistic, release, system_uniforms


class PrivateGradient:
    """Gradients of Poisson samples of a site's records, each of which costs one sampled Gaussian release.

    A look takes every record with probability `sample_rate`, independently, and divides the noisy sum of clipped gradients
    by `expected`, a public number. Source: FedLAP-DP, algorithm 3. Differs from the paper: noise is added once to the sum,
    not inside it for every record, where it would be many times what the accountant counts; sample and noise come from
    the operating system's generator, where the paper's code draws them from one that augmentation re-seeds by the clock;
    and the divisor is not the realised size of the batch, which is private.
    """

    def __init__(
        self,
        body: nn.Module,
        records: LandscapeRecords,
        clip: float,
        noise_multiplier: float,
        sample_rate: float,
        expected: int,
    ) -> None:
        self._body, self._records = body, records
        self._clip, self._multiplier, self._rate, self._expected = clip, noise_multiplier, sample_rate, expected
        self._clipped = self._drawn = 0
        self._signal: list[float] = []
        self.noise = noise_multiplier * clip / expected

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """One look at the records."""
        rows = poisson_sample(len(self._records.labels), self._rate).to(self._records.labels.device)
        total, cut = clipped_sum(self._body, parameters, self._records.take(rows), self._clip, change)
        self._clipped, self._drawn = self._clipped + cut, self._drawn + len(rows)
        flat = torch.cat([part.flatten() for part in total])
        # All parameters are one statistic: one record moves all of them together by at most the clip.
        (noisy,) = release([Statistic("gradients", flat, self._clip, 1.0)], self._multiplier)
        self._signal.append(float(flat.norm()) / (noisy.sigma * len(flat) ** 0.5))
        parts = torch.split(noisy.value / self._expected, [part.numel() for part in total])
        return {
            name: part.reshape(tensor.shape).to(tensor)
            for (name, tensor), part in zip(parameters.items(), parts, strict=True)
        }

    def facts(self) -> dict[str, float]:
        """About all looks so far; they stay at the site."""
        return {
            "clip-fraction": self._clipped / max(1, self._drawn),
            "signal-to-noise-gradients": sum(self._signal) / max(1, len(self._signal)),
        }


def clipped_sum(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, clip: float, change: Change
) -> tuple[list[Tensor], int]:
    """The sum (float64) of all records' gradients, each of norm at most `clip`, by parameter; and how many were longer."""

    def one(at: dict[str, Tensor], value: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(body, at, (change(value[None]),))
        return torch.nn.functional.cross_entropy(logits, label[None])

    each_of = vmap(grad(one), in_dims=(None, 0, 0))
    at = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def gradients(values: Tensor, labels: Tensor) -> list[Tensor]:
        each = list(each_of(at, values, labels).values())
        return [*each, norms_of(each)]

    total, cut = sums_like(at.values(), clip), 0
    for *each, norms in per_record(gradients, (records.values, records.labels), body, list(at.values())):
        cut += add_clipped(total, each, norms, clip)
    return [part.value for part in total], cut


def poisson_sample(count: int, rate: float) -> Tensor:
    """Rows of so many, each taken with probability `rate`, independently, by numbers as secret as the noise.

    53 bits each: with 24 a tiny rate would be 6e-8.
    """
    return (system_uniforms(count) < rate).nonzero().squeeze(1)


def clip_factors(norms: Tensor, clip: float) -> Tensor:
    """What brings gradients of these norms (n,), float64, to norm `clip` at most; zero for those that say nothing."""
    # The bound must hold in exact arithmetic, and for the sum that is computed. A norm over d entries is off by d 2^-53 at
    # most, 1e-8 for a hundred million; factor and product by 2^-53; the sum by 1e-8 at a hundred million records (ExactSum).
    shortest = torch.finfo(torch.float64).tiny
    return torch.where(norms.isfinite(), (clip * (1 - 1e-6) / norms.clamp_min(shortest)).clamp_max(1.0), 0.0)


def sums_like(tensors: Iterable[Tensor], clip: float) -> list[ExactSum]:
    """Empty sums, one for each tensor, of gradients of norm at most `clip`."""
    return [ExactSum(tensor.shape, clip, tensor.device) for tensor in tensors]


def norms_of(each: Sequence[Tensor]) -> Tensor:
    """Norms (n,), float64, of records' gradients (n, ...) over all parameters."""
    parts = [torch.linalg.vector_norm(part.flatten(1), dim=1, dtype=torch.float64) for part in each]
    norms: Tensor = torch.stack(parts).norm(dim=0)
    return norms


def add_clipped(total: Sequence[ExactSum], each: Sequence[Tensor], norms: Tensor, clip: float) -> int:
    """Add records' gradients (n, ...) with these norms (n,), each shortened to `clip`, to sums; how many were longer.

    In double precision: a factor that is rounded to single may have lost all its digits, and is then up to twice as large.
    Every step rounds each number by itself, whatever stands next to it.
    """
    factors = clip_factors(norms, clip)
    for sum_, gradients in zip(total, each, strict=True):
        scaled = gradients * factors.reshape(-1, *[1] * (gradients.ndim - 1))
        sum_.add(scaled.nan_to_num_(0.0, 0.0, 0.0))
    return int((norms > clip).sum())
