"""A site's part in a round of FedAvg and its variants: it trains the received model and sends the
change of parameters. SCAFFOLD keeps a control variate on the site's disk. Personal heads stay at the site:
FedLambda mixes in a local head, kNN-Per the nearest records, and FedRep trains the body below its own head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.classifiers import Classifier, Network, class_indices
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.networks import HEAD, OFFSETS, body_of, embed, fresh
from fedsurrogate.common.models.parameters import (
    CONTROL,
    Parameters,
    Tensors,
    flat,
    largest,
    split_control,
)
from fedsurrogate.common.models.training_parts import train_on_features
from fedsurrogate.common.privacy.gaussian_mechanism import clip
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, Mechanism
from fedsurrogate.common.settings import HeadSettings
from fedsurrogate.common.targets.target import Objective
from fedsurrogate.common.wire.model_proto import pack_parameters
from fedsurrogate.common.wire.records import Info

from ...governance.gate import Gate
from ..dp.record_gradients import UnitRecords, Units, clipped_gradients, train_privately
from ..evaluation import checked_classifier, counted
from ..job import Job, MethodOutput, SiteStatistic
from ..local_training import (
    Losses,
    Variant,
    class_losses,
    mean_square,
    network,
    step_length,
    train,
)


def update(job: Job) -> MethodOutput:
    """Train the received model on this site's records.

    Methods: FedAvg, FedProx, FedSGD, SCAFFOLD; DSFL, which sends only the largest entries; and
    DP-FedAvg and DP-FedProx, which protect records or patients with one epsilon for all rounds
    together.

    Args:
        job: the request, with the model.

    Returns:
        The change of its parameters.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's.

    Source: FedAvg (McMahan et al. 2017), FedProx (Li et al. 2020), SCAFFOLD (Karimireddy et al.
    2020).
    """
    received = job.received_model()
    if job.run.settings.epsilon:
        answer, facts = _privately(job, received)
        return MethodOutput(pack_parameters(answer), answer.claim, facts)
    return MethodOutput(pack_parameters(_trained(job, received)))


def weighted_update(job: Job) -> SiteStatistic:
    """The weighted change of the parameters, for secure aggregation.

    Under privacy the update has its noise already, and every site counts as the same public number
    of records; with one distributed noise for all sites, see `gradient_sums`.

    All sites receive the same model: with another one for a single site, the mean update would show
    that site's (Pasquini et al. 2022, "Eluding Secure Aggregation in Federated Learning").

    Args:
        job: the request, with the model.

    Returns:
        Records (1,) of this site, and update (P,), its change of the parameters times them,
        float64; and the claim. Parameters in the order of their names.
    """
    if job.run.plan.mechanism_name == DISTRIBUTED_SUMS:
        return gradient_sums(job)
    received = job.received_model()
    trained = _privately(job, received)[0] if job.run.settings.epsilon else _trained(job, received)
    records = (
        job.run.settings.secure_aggregation_records if job.run.settings.epsilon else trained.records
    )
    moved = flat(trained.tensors)
    weight = torch.tensor([float(records)], dtype=torch.float64)
    return SiteStatistic({"records": weight, "update": records * moved}, trained.claim)


def gradient_sums(job: Job) -> SiteStatistic:
    """The sum of clipped gradients, for secure aggregation with distributed noise.

    All units, records or patients, take part, so that the noise needs no accounting of samples:
    rounds compose as Gaussian mechanisms.

    Args:
        job: the request, with the model.

    Returns:
        Records (1,) of this site, or its patients; and gradients (P,), the sum of their gradients
        at the received model, each divided by the clip after it was shortened to it; float64,
        without noise. And the claim.
    """
    claim, module, (features, labels, units) = _private_start(job, job.received_model())
    losses = _losses(job.run.objective)
    gradients = clipped_gradients(module, features, labels, claim.clip, losses, units.weights)
    summed = flat(gradients) / claim.clip
    count = torch.tensor([float(units.count)], dtype=torch.float64)
    return SiteStatistic({"records": count, "gradients": summed}, claim)


def _trained(job: Job, received: Parameters) -> Parameters:
    run, frame = job.run, received.header.frame
    features, labels = job.training_data(received.header.classes, frame)
    start, common = split_control(received.tensors)
    settings, kind = run.settings.fedavg, run.settings.fedavg.kind
    classes = len(received.header.classes)
    module = network(kind, features.shape[1], classes, start, run.objective)
    objective = run.objective
    rate = step_length(kind, settings, features, objective.rates.site if objective else 0.0)
    own = read_control(job.state, job.confirmed, start) if common else {}
    variant = Variant(
        mu=settings.mu if run.plan.training.proximal else 0.0,
        correction={name: common[name] - own[name] for name in common} if common else None,
        single_step=run.plan.training.single_step,
        losses=_losses(run.objective),
        faster=_faster(objective, features),
    )
    order = stream(run.settings.seed, job.site, job.round)
    steps = train(module, features, labels, settings, rate, order, variant)
    moved: Tensors = {
        name: parameter.detach() - start[name] for name, parameter in module.named_parameters()
    }
    if common:
        rates = {name: rate * variant.faster.get(name, 1.0) for name in moved}
        new = next_control(own, common, moved, steps, rates)
        moved = {**moved, **{CONTROL + name: new[name] - own[name] for name in new}}
        write_control(job.state, received.round, new)
    if run.plan.training.sparse:
        moved = largest(moved, settings.keep)
    header = job.header(received.header.classes, frame)
    return Parameters(header, received.round, moved, len(labels))


def _privately(job: Job, received: Parameters) -> tuple[Parameters, dict[str, float]]:
    """The update with the noise of DP-SGD, and facts that stay at the site."""
    run, settings = job.run, job.run.settings.fedavg
    claim, module, records = _private_start(job, received)
    rate = settings.rate(True, run.objective.rates.private if run.objective else 0.0)
    variant = Variant(
        mu=settings.mu if run.plan.training.proximal else 0.0, losses=_losses(run.objective)
    )
    facts = train_privately(module, records, settings, claim, rate, variant)
    moved = {
        name: parameter.detach() - received.tensors[name]
        for name, parameter in module.named_parameters()
    }
    header = job.header(received.header.classes, received.header.frame)
    return Parameters(header, received.round, moved, 0, claim), facts


def _private_start(job: Job, received: Parameters) -> tuple[Mechanism, nn.Module, UnitRecords]:
    """The claim, the received network, and all records."""
    kind, claim = job.run.settings.fedavg.kind, job.mechanism()
    assert claim is not None
    # No minimum class size applies here: everything that leaves has noise.
    features, labels = job.training_data(received.header.classes, received.header.frame)
    if kind == "linear":
        features = clip(features, 0.0)[0].float()
    units = Units.of(job.training_units(received.header.classes), len(labels))
    classes = len(received.header.classes)
    module = network(kind, features.shape[1], classes, received.tensors, job.run.objective)
    return claim, module, UnitRecords(features, labels, units)


def _losses(objective: Objective | None) -> Losses:
    return class_losses if objective is None else objective.losses


def _faster(objective: Objective | None, features: Tensor) -> dict[str, float]:
    """What multiplies an offset of another target's model is one, not a feature. And each of B
    levels belongs to about a part in B of what is seen of a record.
    """
    if objective is None:
        return {}
    return dict.fromkeys(OFFSETS, max(1, len(objective.levels)) * mean_square(features))


def read_control(folder: Path, confirmed: int, like: Tensors) -> dict[str, Tensor]:
    """This site's control variate after the last round that the coordinator used; zero before the
    first.

    Args:
        folder: of its files.
        confirmed: that round; zero before the first.
        like: parameters of the model; the control variate has their names and shapes.

    Raises:
        DataError: when its file is missing: without it, c would no longer be the mean of the sites'
            c_i.
    """
    if not confirmed:
        return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    file = folder / f"control-{confirmed}.safetensors"
    if not file.is_file():
        raise DataError(
            f"the control variate of round {confirmed} is not in {str(folder)!r}; it is needed to "
            "go on"
        )
    control: dict[str, Tensor] = load_file(file)
    return control


def next_control(
    own: Tensors, common: Tensors, moved: Tensors, steps: int, rates: Mapping[str, float]
) -> dict[str, Tensor]:
    """The new control variate c_i - c + (x - y_i) / (steps rate).

    Args:
        own: c_i, by parameter.
        common: c, by parameter.
        moved: y_i - x, by parameter.
        steps: of training in the round.
        rates: learning rates, by parameter.

    Source: Karimireddy et al. 2020, option II.

    Example:
        >>> one = {"weight": torch.ones(1)}
        >>> next_control(one, one, {"weight": torch.tensor([-1.0])}, steps=2, rates={"weight": 0.25})
        {'weight': tensor([2.])}
    """
    return {name: own[name] - common[name] - moved[name] / (steps * rates[name]) for name in moved}


def write_control(folder: Path, number: int, control: Tensors) -> None:
    """Write the control variate of a round atomically.

    Earlier ones stay: the next request names the round that counts.

    Args:
        folder: of its files.
        number: of the round.
        control: by parameter.
    """
    replace_file(folder / f"control-{number}.safetensors", save(dict(control)), durable=False)


# Candidate weights of the site's own part in the mixture.
SHARES = torch.linspace(0, 1, 11)
# Nearest records whose labels kNN-Per mixes with the prediction.
NEIGHBOURS = 10
# Class probabilities (n, C) of features (n, d), and what makes them from the features, labels and
# number of classes of the site's own records.
Scores = Callable[[Tensor], Tensor]
Fit = Callable[[Tensor, Tensor, int], Scores]


def with_head(job: Job, gate: Gate) -> Info:
    """Evaluate the received head mixed with a head of the site's own (FedLambda).

    Args:
        job: the request, with the received head.
        gate: of the site.

    Raises:
        SurrogateError: for a head that is not this run's.
    """
    own = job.run.settings
    fit = partial(own_head, head=own.head, seed=own.seed)
    return counted(personal_accuracy(job, checked_classifier(job), fit))


def with_neighbours(job: Job, gate: Gate) -> Info:
    """Evaluate the received head mixed with the site's nearest records (kNN-Per).

    Args:
        job: as in `with_head`.
        gate: as in `with_head`.

    Raises:
        SurrogateError: for a head that is not this run's.
    """
    return counted(personal_accuracy(job, checked_classifier(job), nearest_records))


def personal_accuracy(job: Job, model: Classifier, fit: Fit) -> tuple[int, int]:
    """Evaluate a mixture of the site's own and federated probabilities.

    The weight of the own part, 0 to 1, maximises validation accuracy; among equals, the likelihood
    decides. The share `baseline.validation` of the training records is held out for that.

    Args:
        job: the request.
        model: the federated head.
        fit: makes the site's own part.

    Returns:
        Numbers of correct predictions and of test records.

    Source: kNN-Per (Marfoq et al. 2022).
    """
    names = model.header.classes
    features, labels = job.training_data(names)
    order = torch.randperm(
        len(labels), generator=torch.Generator().manual_seed(job.run.settings.seed)
    )
    held = max(1, round(job.run.settings.baseline.validation * len(labels)))
    if held == len(labels):
        return model.accuracy(job.found.test.features, job.found.classes, job.found.test.labels)
    validation, rest = order[:held], order[held:]
    own = fit(model.framed(features[rest]), labels[rest], len(names))
    some = features[validation]
    share = _share(own(model.framed(some)), model.scores(some).softmax(1), labels[validation])
    test = job.found.test.features.float()
    truth = class_indices(names, job.found.classes)[job.found.test.labels]
    if not len(truth):
        return 0, 0
    mixed = share * own(model.framed(test)) + (1 - share) * model.scores(test).softmax(1)
    return int((mixed.argmax(1) == truth).sum()), len(truth)


def _share(own: Tensor, federated: Tensor, labels: Tensor) -> float:
    mixed = SHARES[:, None, None] * own + (1 - SHARES[:, None, None]) * federated
    right = (mixed.argmax(2) == labels).float().mean(1)
    true = mixed.gather(2, labels.expand(len(SHARES), -1)[:, :, None])
    likely = true.clamp_min(1e-6).log().mean((1, 2))
    return float(SHARES[int((right + 1e-3 * torch.tanh(likely)).argmax())])


def own_head(
    features: Tensor, labels: Tensor, classes: int, head: HeadSettings, seed: int
) -> Scores:
    """Probabilities of a head that is trained on the site's own records.

    Args:
        features: (n, d).
        labels: indices of classes, (n,).
        classes: their number, C.
        head: how it is trained.
        seed: of the training.
    """
    weight, bias = train_on_features(features, labels, classes, head, seed)
    return lambda asked: (asked @ weight.T + bias).softmax(1)


def nearest_records(features: Tensor, labels: Tensor, classes: int) -> Scores:
    """Shares of the classes among the nearest of the site's own records, weighted by distance.

    Args:
        features: as in `own_head`.
        labels: as in `own_head`.
        classes: as in `own_head`.
    """
    memory = torch.nn.functional.normalize(features, dim=1)
    count = min(NEIGHBOURS, len(labels))

    def scores(asked: Tensor) -> Tensor:
        distances = torch.cdist(torch.nn.functional.normalize(asked, dim=1), memory)
        near, index = distances.topk(count, largest=False)
        weights = (-near / near.mean().clamp_min(1e-9)).softmax(1)
        return torch.zeros(len(asked), classes).scatter_add_(1, labels[index], weights)

    return scores


def update_body(job: Job) -> MethodOutput:
    """Fit this site's head to the received body, then train the body below this head.

    Args:
        job: the request, with the body.

    Returns:
        The body's change.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's, or a body of another network.

    Source: Collins et al. 2021, algorithm 1. Differs from the paper: the head is fitted anew for
    every body, as in the paper's analysis; its experiments continue the last round's head for a few
    steps. So a site keeps no state, and a round that it misses changes nothing.
    """
    run, received = job.run, job.received_model()
    frame = received.header.frame
    features, labels = job.training_data(received.header.classes, frame)
    settings, classes = run.settings.fedavg, len(received.header.classes)
    tensors = _with_own_head(job, received.tensors, features, labels, classes)
    module = network(settings.kind, features.shape[1], classes, tensors)
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not name.startswith(HEAD))
    generator = stream(run.settings.seed, job.site, job.round)
    train(module, features, labels, settings, settings.rate(private=False), generator)
    trained = body_of(dict(module.named_parameters()))
    moved = {
        name: parameter.detach() - received.tensors[name] for name, parameter in trained.items()
    }
    header = job.header(received.header.classes, frame)
    answer = Parameters(header, received.round, moved, len(labels))
    return MethodOutput(pack_parameters(answer))


def own_network(job: Job) -> Classifier:
    """The received body with a head that this site fits to its own records. Raises SurrogateError,
    DataError.
    """
    received, kind = checked_classifier(job), job.run.settings.fedavg.kind
    if not isinstance(received, Network) or received.kind != kind:
        raise SurrogateError(f"a model that is no {kind}")
    names, frame = received.header.classes, received.header.frame
    features, labels = job.training_data(names, frame)
    tensors = _with_own_head(job, body_of(received.tensors), features, labels, len(names))
    return Network(job.header(names, frame), kind, features.shape[1], tensors)


def top_layer(
    job: Job, body: Tensors, features: Tensor, labels: Tensor, classes: int
) -> tuple[Tensor, Tensor]:
    """A head trained on the body's outputs for features; an empty body gives the head on these
    themselves.

    Args:
        job: the request; its settings name the network.
        body: parameters of the body, by name.
        features: of the records, (n, d).
        labels: indices of classes, (n,).
        classes: C, number of classes.

    Returns:
        Weight (C, width) and bias (C,).

    Raises:
        SurrogateError: for a body of another network.
    """
    settings = job.run.settings.fedavg
    module = fresh(settings.kind, features.shape[1], classes, settings.width)
    wanted = {name: p.shape for name, p in body_of(dict(module.named_parameters())).items()}
    if {name: tensor.shape for name, tensor in body.items()} != wanted:
        raise SurrogateError(
            f"a body that is not that of a {settings.kind} of width {settings.width}"
        )
    with torch.no_grad():
        embedded = torch.cat([embed(module, body, part) for part in torch.split(features, 1000)])
    return train_on_features(
        embedded, labels, classes, job.run.settings.head, job.run.settings.seed
    )


def _with_own_head(
    job: Job, body: Tensors, features: Tensor, labels: Tensor, classes: int
) -> dict[str, Tensor]:
    weight, bias = top_layer(job, body, features, labels, classes)
    return {**body, HEAD + "weight": weight, HEAD + "bias": bias}
