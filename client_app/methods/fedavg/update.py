"""A site's part in a round of FedAvg and its variants: it trains the received model and sends the
change of parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp.dp_sgd import (
    UnitRecords,
    clipped_gradients,
    train_privately,
)
from fedsurrogate.client_app.methods.dp.units import Units
from fedsurrogate.client_app.methods.fedavg import scaffold
from fedsurrogate.client_app.methods.local_training import (
    Losses,
    Variant,
    class_losses,
    mean_square,
    network,
    network_of_target,
    step_length,
    train,
)
from fedsurrogate.client_app.methods.task import MethodOutput, SiteStatistic, Task
from fedsurrogate.common.models.networks import OFFSETS
from fedsurrogate.common.models.parameters import (
    CONTROL,
    Parameters,
    Tensors,
    flat,
    largest,
    split_control,
)
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.privacy.mechanism import JOINT_SUMS, Mechanism
from fedsurrogate.common.randomness import stream
from fedsurrogate.common.settings import Model
from fedsurrogate.common.targets.objective import Objective
from fedsurrogate.common.wire.model_proto import pack_parameters


def update(task: Task) -> MethodOutput:
    """Train the received model on this site's records.

    Methods: FedAvg, FedProx, FedSGD, SCAFFOLD; DSFL, which sends only the largest entries; and
    DP-FedAvg and DP-FedProx, which protect records or patients with one epsilon for all rounds
    together.

    Args:
        task: the request, with the model.

    Returns:
        The change of its parameters.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's.

    Source: FedAvg (McMahan et al. 2017), FedProx (Li et al. 2020), SCAFFOLD (Karimireddy et al.
    2020).
    """
    received = task.received_model()
    if task.run.settings.epsilon:
        return _private_update(task, received)
    return MethodOutput(pack_parameters(_trained(task, received)))


def weighted_update(task: Task) -> SiteStatistic:
    """The weighted change of the parameters, for a secure sum.

    Under privacy the update has its noise already, and every site counts as the same public number
    of records; with one joint noise for all sites, see `gradient_sums`.

    All sites receive the same model: with another one for a single site, the mean update would show
    that site's (Pasquini et al. 2022, "Eluding Secure Aggregation in Federated Learning").

    Args:
        task: the request, with the model.

    Returns:
        Records (1,) of this site, and update (P,), its change of the parameters times them,
        float64; and the claim. Parameters in the order of their names.
    """
    if task.run.plan.mechanism_name == JOINT_SUMS:
        return gradient_sums(task)
    received = task.received_model()
    trained = (
        _privately(task, received)[0] if task.run.settings.epsilon else _trained(task, received)
    )
    records = task.run.settings.secure_sum_records if task.run.settings.epsilon else trained.records
    moved = flat(trained.tensors)
    weight = torch.tensor([float(records)], dtype=torch.float64)
    return SiteStatistic({"records": weight, "update": records * moved}, trained.claim)


def gradient_sums(task: Task) -> SiteStatistic:
    """The sum of clipped gradients, for a secure sum with joint noise.

    All units, records or patients, take part, so that the noise needs no accounting of samples:
    rounds compose as Gaussian mechanisms.

    Args:
        task: the request, with the model.

    Returns:
        Records (1,) of this site, or its patients; and gradients (P,), the sum of their gradients
        at the received model, each divided by the clip after it was shortened to it; float64,
        without noise. And the claim.
    """
    claim, module, (features, labels, units) = _private_start(task, task.received_model())
    losses = _losses(task.run.objective)
    gradients = clipped_gradients(module, features, labels, claim.clip, losses, units.weights)
    summed = flat(gradients) / claim.clip
    count = torch.tensor([float(units.count)], dtype=torch.float64)
    return SiteStatistic({"records": count, "gradients": summed}, claim)


def _trained(task: Task, received: Parameters) -> Parameters:
    run, frame = task.run, received.header.frame
    features, labels = task.training_data(received.header.classes, frame)
    start, common = split_control(received.tensors)
    settings, kind = run.settings.fedavg, run.settings.fedavg.kind
    module = _network(run.objective, kind, features.shape[1], received, start)
    objective = run.objective
    rate = step_length(kind, settings, features, objective.rates.site if objective else 0.0)
    own = scaffold.read_control(task.state, task.confirmed, start) if common else {}
    variant = Variant(
        mu=settings.mu if run.plan.training.proximal else 0.0,
        correction={name: common[name] - own[name] for name in common} if common else None,
        single_step=run.plan.training.single_step,
        losses=_losses(run.objective),
        faster=_faster(objective, features),
    )
    steps = train(
        module,
        features,
        labels,
        settings,
        rate,
        stream(run.settings.seed, task.site, task.round),
        variant,
    )
    moved: Tensors = {
        name: parameter.detach() - start[name] for name, parameter in module.named_parameters()
    }
    if common:
        rates = {name: rate * variant.faster.get(name, 1.0) for name in moved}
        new = scaffold.next_control(own, common, moved, steps, rates)
        moved = {**moved, **{CONTROL + name: new[name] - own[name] for name in new}}
        scaffold.write_control(task.state, received.round, new)
    if run.plan.training.sparse:
        moved = largest(moved, settings.keep)
    header = task.header(received.header.classes, frame)
    return Parameters(header, received.round, moved, len(labels))


def _private_update(task: Task, received: Parameters) -> MethodOutput:
    answer, facts = _privately(task, received)
    return MethodOutput(pack_parameters(answer), answer.claim, facts)


def _privately(task: Task, received: Parameters) -> tuple[Parameters, dict[str, float]]:
    """The update with the noise of DP-SGD, and facts that stay at the site."""
    run, settings = task.run, task.run.settings.fedavg
    claim, module, records = _private_start(task, received)
    rate = settings.rate(True, run.objective.rates.private if run.objective else 0.0)
    variant = Variant(
        mu=settings.mu if run.plan.training.proximal else 0.0, losses=_losses(run.objective)
    )
    facts = train_privately(module, records, settings, claim, rate, variant)
    moved = {
        name: parameter.detach() - received.tensors[name]
        for name, parameter in module.named_parameters()
    }
    header = task.header(received.header.classes, received.header.frame)
    return Parameters(header, received.round, moved, 0, claim), facts


def _private_start(task: Task, received: Parameters) -> tuple[Mechanism, nn.Module, UnitRecords]:
    """The claim, the received network, and all records."""
    kind, claim = task.run.settings.fedavg.kind, task.mechanism()
    assert claim is not None
    # No minimum class size applies here: everything that leaves has noise.
    features, labels = task.training_data(received.header.classes, received.header.frame)
    if kind == "linear":
        features = clip(features, 0.0)[0].float()
    units = Units.of(task.training_units(received.header.classes), len(labels))
    module = _network(task.run.objective, kind, features.shape[1], received, received.tensors)
    return claim, module, UnitRecords(features, labels, units)


def _network(
    objective: Objective | None, kind: Model, inputs: int, received: Parameters, tensors: Tensors
) -> nn.Module:
    """The network with the parameters that were received. Raises SurrogateError."""
    if objective is not None:
        return network_of_target(objective, inputs, tensors)
    return network(kind, inputs, len(received.header.classes), tensors)


def _losses(objective: Objective | None) -> Losses:
    return class_losses if objective is None else objective.losses


def _faster(objective: Objective | None, features: Tensor) -> dict[str, float]:
    """What multiplies an offset of another target's model is one, not a feature. And each of B
    levels belongs to about a part in B of what is seen of a record.
    """
    if objective is None:
        return {}
    return dict.fromkeys(OFFSETS, max(1, len(objective.levels)) * mean_square(features))
