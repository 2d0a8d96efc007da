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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import FedSurrogateError

if TYPE_CHECKING:
    from fedsurrogate.common.settings.flat import Scalar

# By their names: the packages have functions of these names, too.
SUPERLINK = "flwr.superlink.cli.flower_superlink"
TASKS = {
    "flwr-serverapp": ("flwr.superlink.cli.flwr_serverapp", "flwr.superlink.runtime.run_serverapp"),
    "flwr-simulation": ("flwr.simulation.app", "flwr.simulation.app"),
}
"""Commands that a coordinator's processes run: the module of each, and the one that unpacks the app."""


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


def serve_commands_without_tls() -> None:
    """Let the Control API do without TLS: it is at a Unix socket, which has no name to certify."""
    superlink: Any = import_module(SUPERLINK)
    run = superlink.run_control_api_grpc
    superlink.run_control_api_grpc = lambda **named: run(**named | {"certificates": None})


def start_own_apps(command: Sequence[str]) -> None:
    """Let a SuperLink that starts its apps itself use this command in place of Flower's SuperExec."""
    superlink: Any = import_module(SUPERLINK)
    superlink._get_superexec_command = lambda **_: list(command)


class Apps134:
    """The processes of a coordinator's app, in Flower 1.34.

    Attributes:
        address_flags: Of `flower-superexec`; an address follows.
    """

    address_flags: tuple[str, ...] = ("--plugin-type", "serverapp", "--appio-api-address")

    def packed_digest(self, folder: Path) -> str:
        """Flower's own command packs it, always into the same bytes."""
        from flwr.cli.build import build_fab_from_disk

        return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()

    def coordinator_apps(self, runtime: str, task: Sequence[str], parent: int | None) -> None:
        """`flower-superexec`, whose processes are those of `task`."""
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
        """`flwr-serverapp` or `flwr-simulation` that leaves the received code packed."""
        name = sys.argv.pop(1)
        if name not in TASKS:
            sys.exit(f"a coordinator starts no {name}")
        command, task = (import_module(each) for each in TASKS[name])
        module: Any = task
        module.install_from_fab = lambda *_, **__: None
        module.get_fab_metadata = lambda *_: ("", "")
        module.get_project_dir = lambda *_: folder
        # Ray adds the folder of the program to the paths of its workers.
        sys.argv[0] = str(Path(sys.executable).with_name(name))
        getattr(command, name.replace("-", "_"))()
