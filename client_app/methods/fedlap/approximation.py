"""A site's part in a round of FedLAP: it receives the model and sends synthetic records that
approximate its loss. DSC, FedDM and PSG are recipes of its synthesis for comparison, without a radius.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.loss_landscape import Descent, LandscapeRecords, distance, gradient
from fedsurrogate.common.models.networks import fresh, parameters_of, split_input
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.models.training_parts import Change, UncompiledSGD, draws
from fedsurrogate.common.surrogates.surrogates import LARGEST_VALUE, Synthetic
from fedsurrogate.common.wire.model_proto import pack_synthetic

from ...features.site_features import site_device
from ..dp.record_gradients import PrivateGradient, Units
from ..job import Job, MethodOutput
from ..local_training import network
from .statistics import (
    CLASS_GRADIENTS,
    CLASS_MEANS,
    GRADIENT,
    IMAGE_STEP,
    MODEL_STEP,
    Batches,
    Search,
    ServerWalk,
    Statistic,
    effective_radius,
)

if TYPE_CHECKING:
    from fedsurrogate.common.settings import FedLAPSettings

# Of the steps of the images.
MOMENTUM = 0.5


class RealStatistic(Protocol):
    """A statistic of a site's real records, such as their gradient: of all, of a batch, or private.

    Attributes:
        noise: standard deviation of it in every entry.
    """

    noise: float

    def __call__(self, parameters: Tensors, change: Change) -> dict[str, Tensor]:
        """One evaluation of the statistic."""


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
    real: RealStatistic,
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
                        body, here, now, change, target, matching.mse_weight, real.noise
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


@dataclass(frozen=True)
class Recipe:
    """What a method of this family does. The default is FedLAP.

    Attributes:
        statistic: what synthetic records match.
        starts: makes `Matching.start` for a round.
        searches: whether the site looks for the effective radius; otherwise it reports the run's
            trust radius.
    """

    statistic: Statistic = GRADIENT
    starts: Callable[[Job], Callable[[Tensors], Tensors]] = lambda job: dict
    searches: bool = True


def approximate(job: Job, recipe: Recipe = Recipe()) -> MethodOutput:
    """Make this round's synthetic records: FedLAP or, with a privacy budget, FedLAP-DP; other
    methods by their recipe.

    With a budget a round uses the records only through private gradients. The steps of the images
    use nothing else; the labels are all classes of the run, and the radius is the run's setting.

    Args:
        job: the request, with the model.
        recipe: of the method.

    Raises:
        DataError: if no training record is left.
        SurrogateError: for a model that is not this run's.
    """
    run, received = job.run, job.received_model()
    classes = received.header.classes
    settings, private, claim = run.settings.fedlap, bool(run.settings.epsilon), job.mechanism()
    features, labels = job.training_data(classes)
    body, real, model = _in_place(job, received, features, labels)
    present = (
        torch.arange(len(classes)) if private or settings.labels == "all" else torch.unique(labels)
    )
    named = tuple(classes[index] for index in present.tolist())
    begin = _begin(job, present, named, real.values.shape[1:])
    begin = LandscapeRecords.evenly(
        begin.values.to(real.values), begin.labels.to(real.values.device)
    )
    changes = draws(
        settings.augment, stream(run.settings.seed, "fedlap", job.site, job.round, "augment")
    )
    batches = stream(run.settings.seed, "fedlap", job.site, job.round)
    looks: RealStatistic = Batches(body, real, settings.batch_size, batches, recipe.statistic)
    if claim is not None:
        expected = settings.batch_size or 1
        units = Units.of(job.training_units(classes), len(labels))
        looks = PrivateGradient(
            body, real, claim.clip, claim.noise_multiplier, settings.sample_rate, expected, units
        )
    rate = settings.rate(job.round, run.rounds)
    matching = Matching(settings, rate, settings.mse(private), recipe.statistic, recipe.starts(job))
    made, synthesis = synthesise(body, model, begin, looks, matching, changes)
    began = time.perf_counter()
    searches = recipe.searches and not private
    radius = _radius(job, body, model, made, real, synthesis) if searches else settings.trust_radius
    synthesis.seconds["radius-search"] = time.perf_counter() - began
    values = made.values.flatten(1).cpu().clamp(-LARGEST_VALUE, LARGEST_VALUE)
    own = torch.arange(len(named)).repeat_interleave(settings.images_per_class)
    records = 0 if private else len(labels)
    answer = Synthetic(job.header(named), job.round, values, own, radius, records, claim)
    payload = pack_synthetic(answer)
    kept = {
        job.state / f"synthetic-{job.round}.safetensors": save(
            {"values": values}, {"classes": "\n".join(named)}
        )
    }
    facts = {f"seconds-{name}": round(seconds, 3) for name, seconds in synthesis.seconds.items()}
    facts |= {"mismatch-first": synthesis.first, "mismatch-last": synthesis.last}
    if isinstance(looks, PrivateGradient):
        facts |= looks.facts()
    timings = (
        {}
        if private
        else {f"{name}-seconds": float(seconds) for name, seconds in synthesis.seconds.items()}
    )
    return MethodOutput(payload, claim, facts, {**timings}, kept)


def _in_place(
    job: Job, received: Parameters, features: Tensor, labels: Tensor
) -> tuple[nn.Module, LandscapeRecords, Tensors]:
    """The network without its fixed first step, the records after that step, and the model, on the
    site's device.
    """
    device = site_device(job.run.settings.device, job.node)
    module = network(
        job.run.settings.fedlap.kind,
        features.shape[1],
        len(received.header.classes),
        received.tensors,
    )
    body, values = split_input(module, features)
    model = {name: tensor.to(device) for name, tensor in received.tensors.items()}
    return (
        body.to(device),
        LandscapeRecords.evenly(values.float().to(device), labels.to(device)),
        model,
    )


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
    settings, batch = (
        job.run.settings.fedlap,
        job.run.settings.fedlap.batch_size or len(real.labels),
    )
    work = synthesis.looks * (
        settings.image_steps * IMAGE_STEP * len(made.labels)
        + MODEL_STEP * min(batch, len(real.labels))
    )
    plain = settings.descent == "plain"
    search = (
        Search(settings.server_steps)
        if plain
        else Search.within(work, len(made.labels), len(real.labels), settings.server_steps)
    )
    generator = stream(job.run.settings.seed, "fedlap", job.site, job.round, "radius")
    changes = draws(settings.augment, generator)
    server = ServerWalk(
        body,
        model,
        Descent(
            settings.rate(job.round, job.run.rounds),
            settings.server_steps,
            settings.trust_radius,
            plain,
        ),
        changes,
    )
    return effective_radius(server, made, real, search, generator)


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
    return approximate(job, Recipe(CLASS_GRADIENTS, searches=False))


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

    def starts(job: Job) -> Callable[[Tensors], Tensors]:
        generator = stream(job.run.settings.seed, "feddm", job.site, job.round)
        return lambda model: perturbed(model, job.run.settings.fedlap.trust_radius, generator)

    return approximate(job, Recipe(CLASS_MEANS, starts, searches=False))


def psg(job: Job) -> MethodOutput:
    """Private set generation: private gradients of all classes together, at models drawn at random.

    Args:
        job: the request, with the model.

    Raises:
        DataError, SurrogateError: as `approximate`.

    Source: Chen et al. 2022, algorithm 1. Noise and accounting are those of FedLAP-DP.
    """

    def starts(job: Job) -> Callable[[Tensors], Tensors]:
        generator = stream(job.run.settings.seed, "psg", job.site, job.round)
        return lambda model: _fresh(job, model, generator)

    return approximate(job, Recipe(starts=starts, searches=False))


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
