"""FedAvg and related methods at the coordinator: a reply is the change of the model in a site's
training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flwr.serverapp import Grid

from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import FedAvgSettings
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.rounds import Rounds
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedavg.aggregation import aggregate, fresh_memory
from fedsurrogate.strategies.robustness.defence import defend_updates


class Updates(Rounds[Parameters]):
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

    def parse(self, payload: bytes, training: Training) -> Parameters:
        """Parse one site's update.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for bytes that are no update, or one with too many numbers.
        """
        return unpack_parameters(payload, most=sum(map(math.prod, self.shapes(training).values())))

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
