"""DP-SGD at a site: Poisson samples, per-record clipping, noise added once to the sum (Abadi et al.
2016).

With noise that all sites add together, a site only clips and sums.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp.linear_clipping import clipped_sums
from fedsurrogate.client_app.methods.dp.record_chunks import per_record
from fedsurrogate.client_app.methods.dp.record_gradients import (
    add_clipped,
    norms_of,
    sums_like,
    weights_of,
)
from fedsurrogate.client_app.methods.dp.units import Units
from fedsurrogate.client_app.methods.local_training import PLAIN, Losses, Variant, class_losses
from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.common.privacy.exact_sums import IntegerSum
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import FedAvgSettings

USER = "DP-SGD"
# From features, labels and weights (None for one) of records to the sum of their clipped gradients
# by parameter, and the number of clipped ones.
ClippedSums = Callable[[Tensor, Tensor, Tensor | None], tuple[list[IntegerSum], int]]


class UnitRecords(NamedTuple):
    """Records of a site, and whose they are.

    Attributes:
        features: (n, d).
        labels: indices of classes, (n,), or the code of another target, (n, q).
        units: of privacy.
    """

    features: Tensor
    labels: Tensor
    units: Units


def train_privately(
    module: nn.Module,
    records: UnitRecords,
    settings: FedAvgSettings,
    claim: Mechanism,
    rate: float,
    variant: Variant = PLAIN,
) -> dict[str, float]:
    """Train a network in place by DP-SGD.

    A step takes each unit, a record or a patient, independently with probability
    `settings.sample_rate` and divides the noisy sum by `settings.batch_size`. Both are public; the
    number of units, or of those drawn, is private. So a site with more units takes longer steps,
    which agrees with FedAvg's weights.
    FedProx's term is added after the noise: it depends on public numbers only, and Opacus' hooks
    would overwrite it.

    Args:
        module: the network.
        records: of the site.
        settings: steps, sample rate and divisor.
        claim: its clip and noise multiplier are used.
        rate: learning rate.
        variant: the losses of records, and the weight of FedProx's term.

    Returns:
        Facts that stay at the site.

    Source: Abadi et al. 2016.
    """
    summed = _sums_of(module, claim.clip, variant.losses)
    start = [parameter.detach().clone() for parameter in module.parameters()]
    clipped = drawn = 0
    signal: list[float] = []
    for _ in range(settings.private_steps):
        rows, weights = records.units.sample(settings.sample_rate)
        features, labels, _ = records
        if len(rows) < len(labels):
            features, labels = features[rows], labels[rows]
        total, cut = summed(features, labels, weights)
        clipped, drawn = clipped + cut, drawn + len(rows)
        flat = IntegerSum.joined(total)
        # All parameters are one statistic: one unit changes all of them together by at most the
        # clip.
        noisy = BoundedSum("gradients", flat, claim.clip).noisy(claim.noise_multiplier * claim.clip)
        signal.append(float(flat.value.norm()) / (noisy.sigma * len(noisy.value) ** 0.5))
        parts = torch.split(
            noisy.value / settings.batch_size, [part.fine.numel() for part in total]
        )
        with torch.no_grad():
            for parameter, before, part in zip(module.parameters(), start, parts, strict=True):
                step = part.reshape(parameter.shape).to(parameter)
                parameter.sub_(rate * (step + variant.mu * (parameter - before)))
    return {
        "clip-fraction": clipped / max(1, drawn),
        "signal-to-noise-gradients": sum(signal) / len(signal),
    }


def clipped_gradients(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    clip: float,
    losses: Losses = class_losses,
    weights: Tensor | None = None,
) -> dict[str, Tensor]:
    """The sum of all records' gradients, each clipped and weighted.

    Args:
        module: the network.
        features: of the records, (n, d).
        labels: indices of classes, (n,), or the code of another target, (n, q).
        clip: largest norm of one record's gradient, over all parameters.
        losses: of records.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The sum (float64), by parameter.
    """
    names = [name for name, _ in module.named_parameters()]
    total, _ = _sums_of(module, clip, losses)(features, labels, weights)
    return dict(zip(names, (part.value for part in total), strict=True))


def _sums_of(module: nn.Module, clip: float, losses: Losses) -> ClippedSums:
    """The function that sums clipped gradients. For linear layers no gradient of a single record is
    stored, which takes a small part of the time.
    """
    layers = [each for each in module.modules() if [*each.parameters(recurse=False)]]
    if not all(isinstance(each, nn.Linear) for each in layers):
        with needed_for(USER):
            from opacus import GradSampleModule

        sampled = GradSampleModule(module, loss_reduction="sum")
        return lambda some, truth, weights: _clipped_sum(
            sampled, some, truth, clip, losses, weights
        )
    modules = nn.ModuleList([module])

    def of_linear_layers(
        features: Tensor, labels: Tensor, weights: Tensor | None
    ) -> tuple[list[IntegerSum], int]:
        sums, cut = clipped_sums(
            modules,
            lambda some, truth: losses(module(some), truth),
            (features, labels),
            clip,
            weights,
        )
        return list(sums.values()), cut

    return of_linear_layers


def _clipped_sum(
    module: nn.Module,
    features: Tensor,
    labels: Tensor,
    clip: float,
    losses: Losses = class_losses,
    weights: Tensor | None = None,
) -> tuple[list[IntegerSum], int]:
    """The sum, by parameter, of all records' gradients clipped at norm `clip` and weighted; and
    the number of clipped ones.
    """
    parameters = list(module.parameters())

    def gradients(some: Tensor, truth: Tensor) -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            # Opacus' hooks fire on outputs as well as inputs; only the outputs' gradients are used.
            warnings.filterwarnings("ignore", "Full backward hook is firing")
            losses(module(some), truth).sum().backward()  # type: ignore[no-untyped-call]
        each = [parameter.grad_sample for parameter in parameters]  # type: ignore[attr-defined]
        return [*each, norms_of(each)]

    total, cut, start = sums_like(parameters, clip), 0, 0
    for *each, norms in per_record(gradients, (features, labels), module, parameters):
        own = weights_of(weights, start, norms)
        cut, start = cut + add_clipped(total, each, norms, clip, own), start + len(norms)
    return [part.total for part in total], cut
