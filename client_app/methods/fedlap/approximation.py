"""A site's part in a round of FedLAP: it receives the model and sends synthetic records that
approximate its loss. DSC, FedDM and PSG are recipes of its synthesis for comparison, without a radius.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.loss_landscape import (
    TOGETHER,
    Descent,
    LandscapeRecords,
    distance,
    gradient,
    loss,
    mismatch,
    total_loss,
    walk,
)
from fedsurrogate.common.models.networks import HEAD, embed, fresh, parameters_of, split_input
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.models.training_parts import Change, UncompiledSGD, draws
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import LARGEST_VALUE, Synthetic
from fedsurrogate.common.wire.model_proto import pack_synthetic
from fedsurrogate.common.wire.records import Info

from ...features.site_features import site_device
from ..dp.record_gradients import PrivateGradient, Units
from ..job import Job, MethodOutput
from ..local_training import network

# With this factor the default learning rate of images, which suits gradients, also suits means.
SCALE = 0.1
# The mismatch of synthetic and real gradients.
Compare = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class Statistic:
    """What is matched.

    Attributes:
        real: of a site's records, by name.
        slope: its mismatch with the same of synthetic records, and the derivative of the mismatch
            by their values (n, ...); takes the network, its parameters, the synthetic records and
            their change, the real statistic, and how gradients are compared.
        by_class: whether a batch has `batch-size` records of each class, not of all classes
            together.
    """

    real: Callable[[nn.Module, Tensors, LandscapeRecords, Change], dict[str, Tensor]]
    slope: Callable[
        [nn.Module, Tensors, LandscapeRecords, Change, Sequence[Tensor], Compare],
        tuple[float, Tensor],
    ]
    by_class: bool = False


def gradient_slope(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    real: Sequence[Tensor],
    compare: Compare,
    by_class: bool = False,
) -> tuple[float, Tensor]:
    """`Statistic.slope` of the gradient of the loss, or of the gradients of each class.

    The mismatch of these is divided by the number of tensors. Without that, the steps of the images
    would grow with the classes.

    Source: Zhao et al. 2021, algorithm 1, which matches by class.
    """
    sets = [own for _, own in classes_of(records)] if by_class else [records]

    def difference(mine: Sequence[Tensor]) -> Tensor:
        wrong = compare(mine, real)
        return wrong / len(mine) if by_class else wrong

    wrong, slope = matching_slope(body, parameters, sets, change, difference)
    return wrong, slope[records.labels.argsort(stable=True).argsort()] if by_class else slope


def class_mean_slope(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    real: Sequence[Tensor],
    compare: Compare,
) -> tuple[float, Tensor]:
    """`Statistic.slope` of the means of each class: the mean squared distance over the means, times
    `SCALE`.

    Source: Xiong et al. 2023, equation 4, which sums over the classes.
    """
    values = records.values.detach().requires_grad_()
    mine = class_means(
        body, parameters, LandscapeRecords(change(values), records.labels, records.weights)
    )
    wrong = (
        SCALE
        * torch.stack([(a - b).square().sum() for a, b in zip(mine, real, strict=True)]).mean()
    )
    return float(wrong.detach()), torch.autograd.grad(wrong, [values])[0]


def classes_of(records: LandscapeRecords) -> Iterator[tuple[int, LandscapeRecords]]:
    """The records of each class in rising order, with equal weights."""
    for label in torch.unique(records.labels).tolist():
        yield label, records.take((records.labels == label).nonzero().squeeze(1))


def real_class_gradients(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, change: Change
) -> dict[str, Tensor]:
    """Gradients of each class's loss.

    Args:
        body: the network.
        parameters: where the gradients are taken, by name.
        records: of the site.
        change: their augmentation.

    Returns:
        Gradients by class and parameter.
    """
    return {
        f"{label} {name}": part
        for label, own in classes_of(records)
        for name, part in gradient(body, parameters, own, change).items()
    }


def class_means(body: nn.Module, parameters: Tensors, records: LandscapeRecords) -> list[Tensor]:
    """For each class, means of the inputs of the network's head and of its logits.

    Args:
        body: the network.
        parameters: by name.
        records: at least one of each class.

    Returns:
        Means (width,) and (C,) in turn, by class in rising order.

    Source: Xiong et al. 2023, equation 4.
    """
    means = []
    for _, own in classes_of(records):
        inputs, logits = _outputs(body, parameters, own.values)
        means += [inputs.mean(0), logits.mean(0)]
    return means


def real_class_means(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, change: Change
) -> dict[str, Tensor]:
    """The means of `class_means`, a thousand records at a time.

    Args:
        body: the network.
        parameters: by name.
        records: of the site.
        change: their augmentation.

    Returns:
        Means (width,) and (C,) by class and name.
    """
    means: dict[str, Tensor] = {}
    with torch.no_grad():
        for label, own in classes_of(records):
            parts = [
                _outputs(body, parameters, change(part))
                for part in torch.split(own.values, TOGETHER)
            ]
            for name, outputs in zip(("inputs", "logits"), zip(*parts, strict=True), strict=True):
                means[f"{label} {name}"] = torch.cat(outputs).mean(0)
    return means


def _outputs(body: nn.Module, parameters: Tensors, values: Tensor) -> tuple[Tensor, Tensor]:
    inputs = embed(body, parameters, values)
    prefix = HEAD if isinstance(body, nn.Sequential) else ""
    return inputs, torch.nn.functional.linear(
        inputs, parameters[prefix + "weight"], parameters[prefix + "bias"]
    )


GRADIENT = Statistic(gradient, gradient_slope)
CLASS_GRADIENTS = Statistic(
    real_class_gradients, partial(gradient_slope, by_class=True), by_class=True
)
CLASS_MEANS = Statistic(real_class_means, class_mean_slope, by_class=True)


class Batches:
    """A statistic, without noise, of random batches of a site's records.

    Args:
        body: the network.
        records: of the site.
        size: records in a batch, or of each class in it; zero: all records.
        generator: of the batches.
        statistic: which one.
    """

    noise = 0.0

    def __init__(
        self,
        body: nn.Module,
        records: LandscapeRecords,
        size: int,
        generator: torch.Generator,
        statistic: Statistic = GRADIENT,
    ) -> None:
        self._body, self._records, self._size, self._generator = body, records, size, generator
        self._statistic = statistic

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """The statistic of one batch, by name."""
        return self._statistic.real(self._body, parameters, self._batch(), change)

    def _batch(self) -> LandscapeRecords:
        records = self._records
        if not self._size:
            return records
        if not self._statistic.by_class:
            return self._sample(records)
        parts = [self._sample(own) for _, own in classes_of(records)]
        return LandscapeRecords.pool(parts, [len(part.labels) for part in parts])

    def _sample(self, records: LandscapeRecords) -> LandscapeRecords:
        count = len(records.labels)
        if self._size >= count:
            return records
        return records.take(
            torch.randperm(count, generator=self._generator)[: self._size].to(records.labels.device)
        )


# Length of a move of the model, as a share of one plus its norm. Longer moves bend; shorter ones
# lose digits of 32 bits.
MOVE = 1e-3

Difference = Callable[[Sequence[Tensor]], Tensor]


def matching_slope(
    body: nn.Module,
    parameters: Tensors,
    sets: Sequence[LandscapeRecords],
    change: Change,
    difference: Difference,
) -> tuple[float, Tensor]:
    """The difference between gradients of synthetic records and a target, and its derivative by
    their values.

    Let v be the derivative of the difference by a gradient. The derivative by the values is that of
    v · ∇L: the rate at which the derivative of L by the values changes as the model moves along v
    (Pearlmutter 1994). So two plain backward passes serve in place of one through another, which
    for GroupNorm and pooling costs more than twice as much. Each unit of ReLU stays as it is during
    the move, as in the exact derivative. The error is below a hundredth of its length.

    Args:
        body: the network.
        parameters: of the model, by name.
        sets: records with one gradient each: all together, or those of one class.
        change: augmentation of the values.
        difference: takes the gradients of all sets, parameter by parameter; differentiable.

    Returns:
        The difference, and its derivative (n, ...) by the values of all sets.

    Source: Pearlmutter 1994.
    """
    model = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    size = 1 + _norm(parameters.values())
    gradients: list[Tensor] = []
    befores, holds = [], []
    for records in sets:
        with _held_units(body) as units:
            *mine, before = _slopes(body, model, records, change, list(model.values()))
        gradients += mine
        befores.append(before)
        holds.append(units)
    for part in gradients:
        part.requires_grad_()
    wrong = difference(gradients)
    directions = torch.autograd.grad(wrong, gradients)
    slopes = []
    for index, (records, before, units) in enumerate(zip(sets, befores, holds, strict=True)):
        along = directions[index * len(model) : (index + 1) * len(model)]
        far = MOVE * size / _norm(along).clamp_min(1e-30)
        moved = {
            name: tensor + far * by
            for (name, tensor), by in zip(parameters.items(), along, strict=True)
        }
        with _held_units(body, units):
            (after,) = _slopes(body, moved, records, change, [])
        slopes.append((after - before) / far)
    return float(wrong.detach()), torch.cat(slopes)


def _slopes(
    body: nn.Module,
    parameters: Tensors,
    records: LandscapeRecords,
    change: Change,
    asked: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Derivatives of the loss by the parameters `asked`, and by the values before their change."""
    values = records.values.detach().requires_grad_()
    total = loss(
        body, parameters, LandscapeRecords(change(values), records.labels, records.weights)
    )
    return torch.autograd.grad(total, [*asked, values])


@contextmanager
def _held_units(
    body: nn.Module, units: dict[nn.Module, Tensor] | None = None
) -> Iterator[dict[nn.Module, Tensor]]:
    """Record which units of each ReLU pass their inputs on; with `units`, these do, whatever their
    inputs.
    """
    kept: dict[nn.Module, Tensor] = {} if units is None else units

    def hold(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if units is not None:
            return inputs[0] * units[layer]  # type: ignore[no-any-return]
        kept[layer] = (output > 0).to(output)
        return None

    handles = [
        layer.register_forward_hook(hold) for layer in body.modules() if isinstance(layer, nn.ReLU)
    ]
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.detach().square().sum() for tensor in tensors]).sum().sqrt()


# The search may use this share of the forward passes of the synthesis: a tenth of its time, with a
# margin.
SHARE = 0.07
# Real records in an evaluation; number of evaluations without a smaller loss after which the search
# stops.
SUBSET, PATIENCE = 128, 4
# Costs of one step in forward passes of its records. Image step: forward and backward, twice
# (benchmarks/fedlap_cost.py).
IMAGE_STEP, MODEL_STEP = 7, 3


@dataclass(frozen=True)
class Search:
    """Length of a search.

    Attributes:
        steps: number of steps of the walk.
        every: number of steps between two evaluations.
    """

    steps: int
    every: int = 1

    @classmethod
    def within(cls, work: float, synthetic: int, real: int, most: int) -> Search:
        """The search that the allowed part of the synthesis pays for.

        Half is spent on the walk, half on evaluations.

        Args:
            work: of the synthesis, in forward passes of a record.
            synthetic: number of synthetic records.
            real: number of real records.
            most: steps at most.
        """
        half = SHARE * work / 2
        steps = max(4, min(most, int(half / (MODEL_STEP * synthetic))))
        evaluations = max(4, int(half / min(real, SUBSET)))
        return cls(steps, max(1, -(-steps // evaluations)))


# The coordinator's gradient descent: the network without its fixed first step, its parameters at the
# start, its steps, and the augmentation of each step.
ServerWalk = tuple[nn.Module, Tensors, Descent, Iterator[Change]]


def effective_radius(
    server: ServerWalk,
    synthetic: LandscapeRecords,
    real: LandscapeRecords,
    search: Search,
    generator: torch.Generator,
) -> float:
    """Distance that gradient descent on synthetic records has covered where the loss of real ones
    is smallest.

    The search takes the first `search.steps` steps of the coordinator's walk. If the loss still
    falls at the last step, there is no turning point; the result is then the trust radius, or the
    distance itself if the descent is plain.

    Args:
        server: the coordinator's walk.
        synthetic: records that the walk descends on.
        real: records of the site.
        search: its length.
        generator: draws the real records that are evaluated.

    Returns:
        The distance, at most the trust radius.

    Source: FedLAP-DP, figure 2. Differs from the paper: the loss is evaluated every few steps on at
    most 128 real records, and the search stops after four evaluations without a smaller loss. The
    paper's code makes a hundred passes over all records, more than half of a round.
    """
    rows = torch.randperm(len(real.labels), generator=generator)[:SUBSET].to(real.labels.device)
    seen, (body, start, descent, changes) = real.take(rows), server
    best, best_step, covered, last = float("inf"), 0, 0.0, 0
    for step, (here, _) in enumerate(walk(body, start, synthetic, descent, changes), 1):
        if step % search.every == 0 or step == search.steps:
            last, now = step, total_loss(body, here, seen)
            if now < best:
                best, best_step, covered = now, step, distance(here, start)
            elif step - best_step >= PATIENCE * search.every:
                break
        if step >= search.steps:
            break
    if (best_step == last and not descent.plain) or not covered > 0:
        return descent.radius
    return min(covered, descent.radius)


# Of the steps of the images.
MOMENTUM = 0.5


@dataclass(frozen=True)
class Matching:
    """Settings of the synthesis in a round.

    Attributes:
        settings: of the run.
        rate: learning rate of the model along a trajectory.
        mse_weight: weight of the squared error in the mismatch (see
            `fedsurrogate.common.models.loss_landscape.mismatch`).
        statistic: what is matched.
        start: where the next trajectory begins, given the received model; FedLAP begins there
            itself.
    """

    settings: FedLAPSettings
    rate: float
    mse_weight: float
    statistic: Statistic = GRADIENT
    start: Callable[[Tensors], Tensors] = dict


@dataclass
class Synthesis:
    """Record of a synthesis.

    Attributes:
        first: first mismatch.
        last: last mismatch.
        looks: evaluations of the real statistic.
        seconds: for each part.
    """

    first: float = float("nan")
    last: float = float("nan")
    looks: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {"real-gradients": 0.0, "image-steps": 0.0}
    )


def synthesise(
    body: nn.Module,
    model: Tensors,
    begin: LandscapeRecords,
    real: Batches | PrivateGradient,
    matching: Matching,
    changes: Iterator[Change],
) -> tuple[LandscapeRecords, Synthesis]:
    """Optimise synthetic records so that their statistic, such as the gradient, matches the real
    one.

    Values are optimised along trajectories that start at `model`. Labels do not change.

    Args:
        body: the network.
        model: its parameters, by name.
        begin: the first synthetic records.
        real: statistic of the real records.
        matching: settings of the round.
        changes: augmentations, one for each evaluation of the real statistic and each step of the
            model.

    Returns:
        The synthetic records, and the record of the synthesis.

    Source: FedLAP-DP, algorithm 1 (algorithm 3 with a private `real`). Differs from the paper: the
    number of batches in a loop is a setting; the paper's algorithm omits them, but its accounting
    counts them.
    """
    synthesis, settings = Synthesis(), matching.settings
    compare = partial(mismatch, mse_weight=matching.mse_weight, noise=real.noise)
    values = begin.values.clone().requires_grad_()
    optimiser = UncompiledSGD([values], lr=settings.image_learning_rate, momentum=MOMENTUM)
    for _ in range(settings.trajectories):
        start = matching.start(model)
        here = {name: tensor.clone() for name, tensor in start.items()}
        for loop in range(settings.loops):
            if distance(here, start) >= settings.trust_radius:
                break
            for _ in range(settings.batches):
                change = next(changes)
                began = time.perf_counter()
                target = list(real(here, change).values())
                synthesis.looks += 1
                synthesis.seconds["real-gradients"] += time.perf_counter() - began
                began = time.perf_counter()
                for _ in range(settings.image_steps):
                    now = LandscapeRecords(values, begin.labels, begin.weights)
                    synthesis.last, values.grad = matching.statistic.slope(
                        body, here, now, change, target, compare
                    )
                    # A step that is not finite would destroy the result of all earlier steps.
                    if values.grad.isfinite().all():
                        optimiser.step()
                    synthesis.first = (
                        synthesis.last if synthesis.first != synthesis.first else synthesis.first
                    )
                synthesis.seconds["image-steps"] += time.perf_counter() - began
            if loop < settings.loops - 1:
                now = LandscapeRecords(values.detach(), begin.labels, begin.weights)
                for _ in range(settings.model_steps):
                    slope = gradient(body, here, now, next(changes))
                    here = {name: here[name] - matching.rate * slope[name] for name in here}
    return LandscapeRecords(values.detach(), begin.labels, begin.weights), synthesis


def approximate(
    job: Job,
    statistic: Statistic = GRADIENT,
    start: Callable[[Tensors], Tensors] = dict,
    searches: bool = True,
) -> MethodOutput:
    """Make this round's synthetic records: FedLAP or, with a privacy budget, FedLAP-DP; other
    methods by what they match and where.

    With a budget a round uses the records only through private gradients. The steps of the images
    use nothing else; the labels are all classes of the run, and the radius is the run's setting.

    Args:
        job: the request, with the model.
        statistic: what synthetic records match.
        start: as in `Matching`.
        searches: whether the site looks for the effective radius; otherwise it reports the run's
            trust radius.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's.
    """
    run, received = job.run, job.received_model()
    classes = received.header.classes
    settings, private, claim = run.settings.fedlap, bool(run.settings.epsilon), job.mechanism()
    features, labels = job.training_data(classes)
    body, real, model = _in_place(job, received, features, labels)
    # All classes of the run hide a site's own.
    present = torch.arange(len(classes)) if private else torch.unique(labels)
    named = tuple(classes[index] for index in present.tolist())
    begin = _begin(job, present, named, real.values.shape[1:])
    begin = LandscapeRecords.evenly(
        begin.values.to(real.values), begin.labels.to(real.values.device)
    )
    changes = draws(
        settings.augment, stream(run.settings.seed, "fedlap", job.site, job.round, "augment")
    )
    batches = stream(run.settings.seed, "fedlap", job.site, job.round)
    looks: Batches | PrivateGradient = Batches(body, real, settings.batch_size, batches, statistic)
    if claim is not None:
        expected = settings.batch_size or 1
        units = Units.of(job.training_units(classes), len(labels))
        looks = PrivateGradient(
            body, real, claim.clip, claim.noise_multiplier, settings.sample_rate, expected, units
        )
    rate = settings.rate(job.round, run.rounds)
    matching = Matching(settings, rate, settings.mse(private), statistic, start)
    made, synthesis = synthesise(body, model, begin, looks, matching, changes)
    began = time.perf_counter()
    searches = searches and not private
    radius = _radius(job, body, model, made, real, synthesis) if searches else settings.trust_radius
    synthesis.seconds["radius-search"] = time.perf_counter() - began
    values = made.values.flatten(1).cpu().clamp(-LARGEST_VALUE, LARGEST_VALUE)
    own = torch.arange(len(named)).repeat_interleave(settings.images_per_class)
    records = 0 if private else len(labels)
    answer = Synthetic(job.header(named), job.round, values, own, radius, records, claim)
    payload = pack_synthetic(answer)
    stored = save({"values": values}, {"classes": "\n".join(named)})
    kept = {job.state / f"synthetic-{job.round}.safetensors": stored}
    facts = {f"seconds-{name}": round(seconds, 3) for name, seconds in synthesis.seconds.items()}
    facts |= {"mismatch-first": synthesis.first, "mismatch-last": synthesis.last}
    if isinstance(looks, PrivateGradient):
        facts |= looks.facts()
    timings: Info = {}
    if not private:
        timings |= {f"{name}-seconds": seconds for name, seconds in synthesis.seconds.items()}
    return MethodOutput(payload, claim, facts, timings, kept)


def _in_place(
    job: Job, received: Parameters, features: Tensor, labels: Tensor
) -> tuple[nn.Module, LandscapeRecords, Tensors]:
    """The network without its fixed first step, the records after that step, and the model, on the
    site's device.
    """
    device = site_device(job.run.settings.device, job.node)
    sizes = features.shape[1], len(received.header.classes)
    module = network(job.run.settings.fedlap.kind, *sizes, received.tensors)
    body, values = split_input(module, features)
    model = {name: tensor.to(device) for name, tensor in received.tensors.items()}
    records = LandscapeRecords.evenly(values.float().to(device), labels.to(device))
    return body.to(device), records, model


def _begin(
    job: Job, present: Tensor, named: tuple[str, ...], shape: torch.Size
) -> LandscapeRecords:
    """First synthetic records: noise, or those this site sent in the last round that the
    coordinator used, if still here.

    They are never real records. The file on the disk has been released before, so under privacy it
    is already charged.
    """
    settings = job.run.settings.fedlap
    labels = present.repeat_interleave(settings.images_per_class)
    noise = torch.randn(
        (len(labels), *shape),
        generator=stream(job.run.settings.seed, "fedlap", job.site, "begin"),
    )
    if settings.kind == "linear":
        # About norm one, as the records.
        noise /= noise[0].numel() ** 0.5
    if settings.start == "last" and job.confirmed:
        last = _last(job.state / f"synthetic-{job.confirmed}.safetensors", named)
        if last is not None and last.shape == noise.flatten(1).shape:
            noise = last.reshape(noise.shape)
    return LandscapeRecords.evenly(noise, labels)


def _last(file: Path, named: tuple[str, ...]) -> Tensor | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as content:
            if (content.metadata() or {}).get("classes") != "\n".join(named):
                return None
        values: Tensor = load_file(file)["values"]
    except (OSError, SafetensorError, KeyError):
        return None
    return values


def _radius(
    job: Job,
    body: nn.Module,
    model: Tensors,
    made: LandscapeRecords,
    real: LandscapeRecords,
    synthesis: Synthesis,
) -> float:
    settings = job.run.settings.fedlap
    batch = job.run.settings.fedlap.batch_size or len(real.labels)
    work = synthesis.looks * (
        settings.image_steps * IMAGE_STEP * len(made.labels)
        + MODEL_STEP * min(batch, len(real.labels))
    )
    plain = settings.descent == "plain"
    search = Search(settings.server_steps)
    if not plain:
        search = Search.within(work, len(made.labels), len(real.labels), settings.server_steps)
    generator = stream(job.run.settings.seed, "fedlap", job.site, job.round, "radius")
    changes = draws(settings.augment, generator)
    rate = settings.rate(job.round, job.run.rounds)
    descent = Descent(rate, settings.server_steps, settings.trust_radius, plain)
    return effective_radius((body, model, descent, changes), made, real, search, generator)


def dsc(job: Job) -> MethodOutput:
    """Dataset condensation by gradient matching in each class, at the received model.

    Args:
        job: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Zhao et al. 2021, algorithm 1. Differs from the paper, which begins at many random
    models: here all gradients are those at one model, and later rounds go on at the model that was
    learned.
    """
    return approximate(job, CLASS_GRADIENTS, searches=False)


def feddm(job: Job) -> MethodOutput:
    """Distribution matching: class means of the head's inputs and outputs, at models drawn around
    the received one.

    Args:
        job: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Xiong et al. 2023, algorithm 1; their rho, which bounds the drawn models and the
    coordinator's steps, is `fedlap.trust-radius`. Differs from the paper: a drawn model's distance
    is uniform from zero to rho; there it is that of a truncated Gaussian, which in many dimensions
    is nearly always rho.
    """

    generator = stream(job.run.settings.seed, "feddm", job.site, job.round)
    radius = job.run.settings.fedlap.trust_radius
    return approximate(
        job, CLASS_MEANS, lambda model: perturbed(model, radius, generator), searches=False
    )


def psg(job: Job) -> MethodOutput:
    """Private set generation: private gradients of all classes together, at models drawn at random.

    Args:
        job: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Chen et al. 2022, algorithm 1. Noise and accounting are those of FedLAP-DP.
    """

    generator = stream(job.run.settings.seed, "psg", job.site, job.round)
    return approximate(job, start=lambda model: _fresh(job, model, generator), searches=False)


def perturbed(model: Tensors, radius: float, generator: torch.Generator) -> dict[str, Tensor]:
    """A model in a random direction from another one.

    Args:
        model: the other one, by parameter.
        radius: its distance is drawn from zero to this.
        generator: of direction and distance.
    """
    noise = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.items()}
    length = torch.stack([part.double().square().sum() for part in noise.values()]).sum().sqrt()
    share = float(radius * torch.rand(1, generator=generator) / length)
    return {name: tensor + share * noise[name].to(tensor) for name, tensor in model.items()}


def _fresh(job: Job, model: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    settings, seed = job.run.settings.fedlap, int(torch.randint(2**31, (1,), generator=generator))
    inputs, classes = job.found.train.features.shape[1], len(job.received_model().header.classes)
    drawn = parameters_of(fresh(settings.kind, inputs, classes, settings.width, seed))
    return {name: drawn[name].to(tensor) for name, tensor in model.items()}
