"""Tasks in Flower 1.42: a site takes those of ClientApps, whatever kind a run asks for.

A run of an AgentApp makes another kind of task at every SuperNode, and Flower's SuperExec starts
every kind, whatever `--plugin-type` says: code sent with the run. Here a SuperNode makes no such
task, and answers the message with an error; a SuperExec takes none, and starts none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.flower import v134_tasks
from fedsurrogate.common.flower.pace import HERE, Pace

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

    from fedsurrogate.common.flower.interface import TaskStarter

REFUSED = "this site starts only the ClientApp that is installed there"


class ClientAppExecutor(v134_tasks.OwnExecutor):
    """As 1.42 calls an executor."""

    def get_eligible_capacity(self, *_: object, **__: object) -> tuple[set[Any], set[str]]:
        """Of all kinds of tasks, one."""
        from flwr.supercore.constant import TaskType

        return {TaskType.CLIENT_APP}, set()

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """There is work."""
        self._pace.worked()
        return super().launch(spec)

    def reconcile(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """The starter ends its processes itself."""


def run_superexec(runtime: str, starter: TaskStarter) -> None:
    """`flower-superexec` that takes tasks of ClientApps only."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop

    pace = Pace(HERE)

    def pause(seconds: float) -> None:
        starter.tend()
        pace.sleep(seconds)

    def executor(*_: object, **__: object) -> ClientAppExecutor:
        return ClientAppExecutor(starter, pace)

    module: Any = loop
    module.get_executor, module.time = executor, SimpleNamespace(sleep=pause)
    sys.argv = ["flower-superexec", "--insecure", "--runtime-api-address", runtime]
    flower_superexec()


class _OtherTaskError(Exception):
    """A task of another kind than a ClientApp's was to be made."""


def refuse_other_tasks(node: Any) -> None:
    """Let a SuperNode make tasks of ClientApps only, and answer other messages with an error.

    Without the answer Flower would wait for one for ever, and the site would take no other run.

    Args:
        node: The module `flwr.supernode.start_client_internal`.
    """
    from flwr.app import Error
    from flwr.app import Message as Reply
    from flwr.common.constant import ErrorCode
    from flwr.supercore.constant import TaskType
    from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

    states: Any = InMemoryNodeState
    create, pull = states.create_task, node._pull_and_store_message

    def create_task(state: Any, task_type: str, *args: Any, **named: Any) -> int | None:
        if task_type != TaskType.CLIENT_APP:
            raise _OtherTaskError(task_type)
        number: int | None = create(state, task_type, *args, **named)
        return number

    def _pull_and_store_message(
        *, state: Any, object_store: Any, receive: Callable[[], Any], **named: Any
    ) -> int | None:
        received: list[Message] = []

        def noted() -> Any:
            if found := receive():
                received.append(found[0])
            return found

        try:
            run: int | None = pull(state=state, object_store=object_store, receive=noted, **named)
        except _OtherTaskError:
            (message,) = received
            reply = Reply(Error(ErrorCode.UNKNOWN, REFUSED), reply_to=message)
            node._insert_message(reply, state, object_store)
            return message.metadata.run_id
        return run

    states.create_task, node._pull_and_store_message = create_task, _pull_and_store_message


def answer_for_ended_tasks() -> None:
    """Let a SuperNode go on when the process of a task ends before its reply, as with 1.34."""
    from flwr.supernode.nodestate import in_memory_nodestate as module

    states: Any = module

    def apologise(state: Any, runs: set[int]) -> None:
        state._store_error_replies(runs, states.CLIENT_APP_CRASHED_ERROR)

    v134_tasks.answer_for_ended_tasks(apologise)
