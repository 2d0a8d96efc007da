"""FedPFT's head by a logistic loss at the coordinator: secure sums of gradients with joint noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.methods.logistic_rounds import (
    BIAS,
    BOUND,
    CENTRE,
    CLIP,
    CONSTANT,
    LENGTH,
    PROJECTION,
    WEIGHT,
)
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.targets.target import RECORDS, SUMS, TOTALS
from fedsurrogate.common.wire.float16 import pack, unpack
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.plausibility import check_gradients
from fedsurrogate.strategies.pooling.public_mean import read_public
from fedsurrogate.strategies.pooling.public_projection import read_map
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.secure_sum.rounds import SecureRounds

# Largest curvature of the softmax loss, as a part of the second moment (Böhning 1992).
CURVATURE = 0.5
# The ridge, as a multiple of the noise on the mean gradient of all steps together. That of the bias,
# of which there is one number a class, as a part of it.
RIDGE, BIAS_RIDGE = 1.6, 0.1
# In the memory of a training: number of records; weighted sum of what the steps have observed.
COUNTED, OBSERVED = "counted", "observed"


class Start:
    """What sites receive in the first round.

    Attributes:
        run: with the public map.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def start(self, inputs: int) -> Tensors:
        """A head of zeros, the public map, and the root mean square of the norm of public features.

        Args:
            inputs: number of features.

        Raises:
            ConfigError: for a map of another number of features.
        """
        # The size of a model is first asked for on a device without memory; the map is read anyway.
        with torch.device("cpu"):
            return {name: _sent(tensor) for name, tensor in self._model(inputs).items()}

    def _model(self, inputs: int) -> Tensors:
        own = self.run.settings
        public, classes = read_map(self.run, inputs), len(own.classes)
        assert public.centre is not None
        sizes = self.run.plan.messages.sizes(classes, inputs, 1)
        if len(public.centre) != inputs:
            raise ConfigError(
                f"fedpft.public = {own.fedpft.public!r} has {len(public.centre)} features; those of "
                f"the sites have {inputs}"
            )
        images = raised(read_public(own.fedpft.public), self.run.power)
        norms = public.apply(images).norm(dim=1)
        model = {
            WEIGHT: torch.zeros(classes, sizes["k"]),
            BIAS: torch.zeros(classes),
            CENTRE: public.centre,
            BOUND: norms.square().mean().sqrt()[None],
        }
        if public.projection is not None:
            # A head of few classes has fewer directions; those of zeros change nothing.
            rows = torch.zeros(sizes["p"], inputs)
            rows[: len(public.projection)] = public.projection
            model[PROJECTION] = rows
        return model


class LogisticRounds(SecureRounds):
    """Rounds of secure sums, from which a head of mapped features is learned."""

    def classifier(self, training: Training) -> Classifier:
        """The head after any round; that of the first is zero."""
        model, mechanism = training.model, self.config.mechanism
        assert mechanism is not None
        return Head(
            training.header(),
            model[WEIGHT],
            model[BIAS],
            mechanism.clip,
            model[CENTRE],
            model.get(PROJECTION),
        )


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Finish a round with a secure sum: the centre, or a step.

    Args:
        total: of the round.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have.
    """
    if TOTALS in total.tensors:
        records = total.tensors[RECORDS]
        _check(total, TOTALS, records, total.sigmas[RECORDS])
        number = max(float(records), total.sigmas[RECORDS], 1.0)
        training.model = {
            **training.model,
            CENTRE: _sent(_centre(training.model, total.tensors[TOTALS] / number)),
        }
        training.memory = {COUNTED: torch.tensor([number, total.sigmas[RECORDS]])}
    else:
        counted = training.memory[COUNTED].double()
        _check(total, SUMS, counted[:1], float(counted[1]))
        _step(total, training)
    training.finish_round(summed)


def _centre(model: Tensors, mean: Tensor) -> Tensor:
    """The centre (d,) from which features have no mean.

    Args:
        model: that sites had in the first round.
        mean: of what they summed, (k,), of norm at most one.
    """
    centre, shift = model[CENTRE].double(), float(model[BOUND]) * mean
    shift = shift / max(1.0, float(mean.norm()))
    projection = model.get(PROJECTION)
    if projection is None:
        return centre + shift
    # Its projection is the mean.
    back: Tensor = torch.linalg.pinv(projection.double()) @ shift
    return centre + back


def _step(total: Total, training: Training) -> None:
    """Move the head to the mean of what the steps so far have observed.

    A step observes the minimum of the loss: the head minus its gradient over the curvature, of which
    an upper bound serves. Its noise is that of one gradient, and the mean of all steps has the noise
    of one release with the whole budget. Later steps are nearer to the minimum and weigh more.
    """
    counted, steps = float(training.memory[COUNTED][0]), training.config.rounds - 1
    sums = total.tensors[SUMS]
    k = sums.shape[1] - 1
    weight, bias = training.model[WEIGHT].double(), training.model[BIAS].double()
    # In units of features with the constant.
    head = LENGTH * torch.cat([weight, bias[:, None] / CONSTANT], 1)
    noise = total.sigmas[SUMS] * CLIP / counted / math.sqrt(steps)
    curvature = torch.full((k + 1,), CURVATURE / LENGTH**2 / k, dtype=torch.float64)
    curvature[-1] = CURVATURE * (CONSTANT / LENGTH) ** 2
    ridge = torch.full((k + 1,), RIDGE * noise, dtype=torch.float64)
    ridge[-1] *= BIAS_RIDGE
    number = training.round
    observed = number * (curvature * head + CLIP * sums / counted)
    if OBSERVED in training.memory:
        observed += training.memory[OBSERVED].double()
    head = observed / (number * (number + 1) / 2) / (curvature + ridge) / LENGTH
    training.memory = {**training.memory, OBSERVED: observed}
    training.model = {
        **training.model,
        WEIGHT: _sent(head[:, :k]),
        BIAS: _sent(CONSTANT * head[:, k]),
    }


def _check(total: Total, name: str, records: Tensor, noise: float) -> None:
    """Check the length of a sum over records, each of which adds at most one.

    Args:
        total: of the round.
        name: of the sum.
        records: their noisy number, (1,).
        noise: its standard deviation.

    Raises:
        RunError: for a sum that no records have.
    """
    sigmas = {RECORDS: noise, "gradients": total.sigmas[name]}
    tensors = {RECORDS: records, "gradients": total.tensors[name].flatten()}
    check_gradients(replace(total, tensors=tensors, sigmas=sigmas))


def _sent(tensor: Tensor) -> Tensor:
    """A tensor as sites receive it, rounded to 16 bits."""
    return unpack(pack(tensor), "sent", tuple(tensor.shape))
