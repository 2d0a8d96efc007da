"""Aggregation of a round's updates: Flower's own FedAvg, FedProx and FedYogi at 32 bits, and
SCAFFOLD.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg, FedProx, FedYogi
from torch import Tensor

from fedsurrogate.common.methods.method import Field, ModelTraining
from fedsurrogate.common.models.parameters import CONTROL, Parameters, Tensors, split_control
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import FedAvgSettings
from fedsurrogate.strategies.pooling.robust_centres import POOLED, robust_mean, robust_tensors

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
    if rule in POOLED:
        moved, weights = [robust_tensors(moved, rule)], [1]
    strategy = _strategy(config.plan.training, config.settings.fedavg)
    new, kept = _flower(strategy, model, moved, weights, memory)
    if all(CONTROL + name in memory for name in model):
        for name in model:
            each = torch.stack([control[name].double() for _, control in split])
            total = (
                robust_mean(each, torch.ones(len(each)), rule) * len(each)
                if rule in POOLED
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
