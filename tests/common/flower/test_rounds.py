"""Fewer calls and shorter waits in a round: whatever an end knows of them, the same messages arrive."""

from __future__ import annotations

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PushAppMessagesRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    inflate_object_from_contents,
    iterate_object_tree,
)
from flwr.superlink.servicer.runtime import runtime_handlers
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower import v134_rounds as own
from fedsurrogate.common.flower.v134_rounds import (
    HOLD,
    LOOK_SECONDS,
    PARTS,
    SMALL,
    Bells,
    ask_the_database_less,
    bring_parts,
    hold_pulls,
    store_parts,
    take_parts,
)
from tests.common.flower.test_replies_again import Link, link

__all__ = ["link"]


def message(link: Link, size: int, reply_to: Message | None = None) -> Message:
    """With an array of so many bytes, and facts."""
    flower().local_run(link.run)
    array = Array("uint8", (size,), "raw", secrets.token_bytes(size))
    records = RecordDict({"a": ArrayRecord({"x": array}), "b": ConfigRecord({"n": size})})
    made = (
        Message(records, link.node, "train", group_id=secrets.token_hex(16))
        if reply_to is None
        else Message(records, reply_to=reply_to)
    )
    source = SUPERLINK_NODE_ID if reply_to is None else link.node
    made.metadata.__dict__.update(_run_id=link.run, _src_node_id=source)
    made.metadata.__dict__["_message_id"] = made.object_id
    return made


class Federation:
    """A SuperLink's handlers over its real database, and both ends; calls are counted."""

    def __init__(self, link: Link, brings: bool, stores: bool, takes: bool) -> None:
        self.link, self.calls = link, Counter[str]()
        self.task: Any = link.state.get_tasks()[0]
        self.fleet = SimpleNamespace(push_messages=message_handler.push_messages)
        self.apps = SimpleNamespace(push_messages=runtime_handlers.push_messages)
        self.sender = SimpleNamespace(remove_content_from_message=remove_content_from_message)
        if brings:
            bring_parts(self.sender)
        if stores:
            store_parts(self.fleet)
            store_parts(self.apps)
        self.site = SimpleNamespace(PullMessages=self._fleet_pull, PullObject=self._pull_object)
        self.app = SimpleNamespace(PullMessages=self._app_pull, PullObject=self._pull_object)
        if takes:
            take_parts(self.site)
            take_parts(self.app)

    def _fleet_pull(self, request: Any) -> Any:
        state = self.link.state
        return message_handler.pull_messages(request, state, state.object_store)

    def _app_pull(self, request: Any) -> Any:
        return runtime_handlers.pull_messages(request, self.link.state, self.task)

    def _pull_object(self, request: Any) -> Any:
        self.calls["pull"] += 1
        content = self.link.state.get_object(self.link.run, request.object_id)
        return SimpleNamespace(object_content=content)

    def send(self, messages: list[Message]) -> None:
        """Announce them in one call, as an app or, one reply, as a SuperNode; then send what is asked."""
        answers = [bool(each.metadata.reply_to_message_id) for each in messages]
        announced: Any = {
            "messages_list": [
                message_to_proto(self.sender.remove_content_from_message(each)) for each in messages
            ],
            "message_object_trees": [get_object_tree(each) for each in messages],
        }
        if any(answers):
            request = PushMessagesRequest(node=Node(node_id=self.link.node), **announced)
            asked = self.fleet.push_messages(request=request, state=self.link.state)
        else:
            request = PushAppMessagesRequest(**announced)
            asked = self.apps.push_messages(request, self.link.state, self.task)
        parts = {
            name: part for each in messages for name, part in get_all_nested_objects(each).items()
        }
        for name in asked.objects_to_push:
            self.calls["push"] += 1
            assert self.link.state.store_object(
                self.link.run, asked.session_id, name, parts[name].deflate()
            )

    def receive(self, end: Any, request: Any) -> Iterator[Message]:
        answer = end.PullMessages(request)
        for tree in answer.message_object_trees:
            names = [each.object_id for each in iterate_object_tree(tree)]
            contents = {
                name: end.PullObject(PullObjectRequest(object_id=name)).object_content
                for name in names
            }
            yield inflate_object_from_contents(names[-1], contents)  # type: ignore[misc]

    def at_site(self) -> list[Message]:
        return list(self.receive(self.site, PullMessagesRequest(node=Node(node_id=self.link.node))))

    def at_app(self, questions: list[Message]) -> list[Message]:
        names = [each.metadata.message_id for each in questions]
        return list(self.receive(self.app, PullAppMessagesRequest(message_ids=names)))


def same(received: Message, sent: Message) -> bool:
    return received.object_id == sent.object_id and list(received.content) == ["a", "b"]


@pytest.mark.parametrize("size", [0, 1000, SMALL, SMALL + 1])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("brings", [True, False])
@pytest.mark.parametrize("takes", [True, False])
def test_the_same_messages_arrive_whatever_an_end_knows_of_parts_that_travel_together(
    link: Link, size: int, stores: bool, brings: bool, takes: bool
) -> None:
    """An older site, and an older SuperLink."""
    federation = Federation(link, brings, stores, takes)
    questions = [message(link, size) for _ in range(2)]
    federation.send(questions)
    arrived = [*federation.at_site(), *federation.at_site()]
    assert sorted(each.object_id for each in arrived) == sorted(q.object_id for q in questions)
    for question in questions:
        reply = message(link, size, question)
        federation.send([reply])
        (received,) = federation.at_app([question])
        assert same(received, reply)
    together = brings and size <= SMALL
    assert (federation.calls["push"] == 0) == (together and stores)
    assert (federation.calls["pull"] == 0) == (together and takes)


def test_nobody_takes_and_deletes_a_message_before_its_parts_are_stored(link: Link) -> None:
    """A site that waits for it takes it the moment that it is announced, and confirms it."""
    federation = Federation(link, brings=True, stores=False, takes=True)
    announce, taken = federation.apps.push_messages, list[Message]()

    def take() -> None:
        taken.extend(federation.at_site())
        link.state.object_store.delete(taken[0].object_id)

    site = threading.Thread(target=take)

    def announce_to_a_waiting_site(*given: Any) -> Any:
        answer = announce(*given)
        site.start()
        time.sleep(0.3)
        return answer

    federation.apps.push_messages = announce_to_a_waiting_site
    store_parts(federation.apps)
    question = message(link, 9)
    federation.send([question])
    site.join()
    assert same(taken[0], question)
    assert federation.calls == {}


@settings(max_examples=20, deadline=None)
@given(noise=st.binary(max_size=40), kind=st.sampled_from(["other bytes", "no bytes", "unknown"]))
def test_a_part_is_what_its_id_says_or_it_is_asked_for(noise: bytes, kind: str) -> None:
    """Whoever announces a message cannot let another thing stand in a part's place."""
    flower().local_run(1)
    sent = Message(RecordDict({"a": ConfigRecord({"n": 1})}), 7, "train")
    parts = {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}
    root = sent.object_id
    hostile: dict[str, Any] = {
        "other bytes": parts | {root: noise},
        "no bytes": parts | {root: 7},
        "unknown": {"x": noise},
    }[kind]
    bare = remove_content_from_message(sent)
    bare.content[PARTS] = ConfigRecord(hostile)
    asked = list[str]()

    def pull_object(request: Any) -> Any:
        asked.append(request.object_id)
        return SimpleNamespace(object_content=parts[request.object_id])

    stub = SimpleNamespace(
        PullMessages=lambda request: SimpleNamespace(messages_list=[message_to_proto(bare)]),
        PullObject=pull_object,
    )
    take_parts(stub).PullMessages(None)
    found = {
        name: stub.PullObject(PullObjectRequest(object_id=name)).object_content for name in parts
    }
    assert found == parts
    assert asked == (list(parts) if kind == "unknown" else [root])


@pytest.fixture
def context() -> Any:
    return SimpleNamespace(is_active=lambda: True)


class Servicer:
    """Answers with the work that there is, once."""

    def __init__(self) -> None:
        self.work: list[str] = []

    def Pull(self, request: str, context: Any) -> list[str]:  # noqa: N802
        found, self.work = self.work, []
        return found


@pytest.fixture
def long_hold(monkeypatch: pytest.MonkeyPatch) -> float:
    """Questions are kept open for so long that no busy machine takes a bell for the end of the time."""
    monkeypatch.setattr(own, "HOLD", 60.0)
    return 30.0


@pytest.fixture
def held() -> tuple[Bells, Any]:
    servicer, bells = type("Own", (Servicer,), {}), Bells()
    bells.hold(servicer, "Pull", lambda request: request, lambda answer: answer)
    return bells, servicer()


def test_a_question_is_answered_as_soon_as_there_is_work(
    held: tuple[Bells, Any], context: Any, long_hold: float
) -> None:
    bells, servicer = held

    def later() -> None:
        bells.ring("other")
        servicer.work.append("x")
        bells.ring("site")

    threading.Timer(0.1, later).start()
    began = time.monotonic()
    assert servicer.Pull("site", context) == ["x"]
    assert time.monotonic() - began < long_hold


def test_a_question_without_work_is_answered_after_its_time(
    held: tuple[Bells, Any], context: Any
) -> None:
    began = time.monotonic()
    assert held[1].Pull("site", context) == []
    assert time.monotonic() - began >= 0.9 * HOLD


def test_whoever_has_gone_takes_no_work_with_him(held: tuple[Bells, Any]) -> None:
    bells, servicer = held

    def later() -> None:
        servicer.work.append("x")
        bells.ring("site")

    threading.Timer(HOLD / 5, later).start()
    assert servicer.Pull("site", SimpleNamespace(is_active=lambda: False)) == []
    assert servicer.work == ["x"], "the next one gets it"


def test_questions_take_no_more_threads_than_a_server_can_spare(
    monkeypatch: pytest.MonkeyPatch, context: Any, long_hold: float
) -> None:
    monkeypatch.setattr(own, "MOST_HELD", 2)
    bells, servicer = Bells(), type("Own", (Servicer,), {})
    bells.hold(servicer, "Pull", lambda request: request, lambda answer: answer)
    one: Any = servicer()
    waiting = [threading.Thread(target=one.Pull, args=(n, context)) for n in range(2)]
    for each in waiting:
        each.start()
    while len(bells._held) < 2:
        time.sleep(0.01)
    began = time.monotonic()
    assert one.Pull("third", context) == []
    assert time.monotonic() - began < long_hold
    for number, each in enumerate(waiting):
        bells.ring(number)
        each.join()


@pytest.fixture
def as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a SuperLink changes is changed back."""
    for module, names in (
        (message_handler, ("push_messages",)),
        (runtime_handlers, ("push_messages", "pull_messages")),
        (FleetServicer, ("PullMessages",)),
        (
            SqlLinkState,
            ("_cleanup_expired_task_tokens", "get_node_id_by_public_key", "delete_node"),
        ),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))


@pytest.mark.usefixtures("as_before")
def test_a_message_and_its_reply_end_the_waits_for_them(
    link: Link, context: Any, long_hold: float
) -> None:
    store_parts(message_handler)
    store_parts(runtime_handlers)
    hold_pulls()
    federation, state = Federation(link, brings=True, stores=False, takes=False), link.state
    federation.fleet.push_messages = message_handler.push_messages
    federation.apps.push_messages = runtime_handlers.push_messages
    servicer: Any = FleetServicer(
        SimpleNamespace(state=lambda: state),
        SimpleNamespace(store=lambda: state.object_store),
        True,
    )

    def seconds(ask: Callable[[], Any], send: list[Message]) -> tuple[float, Any]:
        threading.Timer(0.1, federation.send, args=(send,)).start()
        began = time.monotonic()
        found = ask()
        return time.monotonic() - began, found

    question, node = message(link, 9), Node(node_id=link.node)
    waited, answer = seconds(
        lambda: servicer.PullMessages(PullMessagesRequest(node=node), context), [question]
    )
    assert len(answer.messages_list) == 1
    assert waited < long_hold
    waited, answer = seconds(
        lambda: runtime_handlers.pull_messages(PullAppMessagesRequest(), state, federation.task),
        [message(link, 9, question)],
    )
    assert not answer.messages_list, "it names none"
    assert waited < long_hold
    assert len(federation.at_app([question])) == 1


@pytest.mark.usefixtures("as_before")
def test_a_key_that_is_taken_back_has_no_node_at_once(link: Link) -> None:
    ask_the_database_less()
    assert link.state.get_node_id_by_public_key(b"key") == link.node
    assert link.state.get_node_id_by_public_key(b"new") is None
    new = link.state.create_node(NOOP_FLWR_AID, "", b"new", 30.0)
    assert link.state.get_node_id_by_public_key(b"new") == new
    link.state.delete_node(NOOP_FLWR_AID, link.node)
    assert link.state.get_node_id_by_public_key(b"key") is None
    assert link.state.get_node_id_by_public_key(b"new") == new


@pytest.mark.usefixtures("as_before")
def test_silent_tasks_are_looked_for_once_a_second(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, clock = list[float](), [100.0]
    monkeypatch.setattr(
        SqlLinkState, "_cleanup_expired_task_tokens", lambda state: looks.append(clock[0])
    )
    ask_the_database_less()
    monkeypatch.setattr(own.time, "monotonic", lambda: clock[0])
    for _ in range(40):
        link.state.get_run_status({link.run})
        clock[0] += LOOK_SECONDS / 10
    assert len(looks) == 4
