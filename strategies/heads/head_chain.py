"""Knowledge distillation at the coordinator: a chain in which every site's relay is a head."""

from __future__ import annotations

from flwr.serverapp import Grid

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.validation import Expectation, check_header
from fedsurrogate.strategies.base.chain import Chain, Walk
from fedsurrogate.strategies.base.introductions import Group


class HeadChain(Chain):
    """A relay is one head; the last site's head is the run's model.

    Example:
        In a ServerApp, `strategy.run(grid)` runs it with all connected sites.

        >>> strategy = HeadChain({"method": "kd"})
        >>> strategy.config.plan.kind, [each.name for each in strategy.config.plan.messages.sends]
        ('chain', ['weight', 'bias'])
    """

    def last_reply(
        self, payload: bytes, relay: bytes | None, place: Expectation, group: Group
    ) -> Parameters:
        """Parse and check a head.

        Args:
            payload: the relay as the site made it.
            relay: as the site received it; not used.
            place: what is expected of the head's origin.
            group: the sites of the run, and their classes.

        Raises:
            SurrogateError: for a head that is not as it must be.
        """
        head = unpack_parameters(payload, most=len(group.classes) * (group.dimension + 1))
        check_header(head.header, place)
        if head.header.classes != group.classes:
            raise SurrogateError("the head's classes are not the run's classes in the run's order")
        sizes = self.config.plan.messages.sizes(len(group.classes), group.dimension, head.records)
        shapes = {field.name: field.sizes(sizes) for field in self.config.plan.messages.sends}
        check_update(head, shapes, 1, private=False)
        return head

    def learn_from(
        self, grid: Grid, group: Group, walk: Walk, relay: bytes, deadline: float
    ) -> None:
        """Use the last site's head as the model.

        Args:
            grid: not used, like the group, the walk and the deadline.
            group: the sites of the run.
            walk: progress of the chain, which has ended.
            relay: of the last site.
            deadline: in seconds.
        """
        head = unpack_parameters(relay)
        self.outcome.model = Head(head.header, head.tensors["weight"], head.tensors["bias"])
