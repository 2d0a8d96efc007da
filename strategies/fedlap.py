"""FedLAP in rounds: sites receive the model and send synthetic records and radii; the coordinator
learns from these.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import class_indices
from fedsurrogate.common.models.devices import stream
from fedsurrogate.common.models.loss_landscape import (
    Descent,
    LandscapeRecords,
    distance,
    gradient,
    walk,
)
from fedsurrogate.common.models.networks import build, split_input
from fedsurrogate.common.models.parameters import Tensors, length_of
from fedsurrogate.common.models.training_parts import draws
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import Synthetic, check_synthetic
from fedsurrogate.common.wire.model_proto import unpack_synthetic

from .base.outcome import Defended
from .base.rounds import Rounds
from .base.training import Training
from .robustness.defence import defend_synthetic

# A radius this many times below the median counts as an error or an attack: it would stop the
# descent for all sites.
FAR_BELOW = 10
# Largest gradient of a site's set, in lengths of the median one.
LONGEST = 4.0
# Rounds whose images are remembered.
REMEMBERED = 3


def limited_radii(radii: Mapping[str, float]) -> dict[str, float]:
    """Radii by site. Radii far below the median are raised to a tenth of it.

    Args:
        radii: as the sites report them.

    Example:
        >>> limited_radii({"north": 1.0, "south": 2.0, "west": 0.001})
        {'north': 1.0, 'south': 2.0, 'west': 0.1}
    """
    floor = statistics.median(radii.values()) / FAR_BELOW
    return {site: max(radius, floor) for site, radius in radii.items()}


def used_radii(radii: Mapping[str, float], settings: FedLAPSettings) -> dict[str, float]:
    """Radii by site as the coordinator uses them: limited, unless its descent is plain.

    Args:
        radii: as the sites report them.
        settings: of the method.
    """
    return dict(radii) if settings.descent == "plain" else limited_radii(radii)


def limited_weights(weights: Sequence[float], lengths: Sequence[float]) -> list[float]:
    """Weights of sets, so that no gradient counts as more than LONGEST times the median one.

    Args:
        weights: of the sets.
        lengths: of their gradients at the model from which the descent starts.

    Example:
        >>> limited_weights([1.0, 1.0, 1.0], [1.0, 2.0, 80.0])
        [1.0, 1.0, 0.1]
    """
    most = LONGEST * statistics.median_low(lengths)
    return [
        weight * min(1.0, most / length) if length else weight
        for weight, length in zip(weights, lengths, strict=True)
    ]


def common_radius(rule: str, radii: Sequence[float], trust_radius: float) -> float:
    """The common trust radius.

    Args:
        rule: "min", "median" (mean of the middle two) or "max" of the sites' radii; "fixed" for the
            announced one.
        radii: of the sites.
        trust_radius: the announced one.

    Source: FedLAP-DP, table 3.

    Example:
        >>> common_radius("median", [1.0, 2.0, 4.0, 9.0], 10.0)
        3.0
    """
    match rule:
        case "min":
            return min(radii)
        case "median":
            return statistics.median(radii)
        case "max":
            return max(radii)
    return trust_radius


def learn(training: Training, sets: Sequence[Synthetic], device: str = "cpu") -> dict[str, float]:
    """Finish a round: gradient descent from the model on the weighted loss of all sets, inside the
    common radius.

    A set's weight is its site's share of the records, N_k / N. Under privacy, which hides it, all
    weights are equal. A set whose gradient is much longer than the usual one has less, see
    `limited_weights`. Records of earlier rounds are in the training's memory, and have the share
    `fedlap.memory` of the loss.

    Args:
        training: before the round; changed.
        sets: the sites' synthetic records, with their radii.
        device: on which the descent runs.

    Returns:
        The radius of the ball that the descent stays in, its distance from the start, its steps, and
        how many of them ended at the edge.

    Source: FedLAP-DP, equation 14 (its code uses equal weights). Differs from the paper, which
        forgets earlier rounds.
    """
    classes, settings = training.classes, training.config.settings.fedlap
    body, shape = _body(training.model, training.inputs, len(classes), settings)
    start = {name: tensor.to(device) for name, tensor in training.model.items()}
    body, own = body.to(device), [_records(each, classes, shape, device) for each in sets]
    lengths = [length_of(gradient(body, start, each)) for each in own]
    weights = limited_weights([max(1, each.records) for each in sets], lengths)
    records = LandscapeRecords.pool(own, weights)
    records, memory = _remembered(
        records, training.memory, settings.remembered(bool(training.config.settings.epsilon))
    )
    number = sets[0].round
    radii = used_radii({each.header.site: each.radius for each in sets}, settings)
    radius = common_radius(settings.rule, list(radii.values()), settings.trust_radius)
    changes = draws(
        settings.augment, stream(training.config.settings.seed, "fedlap", "coordinator", number)
    )
    current, steps, edge = start, 0, 0
    rate = settings.rate(number, training.config.rounds)
    descent = Descent(rate, settings.server_steps, radius, settings.descent == "plain")
    for here, outside in walk(body, start, records, descent, changes):
        current, steps, edge = here, steps + 1, edge + outside
    moved = distance(current, start)
    training.model, training.memory = (
        {name: tensor.cpu() for name, tensor in each.items()} for each in (current, memory)
    )
    training.finish_round(radii)
    return {"radius": radius, "moved": moved, "steps": steps, "at_edge": edge}


def _remembered(
    new: LandscapeRecords, memory: Tensors, share: float
) -> tuple[LandscapeRecords, Tensors]:
    """The records of this round together with those in memory, and the memory after this round.
    Weights sum to one.
    """
    most = REMEMBERED * len(new.labels)
    if memory:
        values, labels, weights = (
            memory[name].to(new.values.device) for name in ("values", "labels", "weights")
        )
        new = LandscapeRecords.pool(
            [new, LandscapeRecords(values, labels.long(), weights)], [1 - share, share]
        )
    if not share:
        return new, {}
    weights = new.weights[:most]
    return new, {
        "values": new.values[:most],
        "labels": new.labels[:most],
        "weights": weights / weights.sum(),
    }


def gradient_of(
    model: Tensors,
    inputs: int,
    classes: tuple[str, ...],
    synthetic: Synthetic,
    settings: FedLAPSettings,
) -> dict[str, Tensor]:
    """The gradient of the loss of a set, by parameter.

    Args:
        model: at whose parameters the gradient is taken.
        inputs: number of features.
        classes: of the model, in order.
        synthetic: the set of a site.
        settings: of the method.
    """
    body, shape = _body(model, inputs, len(classes), settings)
    return gradient(body, model, _records(synthetic, classes, shape, "cpu"))


def _body(
    model: Tensors, inputs: int, classes: int, settings: FedLAPSettings
) -> tuple[torch.nn.Module, torch.Size]:
    body, first = split_input(build(settings.kind, inputs, classes, model), torch.zeros(1, inputs))
    return body, first.shape[1:]


def _records(
    synthetic: Synthetic, classes: tuple[str, ...], shape: torch.Size, device: str
) -> LandscapeRecords:
    labels = class_indices(classes, synthetic.header.classes)[synthetic.labels]
    return LandscapeRecords.evenly(
        synthetic.values.reshape(-1, *shape).to(device), labels.to(device)
    )


SHEETS = ("first", "middle", "last")


class FedLAP(Rounds[Synthetic]):
    """Training in `fedlap.rounds` rounds.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = FedLAP({"method": "fedlap", "fedlap.rounds": 2})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['images', 'labels'])
    """

    def parse(self, payload: bytes, training: Training) -> Synthetic:
        """Parse one site's synthetic records.

        Args:
            payload: their bytes.
            training: not used.

        Raises:
            SurrogateError: for bytes that are no synthetic records.
        """
        return unpack_synthetic(payload)

    def check(self, reply: Synthetic, training: Training) -> None:
        """Check values, radius and records, and that training on them stays finite.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for synthetic records that cannot be used.
        """
        config = self.config
        check_synthetic(
            reply,
            config.settings.fedlap,
            training.classes,
            training.inputs,
            training.round + 1,
            bool(config.settings.epsilon),
        )
        gradient = self._gradient(training, reply)
        # One that is not finite would spoil the sum over all sets.
        if not all(bool(part.isfinite().all()) for part in gradient.values()):
            raise SurrogateError("synthetic records whose gradient is not finite")

    def defend(self, training: Training, replies: Sequence[Synthetic]) -> Defended[Synthetic]:
        """Exclude sets whose gradient disagrees with the others', cap weights, and bound the lengths
        of synthetic records.

        Args:
            training: before the round.
            replies: checked replies, sorted by site.
        """
        own = self.config
        gradients = [self._gradient(training, each) for each in replies]
        return defend_synthetic(replies, gradients, own.defence, own.settings.max_share)

    def absorb(self, training: Training, replies: Sequence[Synthetic]) -> dict[str, object]:
        """Train the model on the sites' synthetic records, inside the common radius.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.

        Returns:
            Facts for the round's event: the descent, and the sites' radii.
        """
        radii = {each.header.site: each.radius for each in replies}
        used = used_radii(radii, self.config.settings.fedlap)
        raised = [site for site, radius in used.items() if radius > radii[site]]
        if raised:
            self.recorder.event("radius-raised", sites=raised, round=training.round + 1)
        self._keep_sheets(training.round + 1, replies)
        return {**learn(training, replies, self.device), "radii": radii}

    def _gradient(self, training: Training, synthetic: Synthetic) -> dict[str, Tensor]:
        own = self.config.settings.fedlap
        return gradient_of(training.model, training.inputs, training.classes, synthetic, own)

    def _keep_sheets(self, number: int, replies: Sequence[Synthetic]) -> None:
        """Store the synthetic records of the first, middle and last round for inspection."""
        from safetensors.torch import save

        rounds = self.config.settings.fedlap.rounds
        due = dict(zip(SHEETS, (number == 1, number == (rounds + 1) // 2, True), strict=True))
        tensors = {each.header.site: each.values.half() for each in replies}
        labels = {f"{each.header.site} labels": each.labels for each in replies}
        names = {each.header.site: each.header.classes for each in replies}
        content = save(
            tensors | labels,
            {
                "round": str(number),
                "sites": json.dumps(names),
                "model": self.config.settings.fedlap.kind,
            },
        )
        for sheet in (name for name, now in due.items() if now):
            self.recorder.keep(f"synthetic-{sheet}.safetensors", content)
