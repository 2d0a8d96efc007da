"""Flower 1.34: the Fleet API (whom a SuperLink hears), what a SuperLink knows over gRPC, and tasks
of ClientApps.

Flower reads a whole message of up to two gibibytes before it looks for a key. Here a call is
refused by its metadata, which come first: gRPC receives a message only when a handler reads it.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import RunError, SurrogateError
from .environment import HERE, REMOTE, UNIX, Pace, no_proxy_option
from .interface import (
    HAS_EXPIRED,
    Doorkeeper,
    FleetRequest,
    FlowerNode,
    FlowerRun,
    Standing,
    UnreachableError,
)
from .parts import LARGEST_PART, check_tree

if TYPE_CHECKING:
    import grpc
    from cryptography.hazmat.primitives.asymmetric import ec
    from flwr.app import Message
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.fab import Fab
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    from ..settings.base import Scalar
    from .interface import TaskGuard, TaskStarter


# The Unix time of a SuperLink in its refusals. By it a site learns how far its clock is off.
TIME = "fedsurrogate-time"
# Bytes of a message to the Fleet API. Flower cuts arrays into pieces of 5 MiB, and what stands
# beside a payload has at most 4 MiB.
LARGEST_MESSAGE = LARGEST_PART
# Options of the server, which hold for strangers too.
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
        context.set_trailing_metadata(((TIME, repr(time.time())),))
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


SECONDS = 30.0
# The SuperLink packs its own app first, to compare.
# How long a request to the Control API may take.
START_SECONDS = 300.0


class Link134:
    """Connections to a SuperLink of Flower 1.34."""

    @contextmanager
    def control(self, address: str, authority: Path | None) -> Iterator[Control]:
        """Connect to a Control API.

        The SuperLink refuses clients that do not name their version.

        Args:
            address: unix:/path, without TLS, or host:port.
            authority: File of the CA that signed the SuperLink's certificate; None without TLS.

        Raises:
            UnreachableError: Nothing answers there. Raised by the first request.
            RunError: A request fails.
        """
        import grpc
        from flwr.proto.control_pb2_grpc import ControlStub
        from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

        stub: Callable[..., Any] = ControlStub
        version = RuntimeVersionClientInterceptor(component_name="flwr CLI")
        pem = None if authority is None or address.startswith(UNIX) else authority.read_bytes()
        with _channel(address, pem, no_proxy_option(address)) as channel:
            try:
                yield Control(stub(grpc.intercept_channel(channel, version)))
            except grpc.RpcError as error:
                why = f"{error.code().name}: {error.details()}"[:300]
                kind = UnreachableError if error.code() == grpc.StatusCode.UNAVAILABLE else RunError
                raise kind(f"the SuperLink at {address} has failed a request ({why})") from None

    def key_bytes(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """A node's public key as the SuperLink stores it.

        PEM.
        """
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        return public_key_to_bytes(key)

    def read_key(self, stored: bytes) -> ec.EllipticCurvePublicKey:
        """The public key that the SuperLink stores so.

        From PEM.
        """
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key

        return bytes_to_public_key(stored)

    def key_standing(
        self,
        address: str,
        authority: bytes | None,
        key: ec.EllipticCurvePrivateKey,
        seconds: float,
    ) -> tuple[Standing, float | None]:
        """Whether a SuperLink has registered a key. Nothing changes there, and the key's node may
        run or not.

        Request an activation with an invalid heartbeat.

        The SuperLink looks up the key before it refuses this.

        Args:
            address: Of the Fleet API, host:port.
            authority: PEM of the CA that signed the SuperLink's certificate; None without TLS.
            key: Private key of the node.
            seconds: How long each request may take.

        Returns:
            "registered"; "unknown"; "expired": it was accepted for a time that is over; "refused": the
            signature, as that of another time; "open": the SuperLink requires no keys; "silent": no
            useful reply. And by how many seconds this
            machine's clock is ahead of the SuperLink's, where that has told its time.
        """
        import grpc
        from flwr.client.grpc_rere_client import node_auth_client_interceptor
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.fleet_pb2_grpc import FleetStub

        public = self.key_bytes(key.public_key())
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=0.0)
        signer = node_auth_client_interceptor.NodeAuthClientInterceptor(key, key.public_key())

        ahead: float | None = None
        why = ""

        def refusal(channel: grpc.Channel) -> grpc.StatusCode | None:
            nonlocal ahead, why
            try:
                FleetStub(channel).ActivateNode(request, timeout=seconds)
            except grpc.RpcError as error:
                with suppress(KeyError, ValueError):
                    ahead = time.time() - float(dict(error.trailing_metadata() or ())[TIME])
                why = str(error.details())
                code: grpc.StatusCode = error.code()
                return code
            return None

        with _channel(address, authority) as channel:
            if (unsigned := refusal(channel)) != grpc.StatusCode.UNAUTHENTICATED:
                open_ = unsigned == grpc.StatusCode.FAILED_PRECONDITION
                return "open" if open_ else "silent", ahead
            signed = refusal(grpc.intercept_channel(channel, signer))
        by_status: dict[grpc.StatusCode | None, Standing] = {
            grpc.StatusCode.INVALID_ARGUMENT: "registered",
            grpc.StatusCode.FAILED_PRECONDITION: "unknown",
            grpc.StatusCode.UNAUTHENTICATED: "expired" if HAS_EXPIRED in why else "refused",
        }
        return by_status.get(signed, "silent"), ahead


class Control:
    """The Control API of a SuperLink, connected: requests over a stub. One that fails raises RunError."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def runs(self) -> list[FlowerRun]:
        """All its runs.

        In no order.
        """
        from flwr.proto.control_pb2 import ListRunsRequest

        reply = self._stub.ListRuns(ListRunsRequest(), timeout=SECONDS)
        return [_run(number, each) for number, each in reply.run_dict.items()]

    def start(self, app: Path, settings: Mapping[str, Scalar], sites: Mapping[str, Scalar]) -> str:
        """Submit a run; return its id.

        As `flwr run` does.

        Args:
            app: The folder of the app, as `packed_digest` has it.
            settings: Of the run, flat.
            sites: Those of a simulation and their resources, by Flower's names; empty for others.
        """
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab
        from flwr.supercore.utils import simulation_config_from_json

        packed = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(packed).hexdigest(), packed, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab),
            override_config=user_config_to_proto(dict(settings)),
            override_federation_config=simulation_config_from_json(dict(sites)) if sites else None,
        )
        return str(self._stub.StartRun(request, timeout=START_SECONDS).run_id)

    def log(self, run: str) -> str:
        """What the app of this run has written until its end, for which it waits; Flower drops the
        messages of an ended run when it is asked.

        In pieces.
        """
        from flwr.proto.control_pb2 import StreamLogsRequest

        request = StreamLogsRequest(run_id=int(run))
        pieces = self._stub.StreamLogs(request, timeout=SECONDS)
        return "".join(piece.log_output for piece in pieces)

    def stop(self, run: str) -> bool:
        """Stop the run of this id; return whether it did.

        The SuperLink refuses to stop a run that has ended.
        """
        from flwr.proto.control_pb2 import StopRunRequest

        return bool(self._stub.StopRun(StopRunRequest(run_id=int(run)), timeout=SECONDS).success)

    def nodes(self, wait: float = 0.0) -> list[FlowerNode]:
        """All its nodes. wait: seconds to wait until it listens.

        Also those whose key was taken back.
        """
        from flwr.proto.control_pb2 import ListNodesRequest

        seconds = wait or SECONDS
        reply = self._stub.ListNodes(ListNodesRequest(), timeout=seconds, wait_for_ready=wait > 0)
        return [_node(each) for each in reply.nodes_info]

    def register(self, key: bytes) -> int:
        """Accept the node with this public key from now on; return the node's id.

        The SuperLink refuses a key that it has ever known.
        """
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=key)
        return int(self._stub.RegisterNode(request, timeout=SECONDS).node_id)

    def unregister(self, node: int) -> None:
        """Take back the key of a node, for ever.

        Its status is "unregistered" from then on.
        """
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node), timeout=SECONDS)


def _channel(
    address: str, authority: bytes | None, options: list[tuple[str, int]] | None = None
) -> grpc.Channel:
    import grpc

    if authority is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)


def _run(number: int, run: Any) -> FlowerRun:
    status = ":".join(part for part in (run.status.status, run.status.sub_status) if part)
    begun, ended = _time(run.pending_at), _time(run.finished_at)
    return FlowerRun(str(number), status or "unknown", begun, ended)


def _node(node: Any) -> FlowerNode:
    return FlowerNode(
        node.node_id,
        node.public_key,
        online=node.status == "online",
        revoked=node.status == "unregistered",
        activated=_time(node.last_activated_at),
        deactivated=_time(node.last_deactivated_at),
        online_until=node.online_until,
        heartbeat_interval=node.heartbeat_interval,
    )


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


# Seconds for which a task repeats a call. A SuperNode has given a task up that was silent for 60.
PATIENCE = 90.0


TASK_ID_BITS = 63


class OwnExecutor:
    """Hands the tasks of Flower's SuperExec to a starter.

    Args:
        starter: Starts a process for each.
        pace: Of the looks for tasks.
    """

    def __init__(self, starter: TaskStarter, pace: Pace) -> None:
        self._starter, self._pace = starter, pace

    def wait_for_capacity(self) -> None:
        """A SuperNode has one task at a time."""
        self._pace.worked()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a process with the arguments that Flower's own executor gives it."""
        from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG, TaskType
        from flwr.supercore.superexec.executor import LaunchResult

        if spec.task_type != TaskType.CLIENT_APP:
            return LaunchResult.failed(f"a site starts no task of the kind {spec.task_type}")
        address = TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type]
        arguments = [address, spec.runtime_api_address, "--token", spec.token, "--insecure"]
        self._starter.start([*arguments, "--parent-pid", str(spec.parent_pid)])
        return LaunchResult.accepted()


def run_superexec(
    flags: Sequence[str], starter: TaskStarter, executor: Callable[[TaskStarter, Pace], OwnExecutor]
) -> None:
    """`flower-superexec` with another executor, and shorter waits.

    Args:
        flags: Of the command: what it takes tasks from, and of which kind.
        starter: Starts a process for each.
        executor: Makes the executor.
    """
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop

    pace = Pace(HERE)

    def pause(seconds: float) -> None:
        starter.tend()
        pace.sleep(seconds)

    module: Any = loop
    module.get_executor = lambda *_, **__: executor(starter, pace)
    module.time = SimpleNamespace(sleep=pause)
    sys.argv = ["flower-superexec", "--insecure", *flags]
    flower_superexec()


def hurry(node: Any) -> None:
    """Let a SuperNode look for messages and replies more often while there is work.

    Flower looks for messages every 3 s, and for the reply of its app every 0.5 s.

    Args:
        node: The module `flwr.supernode.start_client_internal`.
    """
    messages, replies = Pace(REMOTE), Pace(HERE)
    receive, push = node._pull_and_store_message, node._push_messages

    def _pull_and_store_message(*args: Any, **kwargs: Any) -> int | None:
        run: int | None = receive(*args, **kwargs)
        if run is not None:
            replies.worked()
        return run

    def _push_messages(*args: Any, **kwargs: Any) -> None:
        push(*args, **kwargs)
        messages.worked()

    def sleep(seconds: float) -> None:
        (replies if seconds < 1 else messages).sleep(seconds)

    node._pull_and_store_message, node._push_messages = _pull_and_store_message, _push_messages
    node.time = SimpleNamespace(sleep=sleep)


def pull_again_soon() -> None:
    """Look again soon for a part of a message that its sender has announced and not sent yet.

    Flower waits for a second, and then longer. Its processes announce a message before they send its
    parts, so whoever looks often meets this in every round.
    """
    from flwr.supercore.inflatable import inflatable_utils as parts

    pulls: tuple[Any, ...] = (parts.pull_objects, parts.pull_and_inflate_object_from_tree)
    for each in pulls:
        each.__kwdefaults__["initial_backoff"] = HERE


def leave_out_telemetry() -> None:
    """Collect nothing for Flower's telemetry where it is off.

    Flower sends nothing then, but starts two programs (`file`, `uname`) all the same, when a task
    begins and when it ends.
    """
    from flwr.supercore import telemetry

    def create_event(*_: object) -> str:
        return "disabled"

    if telemetry.FLWR_TELEMETRY_ENABLED != "1":
        telemetry.create_event = create_event  # type: ignore[assignment]


def keep_no_code() -> None:
    """Let a SuperNode forget the code of a run, but for its hash, once it has read the settings in it.

    Flower hands it to the process of each task, some megabytes, and no task of a site uses it.
    """
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState as State

    store = State.store_fab

    def store_fab(state: InMemoryNodeState, fab: Fab) -> str:
        digest = store(state, fab)
        with state.lock_fab_store:
            state.fab_store[digest] = replace(state.fab_store[digest], content=b"")
        return digest

    State.store_fab = store_fab  # type: ignore[method-assign, assignment]


def answer_for_ended_tasks(apologise: Callable[..., None] | None = None) -> None:
    """Let a SuperNode go on when the process of a task ends before its reply.

    Flower answers only for a process that has fetched its message and then stays silent. For one
    that ends before, or that reports its failure itself, Flower 1.34 waits for ever, connected and
    without work. Here a message that was not fetched is a task again; one that was fetched gets an
    error as its reply.

    Args:
        apologise: As for `_settle`; None: Flower's own.
    """
    from flwr.common.constant import SubStatus
    from flwr.proto.task_pb2 import Task
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState as State

    finish = State.finish_task
    replies: Callable[..., None] = apologise or State._store_error_replies

    def _on_task_tokens_expired(state: InMemoryNodeState, tasks: list[Task]) -> None:
        # The caller holds the lock of the tasks.
        _settle(state, tasks, replies)

    def finish_task(state: InMemoryNodeState, task_id: int, sub_status: str, details: str) -> bool:
        done = finish(state, task_id, sub_status, details)
        if done and sub_status != SubStatus.COMPLETED:
            with state.lock_task_store:
                _settle(state, [state.task_store[task_id]], replies)
        return done

    State._on_task_tokens_expired = _on_task_tokens_expired  # type: ignore[method-assign, assignment]
    State.finish_task = finish_task  # type: ignore[method-assign, assignment]


def _settle(state: InMemoryNodeState, ended: list[Any], apologise: Callable[..., None]) -> None:
    """Give the messages of tasks that have ended a reply, or another task.

    Args:
        state: Its tasks are locked.
        ended: Tasks.
        apologise: Stores errors as the replies of runs; takes the state, and the runs' ids.
    """
    from flwr.common.constant import Status
    from flwr.proto.task_pb2 import Task, TaskStatus
    from flwr.supercore.date import now

    for task in ended:
        with state.lock_msg_store:
            entries = [
                entry
                for entry in state.msg_store.values()
                if entry.message.metadata.run_id == task.run_id
            ]
            answered = {entry.message.metadata.reply_to_message_id for entry in entries}
            open_entries = [
                entry
                for entry in entries
                if not entry.message.metadata.reply_to_message_id
                and entry.message.metadata.message_id not in answered
            ]
            if any(entry.is_retrieved for entry in open_entries):
                apologise(state, {task.run_id})
        if all(entry.is_retrieved for entry in open_entries):
            continue
        again = Task()
        again.CopyFrom(task)
        again.task_id = secrets.randbits(TASK_ID_BITS)
        again.pending_at, again.starting_at, again.running_at = now().isoformat(), "", ""
        again.finished_at = ""
        again.status.CopyFrom(TaskStatus(status=Status.PENDING, sub_status="", details=""))
        state.task_store[again.task_id] = again


def guard_task(
    task: Any,
    guard: TaskGuard,
    failed: Callable[[Message, str], Message],
    invokers: str,
) -> None:
    """Call a guard when `task` has received its message, and around the sending of its reply.

    Args:
        task: The module `flwr.supernode.runtime.run_clientapp`.
        guard: It may give up from then on, from any thread.
        failed: Makes a reply with this text as its error.
        invokers: Name of the module's function that makes what repeats its calls.
    """
    pull, push, make = task.pull_task_input, task.push_message, getattr(task, invokers)

    def pull_task_input(stub: Any) -> tuple[Any, ...]:
        message, context, *code = pull(stub)

        def give_up(text: str) -> None:
            push(stub, failed(message, text), context)

        guard.received(give_up)
        return message, context, *code

    def push_message(*reply: Any) -> None:
        with guard.sending():
            push(*reply)

    def make_invoker() -> RetryInvoker:
        invoker: RetryInvoker = make()
        invoker.max_time = PATIENCE
        gives_up = invoker.should_giveup

        def should_giveup(error: Exception) -> bool:
            guard.unreachable()
            return gives_up is None or gives_up(error)

        invoker.should_giveup = should_giveup
        return invoker

    task.pull_task_input, task.push_message = pull_task_input, push_message
    setattr(task, invokers, make_invoker)
