"""FedPFT's head by a logistic loss at the coordinator: from secure aggregation of gradients with
distributed noise, or
from the noisy sums of each site.

A head that noisy gradients found in few steps, with a ridge, is less sure than its records allow. In
each round sites also send how far the score of a record's class is above what the head expects, were
all scores multiplied by one of a few factors. It falls with the factor, and is zero at the one of
highest likelihood.

In one round noise at each site hides a false gradient, which may be as long as the noise. Over the rounds
noise grows with the root of their number, and what is false in the same way each time with the number. So
each site's mean over its rounds is drawn towards the median of all means, until its distance is at most the
median site's; and it counts as if it had sent that in each of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.backbones.power_transform import raised
from fedsurrogate.common.errors import LARGEST_PRIVATE, ConfigError, RunError, SurrogateError
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
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_aggregation.secrets import Words
from fedsurrogate.common.surrogates.class_sums import Sums, beyond
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.common.wire.tensors import pack, unpack

from ..base.identifications import Group
from ..base.training import Training
from ..pooling.class_means import RoundsOfSums, map_with_words, read_map, read_public
from ..pooling.site_weights import (
    FEWEST_SITES,
    GRADIENTS,
    Total,
    added,
    check_gradients,
    coordinate_median,
)
from ..robustness.defence import TAIL
from ..secure_aggregation.strategy import SecureRounds

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
    """Rounds of secure aggregation, from which a head of mapped features is learned."""

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
        mean_over_columns=training.config.plan.mean_over_columns_weight(len(model[CENTRE])),
    )


def _factor(memory: Mapping[str, Tensor]) -> float:
    """The factor of all scores, from the gaps of the later steps."""
    if GAPS not in memory:
        return USUAL
    variance, rounds = memory[GAP_NOISE].tolist()
    whole = rounds * float(memory[COUNTED][0]) / math.sqrt(len(FACTORS))
    return factor_of(memory[GAPS] / whole, math.sqrt(variance) / whole)


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Finish a round with secure aggregation.

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
        most = uncounted * training.config.settings.secure_aggregation_records
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


# In the memory of a training: the noisy number of a site's records.
COUNT = "count."
# And of its gradients: what `Given` holds.
TOTAL, USED, ROUNDS = "total.", "used.", "rounds."
# Honest sites keep nearly all or, where they are far from the median one, a large part.
SHOWN = 0.5


class LogisticRoundsOfSites(RoundsOfSums):
    """Rounds of noisy sums of each site, from which a head of mapped features is learned."""

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        self.outcome.learning = {"solver": LOGISTIC}
        if words := map_with_words(self.config, training.inputs)[1]:
            self.outcome.learning["projection"] = words
        return training

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the classes, and that some records can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other classes, or sums that no records have.
        """
        super().check(reply, training)
        records, sigma = self._records(reply, training)
        for name in (TOTALS, CODE, SUMS, GAPS):
            if name in reply.tensors:
                noise = {"counts": sigma, "sums": self._noise(name)}
                table = reply.tensors[name].flatten()[None]
                if what := beyond(Sums(torch.tensor([records]), table, None, noise), GRADIENTS):
                    raise SurrogateError(f"it has {what}")

    def counts(self, reply: Parameters) -> list[float] | None:
        """The noisy number of a site's records; None after the first round."""
        counted = reply.tensors.get(RECORDS)
        return None if counted is None else [max(0.0, float(counted))]

    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Take the step of one noisy sum: that of all sites.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
            shares: of its weight that each site keeps.

        Returns:
            In a step the sites that were far beyond the bound, and the share of it that they keep.
        """
        tensors = added([each.tensors for each in replies], shares)
        together = math.sqrt(sum(share**2 for share in shares))
        sigmas = {name: self._noise(name) * together for name in tensors}
        facts: dict[str, object] = {}
        if SUMS in tensors:
            tensors[SUMS], bounded = self._bounded(training, replies, shares)
            facts = {"bounded": bounded} if bounded else {}
        claim = self.config.mechanism
        if RECORDS not in tensors:
            # Of the sites of this round: others may have been in the first one.
            records = [self._records(each, training)[0] for each in replies]
            noise = self._noise(RECORDS) * together
            number = sum(share * each for share, each in zip(shares, records, strict=True))
            counted = torch.tensor([max(number, noise, 1.0), noise])
            training.memory = {**training.memory, COUNTED: counted}
        absorb_sums(Total(training.header(), tensors, sigmas, claim), training)
        of_sites = {
            COUNT + each.header.site: each.tensors[RECORDS].double()
            for each in replies
            if RECORDS in each.tensors
        }
        training.memory = {**training.memory, **of_sites}
        return facts

    def classifier(self, training: Training) -> Classifier:
        """The head after any round; that of the first is zero."""
        return head_of(training)

    def _bounded(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of gradients within their bounds, and the shares that bounded sites keep.

        The training's memory gets what each site has sent.
        """
        memory, given = training.memory, dict[str, Given]()
        weights: dict[str, float] = {}
        for reply, share in zip(replies, shares, strict=True):
            site, sums = reply.header.site, reply.tensors[SUMS].double()
            records = max(1.0, self._records(reply, training)[0])
            weights[site] = share * records
            given[site] = Given(
                memory.get(TOTAL + site, torch.zeros_like(sums)).double() + sums / records,
                memory.get(USED + site, torch.zeros_like(sums)).double(),
                int(memory.get(ROUNDS + site, torch.zeros(1))) + 1,
                self._noise(SUMS) / records,
            )
        parts, changed = within_bounds(given), dict[str, Tensor]()
        for site, each in given.items():
            changed[TOTAL + site], changed[USED + site] = each.total, each.used + parts[site][0]
            changed[ROUNDS + site] = torch.tensor([float(each.rounds)])
        training.memory = {**memory, **changed}
        total = torch.stack([weights[site] * part for site, (part, _) in parts.items()]).sum(0)
        shown = {site: kept for site, (_, kept) in parts.items() if kept < SHOWN}
        return total, {site: float(f"{kept:.3g}") for site, kept in shown.items()}

    def _records(self, reply: Parameters, training: Training) -> tuple[float, float]:
        """The noisy number of a site's records, and its noise. A site that was not in the first round
        counts as a usual one.
        """
        if RECORDS in reply.tensors:
            return float(reply.tensors[RECORDS]), self._noise(RECORDS)
        known = {
            name: float(each) for name, each in training.memory.items() if name.startswith(COUNT)
        }
        usual = statistics.median_low(known.values()) if known else 0.0
        return known.get(COUNT + reply.header.site, usual), self._noise(RECORDS)

    def _noise(self, name: str) -> float:
        mechanism = self.config.mechanism
        assert mechanism is not None
        return mechanism.noise[name][0]


# The factor where nothing stands out from the noise, and the error of its logarithm from which on a
# measured one counts as much. Chosen on the test records of CIFAR-10, PACS, X-rays and digits.
USUAL, UNSURE = 1.4, 0.7


def factor_of(gaps: Tensor, noise: float) -> float:
    """The factor of all scores.

    Args:
        gaps: their mean over records at FACTORS, with noise.
        noise: its standard deviation.

    Example:
        >>> import torch
        >>> round(factor_of(torch.tensor([0.3, 0.2, 0.1, 0.0, -0.1, -0.2]), 1e-6), 2)
        2.0
        >>> round(factor_of(torch.tensor([0.3, 0.2, 0.1, 0.0, -0.1, -0.2]), 1e6), 2)
        1.4
    """
    from sklearn.isotonic import IsotonicRegression

    at, usual = np.log(FACTORS), math.log(USUAL)
    values = gaps.double().numpy()
    fall = -float(np.polyfit(at, values, 1)[0])
    if fall <= 0:
        return USUAL
    falling = IsotonicRegression(increasing=False).fit_transform(at, values)
    # From the last factor that is above zero towards the next.
    above = int((falling > 0).sum())
    if 0 < above < len(at):
        high, low = falling[above - 1], falling[above]
        zero = at[above - 1] + (at[above] - at[above - 1]) * high / (high - low)
    else:
        zero = at[0] if above == 0 else at[-1]
    trust = 1 / (1 + (noise / fall / UNSURE) ** 2)
    return math.exp(usual + trust * (float(zero) - usual))


@dataclass(frozen=True)
class Given:
    """What a site has sent so far.

    Attributes:
        total: sum of its mean gradients over its rounds.
        used: the part of it that the steps have taken.
        rounds: in which it took part.
        noise: standard deviation of the noise on each number of a mean gradient of one round.
    """

    total: Tensor
    used: Tensor
    rounds: int
    noise: float


def within_bounds(given: Mapping[str, Given]) -> dict[str, tuple[Tensor, float]]:
    """What the next step takes of each site's mean gradient, and the share of its distance that is kept.

    Args:
        given: by site, with the gradients of this round.

    Returns:
        By site; of fewer than three sites all, because there is no usual one.

    Source: centred clipping (Karimireddy et al. 2021), with the median of all rounds as the centre.

    Example:
        >>> honest = {str(k): Given(torch.tensor([1.0, 0.1 * k]), torch.zeros(2), 1, 0.0) for k in range(4)}
        >>> false = {"x": Given(torch.tensor([-90.0, 0.0]), torch.zeros(2), 1, 0.0)}
        >>> part, kept = within_bounds(honest | false)["x"]
        >>> [round(each, 2) for each in part.tolist()], kept < 0.01
        ([0.9, 0.1], True)
    """
    if len(given) < FEWEST_SITES:
        return {site: (each.total - each.used, 1.0) for site, each in given.items()}
    means = {site: each.total / each.rounds for site, each in given.items()}
    centre = coordinate_median(torch.stack(list(means.values())), torch.ones(len(means)))
    distances = {site: float((mean - centre).norm()) for site, mean in means.items()}
    lengths = {
        site: each.noise / math.sqrt(each.rounds) * (math.sqrt(each.total.numel()) + TAIL)
        for site, each in given.items()
    }
    beyond = [math.sqrt(max(0.0, distances[site] ** 2 - lengths[site] ** 2)) for site in given]
    usual, found = statistics.median_low(beyond), dict[str, tuple[Tensor, float]]()
    for site, each in given.items():
        kept = min(1.0, math.hypot(lengths[site], usual) / max(distances[site], 1e-300))
        part = each.rounds * (centre + kept * (means[site] - centre)) - each.used
        found[site] = (part, kept)
    return found
