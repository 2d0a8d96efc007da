"""Flower 1.42: its processes, messages and tasks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..errors import RunError
from . import v134, v134_fleet
from .environment import UNIX
from .interface import Admit, Refusal, SuperLinkArguments, SuperNodeLog, TaskGuard, TaskStarter
from .v142_fleet import Link142, own_sockets, reach_unix_sockets, read_addresses, reason, serve

if TYPE_CHECKING:
    from pathlib import Path

    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult


REFUSED = "this site starts only the ClientApp that is installed there"


class ClientAppExecutor(v134_fleet.OwnExecutor):
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

    v134_fleet.answer_for_ended_tasks(apologise)


# Variable with which the SuperLink also speaks gRPC with SuperNodes.
GRPC_FLEET = "FLWR_INTERNAL_GRPC_FLEET_API"
# Variable with which it would also hear commands over gRPC, at a port.
GRPC_CONTROL = "FLWR_INTERNAL_GRPC_CONTROL_API"


class Processes142(v134.Processes134):
    """Commands of Flower 1.42, whose servers speak HTTP; the SuperLink also gRPC, with sites of 1.34."""

    address_flags = ("--runtime-api-address",)
    supernode_log = SuperNodeLog(listens="Application startup complete")
    invokers = "make_simple_http_retry_invoker"

    def parse_superlink(self, arguments: Sequence[str]) -> SuperLinkArguments:
        """Flower has no names for the addresses of the two APIs."""
        (control, runtime, _), rest = read_addresses(arguments)
        return v134.meaning(rest, (control, runtime))

    def superlink(
        self, arguments: Sequence[str], refusal: Refusal, admit: Admit, apps: Sequence[str]
    ) -> None:
        """`flower-superlink` with the changes of 1.34, and another address for SuperNodes."""
        addresses, rest = read_addresses(arguments)
        registered_only = self.parse_superlink(arguments).authenticates
        os.environ[GRPC_FLEET], os.environ[GRPC_CONTROL] = "1", "0"
        v134.start_own_apps([*apps, addresses[1]])
        v134.change_superlink(refusal, admit, registered_only)
        # By its name: the package has a function of this name, too.
        module: Any = import_module("flwr.superlink.cli.flower_superlink")
        module.uvicorn = serve(module.uvicorn, addresses, refusal, registered_only)
        sys.argv = ["flower-superlink", *rest]
        module.flower_superlink()

    def coordinator_apps(self, runtime: str, task: Sequence[str], parent: int | None) -> None:
        """At a socket, too."""
        reach_unix_sockets()
        super().coordinator_apps(runtime, task, parent)

    def coordinator_task(self, folder: Path) -> None:
        """At a socket, too."""
        reach_unix_sockets()
        super().coordinator_task(folder)

    def supernode_flags(self, runtime: str) -> list[str]:
        """Without the first two it starts the code that a run brings."""
        flags = ["--isolation", "process"]
        if runtime.startswith(UNIX):
            return flags
        host, _, port = runtime.rpartition(":")
        return [*flags, "--host", host.strip("[]"), "--port", port]

    def supernode(self, runtime: str, arguments: Sequence[str]) -> None:
        """`flower-supernode`, also on a Unix socket. Flower itself repeats interrupted calls.

        Flower ends a node whose signature is refused as if a person had, with exit code 0.
        """
        import httpx
        from flwr.supernode import node_auth_http_interceptor, start_client_internal

        command: Any = import_module("flwr.supernode.cli.flower_supernode")
        command.uvicorn = own_sockets(command.uvicorn, runtime)
        refused = list[str]()
        signer: Any = node_auth_http_interceptor.NodeAuthHttpInterceptor
        sign = signer.intercept

        def intercept(self: Any, *call: Any) -> httpx.Response:
            answer: httpx.Response = sign(self, *call)
            if answer.status_code == httpx.codes.UNAUTHORIZED:
                refused.append(answer.text)
            return answer

        signer.intercept = intercept
        refuse_other_tasks(start_client_internal)
        v134.change_supernode(start_client_internal, httpx.HTTPError)
        answer_for_ended_tasks()
        flags = [*self.supernode_flags(runtime), *arguments]
        v134.run_supernode(command.flower_supernode, flags, refused)

    def superexec(self, runtime: str, starter: TaskStarter) -> None:
        """`flower-superexec` with another executor, and shorter waits."""
        reach_unix_sockets()
        v134_fleet.run_superexec(["--runtime-api-address", runtime], starter, ClientAppExecutor)

    def client_task(self, load: Callable[[str, str], ClientApp], guard: TaskGuard) -> None:
        """At a socket, too."""
        reach_unix_sockets()
        super().client_task(load, guard)

    def hurry_task(self, task: Any) -> None:
        """Each part is a call, as in Flower."""


class Messages142(v134.Messages134):
    """Messages of Flower 1.42, which know the task that makes them."""

    def local_run(self, run_id: int) -> Any:
        """A `Run`, whose messages this process makes from now on."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.task_id, TaskIdentity.run_id = 1, run_id
        TaskIdentity.node_id = SUPERLINK_NODE_ID
        return super().local_run(run_id)

    def calls(self, grid: Any) -> Any:
        """Over HTTP."""
        return grid._runtime_client

    def hurry(self, grid: Any) -> None:
        """Each part is a call, as in Flower."""

    def outlast_interruptions(self, grid: Grid, seconds: float) -> None:
        """Flower itself repeats calls for ever."""
        import httpx

        if not hasattr(grid, "_retry_invoker"):
            return
        invoker: Any = grid._retry_invoker
        call, invoker.max_time = invoker.invoke, seconds

        def invoke(*args: Any, **kwargs: Any) -> Any:
            try:
                return call(*args, **kwargs)
            except (httpx.TransportError, httpx.HTTPStatusError) as error:
                if isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500:
                    raise
                raise RunError(
                    f"the SuperLink has not answered for {seconds:g} s ({reason(error)}); see its "
                    "log"
                ) from None

        invoker.invoke = invoke


class Flower142(Processes142, Link142, Messages142, v134.Flower134):
    """Flower 1.42."""
