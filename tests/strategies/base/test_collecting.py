"""Waiting for sites and their replies: deadlines, lost connections and quorums, over generated
courses of events and a clock of the test's own.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import environment
from fedsurrogate.strategies.base import collection
from fedsurrogate.strategies.base.collection import (
    CONNECT_SECONDS,
    POLL_SECONDS,
    RETURN_SECONDS,
    Collection,
    check_quorum,
    connected_nodes,
    has_quorum,
)

SAME_CLOCK = [HealthCheck.function_scoped_fixture]


@dataclass(frozen=True)
class Node:
    """A site: when its reply is there, and from when on and how long its connection is lost."""

    reply: float = math.inf
    lost: float = math.inf
    back: float = math.inf

    def connected(self, now: float) -> bool:
        return not self.lost <= now < self.back


@dataclass
class Clock:
    """Time that passes only while somebody sleeps, on a machine that has been up for days."""

    now: float = 0.0

    def monotonic(self) -> float:
        return 1e6 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Replies:
    """A grid that holds replies back until their time."""

    clock: Clock
    nodes: dict[int, Node]
    unsent: frozenset[int] = frozenset()
    asked: list[tuple[float, int]] = field(default_factory=list)
    pulled: set[int] = field(default_factory=set)

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        ids = [each.metadata.dst_node_id for each in messages]
        return [f"m{node}" for node in ids if node not in self.unsent]

    def get_node_ids(self) -> list[int]:
        return [node for node, each in self.nodes.items() if each.connected(self.clock.now)]

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        found = []
        for name in names:
            node = int(name[1:])
            assert node not in self.pulled, "a reply is asked for once"
            self.asked.append((self.clock.now, node))
            if self.nodes[node].reply <= self.clock.now:
                self.pulled.add(node)
                found.append(SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=name)))
        return found


def message(node: int) -> Any:
    return SimpleNamespace(metadata=SimpleNamespace(message_id=f"m{node}", dst_node_id=node))


def node_of(reply: Any) -> int:
    return int(reply.metadata.reply_to_message_id[1:])


def with_clock(patch: pytest.MonkeyPatch) -> Clock:
    """The time of the coordinator is the clock's."""
    found = Clock()
    patch.setattr(collection, "time", found)
    patch.setattr(environment, "time", found)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return with_clock(monkeypatch)


TIMES = st.sampled_from([0.0, 0.1, 1.0, 5.0, 30.0, 59.0, 61.0, 100.0, 130.0, 200.0, math.inf])
NODES = st.builds(
    lambda reply, lost, away: Node(reply, lost, lost + away), TIMES, TIMES, TIMES
) | st.builds(Node, TIMES)
NETWORKS = st.dictionaries(st.integers(1, 9), NODES, max_size=6)


@settings(max_examples=60, suppress_health_check=SAME_CLOCK)
@given(
    nodes=NETWORKS,
    unsent=st.frozensets(st.integers(1, 9), max_size=2),
    deadline=st.sampled_from([0.0, 0.2, 5.0, 60.0, 150.0]),
)
def test_replies_in_time_are_taken_and_none_is_pulled_into_nothing(
    clock: Clock, nodes: dict[int, Node], unsent: frozenset[int], deadline: float
) -> None:
    clock.now = 0.0
    grid = Replies(clock, nodes, unsent)
    waiting: Any = Collection(grid, map(message, nodes), deadline)  # type: ignore[arg-type]
    taken = [node_of(reply) for reply in waiting]
    assert len(taken) == len(set(taken))
    assert set(taken) <= set(nodes) - unsent
    assert set(waiting.unanswered.values()) == set(nodes) - unsent - set(taken)
    assert clock.now < deadline + 2 * POLL_SECONDS, "the deadline holds"
    if not waiting.unanswered and taken:
        assert clock.now <= max(nodes[node].reply for node in taken) + RETURN_SECONDS + 230
    for node in nodes.keys() - unsent:
        each = nodes[node]
        steady = each.lost == math.inf
        if steady and each.reply <= deadline:
            assert node in taken
        if each.reply > deadline + POLL_SECONDS:
            assert node not in taken
    for now, node in grid.asked:
        each = nodes[node]
        assert each.connected(now) or now - each.lost >= RETURN_SECONDS


@settings(max_examples=20, suppress_health_check=SAME_CLOCK)
@given(lost=st.sampled_from([0.0, 3.0, 20.0]), more=st.sampled_from([-1.0, 2.0]))
def test_a_reply_of_a_lost_site_is_given_up_only_after_its_time_to_return(
    clock: Clock, lost: float, more: float
) -> None:
    clock.now = 0.0
    grid = Replies(clock, {1: Node(reply=lost, lost=lost)})
    end = lost + RETURN_SECONDS + more
    taken = list(Collection(grid, [message(1)], end))  # type: ignore[arg-type]
    assert len(taken) == (more > 0)
    assert all(now < lost or now >= lost + RETURN_SECONDS for now, _ in grid.asked)


@settings(max_examples=30, suppress_health_check=SAME_CLOCK)
@given(nodes=st.dictionaries(st.integers(1, 9), st.builds(Node, TIMES), max_size=6), more=TIMES)
def test_a_longer_wait_takes_what_arrives_in_it(
    clock: Clock, nodes: dict[int, Node], more: float
) -> None:
    clock.now, seconds = 0.0, min(more, 60.0)
    grid = Replies(clock, nodes)
    waiting = Collection(grid, map(message, nodes), 1.0)  # type: ignore[arg-type]
    first = {node_of(reply) for reply in waiting}
    began = clock.now
    later = {node_of(reply) for reply in waiting.prolonged(seconds)}
    assert not first & later
    for node, each in nodes.items():
        if each.reply <= began + seconds:
            assert node in first | later
        if each.reply > began + seconds + POLL_SECONDS:
            assert node not in first | later


@dataclass
class Claims(Replies):
    """A grid whose replies name the messages that they answer themselves."""

    claims: dict[int, str] = field(default_factory=dict)

    def pull_messages(self, names: Iterable[str]) -> list[Any]:
        new = [int(name[1:]) for name in names if int(name[1:]) not in self.pulled]
        self.pulled.update(new)
        return [
            SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=self.claims[node]))
            for node in new
        ]


@settings(max_examples=60, suppress_health_check=SAME_CLOCK)
@given(
    claims=st.dictionaries(
        st.integers(1, 5), st.sampled_from(["m1", "m2", "m3", "m9", "of an earlier round", ""])
    )
)
def test_no_reply_counts_that_names_a_message_which_waits_for_none(
    clock: Clock, claims: dict[int, str]
) -> None:
    """The run took it up, found no site for it, and ended."""
    clock.now = 0.0
    grid = Claims(clock, dict.fromkeys(claims, Node()), claims=claims)
    waiting = Collection(grid, map(message, claims), 5.0)  # type: ignore[arg-type]
    taken = [reply.metadata.reply_to_message_id for reply in waiting]
    assert len(taken) == len(set(taken))
    assert set(taken) == {f"m{node}" for node in claims} & set(claims.values())
    assert set(waiting.unanswered) == {f"m{node}" for node in claims} - set(taken)


@dataclass
class Events:
    """A recorder that keeps events."""

    seen: list[dict[str, Any]] = field(default_factory=list)

    def event(self, event: str, **fields: object) -> None:
        self.seen.append({"event": event, **fields})


@settings(max_examples=60, suppress_health_check=SAME_CLOCK)
@given(
    joins=st.lists(st.sampled_from([0.0, 1.0, 10.0, 59.0, 61.0]), max_size=5),
    strangers=st.integers(0, 2),
    expected=st.integers(0, 6),
    quorum=st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]),
    deadline=st.sampled_from([0.0, 5.0, 3600.0]),
    table=st.booleans(),
)
def test_a_run_starts_when_all_are_there_or_the_wait_is_over(
    clock: Clock,
    joins: list[float],
    strangers: int,
    expected: int,
    quorum: float,
    deadline: float,
    table: bool,
) -> None:
    """With a table of registered sites, others are connected but do not count."""
    clock.now = 0.0
    nodes = {number + 1: Node(lost=-1.0, back=at) for number, at in enumerate(joins)}
    others = {100 + number: Node() for number in range(strangers)}
    names = {number: f"s{number}" for number in nodes}
    count = nodes if table else nodes | others
    limit, recorder = min(deadline, CONNECT_SECONDS), Events()

    def there(now: float) -> int:
        return sum(each.connected(now) for each in count.values())

    try:
        found: list[int] | None = connected_nodes(
            Replies(clock, nodes | others),  # type: ignore[arg-type]
            expected,
            quorum,
            deadline,
            recorder,  # type: ignore[arg-type]
            (lambda: names) if table else None,
        )
        said = ""
    except RunError as error:
        found, said = None, str(error)
    missing = [name for at, name in names.items() if not nodes[at].connected(clock.now)]
    assert found is not None or not table or all(name in said for name in missing)
    wanted = max(1, expected)
    assert clock.now < limit + POLL_SECONDS + 1e-6
    assert there(clock.now) >= wanted or clock.now >= limit - 1e-6
    assert clock.now == 0.0 or there(clock.now - POLL_SECONDS - 1e-6) < wanted
    assert bool(recorder.seen) == (there(0.0) < wanted)
    enough = there(clock.now) >= max(1, math.ceil(quorum * max(there(clock.now), expected) - 1e-9))
    assert (found is not None) == enough
    if found is not None:
        both = nodes | others
        assert found == [node for node in sorted(both) if both[node].connected(clock.now)]


@settings(max_examples=100)
@example(used=27, invited=42, expected=0, part=9, whole=14)
@example(used=7, invited=25, expected=25, part=28, whole=100)
@given(
    used=st.integers(0, 12),
    invited=st.integers(0, 12),
    expected=st.integers(0, 12),
    part=st.integers(0, 12),
    whole=st.integers(1, 12),
)
def test_a_quorum_is_the_share_of_the_larger_number_and_at_least_one(
    used: int, invited: int, expected: int, part: int, whole: int
) -> None:
    """In whole numbers, so that a share of three out of three is not four."""
    quorum = min(1.0, part / whole)
    most = max(invited, expected)
    enough = used >= 1 and used * whole >= min(part, whole) * most
    assert has_quorum(used, invited, expected, quorum) == enough
    if enough:
        check_quorum(used, invited, expected, quorum)
        return
    reasons = ["late", "", "wrong", "late", "", ""]
    with pytest.raises(
        RunError, match=rf"^quorum missed: {used} of {most} sites .*2 of them: late"
    ):
        check_quorum(used, invited, expected, quorum, reasons=reasons)
