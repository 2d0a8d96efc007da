"""FedAvg and related methods at the coordinator: a reply is the change of the model in a site's training.
Flower's own FedAvg, FedProx and FedYogi aggregate at 32 bits, and SCAFFOLD; or one secure
aggregation a round. FedRep
averages the body of the network, and every site's head stays at the site.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, FedYogi
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import Field, ModelTraining
from fedsurrogate.common.models.classifiers import Classifier, Network
from fedsurrogate.common.models.networks import OFFSETS, body_of, fresh, parameters_of
from fedsurrogate.common.models.parameters import (
    CONTROL,
    Parameters,
    Tensors,
    by_name,
    split_control,
)
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, Mechanism
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import FedAvgSettings
from fedsurrogate.common.wire.records import Info, to_record

from .base.collection import Collection
from .base.federation import COMPARE
from .base.outcome import Defended, Site, share_in
from .base.rounds import RoundsOfParameters
from .base.training import Training
from .pooling import site_weights
from .robustness.defence import defend_updates


class Updates(RoundsOfParameters):
    """FedAvg and related methods: a reply is the change of the model in a site's training.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = Updates({"method": "fedavg", "fedavg.rounds": 3})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['parameters'])
    """

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        return with_memory(training)

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Exclude updates that disagree with the others', cap weights, and bound each update.

        Args:
            training: before the round.
            replies: checked updates, sorted by site.
        """
        own = self.config
        mu = own.settings.fedavg.mu if own.plan.training.proximal else 0.0
        linear = 0.0 if own.objective is None else own.objective.rates.private
        rate = own.settings.fedavg.rate(private=True, linear=linear)
        noise = noise_of_update(own.settings.fedavg, own.mechanism, mu, rate)
        return defend_updates(replies, own.defence, own.settings.max_share, noise)

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Add the mean update to the model.

        Args:
            training: before the round; changed.
            replies: updates that the defence keeps, sorted by site.

        Returns:
            No facts for the round's event.
        """
        sites = [site for site in self.outcome.sites.values() if not site.barred]
        absorb(training, replies, len(sites))
        return {}


def noise_of_update(
    own: FedAvgSettings, mechanism: Mechanism | None, mu: float, rate: float
) -> float:
    """Standard deviation of the privacy noise on each number of an update; 0 without privacy.

    Every step of DP-SGD adds noise of the same variance, and FedProx's term shrinks that of earlier
    steps.

    Args:
        own: settings of the training.
        mechanism: of the run; None without privacy.
        mu: weight of FedProx's term; 0 for none.
        rate: learning rate.
    """
    if mechanism is None:
        return 0.0
    step = rate * mechanism.clip * mechanism.noise_multiplier / own.batch_size
    return step * math.sqrt(sum((1 - rate * mu) ** (2 * k) for k in range(own.private_steps)))


def with_memory(training: Training) -> Training:
    """The training with its aggregator's initial memory, unless it has a memory already."""
    if not training.memory:
        training.memory = fresh_memory(training.config.plan.messages.sends, training.model)
    return training


def absorb(training: Training, updates: Sequence[Parameters], sites: int) -> None:
    """Update the model with one round's updates, and finish the round.

    Args:
        training: before the round; changed.
        updates: that the defence keeps.
        sites: number of sites in the run.
    """
    training.model, training.memory = aggregate(
        training.config, training.model, updates, training.memory, sites
    )
    training.finish_round(update.header.site for update in updates)


# FedPFT's settings of FedYogi (appendix). Flower's moments start at zero; the paper's start at
# 1e-6.
YOGI_MOMENTUM, YOGI_DECAY, YOGI_TAU = 0.9, 0.99, 1e-3

Memory = dict[str, Tensor]


def aggregate(
    config: Run,
    model: Tensors,
    updates: Sequence[Parameters],
    memory: Mapping[str, Tensor],
    sites: int,
) -> tuple[dict[str, Tensor], Memory]:
    """The model after a round's updates.

    An update's weight is its site's number of records; under privacy, which hides it, all weights
    are one. SCAFFOLD's control variate changes by the mean change over all sites; a site without a
    reply counts as zero.

    Args:
        config: of the run.
        model: before the round, by parameter.
        updates: of the sites, one or more.
        memory: FedYogi's moments, or SCAFFOLD's control variate under "control.".
        sites: number of sites in the run.

    Returns:
        The model, float32, and the aggregator's memory for the next round.

    Source: SCAFFOLD (Karimireddy et al. 2020), algorithm 1.
    """
    split = [split_control(update.tensors) for update in updates]
    weights = [max(1, update.records) for update in updates]
    moved, rule = [own for own, _ in split], config.defence
    if rule in site_weights.POOLED:
        moved, weights = [site_weights.robust_tensors(moved, rule)], [1]
    strategy = _strategy(config.plan.training, config.settings.fedavg)
    new, kept = _flower(strategy, model, moved, weights, memory)
    if all(CONTROL + name in memory for name in model):
        for name in model:
            each = torch.stack([control[name].double() for _, control in split])
            total = (
                site_weights.robust_mean(each, torch.ones(len(each)), rule) * len(each)
                if rule in site_weights.POOLED
                else each.sum(0)
            )
            kept[CONTROL + name] = (
                memory[CONTROL + name].double() + total / max(sites, len(updates))
            ).float()
    return new, kept


def fresh_memory(sends: Sequence[Field], model: Tensors) -> Memory:
    """The aggregator's memory before the first round.

    Args:
        sends: fields of a site's message; with control variates, the memory has them too.
        model: before the first round, by parameter.
    """
    if not any(field.prefix == CONTROL for field in sends):
        return {}
    return {CONTROL + name: torch.zeros_like(tensor) for name, tensor in model.items()}


def _flower(
    strategy: FedAvg,
    model: Tensors,
    moved: Sequence[Tensors],
    weights: Sequence[int],
    memory: Mapping[str, Tensor],
) -> tuple[dict[str, Tensor], Memory]:
    """Aggregate with Flower's strategy, which expects the sites' models as float32 arrays in
    messages.
    """
    replies = []
    for delta, weight in zip(moved, weights, strict=True):
        arrays = ArrayRecord({name: Array(_numpy(model[name] + delta[name])) for name in model})
        content = RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": weight})})
        replies.append(Message(content, dst_node_id=0, message_type=MessageType.TRAIN))
    if isinstance(strategy, FedYogi):
        strategy.current_arrays = {name: _numpy(tensor) for name, tensor in model.items()}
        strategy.m_t = {name: _numpy(memory["first." + name]) for name in model} if memory else None
        strategy.v_t = (
            {name: _numpy(memory["second." + name]) for name in model} if memory else None
        )
    arrays_, _ = strategy.aggregate_train(1, replies)
    assert arrays_ is not None  # there is at least one reply
    new = {
        name: torch.from_numpy(np.array(array.numpy(), dtype=np.float32))
        for name, array in arrays_.items()
    }
    kept: Memory = {}
    if isinstance(strategy, FedYogi):
        for prefix, table in (("first.", strategy.m_t), ("second.", strategy.v_t)):
            kept |= {
                prefix + name: torch.tensor(array, dtype=torch.float32)
                for name, array in (table or {}).items()
            }
    return new, kept


def _strategy(training: ModelTraining, own: FedAvgSettings) -> FedAvg:
    if training.adaptive:
        rate = own.server_learning_rate
        return FedYogi(eta=rate, beta_1=YOGI_MOMENTUM, beta_2=YOGI_DECAY, tau=YOGI_TAU)
    return FedProx(proximal_mu=own.mu) if training.proximal else FedAvg()


def _numpy(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return tensor.detach().float().contiguous().numpy()


# Of the steps with distributed noise. A bias acts as a feature of value one, and features of records have
# norm one: at the full rate the bias alone would double the largest curvature.
MOMENTUM, BIAS = 0.9, 0.1
# Standard deviations that the length of noise exceeds its root mean square by hardly ever.
TAIL = 6.0
VELOCITY, RECORDS = "velocity.", "records"


def absorb_total(total: site_weights.Total, training: Training, summed: Sequence[str]) -> None:
    """Update the model with a sum over sites, and finish the round.

    Args:
        total: the sum of weighted updates, or of gradients with distributed noise.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for a sum that no records have.
    """
    if total.claim is not None and total.claim.name == DISTRIBUTED_SUMS:
        training.model, training.memory = _step(total, total.claim.clip, training)
    else:
        training.model, training.memory = _mean_update(total, training, len(summed))
    training.finish_round(summed)


def _mean_update(
    total: site_weights.Total, training: Training, sites: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model moved by the mean update, and the memory of the aggregator."""
    # With noise at every site, all weigh the same.
    public = (
        float(training.config.settings.secure_aggregation_records)
        if training.config.settings.epsilon
        else 0.0
    )
    records = site_weights.weight_of(total, sites, public)
    moved = {
        name: part.float()
        for name, part in by_name(total.tensors["update"] / records, training.shapes()).items()
    }
    mean = Parameters(training.header(), training.round + 1, moved, int(records))
    return aggregate(training.config, training.model, [mean], training.memory, sites)


def _step(
    total: site_weights.Total, clip: float, training: Training
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The model after a step with momentum along the mean of clipped gradients, and the memory for
    the next one.

    All of it is computed from noisy sums, so it costs no privacy. The number of records is the mean
    of all rounds' noisy numbers, and at least the noise on it. As gradients have norm one, the mean
    is shortened to one, plus the noise.
    """
    site_weights.check_gradients(total)
    settings, rounds = training.config.settings.fedavg, training.round + 1
    counted = training.memory.get(RECORDS, torch.zeros(1)) + total.tensors["records"].float()
    records = max(float(counted) / rounds, total.sigmas["records"] / math.sqrt(rounds), 1.0)
    objective = training.config.objective
    usual = 0.0 if objective is None else objective.rates.distributed
    rate = settings.distributed_rate(len(training.classes), usual)
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


class Representation(Updates):
    """Training of a shared body in `fedavg.rounds` rounds.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = Representation({"method": "fedrep", "fedavg.rounds": 3})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['parameters'])
    """

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        training.model = body_of(training.model)
        return training

    def classifier(self, training: Training) -> Classifier:
        """The body with a head of zeros, which each site replaces by its own."""
        settings, classes = self.config.settings.fedavg, len(training.classes)
        # The seed has no effect: only the shapes of the head are used.
        whole = parameters_of(fresh(settings.kind, training.inputs, classes, settings.width))
        head = {
            name: tensor.zero_() for name, tensor in whole.items() if name not in training.model
        }
        return Network(
            training.header(), settings.kind, training.inputs, {**training.model, **head}
        )

    def _judged(self, grid: Grid, deadline: float, values: Info) -> Info:
        """In a simulation, the mean accuracy of the sites' own models on the whole test split.
        Raises SurrogateError.
        """
        used = self.outcome.used
        info, payload = super()._judged(grid, deadline, values), self._payload()
        rest = [
            Message(to_record(payload, {"brief": True, "bytes": len(payload)}), node, COMPARE)
            for node in used[1:]
        ]
        infos = [
            info,
            *(self._read(reply, Site(name=""))[1] for reply in Collection(grid, rest, deadline)),
        ]
        known = [
            accuracy for each in infos if (accuracy := share_in(each, "accuracy.model")) is not None
        ]
        if len(known) < len(used):
            raise SurrogateError(
                f"{len(known)} of {len(used)} sites reported the accuracy of their own model"
            )
        return info | {"accuracy.model": sum(known) / len(known)}
