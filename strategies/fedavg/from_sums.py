"""A round of FedAvg from a secure sum: the mean update, weighted by records, or a step along summed
noisy gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedsurrogate.common.models.networks import OFFSETS
from fedsurrogate.common.models.parameters import Parameters, by_name
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg.aggregation import aggregate
from fedsurrogate.strategies.pooling.plausibility import check_gradients, weight_of
from fedsurrogate.strategies.pooling.total import Total

# Of the steps with joint noise. A bias acts as a feature of value one, and features of records have
# norm one: at the full rate the bias alone would double the largest curvature.
MOMENTUM, BIAS = 0.9, 0.1
# Standard deviations that the length of noise exceeds its root mean square by hardly ever.
TAIL = 6.0
VELOCITY, RECORDS = "velocity.", "records"


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Update the model with a sum over sites, and finish the round.

    Args:
        total: the sum of weighted updates, or of gradients with joint noise.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for a sum that no records have.
    """
    if total.claim is not None and total.claim.name == JOINT_SUMS:
        training.model, training.memory = _step(total, total.claim.clip, training)
    else:
        training.model, training.memory = _mean_update(total, training, len(summed))
    training.finish_round(summed)


def _mean_update(
    total: Total, training: Training, sites: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model moved by the mean update, and the memory of the aggregator."""
    # With noise at every site, all weigh the same.
    public = (
        float(training.config.settings.secure_sum_records)
        if training.config.settings.epsilon
        else 0.0
    )
    records = weight_of(total, sites, public)
    moved = {
        name: part.float()
        for name, part in by_name(total.tensors["update"] / records, training.shapes()).items()
    }
    mean = Parameters(training.header(), training.round + 1, moved, int(records))
    return aggregate(training.config, training.model, [mean], training.memory, sites)


def _step(
    total: Total, clip: float, training: Training
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model after a step with momentum along the mean of clipped gradients, and the memory for
    the next one.

    All of it is computed from noisy sums, so it costs no privacy. The number of records is the mean
    of all rounds' noisy numbers, and at least the noise on it. As gradients have norm one, the mean
    is shortened to one, plus the noise.
    """
    check_gradients(total)
    settings, rounds = training.config.settings.fedavg, training.round + 1
    counted = training.memory.get(RECORDS, torch.zeros(1)) + total.tensors["records"].float()
    records = max(float(counted) / rounds, total.sigmas["records"] / math.sqrt(rounds), 1.0)
    objective = training.config.objective
    usual = 0.0 if objective is None else objective.rates.joint
    rate = settings.joint_rate(len(training.classes), usual)
    summed, sigma = total.tensors["gradients"], total.sigmas["gradients"]
    longest = records + sigma * (math.sqrt(summed.numel()) + TAIL)
    mean = summed * (clip / records * longest / max(float(summed.norm()), longest))
    model, memory = {}, {RECORDS: counted}
    for name, gradient in by_name(mean, training.shapes()).items():
        before = training.memory.get(VELOCITY + name, torch.zeros_like(training.model[name]))
        memory[VELOCITY + name] = velocity = MOMENTUM * before + gradient.float()
        slower = BIAS if settings.kind == "linear" and name in OFFSETS else 1.0
        model[name] = training.model[name] - slower * rate * velocity
    return model, memory
