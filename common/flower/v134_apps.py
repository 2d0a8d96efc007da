"""The coordinator's app in Flower 1.34: a SuperLink takes no run of another app, and nothing starts
code that arrives with a run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.flower.environment import UNIX

if TYPE_CHECKING:
    from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult

    from fedsurrogate.common.settings.flat import Scalar

# By their names: the packages have functions of these names, too.
SUPERLINK = "flwr.superlink.cli.flower_superlink"
TASKS = {
    "flwr-serverapp": ("flwr.superlink.cli.flwr_serverapp", "flwr.superlink.runtime.run_serverapp"),
    "flwr-simulation": ("flwr.simulation.app", "flwr.simulation.app"),
}
"""Commands that run an app: the module of each, and the one that unpacks the app."""


def packed_digest(folder: Path) -> str:
    """SHA-256 of the bundle of the app in this folder."""
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()


def admit_runs(admit: Callable[[str, Mapping[str, Scalar]], None]) -> None:
    """Ask `admit`, as `RunRules` has it, before any state stores a run; call it once.

    Every way to a run ends there: a bundle that is sent, named by its hash or loaded from elsewhere,
    a run that is planned for later, and an app that runs agents.
    """
    from flwr.server.superlink.linkstate import in_memory_linkstate, sql_linkstate
    from flwr.supercore.error import ApiErrorCode, FlowerError

    def asking(create: Callable[..., int]) -> Callable[..., int]:
        def create_run(
            state: Any,
            name: str,
            version: str,
            digest: str,
            settings: Any,
            *rest: Any,
            **named: Any,
        ) -> int:
            try:
                admit(digest, settings)
            except FedSurrogateError as error:
                refused = ApiErrorCode.INVALID_RUN_CONFIG
                raise FlowerError(refused, str(error), public_details=str(error)) from None
            return create(state, name, version, digest, settings, *rest, **named)

        return create_run

    states: tuple[Any, ...] = (in_memory_linkstate.InMemoryLinkState, sql_linkstate.SqlLinkState)
    for each in states:
        each.create_run = asking(each.create_run)


def serve_commands_without_tls() -> None:
    """Let the Control API do without TLS on a Unix socket, which has no name to certify."""
    superlink: Any = import_module(SUPERLINK)
    run = superlink.run_control_api_grpc

    def run_control_api_grpc(*, address: str, certificates: Any, **named: Any) -> Any:
        plain = address.startswith(UNIX)
        return run(address=address, certificates=None if plain else certificates, **named)

    superlink.run_control_api_grpc = run_control_api_grpc


def start_own_apps(command: Sequence[str]) -> None:
    """Let a SuperLink that starts its apps itself use this command in place of Flower's SuperExec."""
    superlink: Any = import_module(SUPERLINK)
    superlink._get_superexec_command = lambda **_: list(command)


class AppStarter:
    """Starts Flower's tasks of coordinators' apps, as an executor of its SuperExec.

    Args:
        task: program and arguments, before those of Flower.
    """

    def __init__(self, task: Sequence[str]) -> None:
        self._task = task

    def wait_for_capacity(self, *_: object, **__: object) -> None:
        """There is no limit."""

    def get_eligible_capacity(self, *_: object, **__: object) -> tuple[set[str], set[str]]:
        """Of which kinds it takes tasks, as Flower 1.42 asks."""
        from flwr.supercore.constant import TaskType

        return {TaskType.SERVER_APP, TaskType.SIMULATION}, set()

    def reconcile(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Its processes end with this one."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a process with the arguments that Flower's own executor gives it."""
        from flwr.supercore.constant import TASK_TYPE_TO_APPIO_API_ADDRESS_ARG as OPTIONS
        from flwr.supercore.constant import TASK_TYPE_TO_COMMAND
        from flwr.supercore.superexec.executor import LaunchResult

        name = TASK_TYPE_TO_COMMAND[spec.task_type]
        if name not in TASKS:
            return LaunchResult.failed(f"a coordinator starts no task of the kind {spec.task_type}")
        words = [*self._task, name, OPTIONS[spec.task_type], spec.runtime_api_address]
        words += ["--token", spec.token, "--insecure", "--parent-pid", str(spec.parent_pid)]
        # Its output reaches the SuperLink's log of the run.
        subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return LaunchResult.accepted()


def run_apps(flags: Sequence[str], task: Sequence[str], parent: int | None) -> None:
    """`flower-superexec` of a coordinator with these flags, and with `AppStarter`."""
    from flwr.supercore.cli.flower_superexec import flower_superexec
    from flwr.supercore.superexec import run_superexec as loop

    starter = AppStarter(task)
    loop.get_executor = lambda *_, **__: starter  # type: ignore[attr-defined]
    with_parent = [] if parent is None else ["--parent-pid", str(parent)]
    sys.argv = ["flower-superexec", "--insecure", *flags, *with_parent]
    flower_superexec()


def run_app(folder: Path) -> None:
    """The command that `sys.argv` names, with the app in `folder` in place of the received one."""
    name = sys.argv.pop(1)
    command, task = (import_module(each) for each in TASKS[name])
    module: Any = task
    module.install_from_fab = lambda *_, **__: None
    module.get_fab_metadata = lambda *_: ("", "")
    module.get_project_dir = lambda *_: folder
    # Ray adds the folder of the program to the paths of its workers.
    sys.argv[0] = str(Path(sys.executable).with_name(name))
    getattr(command, name.replace("-", "_"))()
