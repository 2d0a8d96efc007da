"""A SuperNode goes on when the process of a task ends, and looks for work as often as there is some."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Error, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.flower import pace as pace_module
from fedsurrogate.common.flower.pace import HERE, SHARE, Pace
from fedsurrogate.common.flower.v134_tasks import OwnExecutor, answer_for_ended_tasks, hurry

RUN = 7


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> InMemoryNodeState:
    for name in ("_on_task_tokens_expired", "finish_task"):
        monkeypatch.setattr(InMemoryNodeState, name, getattr(InMemoryNodeState, name))
    answer_for_ended_tasks()
    found = InMemoryNodeState(ObjectStoreFactory().store())
    message = Message(RecordDict(), dst_node_id=1, message_type=MessageType.TRAIN)
    message.metadata.__dict__["_run_id"] = RUN
    message.metadata.__dict__["_message_id"] = message.object_id
    found.store_message(message)
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
    assert len(state.get_messages(run_ids=[RUN], is_reply=False)) == 1
    assert not state.get_messages(is_reply=True)


@pytest.mark.parametrize("way", ["killed", "reported"])
def test_a_message_that_was_fetched_gets_one_error_as_its_reply(
    state: InMemoryNodeState, way: str
) -> None:
    task = begin(state)
    state.get_messages(run_ids=[RUN], is_reply=False)
    end(state, task, way)
    (reply,) = state.get_messages(is_reply=True)
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert not state.get_tasks(statuses=[Status.PENDING])


@pytest.mark.parametrize("way", ["killed", "reported"])
def test_a_message_that_has_a_reply_gets_no_second_one(state: InMemoryNodeState, way: str) -> None:
    task = begin(state)
    (message,) = state.get_messages(run_ids=[RUN], is_reply=False)
    reply = Message(Error(1, "own"), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    state.store_message(reply)
    end(state, task, way)
    assert [each.error.code for each in state.get_messages(is_reply=True)] == [1]
    assert not state.get_tasks(statuses=[Status.PENDING])


def test_a_task_that_succeeded_makes_nothing(state: InMemoryNodeState) -> None:
    task = begin(state)
    assert state.finish_task(task, SubStatus.COMPLETED, "")
    assert not state.get_tasks(statuses=[Status.PENDING])


def test_tasks_of_other_kinds_are_refused() -> None:
    started = list[object]()
    starter = SimpleNamespace(start=started.append, tend=lambda: None)
    executor = OwnExecutor(starter, Pace(HERE))
    for kind in TaskType:
        spec = SimpleNamespace(
            task_type=kind, runtime_api_address="127.0.0.1:1", token="t", parent_pid=3
        )
        executor.launch(spec)  # type: ignore[arg-type]
    arguments = ["--clientappio-api-address", "127.0.0.1:1", "--token", "t", "--insecure"]
    assert started == [[*arguments, "--parent-pid", "3"]]


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
    monkeypatch.setattr(pace_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(pace_module.time, "sleep", waits.append)
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
    assert waits == [3, HERE, 0.5, pace_module.REMOTE]
