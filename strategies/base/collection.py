"""Ask sites and wait for their replies until a deadline. Nobody is waited for for ever, and nobody is lost silently."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from common.errors import RunError

POLL_SECONDS = 0.3
# Sites that are not connected when a run starts are given this long, or the deadline if that is shorter.
CONNECT_SECONDS = 60.0
# A site whose line was lost, which shows after a minute, is given this long to come back with its reply.
RETURN_SECONDS = 60.0


class Recorder(Protocol):
    """Where a run's story goes, as it happens."""

    def event(self, event: str, **fields: object) -> None:
        """Write one line of the run's events."""

    def surrogate(self, site: str, payload: bytes) -> None:
        """Keep what a site sent."""

    def keep(self, name: str, content: bytes) -> None:
        """Keep something else that a head is learned from."""

    def discard(self, site: str) -> None:
        """Drop what a site sent: it turned out not to fit the other sites'."""


class Unrecorded:
    """A recorder that keeps nothing."""

    def event(self, event: str, **fields: object) -> None:
        """Nothing."""

    def surrogate(self, site: str, payload: bytes) -> None:
        """Nothing."""

    def keep(self, name: str, content: bytes) -> None:
        """Nothing."""

    def discard(self, site: str) -> None:
        """Nothing."""


class Collection:
    """Replies to `messages`, iterated as they arrive until all are there or `deadline` seconds after the asking are over."""

    def __init__(self, grid: Grid, messages: Iterable[Message], deadline: float) -> None:
        self._grid = grid
        sent = list(messages)
        pushed = set(grid.push_messages(sent))
        # The node that each message went to, and since when nodes have been away.
        self.unanswered = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in sent
            if message.metadata.message_id in pushed
        }
        self._away: dict[int, float] = {}
        self._end = time.monotonic() + deadline

    def __iter__(self) -> Iterator[Message]:
        while self.unanswered:
            # Flower holds a pull for minutes while one reply is broken off; what others sent meanwhile came in time.
            over = time.monotonic() >= self._end
            names = self._askable()
            for reply in self._grid.pull_messages(names) if names else ():
                self.unanswered.pop(reply.metadata.reply_to_message_id, None)
                yield reply
            if over or not self.unanswered:
                break
            time.sleep(POLL_SECONDS)

    def _askable(self) -> list[str]:
        """The messages to ask after now: not those of nodes that went away a moment ago.

        Asked after such a message, Flower drops it, and whatever comes for it later: a release that is paid for.
        """
        now, connected = time.monotonic(), set(self._grid.get_node_ids())
        self._away = {node: self._away.get(node, now) for node in self.unanswered.values() if node not in connected}
        return [name for name, node in self.unanswered.items() if now - self._away.get(node, -math.inf) >= RETURN_SECONDS]

    def prolonged(self, seconds: float) -> Iterator[Message]:
        """What has come in since, and what still comes within so many seconds."""
        self._end = time.monotonic() + seconds
        yield from self


def connected_nodes(
    grid: Grid,
    expected: int,
    quorum: float,
    deadline: float,
    recorder: Recorder,
    registered: Callable[[], Mapping[int, str]] | None = None,
) -> list[int]:
    """Node ids of the connected sites, waiting for `expected` of them (at least one).

    registered: gives the names of registered sites by node id; only those count then, and who is missing is named.
    Raises RunError when fewer come than `quorum` asks for: nobody is then asked for what would be paid for in vain.
    """

    def look() -> tuple[list[int], int, str]:
        nodes = sorted(grid.get_node_ids())
        if registered is None:
            return nodes, len(nodes), ""
        names = registered()
        missing = ", ".join(sorted(name for node, name in names.items() if node not in nodes))
        return nodes, sum(node in names for node in nodes), f"; not connected: {missing}" if missing else ""

    wanted, limit = max(1, expected), min(deadline, CONNECT_SECONDS)
    end, (nodes, there, missing) = time.monotonic() + limit, look()
    if there < wanted:
        reason = f"for {wanted - there} more of {wanted} sites to connect{missing}"
        recorder.event("waiting", reason=reason, seconds=limit)
    while there < wanted and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        nodes, there, missing = look()
    if not there:
        raise RunError(f"no site is connected; start a SuperNode at each site, then run again{missing}")
    try:
        check_quorum(there, there, expected, quorum, "are connected")
    except RunError as error:
        raise RunError(f"{error}{missing}") from None
    return nodes


def check_quorum(used: int, invited: int, expected: int, quorum: float, what: str = "can be used") -> None:
    """Raise RunError when fewer than `quorum` of the sites (invited or expected, whichever is more) can be used."""
    of = max(invited, expected)
    needed = max(1, math.ceil(quorum * of - 1e-9))
    if used < needed:
        raise RunError(f"quorum missed: {used} of {of} sites {what}, quorum = {quorum:g} needs {needed}")
