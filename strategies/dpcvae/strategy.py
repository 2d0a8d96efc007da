"""DP-CVAE in rounds: decoders are averaged, encoders stay at the sites, and a head is trained on
synthetic embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.generators import COUNTS
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.rounds import Rounds
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.dpcvae.generating import check_first_round, expected_shapes, take_in
from fedsurrogate.strategies.dpcvae.shared_generator import SharedGenerator
from fedsurrogate.strategies.robustness.defence import cap_sums, defend_updates


class DPCVAE(SharedGenerator, Rounds[Parameters]):
    """Training in `dpcvae.rounds` rounds. In the first, sites send class sizes and sums; in the
    others, decoder updates.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = DPCVAE({"method": "dpcvae", "dpcvae.rounds": 2})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('rounds', ['decoder'])
    """

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        if self.config.settings.epsilon and training.asked and not training.round:
            raise RunError(
                "the first round of this run failed, but is charged; start a new run, without "
                "resume"
            )
        return training

    def shapes(self, training: Training) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the class sums in the first round, and of the decoder's parameters in
        the others.
        """
        return expected_shapes(training)

    def parse(self, payload: bytes, training: Training) -> Parameters:
        """Parse one site's class sums, or its decoder update.

        Args:
            payload: its bytes.
            training: before the round.

        Raises:
            SurrogateError: for bytes that are no reply, or one with too many numbers.
        """
        return unpack_parameters(payload, most=sum(map(math.prod, self.shapes(training).values())))

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the classes, and that some embeddings can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other classes, or sums that no embeddings have.
        """
        if reply.header.classes != training.classes:
            raise SurrogateError(
                f"its {len(reply.header.classes)} classes are not the run's in the run's order"
            )
        own = self.config.settings
        if training.round == 0:
            check_first_round(reply, self.config.mechanism, own.dpcvae)

    def records(self, reply: Parameters) -> int:
        """Sum of the class sizes, which the first round reports; noisy under privacy."""
        return max(0, round(float(reply.tensors[COUNTS].sum()))) if COUNTS in reply.tensors else 0

    def facts(self, reply: Parameters) -> dict[str, object]:
        """Class sizes in the first round; noisy under privacy."""
        if COUNTS not in reply.tensors:
            return {}
        return {
            "counts": dict(zip(reply.header.classes, reply.tensors[COUNTS].tolist(), strict=True))
        }

    def defend(self, training: Training, replies: Sequence[Parameters]) -> Defended[Parameters]:
        """Cap the class sizes and sums of the first round; in the others, exclude updates that
        disagree with the others', and bound each update.

        Args:
            training: before the round.
            replies: checked replies, sorted by site.
        """
        own = self.config.settings
        if training.round == 0:
            return cap_sums(replies, own.max_share, self.config.private)
        return defend_updates(replies, self.config.defence, own.max_share)

    def absorb(self, training: Training, replies: Sequence[Parameters]) -> dict[str, object]:
        """Update the generator with one round's replies.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.

        Returns:
            No facts for the round's event.
        """
        take_in(training, replies)
        return {}
