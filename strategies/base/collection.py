"""Send requests to sites and wait for replies until a deadline. A site that does not reply in time
is always recorded.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import HERE, Pace

POLL_SECONDS = 0.3
# How long a run waits at its start for sites to connect; the deadline if that is shorter.
CONNECT_SECONDS = 60.0
# How long a site with a lost connection (detected after a minute) may take to return with its
# reply.
RETURN_SECONDS = 60.0


class Recorder(Protocol):
    """Records a run's events and files while it runs."""

    def event(self, event: str, **fields: object) -> None:
        """Write one event."""

    def surrogate(self, site: str, payload: bytes) -> Callable[[], bytes]:
        """Store a site's surrogate.

        Args:
            site: name of the site.
            payload: bytes of the surrogate.

        Returns:
            How to read it again.
        """

    def keep(self, name: str, content: bytes) -> None:
        """Store another file that a head is learned from.

        Args:
            name: of the file.
            content: of the file.
        """

    def discard(self, site: str) -> None:
        """Delete a site's surrogate that does not fit those of the other sites."""


class Unrecorded:
    """A recorder that stores nothing."""

    def event(self, event: str, **fields: object) -> None:
        """Nothing."""

    def surrogate(self, site: str, payload: bytes) -> Callable[[], bytes]:
        """Nothing; the bytes stay in memory."""
        return lambda: payload

    def keep(self, name: str, content: bytes) -> None:
        """Nothing."""

    def discard(self, site: str) -> None:
        """Nothing."""


class Collection:
    """Iterator over the replies to messages as they arrive. It ends with the last reply, or at the
    deadline.

    Args:
        grid: through which the messages are sent.
        messages: to send.
        deadline: seconds after the messages were sent.

    Attributes:
        unanswered: node by message without a reply.
    """

    def __init__(self, grid: Grid, messages: Iterable[Message], deadline: float) -> None:
        self._grid = grid
        sent = list(messages)
        pushed = set(grid.push_messages(sent))
        # Node by message without a reply, and the time since when a node has been disconnected.
        self.unanswered = {
            message.metadata.message_id: message.metadata.dst_node_id
            for message in sent
            if message.metadata.message_id in pushed
        }
        self._away: dict[int, float] = {}
        self._pace = Pace(HERE)
        self._end = time.monotonic() + deadline

    def __iter__(self) -> Iterator[Message]:
        while self.unanswered:
            # One broken reply can block Flower's pull for minutes. Replies that arrived meanwhile
            # still count as in time.
            over = time.monotonic() >= self._end
            names = self._askable()
            for reply in self._grid.pull_messages(names) if names else ():
                # What a reply says of itself is not what the SuperLink has checked.
                if self.unanswered.pop(reply.metadata.reply_to_message_id, None) is None:
                    continue
                self._pace.worked()
                yield reply
            if over or not self.unanswered:
                break
            self._pace.sleep(POLL_SECONDS)

    def _askable(self) -> list[str]:
        """The messages to pull replies for now. Nodes that disconnected a moment ago are left out.

        A pull for such a node makes Flower drop the message and any later reply: a release that is
        already charged.
        """
        now, connected = time.monotonic(), set(self._grid.get_node_ids())
        self._away = {
            node: self._away.get(node, now)
            for node in self.unanswered.values()
            if node not in connected
        }
        return [
            name
            for name, node in self.unanswered.items()
            if now - self._away.get(node, -math.inf) >= RETURN_SECONDS
        ]

    def prolonged(self, seconds: float) -> Iterator[Message]:
        """Replies that have arrived since, and those that arrive in the next seconds.

        Args:
            seconds: their number.
        """
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
    """Node ids of the connected sites.

    Args:
        grid: that they are connected to.
        expected: waits for so many of them (at least one).
        quorum: share of the expected sites that must be connected.
        deadline: seconds to wait; at most CONNECT_SECONDS.
        recorder: of the wait.
        registered: returns the names of registered sites by node id; then only those count, and
            missing ones are named.

    Raises:
        RunError: below the quorum, before any site is charged for a run that cannot finish.
    """

    def look() -> tuple[list[int], int, str]:
        nodes = set(grid.get_node_ids())
        if registered is None:
            return sorted(nodes), len(nodes), ""
        names = registered()
        missing = ", ".join(sorted(name for node, name in names.items() if node not in nodes))
        return (
            sorted(nodes),
            len(nodes & names.keys()),
            f"; not connected: {missing}" if missing else "",
        )

    wanted, limit = max(1, expected), min(deadline, CONNECT_SECONDS)
    end, (nodes, there, missing) = time.monotonic() + limit, look()
    if there < wanted:
        reason = f"for {wanted - there} more of {wanted} sites to connect{missing}"
        recorder.event("waiting", reason=reason, seconds=limit)
    while there < wanted and time.monotonic() < end:
        time.sleep(POLL_SECONDS)
        nodes, there, missing = look()
    if not there:
        raise RunError(
            f"no site is connected; start a SuperNode at each site, then run again{missing}"
        )
    try:
        check_quorum(there, there, expected, quorum, "are connected")
    except RunError as error:
        raise RunError(f"{error}{missing}") from None
    return nodes


def has_quorum(used: int, invited: int, expected: int, quorum: float) -> bool:
    """Whether enough sites can be used.

    Args:
        used: as in `check_quorum`.
        invited: as in `check_quorum`.
        expected: as in `check_quorum`.
        quorum: as in `check_quorum`.

    Example:
        >>> has_quorum(used=2, invited=3, expected=4, quorum=0.5)
        True
        >>> has_quorum(used=1, invited=3, expected=4, quorum=0.5)
        False
    """
    return used >= _needed(invited, expected, quorum)


def _needed(invited: int, expected: int, quorum: float) -> int:
    return max(1, math.ceil(quorum * max(invited, expected) - 1e-9))


def check_quorum(
    used: int,
    invited: int,
    expected: int,
    quorum: float,
    what: str = "can be used",
    reasons: Iterable[str] = (),
) -> None:
    """Check that enough sites can be used.

    Args:
        used: number of sites that can be.
        invited: number of invited sites.
        expected: number of expected sites; 0 if it is not known.
        quorum: share that is needed of the invited or expected sites, the larger number.
        what: the predicate of the error message, such as "are connected".
        reasons: why sites cannot be used; the error names the most common one.

    Raises:
        RunError: when fewer can be used.
    """
    of, needed = max(invited, expected), _needed(invited, expected, quorum)
    if used < needed:
        known = Counter(each for each in reasons if each)
        reason = "".join(f"; {times} of them: {each}" for each, times in known.most_common(1))
        raise RunError(
            f"quorum missed: {used} of {of} sites {what}, quorum = {quorum:g} needs "
            f"{needed}{reason}"
        )
