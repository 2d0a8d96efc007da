"""Flower 1.34: fewer calls and shorter waits in a round. Small messages bring their parts, questions for
work wait until there is some, and a SuperLink asks its database less.

Both ends may be without any of it: they then ask for each part, and ask again.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from .parts import MOST_PARTS

if TYPE_CHECKING:
    import grpc

# Bytes of arrays up to which a message brings its parts, which are then twice as many at most. Each
# part is else a call, at every hop.
SMALL = 2**16
# Record in which a message brings them, by id. Flower leaves the content of an announcement empty,
# and whoever does not know the record asks for each part.
PARTS = "fedsurrogate.parts"
# Number of messages in an announcement up to which a server takes what they bring: it stores all of
# it in one transaction, and meanwhile no heartbeat is written.
MOST_TOGETHER = 32


def bring_parts(sender: Any) -> None:
    """Let a module that sends messages announce small ones together with their parts.

    Args:
        sender: Its `remove_content_from_message` makes the announcements.
    """
    from flwr.app import ConfigRecord, Message
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    strip = sender.remove_content_from_message

    def remove_content_from_message(message: Message) -> Message:
        bare: Message = strip(message)
        if message.has_error():
            return bare
        arrays = (
            each for record in message.content.array_records.values() for each in record.values()
        )
        if sum(len(each.data) for each in arrays) <= SMALL:
            objects = get_all_nested_objects(message).items()
            parts: dict[str, Any] = {name: part.deflate() for name, part in objects}
            if sum(map(len, parts.values())) <= 2 * SMALL:
                bare.content[PARTS] = ConfigRecord(parts)
        return bare

    sender.remove_content_from_message = remove_content_from_message


def store_parts(handlers: Any) -> None:
    """Let a server of Flower store the parts that announced messages bring, and ask for the others.

    Args:
        handlers: A module with its function `push_messages`.
    """
    from flwr.supercore.run import InvalidRunStatusException

    push = handlers.push_messages

    def push_messages(request: Any, state: Any, *task: Any) -> Any:
        if len(request.messages_list) > MOST_TOGETHER:
            for message in request.messages_list:
                del message.content.items[:]
        brought = _brought(request.messages_list)
        over: InvalidRunStatusException | None = None
        # Nobody sees a message, and deletes it, before its parts are stored.
        with _alone(state):
            try:
                answer = push(request, state, *task)
                run = request.messages_list[0].metadata.run_id
                answer.objects_to_push[:] = [
                    name
                    for name in answer.objects_to_push
                    if name not in brought
                    or not state.store_object(run, answer.session_id, name, brought[name])
                ]
            except InvalidRunStatusException as error:
                # What Flower has deleted of a run that is over stays so.
                over = error
        if over is not None:
            raise over
        return answer

    handlers.push_messages = push_messages


@contextmanager
def _alone(state: Any) -> Iterator[None]:
    """One transaction of a state with a database; of one in memory its locks, in Flower's order."""
    if hasattr(state, "session"):
        with state.session():
            yield
    else:
        with state._lock_object_push_sessions, state.lock_msg_store:
            yield


def take_parts(stub: Any) -> Any:
    """Let what makes the calls of a receiver ask for no part that a message has brought.

    Args:
        stub: Has the methods `PullMessages` and `PullObject`.

    Returns:
        The same.
    """
    from flwr.proto.message_pb2 import PullObjectResponse

    pull_messages, pull_object, kept = stub.PullMessages, stub.PullObject, dict[str, bytes]()

    def pull_announced(*request: Any, **named: Any) -> Any:
        answer = pull_messages(*request, **named)
        kept.clear()
        kept.update(_brought(answer.messages_list))
        return answer

    def pull_part(request: Any, **named: Any) -> Any:
        if (part := kept.get(request.object_id)) is None:
            return pull_object(request, **named)
        return PullObjectResponse(object_found=True, object_available=True, object_content=part)

    stub.PullMessages, stub.PullObject = pull_announced, pull_part
    return stub


def _brought(announced: Iterable[Any]) -> dict[str, bytes]:
    """The parts that announced messages bring, by their ids, which are hashes of them."""
    records = (
        record.config_record
        for message in announced
        for record in message.content.items[:1]
        if record.key == PARTS and len(record.config_record.items) <= MOST_PARTS
    )
    found = {part.key: part.value.bytes for record in records for part in record.items}
    return {name: part for name, part in found.items() if _sound(name, part)}


def _sound(name: str, part: bytes) -> bool:
    """Whether Flower stores a part. A refusal amid a transaction would leave half of its steps."""
    from flwr.supercore.inflatable.inflatable_object import (
        UnexpectedObjectContentError,
        get_object_id,
    )
    from flwr.supercore.inflatable.inflatable_utils import validate_object_content

    with suppress(UnexpectedObjectContentError):
        if get_object_id(part) == name:
            validate_object_content(part)
            return True
    return False


# Between two looks of a SuperLink for tasks that have fallen silent, which takes Flower a minute.
LOOK_SECONDS = 1.0


def ask_the_database_less() -> None:
    """Let a SuperLink ask its database less; call it once.

    For each part of a message, Flower looks for tasks that have fallen silent, and two times for the
    node of a key, which is always the same until the key is taken back.
    """
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from sqlalchemy import event

    states: Any = SqlLinkState
    look, find, delete = (
        states._cleanup_expired_task_tokens,
        states.get_node_id_by_public_key,
        states.delete_node,
    )
    looked, nodes, changing = -LOOK_SECONDS, dict[bytes, int](), threading.Lock()

    def _cleanup_expired_task_tokens(state: Any) -> None:
        if (now := time.monotonic()) - looked < LOOK_SECONDS:
            return

        def remember(_: Any) -> None:
            nonlocal looked
            looked = now

        # Whoever lets a transaction fail undoes what was found in it.
        with state.session() as session:
            event.listen(session, "after_commit", remember, once=True)
            look(state)

    def get_node_id_by_public_key(state: Any, key: bytes) -> int | None:
        node: int | None = nodes.get(key)
        if node is None:
            with changing:
                node = find(state, key)
                if node is not None:
                    nodes[key] = node
        return node

    def delete_node(state: Any, *node: Any, **named: Any) -> None:
        with changing:
            delete(state, *node, **named)
            nodes.clear()

    states._cleanup_expired_task_tokens = _cleanup_expired_task_tokens
    states.get_node_id_by_public_key = get_node_id_by_public_key
    states.delete_node = delete_node


# Seconds for which a question for work is kept open where there is none.
HOLD = 0.5
# Number of questions that are kept open at a time. Each takes a thread, of which a server has
# 1,000.
MOST_HELD = 256


class Bells:
    """Lets servers keep questions for work open until there is some, a thread each."""

    def __init__(self) -> None:
        self._bells: defaultdict[object, threading.Event] = defaultdict(threading.Event)
        self._held, self._changing = set[object](), threading.Lock()

    def ring(self, name: object) -> None:
        """There is work of this name."""
        self._bells[name].set()

    def wait(self, name: object) -> bool:
        """Wait until there is work of this name, for `HOLD` at most; whether there is. One place a name."""
        with self._changing:
            if name in self._held or len(self._held) >= MOST_HELD:
                return False
            self._held.add(name)
        try:
            came = self._bells[name].wait(HOLD)
            self._bells[name].clear()
        finally:
            self._held.remove(name)
        return came

    def hold(
        self, servicer: Any, method: str, name: Callable[[Any], object], work: Callable[[Any], Any]
    ) -> None:
        """Let a method of a servicer be answered when there is work.

        Args:
            servicer: Its class.
            method: The method's name.
            name: Of the work that a request asks for.
            work: In an answer; empty for none.
        """
        ask = getattr(servicer, method)

        def answer(self_: Any, request: Any, context: grpc.ServicerContext) -> Any:
            found = ask(self_, request, context)
            # Whoever has gone is given nothing.
            if work(found) or not (self.wait(name(request)) and context.is_active()):
                return found
            return ask(self_, request, context)

        setattr(servicer, method, answer)


def hold_pulls() -> None:
    """Let a SuperLink answer the questions of SuperNodes for messages, and of its apps for replies, when
    there are some; call it once. An app that names no message waits for the next reply.
    """
    from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
    from flwr.server.superlink.fleet.message_handler import message_handler
    from flwr.superlink.servicer.runtime import runtime_handlers

    bells, handlers, apps = Bells(), cast("Any", message_handler), cast("Any", runtime_handlers)
    bells.hold(
        FleetServicer,
        "PullMessages",
        lambda request: request.node.node_id,
        lambda answer: answer.messages_list,
    )
    announce, reply, pull = apps.push_messages, handlers.push_messages, apps.pull_messages

    def push_to_sites(request: Any, *given: Any, **named: Any) -> Any:
        answer = announce(request, *given, **named)
        for message in request.messages_list:
            bells.ring(message.metadata.dst_node_id)
        return answer

    def push_to_app(request: Any, *given: Any, **named: Any) -> Any:
        answer = reply(request, *given, **named)
        bells.ring(("replies", request.messages_list[0].metadata.run_id))
        return answer

    def pull_messages(request: Any, state: Any, task: Any) -> Any:
        if not request.message_ids:
            bells.wait(("replies", task.run_id))
        return pull(request, state, task)

    apps.push_messages, handlers.push_messages = push_to_sites, push_to_app
    apps.pull_messages = pull_messages


def hold_tasks() -> None:
    """Let a SuperNode answer the questions of its app for a task when there is one; call it once."""
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
    from flwr.supernode.servicer.runtime.runtime_servicer import SuperNodeRuntimeServicer

    states, bells = cast("Any", InMemoryNodeState), Bells()
    create = states.create_task

    def create_task(*given: Any, **named: Any) -> int | None:
        made: int | None = create(*given, **named)
        bells.ring("task")
        return made

    states.create_task = create_task
    bells.hold(
        SuperNodeRuntimeServicer, "PullPendingTasks", lambda _: "task", lambda answer: answer.tasks
    )
