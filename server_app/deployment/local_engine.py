"""Run a whole federation in this process: the same apps, messages and checks as Flower's engines,
without Ray.
"""

from __future__ import annotations

import copy
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.help import without_effect
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings.base import Scalar

from ..control_api import find_folder
from ..lifecycle.before_start import (
    Interrupted,
    check_local,
    check_records,
    check_simulation,
    site_folders,
)
from ..runs.reader import POLL_SECONDS
from ..runs.state import PARTS, EventFile
from ..serverapp import federate
from .submit import OnEvent, warn

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


CLIENT_APP = "fedsurrogate.client_app.clientapp:app"
# Every run of Flower has its own id. Ledgers and checkpoints use it.
RUN_IDS = itertools.count(time.time_ns() % 2**40)
_active = 0


def running() -> bool:
    """Whether this process simulates sites now. Sites then accept the run's own data, as in
    Flower's simulation.
    """
    return _active > 0


def simulate_here(
    sites: int, overrides: Mapping[str, Scalar], on_event: OnEvent, *, report: bool = True
) -> Path:
    """Run simulated sites, which share the run's data, in this process.

    Args:
        sites: their number.
        overrides: settings of the run, flat.
        on_event: takes each event of the run.
        report: as for `run_here`.

    Returns:
        The run folder.

    Raises:
        FedSurrogateError: the run fails.
    """
    nodes = [{"partition-id": index, "num-partitions": sites} for index in range(sites)]
    return run_here(nodes, parse_run(overrides), dict(overrides), on_event, report=report)


def run_here(
    nodes: Sequence[Mapping[str, Scalar]],
    config: Run,
    overrides: Mapping[str, Scalar],
    on_event: OnEvent,
    *,
    report: bool = True,
) -> Path:
    """Run sites with these node-configs in this process. The settings are checked first, and the
    records that the sites share.

    Args:
        nodes: the node-config of each site.
        config: the run.
        overrides: its settings, flat.
        on_event: takes each event of the run.
        report: as for `federate`.

    Returns:
        The run folder.

    Raises:
        FedSurrogateError: the run fails.
    """
    _, settings = check_simulation(overrides, any(node.get("backbone") for node in nodes))
    check_local()
    own_data = any(node.get("data") for node in nodes)
    output = Path(config.settings.output_dir).expanduser().absolute()
    run_id = next(RUN_IDS)
    # A site with data of its own has a ledger, which must not be lost.
    folders: AbstractContextManager[list[str]] = nullcontext([]) if own_data else site_folders()
    with folders as warnings:
        warn(
            [
                *without_effect(config.method, config.settings.flat()),
                *warnings,
                *([] if own_data else check_records(settings, len(nodes))),
            ],
            on_event,
        )
        grid = LocalGrid(_one_thread(_client_app()), nodes, run_id)
        grid.run_config = settings
        with _simulating(), quiet(), _watched(output, str(run_id), on_event):
            work = partial(federate, config, grid, run_id, simulated=True, report=report)
            return folder_after(work, output, run_id)


def folder_after(work: Callable[[], object], output: Path, run_id: int) -> Path:
    """The run folder of a run in this process.

    Args:
        work: makes the run.
        output: folder of all runs.
        run_id: number of the run.

    Raises:
        RunError: the run left no folder.
        Interrupted: by a signal; with the run folder.
    """
    try:
        work()
    except Interrupted as stop:
        stop.folder = find_folder(output, str(run_id))
        raise
    folder = find_folder(output, str(run_id))
    if folder is None:
        raise RunError(f"the run left no folder in {output}")
    return folder


def _client_app() -> ClientApp:
    """The site's app by its name: the coordinator's code does not import the site's."""
    module, _, name = CLIENT_APP.partition(":")
    app: ClientApp = getattr(import_module(module), name)
    return app


def _one_thread(app: ClientApp) -> ClientApp:
    """Flower's simulation gives each site one thread. The same number here gives the same digits."""

    def answer(message: Message, context: Context) -> Message:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return app(message, context)
        finally:
            torch.set_num_threads(threads)

    return answer


@contextmanager
def _simulating() -> Iterator[None]:
    global _active
    _active += 1
    try:
        yield
    finally:
        _active -= 1


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Flower's log below warnings: `on_event` reports what happens."""
    log = logging.getLogger("flwr")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _watched(output: Path, run_id: str, on_event: OnEvent) -> Iterator[None]:
    """Pass the new run's events to `on_event` from a thread, and the last ones at the end."""
    ended = threading.Event()

    def watch() -> None:
        events: EventFile | None = None
        while True:
            last = ended.wait(POLL_SECONDS)
            if events is None and (folder := find_folder(output, run_id)) is not None:
                events = EventFile(folder / PARTS[2])
            for event in events.read() if events else ():
                on_event(event)
            if last:
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
