"""FedPFT's head by a logistic loss at the coordinator: secure sums of gradients with joint noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.backbones.feature_power import raised
from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.limits import LARGEST_PRIVATE
from fedsurrogate.common.methods.logistic_rounds import (
    BIAS,
    BINS,
    BINS_OF_TWICE,
    BOUND,
    CENTRE,
    CLIP,
    CONSTANT,
    FACTORS,
    GAPS,
    LENGTH,
    LOGISTIC,
    PROJECTION,
    WEIGHT,
)
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_sum.words import Words
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.common.wire.float16 import pack, unpack
from fedsurrogate.strategies.base.introductions import Group
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_slope import USUAL, factor_of
from fedsurrogate.strategies.pooling.plausibility import check_gradients
from fedsurrogate.strategies.pooling.public_mean import read_public
from fedsurrogate.strategies.pooling.public_projection import map_with_words, read_map
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.secure_sum.rounds import SecureRounds

# Largest curvature of the softmax loss, as a part of the second moment (Böhning 1992).
CURVATURE = 0.5
# The ridge, as a multiple of the noise on the mean gradient of all steps together. That of the bias,
# of which there is one number a class, as a part of it.
RIDGE, BIAS_RIDGE = 1.6, 0.1
# Three bins of lengths hold so many deviations of their noise, or say nothing. Of 62 sums of three,
# one that is noise alone does so once in 10,000 runs.
STANDS_OUT = 5.0
# In the memory of a training: number of records; weighted sum of what the steps have observed.
COUNTED, OBSERVED = "counted", "observed"
# A site that was in the first sum, whose records are counted.
IN_FIRST = "in-first."
# Of the later steps: the sum of their noisy gaps under GAPS; the sum of the variances of their noise, and
# their number.
GAP_NOISE = "gap-noise"


class LogisticStart:
    """What sites receive in the first round; without public images a centre and a bound of zero.

    Attributes:
        run: with the public map.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def start(self, inputs: int) -> Tensors:
        """A head of zeros, the public map, and the root mean square of the norm of public features,
        or zero.

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
        centre = torch.zeros(inputs) if public.centre is None else public.centre
        sizes = self.run.plan.messages.sizes(classes, inputs, 1)
        if len(centre) != inputs:
            raise ConfigError(
                f"fedpft.public = {own.fedpft.public!r} has {len(centre)} features; those of "
                f"the sites have {inputs}"
            )
        bound = torch.zeros(1)
        if own.fedpft.public:
            images = raised(read_public(own.fedpft.public), self.run.power)
            bound = public.apply(images).norm(dim=1).square().mean().sqrt()[None]
        model = {
            WEIGHT: torch.zeros(classes, sizes["k"]),
            BIAS: torch.zeros(classes),
            CENTRE: centre,
            BOUND: bound,
        }
        if public.projection is not None:
            # A head of few classes has fewer directions; those of zeros change nothing.
            rows = torch.zeros(sizes["p"], inputs)
            rows[: len(public.projection)] = public.projection
            model[PROJECTION] = rows
        return model


class LogisticRounds(SecureRounds):
    """Rounds of secure sums, from which a head of mapped features is learned."""

    def _agreed_payload(self, group: Group) -> tuple[bytes, int]:
        if not self._projection:
            self._projection = map_with_words(self.config, group.dimension)[1]
        return super()._agreed_payload(group)

    def _learn(self, summed: list[str], numbers: Words) -> None:
        super()._learn(summed, numbers)
        self.outcome.learning["solver"] = LOGISTIC

    def classifier(self, training: Training) -> Classifier:
        """The head after any round; that of the first is zero."""
        return head_of(training)


def head_of(training: Training) -> Head:
    """The head after a round, with the map of features. Sites are sent the one that has no factor."""
    model, mechanism = training.model, training.config.mechanism
    assert mechanism is not None
    factor = _factor(training.memory)
    return Head(
        training.header(),
        factor * model[WEIGHT],
        factor * model[BIAS],
        mechanism.clip,
        model[CENTRE],
        model.get(PROJECTION),
    )


def _factor(memory: Mapping[str, Tensor]) -> float:
    """The factor of all scores, from the gaps of the later steps."""
    if GAPS not in memory:
        return USUAL
    variance, rounds = memory[GAP_NOISE].tolist()
    whole = rounds * float(memory[COUNTED][0]) / math.sqrt(len(FACTORS))
    return factor_of(memory[GAPS] / whole, math.sqrt(variance) / whole)


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Finish a round with a secure sum.

    Args:
        total: of the round.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have.
    """
    if TOTALS in total.tensors:
        in_first = {IN_FIRST + name: torch.ones(1) for name in summed}
        training.memory = {**training.memory, **in_first}
        records, noise = total.tensors[RECORDS], total.sigmas[RECORDS]
    else:
        counted = training.memory[COUNTED].double()
        # Sites that were not in the first round are not counted.
        uncounted = sum(IN_FIRST + name not in training.memory for name in summed)
        most = uncounted * training.config.settings.secure_sum_records
        records, noise = counted[:1] + most, float(counted[1])
    for name in total.tensors.keys() - {RECORDS}:
        _check(total, name, records, noise)
    absorb_sums(total, training)
    training.finish_round(summed)


def absorb_sums(total: Total, training: Training) -> None:
    """What a noisy sum over all sites changes: the centre, or a step.

    Args:
        total: of the round.
        training: before the round; its model and memory change.

    Raises:
        RunError: for a mean that no site accepts in a model.
    """
    if TOTALS in total.tensors:
        records = total.tensors[RECORDS]
        number = max(float(records), total.sigmas[RECORDS], 1.0)
        length = float(training.model[BOUND])
        if CODE in total.tensors:
            length = usual_length(total.tensors[CODE], total.sigmas[CODE])
        shift = length * total.tensors[TOTALS] / number
        centre = _sent(_centre(training.model, shift, length))
        if not (largest := float(centre.abs().max())) < LARGEST_PRIVATE:
            raise RunError(
                f"the mean of the sites' features has an entry of {largest:.3g}; a model of a private "
                f"run has numbers below {LARGEST_PRIVATE:g}. Divide large columns at every site, or "
                "set features.ranges"
            )
        training.model = {**training.model, CENTRE: centre}
        counted = torch.tensor([number, total.sigmas[RECORDS]])
        training.memory = {**training.memory, COUNTED: counted}
    else:
        _step(total, training)
        _note_gaps(total, training)


def usual_length(counts: Tensor, noise: float) -> float:
    """The length that most features have nearly: the mean of three neighbouring bins. Zero where no
    three stand out from the noise: then the features keep their mean.

    Args:
        counts: noisy number of features of each length, (BINS,).
        noise: its standard deviation.

    Example:
        >>> usual_length(torch.eye(64)[34] * 500.0, 1.0)
        2.0
    """
    three = counts.double().unfold(0, 3, 1)
    best = int(three.sum(1).argmax())
    if float(three[best].sum()) < STANDS_OUT * noise * math.sqrt(3):
        return 0.0
    exponents = torch.arange(best, best + 3, dtype=torch.float64) - BINS // 2
    weights = three[best].clamp_min(0)
    return float((weights * 2 ** (exponents / BINS_OF_TWICE)).sum() / weights.sum())


def _centre(model: Tensors, shift: Tensor, most: float) -> Tensor:
    """The centre (d,) from which features have no mean.

    Args:
        model: that sites had in the first round.
        shift: the mean of mapped features, (k,).
        most: its norm at most.
    """
    centre = model[CENTRE].double()
    shift = shift * min(1.0, most / max(float(shift.norm()), 1e-300))
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


def _note_gaps(total: Total, training: Training) -> None:
    """Add the gaps of the later half of the steps, whose heads are nearly the last one."""
    number, steps = training.round, training.config.rounds - 1
    if 2 * number <= steps:
        return
    gaps, noise = total.tensors[GAPS].double(), torch.tensor([total.sigmas[GAPS] ** 2, 1.0])
    if GAPS in training.memory:
        gaps, noise = gaps + training.memory[GAPS], noise + training.memory[GAP_NOISE]
    training.memory = {**training.memory, GAPS: gaps, GAP_NOISE: noise}


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
