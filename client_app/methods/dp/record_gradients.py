"""A site's gradient under differential privacy: per-record clipping, noise added once to the sum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedsurrogate.client_app.methods.dp.record_chunks import aligned, per_record
from fedsurrogate.client_app.methods.dp.units import Units
from fedsurrogate.common.models.augmentation import Change
from fedsurrogate.common.models.loss_landscape import LandscapeRecords
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.privacy.exact_sums import ExactSum, IntegerSum, clip_factors
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum


class PrivateGradient:
    """Private gradients of Poisson samples of a site's units: records or patients.

    Each costs one sampled Gaussian release. A call takes each unit independently with probability
    `sample_rate`, and divides the noisy sum of clipped gradients by `expected`, a public number.

    Args:
        body: the network.
        records: of the site.
        clip: largest norm of one record's gradient, over all parameters.
        noise_multiplier: standard deviation of the noise over the clip.
        sample_rate: probability that a unit takes part in a call.
        expected: public divisor of the sum.
        units: of the records; by default each record is one.

    Attributes:
        noise: standard deviation in every entry of a private gradient.

    Source: FedLAP-DP, algorithm 3. Differs from the paper:
    - Noise is added once to the sum. The paper adds it for every record, which is many times what
    the accountant counts.
    - Sample and noise come from the operating system's generator. In the paper's code augmentation
    re-seeds it by the clock.
    - The divisor is not the actual size of the batch, which is private.
    """

    def __init__(
        self,
        body: nn.Module,
        records: LandscapeRecords,
        clip: float,
        noise_multiplier: float,
        sample_rate: float,
        expected: int,
        units: Units | None = None,
    ) -> None:
        self._units = units or Units(len(records.labels))
        self._body, self._records = body, records
        self._clip, self._multiplier, self._rate, self._expected = (
            clip,
            noise_multiplier,
            sample_rate,
            expected,
        )
        self._clipped = self._drawn = 0
        self._signal: list[float] = []
        self.noise = noise_multiplier * clip / expected

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """One private gradient, by name of the parameter."""
        rows, weights = self._units.sample(self._rate)
        rows = rows.to(self._records.labels.device)
        total, cut = clipped_sum(
            self._body, parameters, self._records.take(rows), self._clip, change, weights
        )
        self._clipped, self._drawn = self._clipped + cut, self._drawn + len(rows)
        flat = IntegerSum.joined(total)
        # All parameters are one statistic: one unit changes all of them together by at most the
        # clip.
        noisy = BoundedSum("gradients", flat, self._clip).noisy(self._multiplier * self._clip)
        self._signal.append(float(flat.value.norm()) / (noisy.sigma * len(noisy.value) ** 0.5))
        parts = torch.split(noisy.value / self._expected, [part.fine.numel() for part in total])
        return {
            name: part.reshape(tensor.shape).to(tensor)
            for (name, tensor), part in zip(parameters.items(), parts, strict=True)
        }

    def facts(self) -> dict[str, float]:
        """Facts about all calls so far; they stay at the site."""
        return {
            "clip-fraction": self._clipped / max(1, self._drawn),
            "signal-to-noise-gradients": sum(self._signal) / max(1, len(self._signal)),
        }


def clipped_sum(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    clip: float,
    change: Change,
    weights: Tensor | None = None,
) -> tuple[list[IntegerSum], int]:
    """The sum of all records' gradients, each clipped and weighted.

    Args:
        body: the network.
        parameters: where the gradients are taken, by name.
        records: of the site.
        clip: largest norm of one record's gradient, over all parameters.
        change: augmentation.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The sum, by parameter, and the number of clipped gradients.
    """

    def one(at: dict[str, Tensor], value: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(body, at, (change(value[None]),))
        return torch.nn.functional.cross_entropy(logits, label[None])

    each_of = vmap(grad(one), in_dims=(None, 0, 0))
    at = {name: tensor.detach().clone() for name, tensor in parameters.items()}

    def gradients(values: Tensor, labels: Tensor) -> list[Tensor]:
        each = list(each_of(at, values, labels).values())
        return [*each, norms_of(each)]

    total, cut, start = sums_like(at.values(), clip), 0, 0
    for *each, norms in per_record(
        gradients, (records.values, records.labels), body, list(at.values())
    ):
        own = weights_of(weights, start, norms)
        cut, start = cut + add_clipped(total, each, norms, clip, own), start + len(norms)
    return [part.total for part in total], cut


def sums_like(tensors: Iterable[Tensor], clip: float) -> list[ExactSum]:
    """Empty sums, one for each tensor.

    Args:
        tensors: whose shapes the sums have.
        clip: largest norm of a gradient that is added.
    """
    return [ExactSum(tensor.shape, clip, tensor.device) for tensor in tensors]


def norms_of(each: Sequence[Tensor]) -> Tensor:
    """Norms (n,), float64, of records' gradients (n, ...) over all parameters."""
    parts = [
        torch.linalg.vector_norm(aligned(part.flatten(1)), dim=1, dtype=torch.float64)
        for part in each
    ]
    norms: Tensor = torch.stack(parts).norm(dim=0)
    return norms


def weights_of(weights: Tensor | None, start: int, norms: Tensor) -> Tensor | None:
    """The weights of the records whose gradients have these norms; None for one.

    Args:
        weights: of all records, (n,); None for one.
        start: index of the first of these records.
        norms: of their gradients, (m,).
    """
    return None if weights is None else weights[start : start + len(norms)].to(norms)


def add_clipped(
    total: Sequence[ExactSum],
    each: Sequence[Tensor],
    norms: Tensor,
    clip: float,
    weights: Tensor | None = None,
) -> int:
    """Clip records' gradients and add them to sums.

    In double precision: a tiny factor rounded to single precision may lose all its digits and be up
    to twice as large. Every step rounds each number by itself, independently of its neighbours.

    Args:
        total: the sums, by parameter.
        each: gradients (n, ...), by parameter.
        norms: of the gradients over all parameters, (n,).
        clip: largest norm.
        weights: of the records, (n,), float64, at most one; None for one.

    Returns:
        How many were clipped.
    """
    factors = clip_factors(norms, clip)
    if weights is not None:
        factors = factors * weights
    lengths = torch.where(factors > 0, norms * factors, 0.0)
    for sum_, gradients in zip(total, each, strict=True):
        scaled = gradients * factors.reshape(-1, *[1] * (gradients.ndim - 1))
        sum_.add(scaled.nan_to_num_(0.0, 0.0, 0.0), weights, lengths)
    return int((norms > clip).sum())
