"""A SuperNode goes on when the process of a task ends, and looks for work as often as there is some."""

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable import inflatable_utils as parts
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode import start_client_internal
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.flower import environment, flower
from fedsurrogate.common.flower.environment import HERE, QUIET, SHARE, Pace
from fedsurrogate.common.flower.v134_fleet import OwnExecutor, hurry, keep_no_code, pull_again_soon

RUN = 7
# Of the Flower that is installed here.
ROOM = type(flower()).__module__
TASKS: Any = import_module(ROOM if ROOM.endswith("v142") else f"{ROOM}_fleet")
NEWEST = hasattr(TASKS, "refuse_other_tasks")
only_newest = pytest.mark.skipif(
    not NEWEST, reason="only newer Flowers make other tasks at a site: make flower-newest"
)
CODE = b"what a run brings"
TELEMETRY = """
import sys
from fedsurrogate.common.flower.v134_fleet import leave_out_telemetry
from flwr.supercore.telemetry import EventType, event
sys.addaudithook(lambda name, given: name == "subprocess.Popen" and print(given[1][0]))
if sys.argv[1] == "True":
    leave_out_telemetry()
print(event(EventType.FLWR_CLIENTAPP_RUN_ENTER).result())
"""
OTHERS = [kind for kind in TaskType if kind != TaskType.CLIENT_APP]


def messages(state: Any, **named: Any) -> list[Message]:
    """Those that an app or the SuperNode fetches."""
    fetch = state.get_messages_legacy if NEWEST else state.get_messages
    return list(fetch(**named))


def request() -> Message:
    """A message to the site, as it arrives."""
    flower().local_run(RUN)
    message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_run_id"] = RUN
    message.metadata.__dict__["_message_id"] = message.object_id
    return message


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> InMemoryNodeState:
    for name in ("_on_task_tokens_expired", "finish_task"):
        monkeypatch.setattr(InMemoryNodeState, name, getattr(InMemoryNodeState, name))
    TASKS.answer_for_ended_tasks()
    found = InMemoryNodeState(ObjectStoreFactory().store())
    found.store_message(request())
    return found


def begin(state: InMemoryNodeState) -> int:
    """A task whose process has begun."""
    task = state.create_task(TaskType.CLIENT_APP, RUN, "f")
    assert task is not None
    assert state.claim_task(task)
    assert state.activate_task(task)
    return task


def end(state: InMemoryNodeState, task: int, way: str) -> None:
    """Let its process end: killed, or with a report of its failure."""
    if way == "killed":
        state.task_token_store[task].active_until = pace_of_the_past()
        state.get_tasks()
    else:
        assert state.finish_task(task, SubStatus.FAILED, "")


def pace_of_the_past() -> Any:
    from flwr.supercore.date import now

    return now().replace(year=2000)


@pytest.mark.parametrize("way", ["killed", "reported"])
def test_a_message_that_was_not_fetched_is_a_task_again(state: InMemoryNodeState, way: str) -> None:
    end(state, begin(state), way)
    (again,) = state.get_tasks(statuses=[Status.PENDING])
    assert (again.run_id, again.type, again.fab_hash) == (RUN, TaskType.CLIENT_APP, "f")
    assert state.claim_task(again.task_id)
    assert state.activate_task(again.task_id)
    assert len(messages(state, run_ids=[RUN], is_reply=False)) == 1
    assert not messages(state, is_reply=True)


@pytest.mark.parametrize("way", ["killed", "reported"])
def test_a_message_that_was_fetched_gets_one_error_as_its_reply(
    state: InMemoryNodeState, way: str
) -> None:
    task = begin(state)
    messages(state, run_ids=[RUN], is_reply=False)
    end(state, task, way)
    (reply,) = messages(state, is_reply=True)
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert not state.get_tasks(statuses=[Status.PENDING])


@pytest.mark.parametrize("way", ["killed", "reported"])
def test_a_message_that_has_a_reply_gets_no_second_one(state: InMemoryNodeState, way: str) -> None:
    task = begin(state)
    (message,) = messages(state, run_ids=[RUN], is_reply=False)
    reply = Message(Error(1, "own"), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    state.store_message(reply)
    end(state, task, way)
    assert [each.error.code for each in messages(state, is_reply=True)] == [1]
    assert not state.get_tasks(statuses=[Status.PENDING])


def test_a_task_that_succeeded_makes_nothing(state: InMemoryNodeState) -> None:
    task = begin(state)
    assert state.finish_task(task, SubStatus.COMPLETED, "")
    assert not state.get_tasks(statuses=[Status.PENDING])


def test_tasks_of_other_kinds_are_refused() -> None:
    started = list[Any]()
    starter = SimpleNamespace(start=started.append, tend=lambda: None)
    executor = getattr(TASKS, "ClientAppExecutor", OwnExecutor)(starter, Pace(HERE))
    for kind in TaskType:
        executor.launch(
            SimpleNamespace(
                task_type=kind, runtime_api_address="127.0.0.1:1", token="t", parent_pid=3
            )
        )
    ((flag, *arguments),) = started
    assert flag in ("--clientappio-api-address", "--runtime-api-address")
    assert arguments == ["127.0.0.1:1", "--token", "t", "--insecure", "--parent-pid", "3"]


@only_newest
@pytest.mark.parametrize("asked", [set(TaskType), set(OTHERS), set()])
def test_no_task_of_another_kind_is_acquired(asked: set[TaskType]) -> None:
    starter = SimpleNamespace(start=lambda _: None, tend=lambda: None)
    executor = TASKS.ClientAppExecutor(starter, Pace(HERE))
    assert executor.get_eligible_capacity(asked, insecure=True) == ({TaskType.CLIENT_APP}, set())


class Arrival:
    """A SuperNode's state, and a message of a run of some kind that arrives there."""

    def __init__(self, kind: str) -> None:
        self.state: Any = InMemoryNodeState(ObjectStoreFactory().store())
        run = Run.create_empty(RUN)
        run.primary_task_type = kind
        self.state.store_run(run)
        self.message = request()

    def arrive(self) -> int | None:
        """The SuperNode receives it; the run's number if it is to wait for a reply."""
        from flwr.supercore.inflatable.inflatable_object import get_object_tree

        contents = {self.message.object_id: self.message.deflate()}
        for each in self.message.children.values() if self.message.children else ():
            contents[each.object_id] = each.deflate()
        run: int | None = start_client_internal._pull_and_store_message(
            state=self.state,
            object_store=self.state.object_store,
            node_config={},
            receive=lambda: (self.message, get_object_tree(self.message)),
            get_run=never,
            get_fab=never,
            pull_object=lambda run, name: contents[name],
            confirm_message_received=lambda run, name: None,
            trusted_entities=None,
        )
        return run

    def kinds(self) -> list[str]:
        """Of the tasks that a SuperExec could take."""
        return [each.type for each in self.state.get_tasks()]


def never(*_: object) -> Any:
    """Of a run that is known."""
    raise AssertionError("asked again")


def test_a_part_that_is_announced_and_not_sent_yet_is_looked_for_again_soon() -> None:
    """Flower's first wait is a second: in half of all rounds a child was ready before its message."""
    pulls = (parts.pull_objects, parts.pull_and_inflate_object_from_tree)
    before = [dict(each.__kwdefaults__) for each in pulls]
    missing = ["first look", "second look"]

    def pull(name: str) -> bytes:
        if missing:
            missing.pop()
            raise parts.ObjectUnavailableError(name)
        return b"part"

    try:
        pull_again_soon()
        assert [each.__kwdefaults__["initial_backoff"] for each in pulls] == [HERE, HERE]
        assert parts.pull_objects(["part"], pull) == {"part": b"part"}
        assert not missing
    finally:
        for each, defaults in zip(pulls, before, strict=True):
            each.__kwdefaults__.update(defaults)


def test_a_supernode_keeps_the_hash_of_received_code_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InMemoryNodeState, "store_fab", InMemoryNodeState.store_fab)
    keep_no_code()
    found = InMemoryNodeState(ObjectStoreFactory().store())
    digest = found.store_fab(Fab(hashlib.sha256(CODE).hexdigest(), CODE, {"signed": "yes"}))
    stored = found.get_fab(digest)
    assert stored is not None
    assert (stored.content, stored.hash_str, stored.verifications) == (
        b"",
        digest,
        {"signed": "yes"},
    )
    with pytest.raises(ValueError, match="mismatch"):
        found.store_fab(Fab("0" * 64, CODE, {}))


@pytest.mark.parametrize(("left_out", "starts"), [(True, set()), (False, {"file"})])
def test_a_task_starts_no_programs_for_telemetry_that_is_off(
    left_out: bool, starts: set[str]
) -> None:
    """In a process of its own, which reports the programs that it starts."""
    done = subprocess.run(
        [sys.executable, "-c", TELEMETRY, str(left_out)],
        env=os.environ | QUIET,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "disabled"
    assert set(done.stdout.splitlines()[:-1]) >= starts
    if left_out:
        assert done.stdout == "disabled\n"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Guards the SuperNode as ours is, where its Flower needs it; undone after the test."""
    node: Any = start_client_internal
    monkeypatch.setattr(node, "_pull_and_store_message", node._pull_and_store_message)
    monkeypatch.setattr(InMemoryNodeState, "create_task", InMemoryNodeState.create_task)
    return (lambda: TASKS.refuse_other_tasks(node)) if NEWEST else (lambda: None)


def test_a_run_of_any_kind_makes_no_other_task_at_a_site(guarded: Callable[[], None]) -> None:
    guarded()
    for kind in TaskType:
        arrival = Arrival(kind)
        assert arrival.arrive() == RUN
        assert set(arrival.kinds()) <= {TaskType.CLIENT_APP}
        replies = messages(arrival.state, is_reply=True)
        assert len(replies) + len(arrival.kinds()) == 1, "a task, or a reply that names the reason"
        for reply in replies:
            assert "only the ClientApp" in reply.error.reason
            assert reply.metadata.reply_to_message_id == arrival.message.metadata.message_id


@only_newest
def test_flowers_own_supernode_makes_a_task_of_code_that_arrives_with_a_run() -> None:
    """The attack. Without the guard the test before this one fails."""
    arrival = Arrival(TaskType.AGENT_APP)
    assert arrival.arrive() == RUN
    assert arrival.kinds() == [TaskType.AGENT_APP]


@only_newest
@pytest.mark.parametrize("kind", OTHERS)
def test_an_app_at_a_site_makes_no_other_task_either(
    guarded: Callable[[], None], kind: TaskType
) -> None:
    guarded()
    arrival = Arrival(TaskType.CLIENT_APP)
    with pytest.raises(Exception, match=kind):
        arrival.state.create_task(kind, RUN)
    assert arrival.kinds() == []


@given(shortest=st.floats(0.001, 1), longest=st.floats(0.001, 10), since=st.floats(0, 1e6))
def test_a_wait_is_a_tenth_of_the_time_since_the_last_work_within_its_limits(
    shortest: float, longest: float, since: float
) -> None:
    pace = Pace(shortest)
    pace._last -= since
    found = pace.seconds(longest)
    assert found <= longest
    assert found >= min(shortest, longest)
    if shortest < SHARE * since and SHARE * (since + 1) < longest:
        assert found == pytest.approx(SHARE * since, abs=0.1)


def test_a_supernode_hurries_while_there_is_work_and_rests_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, waits = [0.0], list[float]()
    monkeypatch.setattr(environment.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(environment.time, "sleep", waits.append)
    node = SimpleNamespace(
        _pull_and_store_message=lambda: RUN, _push_messages=lambda: None, time=time
    )
    hurry(node)
    clock[0] = 3600.0
    node.time.sleep(3)
    node._pull_and_store_message()
    node.time.sleep(0.5)
    clock[0] += 60.0
    node.time.sleep(0.5)
    node._push_messages()
    node.time.sleep(3)
    assert waits == [3, HERE, 0.5, environment.REMOTE]
