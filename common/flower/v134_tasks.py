"""Tasks of ClientApps in Flower 1.34: who starts them, and how a SuperNode waits for them."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.flower.pace import HERE, REMOTE, Pace

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.supercore.fab import Fab
    from flwr.supercore.retry import RetryInvoker
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    from fedsurrogate.common.flower.interface import TaskGuard, TaskStarter

PATIENCE = 90.0
"""Seconds for which a task repeats a call. A SuperNode has given a task up that was silent for 60."""


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


def run_superexec(runtime: str, starter: TaskStarter) -> None:
    """`flower-superexec`, whose plugin `clientapp` takes tasks of this kind only."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop

    pace = Pace(HERE)

    def pause(seconds: float) -> None:
        starter.tend()
        pace.sleep(seconds)

    def executor(*_: object, **__: object) -> OwnExecutor:
        return OwnExecutor(starter, pace)

    loop.get_executor = executor  # type: ignore[attr-defined]
    loop.time = SimpleNamespace(sleep=pause)  # type: ignore[assignment, attr-defined]
    flags = ["--insecure", "--plugin-type", "clientapp", "--appio-api-address", runtime]
    sys.argv = ["flower-superexec", *flags]
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
    invokers: str = "make_simple_grpc_retry_invoker",
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
