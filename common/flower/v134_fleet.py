"""The Fleet API of Flower 1.34: whom its SuperLink hears, and how much it receives of strangers.

Flower reads a whole message of up to two gibibytes before it looks for a key. Here a call is
refused by its metadata, which come first: gRPC receives a message only when a handler reads it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.flower.interface import FleetRequest
from fedsurrogate.common.flower.parts import LARGEST_PART, check_tree
from fedsurrogate.common.flower.places import Doorkeeper

if TYPE_CHECKING:
    import grpc
    from flwr.app import Message
    from flwr.proto.message_pb2 import ObjectTree

LARGEST_MESSAGE = LARGEST_PART
"""Bytes of a message to the Fleet API. Flower cuts arrays into pieces of 5 MiB, and what stands
beside a payload has at most 4 MiB."""
LIMITS = (
    ("grpc.max_receive_message_length", LARGEST_MESSAGE),
    # Of headers, which come before any check; a signature and a key have less than 1 KiB.
    ("grpc.max_metadata_size", 2**14),
    ("grpc.absolute_max_metadata_size", 2**14),
    # Of a connection: calls at a time. A SuperNode makes few.
    ("grpc.max_concurrent_streams", 16),
    # A peer that opens a connection must finish its handshake, and then call.
    ("grpc.server_handshake_timeout_ms", 20_000),
    ("grpc.max_connection_idle_ms", 60_000),
    # A peer that has vanished, or does not answer, is noticed.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Then a site connects anew; what it is sending may go on meanwhile.
    ("grpc.max_connection_age_ms", 3_600_000),
    ("grpc.max_connection_age_grace_ms", 3_600_000),
)
"""Options of the server, which hold for strangers too."""


class _StrangerError(Exception):
    """The call has a signature of a key that is not registered."""


def guard_fleet(refusal: Callable[[FleetRequest], str], registered_only: bool) -> None:
    """Check requests of all Fleet APIs with keys that this process opens later; call it once.

    Args:
        refusal: why a signed request is refused; empty if it is not.
        registered_only: whether nothing is received from a key that is not registered.
    """
    import grpc
    from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as flowers

    interceptor = flowers.NodeAuthServerInterceptor
    wrap = interceptor._wrap_method_handler

    def guarded(self: Any, handler: grpc.RpcMethodHandler, key: bytes) -> grpc.RpcMethodHandler:
        if registered_only and self.state_factory.state().get_node_id_by_public_key(key) is None:
            raise _StrangerError

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            if reason := refusal(fleet_request(request, key)):
                context.abort(grpc.StatusCode.UNAUTHENTICATED, reason)
            return handler.unary_unary(request, context)

        forms = handler.request_deserializer, handler.response_serializer
        # Flower's own check of the request's node id comes first.
        return wrap(self, grpc.unary_unary_rpc_method_handler(answer, *forms), key)

    flowers._unary_unary_rpc_terminator = _unread  # type: ignore[assignment]
    interceptor.intercept_service = _unread_for_strangers(interceptor.intercept_service)  # type: ignore[method-assign]
    interceptor._wrap_method_handler = guarded  # type: ignore[method-assign, assignment]


def _unread_for_strangers(check: Callable[..., Any]) -> Callable[..., Any]:
    """Flower's check of a call's metadata, whose every refusal leaves the message unread."""
    import grpc

    def intercept(self: Any, go_on: Callable[[Any], Any], call: Any) -> grpc.RpcMethodHandler:
        try:
            return check(self, go_on, call)
        except _StrangerError:
            # As Flower answers each of them, from the message.
            if call.method.endswith(("/ActivateNode", "/RegisterNode")):
                return _unread("The key is not registered", grpc.StatusCode.FAILED_PRECONDITION)
            return _unread("Invalid node ID")
        except (ValueError, TypeError):
            return _unread("Unreadable authentication metadata")

    return intercept


def _unread(text: str, code: Any = None) -> Any:
    """A handler that refuses a call and receives nothing of its message. code: UNAUTHENTICATED
    without one.
    """
    import grpc

    def refuse(messages: Any, context: grpc.ServicerContext) -> Any:
        context.abort(code or grpc.StatusCode.UNAUTHENTICATED, text)

    # The messages of a stream are received one by one as they are read, and none is.
    return grpc.stream_unary_rpc_method_handler(refuse)


def take_replies_again() -> None:
    """Let a SuperNode send a reply again whose receipt was lost; call it once.

    A SuperNode announces a reply, and then sends the parts that the receipt asks for. The
    coordinator's app takes the announcement at once, and Flower forgets its question. A second
    announcement then gets a receipt that asks for nothing: the SuperNode counts the reply as sent,
    and the app waits three minutes for its parts.
    """
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from flwr.supercore.state.schema import corestate_models as tables
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import select

    states: Any = SqlLinkState
    store = states.store_message_and_object_tree

    def store_message_and_object_tree(
        state: Any, message: Message, parts: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        stored: bool
        stored, missing = store(state, message, parts, session_id)
        if stored or not message.metadata.reply_to_message_id:
            return stored, missing
        root, push = tables.ObjectPushSessionRoot, tables.ObjectPushSession
        # Flower keeps it from a first announcement that it has accepted, until all parts are there.
        awaited = (
            select(root.session_id)
            .join(push, push.session_id == root.session_id)
            .where(root.root_object_id == parts.object_id)
            .where(push.run_id == uint64_to_int64(message.metadata.run_id))
        )
        with state.session() as session:
            if session.scalar(awaited) is None:
                return False, []
            return True, state.preregister_object_tree(parts, session_id)

    states.store_message_and_object_tree = store_message_and_object_tree


def limit_fleet(door: Doorkeeper, registered_only: bool) -> None:
    """Set `LIMITS` for all Fleet APIs that this process opens later; call it once.

    Args:
        door: limits their connections.
        registered_only: whether a connection needs a registered key to stay.
    """
    import grpc

    most = ("grpc.max_allowed_incoming_connections", door.places.most)

    # By its name: the package has a function of this name, too.
    superlink: Any = import_module("flwr.superlink.cli.flower_superlink")
    create, server = superlink.generic_create_grpc_server, grpc.server

    def limited(*given: Any, options: Any = (), **named: Any) -> grpc.Server:
        # Of two values for one option, gRPC takes the first.
        return server(*given, options=[*LIMITS, most, *options], **named)

    @functools.wraps(create)
    def create_limited(*given: Any, **named: Any) -> grpc.Server:
        # Flower passes no options on to gRPC.
        grpc.server = limited
        if registered_only:
            # The first one sees what all others make of a call.
            named["interceptors"] = [at_the_door(door), *(named.get("interceptors") or ())]
        try:
            made = create(*given, **named)
        finally:
            grpc.server = server
        if registered_only:
            door.watch(int(made.bound_address.rpartition(":")[2]))
        return made

    superlink.generic_create_grpc_server = create_limited


def at_the_door(door: Doorkeeper) -> grpc.ServerInterceptor:
    """An interceptor that reports to `door` which connections have a registered key, and which were
    refused: of both, before a message is received.
    """
    import grpc
    from flwr.common.constant import PUBLIC_KEY_HEADER
    from flwr.supercore.utils import get_metadata_bytes

    def intercept(_: Any, go_on: Callable[[Any], Any], call: Any) -> Any:
        if (handler := go_on(call)) is None:
            return None

        def receive(messages: Iterator[Any], context: grpc.ServicerContext) -> Any:
            try:
                if handler.request_streaming:
                    return handler.stream_unary(messages, context)
                door.accept(
                    context.peer(),
                    get_metadata_bytes(call.invocation_metadata, PUBLIC_KEY_HEADER) or b"",
                )
                for request in messages:
                    return handler.unary_unary(request, context)
                return context.abort(grpc.StatusCode.INVALID_ARGUMENT, "A call without a message")
            finally:
                if handler.request_streaming or context.code() == grpc.StatusCode.UNAUTHENTICATED:
                    door.refuse(context.peer())

        forms = handler.request_deserializer, handler.response_serializer
        return grpc.stream_unary_rpc_method_handler(receive, *forms)

    return type("AtTheDoor", (grpc.ServerInterceptor,), {"intercept_service": intercept})()


def fleet_request(request: Any, key: bytes) -> FleetRequest:
    """What a request of the Fleet API contains that a guard looks at.

    Args:
        request: A message of `flwr.proto.fleet_pb2`.
        key: Public key of its signature.
    """
    from flwr.proto import fleet_pb2

    if isinstance(request, fleet_pb2.ActivateNodeRequest | fleet_pb2.RegisterNodeFleetRequest):
        return FleetRequest(key, key=request.public_key)
    if isinstance(request, fleet_pb2.PushMessagesRequest):
        senders = tuple(message.metadata.src_node_id for message in request.messages_list)
        return FleetRequest(key, None, request.node.node_id, senders, _fault(request))
    return FleetRequest(key)


def _fault(request: Any) -> str:
    """What is wrong with the parts that messages are said to have."""
    try:
        for tree in request.message_object_trees:
            check_tree(tree)
    except SurrogateError as error:
        return str(error)
    return ""
