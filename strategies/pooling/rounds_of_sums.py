"""Rounds in which the coordinator sees the sums of each site, and adds them up."""

from __future__ import annotations

import math
import operator
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.outcome import Defended
from fedsurrogate.strategies.base.rounds import Rounds
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.pooling.site_weights import moment_shares, shares_kept

# In the memory of a training: the share of its weight that a site keeps, from its first round on.
SHARE = "share."


def check_charged(training: Training) -> None:
    """Raise RunError where the next round has been charged: with noise, each is released once."""
    if training.config.private and training.asked > training.round:
        raise RunError(
            f"round {training.round + 1} of this run failed, but is charged; start a new run, "
            "without resume"
        )


class RoundsOfSums(Rounds[Parameters]):
    """Rounds of sums. A site's weight is capped by its records in the first round.

    Attributes:
        power: later, n records have the weight n ** power, in a private run.
    """

    power = 1.0

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        check_charged(training)
        return training

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the sums of the next round."""
        messages = self.config.plan.messages
        sizes = messages.sizes(len(training.classes), training.inputs, 1)
        fields = messages.schema(not training.round)
        shapes = {field.name: field.sizes(sizes) for field in fields}
        return {name: shape for name, shape in shapes.items() if math.prod(shape)}

    def parse(self, payload: bytes, training: Training) -> Parameters:
        """Parse one site's sums.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for bytes that are no sums, or too many numbers.
        """
        return unpack_parameters(payload, most=sum(map(math.prod, self.shapes(training).values())))

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the rows of the sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other rows than the run's.
        """
        if reply.header.classes != training.classes:
            raise SurrogateError("sums of other rows than the run's, or in another order")

    @abstractmethod
    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by kind, for the cap of its weight; None where a reply has
        none.
        """

    @abstractmethod
    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Finish a round but for its number: change model and memory.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
            shares: of its weight that each site keeps.

        Returns:
            Facts for the round's event.

        Raises:
            RunError: for sums that no records have, or from which nothing can be learned.
        """

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Cap weights by records, and without noise by second moments.

        Args:
            training: before the round.
            replies: checked sums, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        capped = {
            each.header.site: share
            for each, share in zip(replies, shares, strict=True)
            if share < 1
        }
        return Defended(list(replies), capped)

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Add the sums of all sites, and finish the round.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
        """
        shares = self._shares(training.memory, replies)
        names = [each.header.site for each in replies]
        facts = self.add(training, replies, shares)
        kept = {
            SHARE + name: torch.tensor([share], dtype=torch.float64)
            for name, share in zip(names, shares, strict=True)
        }
        training.memory = {**training.memory, **kept}
        training.finish_round(names)
        return facts

    def _shares(self, memory: Mapping[str, Tensor], replies: Sequence[Parameters]) -> list[float]:
        """The share of its weight that each site keeps: by this round's records, or an earlier
        one's.
        """
        own = self.config
        rows = [counts for each in replies if (counts := self.counts(each)) is not None]
        if len(rows) == len(replies):
            power = self.power if own.private else 1.0
            shares = shares_kept(rows, own.settings.max_share, power)
        else:
            first = (memory.get(SHARE + each.header.site) for each in replies)
            shares = [1.0 if share is None else float(share) for share in first]
        if own.private:
            return shares
        moments = moment_shares([each.tensors for each in replies], own.settings.max_share)
        return list(map(operator.mul, shares, moments))
