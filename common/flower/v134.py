"""Flower 1.34: its processes and messages, the coordinator's app, and Ray under its simulation."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ..errors import ConfigError, FedSurrogateError, RunError
from ..extras import needed_for
from . import v134_fleet, v134_rounds
from .environment import RAY_PATIENCE, UNIX
from .interface import (
    HTTP_OPTION,
    Admit,
    Doorkeeper,
    Failure,
    Refusal,
    SignatureRefusedError,
    SuperLinkArguments,
    SuperNodeLog,
    TaskGuard,
    TaskStarter,
)
from .parts import bound_received, bound_replies, bound_task

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid
    from flwr.supercore.retry import RetryInvoker

    from ..settings.base import Scalar


# By their names: the packages have functions of these names, too.
SUPERLINK = "flwr.superlink.cli.flower_superlink"
# Commands that a coordinator's processes run: the module of each, and the one that unpacks the app.
TASKS = {
    "flwr-serverapp": ("flwr.superlink.cli.flwr_serverapp", "flwr.superlink.runtime.run_serverapp"),
    "flwr-simulation": ("flwr.simulation.app", "flwr.simulation.app"),
}


def admit_runs(admit: Callable[[str, Mapping[str, Scalar]], None]) -> None:
    """Ask `admit`, as `superlink` has it, before any state stores a run; call it once.

    Every way to a run ends there: a bundle that is sent, named by its hash or loaded from elsewhere,
    a run that is planned for later, and an app that runs agents.
    """
    from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
    from flwr.supercore.error import ApiErrorCode, FlowerError

    def asking(create: Callable[..., int]) -> Callable[..., int]:
        def create_run(state: Any, *run: Any, **named: Any) -> int:
            try:
                admit(run[2], run[3])
            except FedSurrogateError as error:
                refused = ApiErrorCode.INVALID_RUN_CONFIG
                raise FlowerError(refused, str(error), public_details=str(error)) from None
            return create(state, *run, **named)

        return create_run

    states: tuple[Any, ...] = (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState)
    for each in states:
        each.create_run = asking(each.create_run)


def start_own_apps(command: Sequence[str]) -> None:
    """Let a SuperLink that starts its apps itself use this command in place of Flower's SuperExec."""
    superlink: Any = import_module(SUPERLINK)
    superlink._get_superexec_command = lambda **_: list(command)


def end_once() -> None:
    """Let a signal that comes while a task ends not wait for that end.

    A heartbeat that the SuperLink refuses, because the task has just ended, raises SIGINT. Flower's exit
    handlers then hold the lock that the signal's handler waits for, in the same thread, for ever.
    """
    from flwr.supercore.exit import flwr_exit

    names, begun = flwr_exit.__globals__, set[tuple[tuple[str, bool], ...]]()
    trigger = names["trigger_exit_handlers"]

    def once(**how: bool) -> None:
        # 1.42 asks for some handlers first, and then for the others.
        if (part := tuple(how.items())) not in begun:
            begun.add(part)
            trigger(**how)

    names["trigger_exit_handlers"] = once


class Apps134:
    """The processes of a coordinator's app, in Flower 1.34.

    Attributes:
        address_flags: Of `flower-superexec`; an address follows.
    """

    address_flags: tuple[str, ...] = ("--plugin-type", "serverapp", "--appio-api-address")

    def packed_digest(self, folder: Path) -> str:
        """SHA-256 of the bundle that `flwr run` makes of the app in this folder.

        Flower's own command packs it, always into the same bytes.
        """
        from flwr.cli.build import build_fab_from_disk

        return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()

    def coordinator_apps(self, runtime: str, task: Sequence[str], parent: int | None) -> None:
        """Start a process for each run of a SuperLink, and for no other kind of task.

        `flower-superexec`, whose processes are those of `task`.

        Args:
            runtime: Address of the SuperLink's API for its apps.
            task: Program and arguments that call `coordinator_task`; more arguments follow.
            parent: Id of the process with which this one ends; None: it ends by itself.
        """
        from flwr.supercore.cli.flower_superexec import flower_superexec
        from flwr.supercore.superexec.executor import subprocess_executor

        def start(words: Sequence[str], **named: Any) -> object:
            return subprocess.Popen([*task, *words], **named)

        executor: Any = subprocess_executor
        executor.subprocess = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
        flags = [*self.address_flags, runtime]
        flags += [] if parent is None else ["--parent-pid", str(parent)]
        sys.argv = ["flower-superexec", "--insecure", *flags]
        flower_superexec()

    def coordinator_task(self, folder: Path) -> None:
        """Run the coordinator's app, and the simulated sites of a simulation, with the arguments
        that `coordinator_apps` gave this process.

        `flwr-serverapp` or `flwr-simulation` that leaves the received code packed.

        Args:
            folder: The installed app.
        """
        name = sys.argv.pop(1)
        if name not in TASKS:
            sys.exit(f"a coordinator starts no {name}")
        command, task = (import_module(each) for each in TASKS[name])
        module: Any = task
        module.install_from_fab = lambda *_, **__: None
        module.get_fab_metadata = lambda *_: ("", "")
        module.get_project_dir = lambda *_: folder
        end_once()
        # Ray adds the folder of the program to the paths of its workers.
        sys.argv[0] = str(Path(sys.executable).with_name(name))
        getattr(command, name.replace("-", "_"))()


ENGINE = "Flower's simulation"
# Names of the programs of Ray's two servers.
RAYLET, GCS = "raylet", "gcs_server"
LISTEN_PORT = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", LISTEN_PORT, "runtime_env_agent_port")


class Simulation134:
    """Flower 1.34 with Ray 2.55."""

    def __init__(self) -> None:
        self._preparing, self._prepared = threading.Lock(), False

    def is_simulation(self, grid: Grid) -> bool:
        """Whether a ServerApp's grid is that of a simulation.

        By the name of its class, so that nothing is imported.
        """
        return type(grid).__name__ == "InMemoryGrid"

    def ray_has_started(self) -> bool:
        """Whether Ray runs in this process.

        Ray says so itself.
        """
        with needed_for(ENGINE):
            import ray

        return bool(ray.is_initialized())

    def prepare_ray(self, seconds: float) -> None:
        """Let Ray wait longer for its servers when it starts in this process; a second call does
        nothing.

        Half a minute can be too short on a busy machine.

        Constants in Ray's code bound these waits. Two are in Python. The third, of 15 seconds, is
        in the raylet: until its two agents, which are Python programs, have written which ports
        they have. With given ports it does not wait.

        Args:
            seconds: How long Ray may take for each step of its start.
        """
        with needed_for(ENGINE):
            from ray._private import node, services

        with self._preparing:
            if self._prepared:
                return
            # The raylet, which this process starts, inherits it: time in milliseconds for the
            # agent without which no worker starts.
            os.environ.setdefault("RAY_agent_register_timeout_ms", str(round(1000 * seconds)))
            node.wait_for_persisted_port = patient(node.wait_for_persisted_port, GCS, seconds)
            services.get_node = patient(services.get_node, RAYLET, seconds)
            node.Node.start_raylet = with_ports(node.Node.start_raylet)
            self._prepared = True

    def replace_killed_workers(self) -> None:
        """Give each site that follows a killed worker of Ray a new one; call it once.

        Flower puts a killed worker back among the idle ones.

        It then fails at once for every site that it is given, and so takes most of the sites with
        it.
        """
        from flwr.simulation.ray_transport.ray_actor import BasicActorPool as Pool

        with needed_for(ENGINE):
            from ray.exceptions import RayActorError

        fetch = Pool.fetch_result_and_return_actor_to_pool

        def fetched(pool: Any, future: Any) -> Any:
            try:
                return fetch(pool, future)
            except RayActorError:
                # Without the raylet no worker starts any more. A site would wait for it until the
                # deadline.
                if _runs(RAYLET):
                    # Flower's caller puts the worker of this future back.
                    pool._future_to_actor[future] = pool.create_actor_fn()
                raise

        Pool.fetch_result_and_return_actor_to_pool = fetched  # type: ignore[assignment, method-assign]


def with_ports(start: Callable[..., Any]) -> Callable[..., Any]:
    """Ray's method that starts the raylet, with free ports for its agents where none are set."""

    def started(node: Any, *arguments: Any, **named: Any) -> Any:
        with needed_for(ENGINE):
            from ray import _raylet

        settings = node._ray_params
        with ExitStack() as open_sockets:
            for name in AGENT_PORTS:
                probe = open_sockets.enter_context(socket.socket())
                probe.bind(("", 0))
                setattr(settings, name, getattr(settings, name) or probe.getsockname()[1])
        # The only one that the raylet does not take as an argument; it reads this file.
        _raylet.persist_port(  # type: ignore[attr-defined]
            node._session_dir, node._node_id, LISTEN_PORT, getattr(settings, LISTEN_PORT)
        )
        return start(node, *arguments, **named)

    return started


def patient(
    attempt: Callable[..., Any], program: str, seconds: float = RAY_PATIENCE
) -> Callable[..., Any]:
    """A function that repeats a failed `attempt` for some time, while a child process runs this
    program.

    Args:
        attempt: Raises an exception when it fails.
        program: Name of the program's file.
        seconds: After these the failure is raised.
    """

    def repeated(*arguments: Any, **named: Any) -> Any:
        end = time.monotonic() + seconds
        while True:
            try:
                return attempt(*arguments, **named)
            except Exception:
                if time.monotonic() > end or not _runs(program):
                    raise
                time.sleep(0.1)

    return repeated


def _runs(program: str) -> bool:
    """Whether a child process runs this program."""
    import psutil

    for child in psutil.Process().children():
        try:
            if child.name() == program and child.status() != psutil.STATUS_ZOMBIE:
                return True
        except psutil.Error:
            continue
    return False


# Seconds that a writer of the SuperLink's database waits for other writers.
WAIT = 600
# Seconds between two attempts of a SuperNode to reach its SuperLink at most. Flower waits up to 20,
# and a SuperLink gives a node up of which it has heard nothing for 37 to 60.
LONGEST_PAUSE = 5
# What gRPC writes, in small letters, when a connection ends during a call.
ENDED_CONNECTION = ("stream removed", "rst_stream", "goaway", "socket closed", "connection reset")


class Processes134(Apps134):
    """Commands of Flower 1.34, whose servers speak gRPC."""

    supernode_log = SuperNodeLog(listens="Starting Runtime API")
    # Of the module of a task: the name of what makes what repeats its calls.
    invokers = "make_simple_grpc_retry_invoker"

    def open_log(self) -> None:
        """Let Flower add the handlers of its log, which it does once; then they can be replaced.

        Import the module that adds them.
        """
        import flwr.common.logger  # noqa: F401

    def at_exit(self, action: Callable[[], None]) -> None:
        """Call `action` when Flower ends this process in order. Later ones are called first.

        Flower's signal handlers, and the ends of its commands, call it.
        """
        from flwr.supercore.exit import add_exit_handler

        add_exit_handler(action)

    def parse_superlink(self, arguments: Sequence[str]) -> SuperLinkArguments:
        """The meaning of arguments of `flower-superlink`.

        Flower's own parser reads them.

        Raises:
            ConfigError: An address for HTTP is among them.
        """
        if any(each.partition("=")[0] == HTTP_OPTION for each in arguments):
            raise ConfigError(
                f"{HTTP_OPTION}: this SuperLink speaks gRPC only; leave it out, or install flwr 1.42 "
                "for sites that use it"
            )
        parsed = _parsed(arguments)
        apis = [parsed.exec_api_address or parsed.control_api_address, parsed.runtime_api_address]
        if parsed.enable_http_api:
            apis.append(f"{parsed.host}:{parsed.port}")
        return meaning(arguments, apis)

    def superlink(
        self, arguments: Sequence[str], refusal: Refusal, admit: Admit, apps: Sequence[str]
    ) -> None:
        """Run a SuperLink to which many sites can write at once, wherever Flower is installed.

        `flower-superlink` with eleven changes.

        Args:
            arguments: Those of `flower-superlink`.
            refusal: Why a signed request of the Fleet API is refused; empty if it is not.
            admit: Called with the SHA-256 of a run's bundle and with its settings, before anything
                of it is stored. Raises FedSurrogateError, with words for who submitted it, to
                refuse it.
            apps: Program and arguments that call `coordinator_apps`, for a SuperLink that starts
                the apps itself. Its address for apps follows.
        """
        from flwr.server.superlink.fleet.message_handler import message_handler
        from flwr.superlink.cli import flower_superlink
        from flwr.superlink.servicer.runtime import runtime_handlers

        # The Control API is at a Unix socket, which has no name to certify.
        superlink: Any = import_module(SUPERLINK)
        serve = superlink.run_control_api_grpc
        superlink.run_control_api_grpc = lambda **named: serve(**named | {"certificates": None})
        start_own_apps([*apps, _parsed(arguments).runtime_api_address])
        allow_unix_sockets()
        change_superlink(refusal, admit, self.parse_superlink(arguments).authenticates)
        v134_rounds.store_parts(message_handler)
        v134_rounds.store_parts(runtime_handlers)
        v134_rounds.hold_pulls()
        v134_rounds.ask_the_database_less()
        sys.argv = ["flower-superlink", *arguments]
        flower_superlink()

    def simulation_flags(self) -> list[str]:
        """Arguments of `flower-superlink` for simulations, but for its addresses.

        It starts the apps itself.
        """
        return ["--insecure", "--simulation", "--isolation", "subprocess"]

    def supernode_flags(self, runtime: str) -> list[str]:
        """Arguments of `flower-supernode` that starts no app; its Runtime API is at `runtime`.

        Without the first two it starts the code that a run brings.
        """
        return ["--isolation", "process", "--clientappio-api-address", runtime]

    def supernode(self, runtime: str, arguments: Sequence[str]) -> None:
        """Run a SuperNode that starts no app.

        `flower-supernode`, also on a Unix socket; it outlasts a restart of the SuperLink.

        Flower ends a node whose signature is refused as if a person had, with exit code 0.

        Args:
            runtime: Address of its Runtime API: host:port, or unix:/path.
            arguments: All others of `flower-supernode`.

        Raises:
            SignatureRefusedError: The SuperLink refuses what this node has signed.
            Exception: Any other end by an error, of Flower or of gRPC.
        """
        import grpc
        from flwr.client.grpc_rere_client import connection
        from flwr.supernode import start_client_internal
        from flwr.supernode.cli.flower_supernode import flower_supernode
        from flwr.supernode.servicer.runtime import runtime_handlers

        allow_unix_sockets()
        refused = list[str]()

        def note(error: grpc.RpcError) -> None:
            if error.code() == grpc.StatusCode.UNAUTHENTICATED:
                refused.append(str(error.details()))

        start_client_internal._make_fleet_connection_retry_invoker = lasting(
            start_client_internal._make_fleet_connection_retry_invoker, note
        )
        change_supernode(start_client_internal, grpc.RpcError)
        v134_fleet.answer_for_ended_tasks()
        # It passes parts on as they came.
        v134_rounds.store_parts(runtime_handlers)
        v134_rounds.hold_tasks()
        calls: Any = connection
        stub = calls.FleetStub
        calls.FleetStub = lambda channel: v134_rounds.take_parts(stub(channel))
        calls.remove_content_from_message = lambda message: message
        run_supernode(flower_supernode, [*self.supernode_flags(runtime), *arguments], refused)

    def superexec(self, runtime: str, starter: TaskStarter) -> None:
        """Start a process for each task of a ClientApp, and for no other task.

        `flower-superexec` with another executor, and shorter waits.

        Args:
            runtime: Address of the Runtime API of the SuperNode that has the tasks.
            starter: Starts the processes.
        """
        flags = ["--plugin-type", "clientapp", "--appio-api-address", runtime]
        v134_fleet.run_superexec(flags, starter, v134_fleet.OwnExecutor)

    def client_task(self, load: Callable[[str, str], ClientApp], guard: TaskGuard) -> None:
        """Run one task, with the arguments of this process (`sys.argv`), which `superexec` made.

        `flwr-clientapp` that leaves the received code packed.

        Args:
            load: The app for a run whose app has this name and this version.
            guard: Called before and after the work.
        """
        from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
        from flwr.supernode.runtime import run_clientapp as task

        v134_fleet.leave_out_telemetry()
        end_once()
        v134_fleet.pull_again_soon()
        bound_task()
        self.hurry_task(task)
        install_loader(task, load)
        v134_fleet.guard_task(
            task,
            guard,
            lambda to, text: Messages134().failed_reply(to, "crashed", text),
            self.invokers,
        )
        flwr_clientapp()

    def hurry_task(self, task: Any) -> None:
        """Let small messages and their parts be one call each way.

        Args:
            task: The module `flwr.supernode.runtime.run_clientapp`.
        """
        v134_rounds.bring_parts(task)
        receive = task.pull_task_input
        task.pull_task_input = lambda stub: receive(v134_rounds.take_parts(stub))


def change_superlink(refusal: Refusal, admit: Admit, registered_only: bool) -> None:
    """Make the changes of a SuperLink that every version needs.

    Args:
        refusal: As for `superlink`.
        admit: As for `superlink`.
        registered_only: Whether only registered keys may take part.
    """
    admit_runs(admit)
    let_writers_wait()
    find_migrations()
    v134_fleet.guard_fleet(refusal, registered_only)
    v134_fleet.limit_fleet(Doorkeeper(), registered_only)
    v134_fleet.take_replies_again()


def change_supernode(node: Any, interruptions: type[Exception]) -> None:
    """Make the changes of a SuperNode that every version needs.

    Args:
        node: The module `flwr.supernode.start_client_internal`.
        interruptions: What a connection raises.
    """
    v134_fleet.hurry(node)
    bound_received(node, interruptions)
    v134_fleet.keep_no_code()
    v134_fleet.pull_again_soon()


def run_supernode(
    command: Callable[[], object], arguments: Sequence[str], refused: Sequence[str]
) -> None:
    """Run a SuperNode, and say whether the SuperLink has refused its signature.

    Args:
        command: `flower-supernode`.
        arguments: Of it.
        refused: Why the SuperLink has refused calls, so far.

    Raises:
        SignatureRefusedError: It has.
    """
    sys.argv = ["flower-supernode", *arguments]
    try:
        command()
    finally:
        if refused:
            raise SignatureRefusedError(refused[0][:300])


def install_loader(task: Any, load: Callable[[str, str], ClientApp]) -> None:
    """Let a task leave the received code packed, and run an app that is installed here.

    Args:
        task: The module `flwr.supernode.runtime.run_clientapp`.
        load: The app for a run whose app has this name and this version.
    """

    def leave_packed(content: bytes, **_: object) -> None:
        """Ignore the received code."""

    def loader(**_: object) -> Callable[[str, str, str], ClientApp]:
        return lambda name, version, digest: load(name, version)

    task.install_from_fab, task.get_load_client_app_fn = leave_packed, loader


class Messages134:
    """Messages of Flower 1.34, of which the parts are objects with ids."""

    def local_run(self, run_id: int) -> Any:
        """A run of this id for a `Grid`. Messages of it can be made in this process from now on.

        A `Run`. Messages can be made anywhere.
        """
        from flwr.supercore.run import Run

        return Run.create_empty(run_id=run_id)

    def stamp(self, message: Message, run_id: int) -> str:
        """Make a new message the coordinator's in this run, as a SuperLink does; return its id.

        The SuperLink is a node too.
        """
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.supercore.inflatable.inflatable_object import no_object_id_recompute

        message.metadata.__dict__["_run_id"] = run_id
        message.metadata.__dict__["_src_node_id"] = SUPERLINK_NODE_ID
        with no_object_id_recompute():
            return _named(message, message.object_id)

    def transported(self, message: Message) -> Message:
        """The message as its receiver gets it: converted to bytes and back. Its id stays.

        Each object becomes bytes, as on the wire.
        """
        from flwr.app import Message as Received
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        # Without it, Flower makes the bytes of every object again each time it asks for an id.
        with no_object_id_recompute():
            parts = get_all_nested_objects(message)
            name = message.object_id
            contents = {key: item.deflate() for key, item in parts.items()}
        received = inflate_object_from_contents(name, contents)
        assert isinstance(received, Received)
        _named(received, name)
        return received

    def pull_soon(self) -> None:
        """Look again soon for parts of a message that are still on their way to this process.

        Flower waits for a second first, then longer.
        """
        v134_fleet.pull_again_soon()

    def outlast_interruptions(self, grid: Grid, seconds: float) -> None:
        """Repeat a grid's calls whose connection to the SuperLink broke, until they succeed.

        Flower itself repeats only calls that were never begun (UNAVAILABLE), and for ever.

        A SuperLink that ends cancels those that it has begun. All of a run's calls can be repeated:
        it stores a message once, and a reply stays until it is confirmed.

        Args:
            grid: Of a run; nothing changes for one that has no connection, as in a simulation.
            seconds: How long one call may be repeated. Then it raises RunError.
        """
        if hasattr(grid, "_retry_invoker"):
            outlast(grid._retry_invoker, seconds)

    def limit_replies(self, grid: Grid, largest: int) -> None:
        """Make an error of a reply that is too large, or that cannot be read, in place of an
        exception that ends the run.

        The module of a grid with a connection makes messages of their parts itself.

        Args:
            grid: Of a run; nothing changes for one that has no connection, as in a simulation.
            largest: Bytes of a reply's payload.
        """
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest as Received

        module, own = sys.modules[type(grid).__module__], cast("Any", grid)
        if not hasattr(module, "pull_objects"):
            return

        def forget(name: str) -> None:
            received = Received(node=own.node, run_id=own.run.run_id, message_object_id=name)
            self.calls(own).ConfirmMessageReceived(received)

        bound_replies(module, largest, forget)
        self.hurry(own)

    def hurry(self, grid: Any) -> None:
        """Let small messages and their parts be one call each way, and wait for replies in a call, with
        the SuperLink of `superlink`.
        """
        v134_rounds.bring_parts(sys.modules[type(grid).__module__])
        v134_rounds.take_parts(self.calls(grid))
        pull: Callable[[Iterable[str]], Iterable[Message]] = grid.pull_messages

        def pull_messages(names: Iterable[str]) -> Iterable[Message]:
            return pull(names) or pull([])

        grid.pull_messages = pull_messages

    def calls(self, grid: Any) -> Any:
        """What makes a grid's calls to its SuperLink."""
        return grid._stub

    def failed_reply(self, message: Message, failure: Failure, reason: str) -> Message:
        """A reply without content.

        A message with an error in place of a content.

        Args:
            message: The request.
            failure: "raised": the app raised an exception; "crashed": its process ended;
                "unavailable": no such node.
            reason: Text for the coordinator.
        """
        from flwr.app import Error
        from flwr.app import Message as Reply
        from flwr.common.constant import ErrorCode

        codes = {
            "raised": ErrorCode.CLIENT_APP_RAISED_EXCEPTION,
            "crashed": ErrorCode.CLIENT_APP_CRASHED,
            "unavailable": ErrorCode.NODE_UNAVAILABLE,
        }
        return Reply(Error(codes[failure], reason), reply_to=message)


def lasting(
    make: Callable[..., RetryInvoker], note: Callable[[Any], object]
) -> Callable[..., RetryInvoker]:
    """Let what `make` makes repeat calls whose connection ended after they had begun, and wait no
    longer than `LONGEST_PAUSE`; `note` takes each error.
    """
    from flwr.supercore.retry import exponential

    def made(*args: Any, **kwargs: Any) -> RetryInvoker:
        repeat_interrupted(invoker := make(*args, **kwargs), note)
        invoker.wait_gen_factory = lambda: exponential(max_delay=LONGEST_PAUSE)
        return invoker

    return made


def repeat_interrupted(invoker: RetryInvoker, note: Callable[[Any], object] = id) -> None:
    """Take an interruption of the connection for no reason to give up; the others stay."""
    gives_up = invoker.should_giveup

    def should_giveup(error: Exception) -> bool:
        note(error)
        return not _interrupted(error) and (gives_up is None or gives_up(error))

    invoker.should_giveup = should_giveup


def outlast(invoker: RetryInvoker, seconds: float) -> None:
    """Let calls be repeated after any interruption of their connection, for so many seconds.

    Args:
        invoker: Makes the calls of a grid. `max_tries`, which Flower sets when it ends, still
            holds, and so do its reasons to give up.
        seconds: Then a call raises RunError.
    """
    import grpc

    repeat_interrupted(invoker)
    call, invoker.max_time = invoker.invoke, seconds

    def invoke(*args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except grpc.RpcError as error:
            if not (_interrupted(error) or error.code() == grpc.StatusCode.UNAVAILABLE):
                raise
            raise RunError(
                f"the SuperLink has not answered for {seconds:g} s ({error.code().name}: "
                f"{error.details()}); see its log"
            ) from None

    invoker.invoke = invoke  # type: ignore[method-assign]


def _interrupted(error: Any) -> bool:
    """Whether a call had begun when its connection ended."""
    import grpc

    text = str(error.details()).lower()
    return error.code() == grpc.StatusCode.CANCELLED or (
        error.code() in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
        and any(sign in text for sign in ENDED_CONNECTION)
    )


class Flower134(Processes134, v134_fleet.Link134, Messages134, Simulation134):
    """Flower 1.34."""


def allow_unix_sockets() -> None:
    """Let Flower's servers listen on Unix sockets; Flower takes their addresses for ports in use.

    gRPC replaces the file that a killed process has left.
    """
    from flwr.supercore import grpc

    in_use = grpc.is_port_in_use  # type: ignore[attr-defined]

    def is_port_in_use(address: str) -> bool:
        return not address.startswith(UNIX) and in_use(address)

    grpc.is_port_in_use = is_port_in_use  # type: ignore[attr-defined]


def let_writers_wait() -> None:
    """Make writers wait for `WAIT` seconds, in all databases that this process opens later."""
    from flwr.supercore import sql_mixin

    patience = ("busy_timeout", str(1000 * WAIT))
    pragmas = (*sql_mixin.SQLITE_PRAGMAS, patience)  # type: ignore[attr-defined]
    sql_mixin.SQLITE_PRAGMAS = pragmas  # type: ignore[assignment, attr-defined]


def find_migrations() -> None:
    """Let Flower make the tables of its database wherever it is installed.

    Flower joins the folders of its migrations to one text, which alembic splits at blanks and
    commas. In a path with a blank it then finds no migration and makes no table. The name of a
    resource of a package has neither.
    """
    from flwr.supercore.state.alembic import utils

    utils.ALEMBIC_DIR = Path("flwr.supercore.state:alembic")


def _named(message: Message, name: str) -> str:
    """Set a message's id, which its bytes do not contain."""
    message.metadata.__dict__["_message_id"] = name
    return name


def meaning(arguments: Sequence[str], apis: Sequence[str]) -> SuperLinkArguments:
    """What arguments of a SuperLink mean, but for the addresses of its open APIs, which are given."""
    parsed = _parsed(arguments)
    file = parsed.ssl_certfile
    certificate = Path(file).expanduser().absolute() if file else None
    authenticates, simulates = bool(parsed.enable_supernode_auth), bool(parsed.simulation)
    return SuperLinkArguments(certificate, authenticates, tuple(apis), simulates)


def _parsed(arguments: Sequence[str]) -> Namespace:
    from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink

    parsed, _ = _parse_args_run_superlink().parse_known_args(list(arguments))
    return parsed
