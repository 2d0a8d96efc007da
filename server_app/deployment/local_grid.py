"""A Flower `Grid` in this process: each message is answered at once by a ClientApp, without sockets
and processes.

Messages are converted to bytes and back, as on a network, so that both sides see what they would
see there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedsurrogate.common.flower import flower
from fedsurrogate.common.settings.flat import Scalar

FIRST_NODE = 1001
ClientApp = Callable[[Message, Context], Message]


class LocalGrid(Grid):
    """Nodes 1001, 1002, ... with node-configs of their own.

    Args:
        client_app: answers for all of them.
        node_configs: one for each node.
        run_id: the number of the run in Flower.

    Attributes:
        node_configs: by node id.
        run_config: settings of the run, flat, as each site gets them.

    Example:
        A grid whose nodes send back what they receive.

        >>> def answer(message, context):
        ...     return Message(message.content, reply_to=message)
        >>> grid = LocalGrid(answer, [{"name": "north"}, {"name": "south"}])
        >>> grid.get_node_ids()
        [1001, 1002]
        >>> ids = grid.push_messages([grid.create_message(RecordDict(), "query", 1001, "1")])
        >>> [reply.metadata.src_node_id for reply in grid.pull_messages(ids)]
        [1001]
    """

    def __init__(
        self, client_app: ClientApp, node_configs: Sequence[Mapping[str, Scalar]], run_id: int = 77
    ) -> None:
        self.node_configs = {
            FIRST_NODE + index: dict(config) for index, config in enumerate(node_configs)
        }
        self.run_config: dict[str, Scalar] = {}
        self._client_app = client_app
        self._waiting: dict[str, Message] = {}
        self._states = {node: RecordDict() for node in self.node_configs}
        self.set_run(flower().local_run(run_id))

    def set_run(self, run: Any) -> None:
        """Set the run that messages belong to."""
        self._run = run

    @property
    def run(self) -> Any:
        """A copy of the run."""
        return copy.copy(self._run)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """A message to a node.

        Args:
            content: of the message.
            message_type: which function of the app answers it.
            dst_node_id: the node.
            group_id: of the messages that belong together.
            ttl: seconds for which it may be answered; None for Flower's default.

        Returns:
            The message.
        """
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self.node_configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Deliver messages. The reply to each waits until it is pulled."""
        ids = []
        for message in messages:
            ids.append(flower().stamp(message, self._run.run_id))
            self._deliver(self._transported(message, "down"))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The replies to these messages that have arrived."""
        return [
            self._waiting.pop(name)
            for name in list(message_ids)
            if name in self._waiting and self._may_arrive(name)
        ]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Not offered: strategies push and pull, so that late replies are not lost."""
        raise NotImplementedError("the strategies push and pull, so that late replies are not lost")

    def _deliver(self, message: Message) -> None:
        node = message.metadata.dst_node_id
        context = Context(
            self._run.run_id,
            node,
            dict(self.node_configs[node]),
            self._states[node],
            dict(self.run_config),
        )
        try:
            reply = self._answer(message, context)
        except Exception as error:
            # In the words of Flower's own process of an app.
            reply = flower().failed_reply(
                message, "raised", str(type(error)) + ":<'" + str(error) + "'>"
            )
        self._waiting[message.metadata.message_id] = self._transported(reply, "up")

    def _answer(self, message: Message, context: Context) -> Message:
        return self._client_app(message, context)

    def _may_arrive(self, message_id: str) -> bool:
        return True

    def _transported(self, message: Message, way: str) -> Message:
        """The message as the receiver gets it. way: "up" or "down"."""
        return flower().transported(message)
