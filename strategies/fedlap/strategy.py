"""FedLAP in rounds: sites receive the model and send synthetic records and radii; the coordinator
learns from these.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogates.surrogates import Synthetic, check_synthetic
from fedsurrogate.common.wire.model_proto import unpack_synthetic
from fedsurrogate.strategies.base.outcome import Defended
from fedsurrogate.strategies.base.rounds import Rounds
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedlap.landscapes import gradient_of, learn, used_radii
from fedsurrogate.strategies.robustness.defence import defend_synthetic

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
        step = learn(training, replies, self.device)
        facts = {
            "radius": step.radius,
            "moved": step.moved,
            "steps": step.steps,
            "at_edge": step.at_edge,
        }
        return {**facts, "radii": radii}

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
