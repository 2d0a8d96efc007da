"""What a hostile end does with parts that travel together, with questions that wait, and with what a
SuperLink remembers: a SuperLink's handlers over its database, in which parts are stored too.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import NOOP_FLWR_AID, Status
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree, PullObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PushAppMessagesRequest
from flwr.server.superlink.fleet.grpc_rere.fleet_servicer import FleetServicer
from flwr.server.superlink.fleet.message_handler import message_handler
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.utils import uint64_to_int64
from flwr.superlink.servicer.runtime import runtime_handlers
from sqlalchemy import text

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower import v134_rounds as own
from fedsurrogate.common.flower.parts import MOST_PARTS, limited
from fedsurrogate.common.flower.v134_rounds import (
    HOLD,
    MOST_TOGETHER,
    PARTS,
    Bells,
    ask_the_database_less,
    hold_pulls,
    store_parts,
    take_parts,
)
from tests.common.flower.test_replies_again import Link, active_link, active_run
from tests.common.flower.test_rounds import (
    Federation,
    Servicer,
    as_before,
    long_hold,
    message,
    same,
)

__all__ = ["as_before", "long_hold"]


@pytest.fixture
def link(tmp_path: Path) -> Link:
    database = str(tmp_path / "state.db")
    return active_link(database, ObjectStoreFactory(database))


@pytest.fixture
def federation(link: Link) -> Federation:
    return Federation(link, brings=True, stores=True, takes=True)


def parts_of(sent: Message) -> dict[str, Any]:
    return {name: part.deflate() for name, part in get_all_nested_objects(sent).items()}


def announced(sent: Message, *records: dict[str, Any]) -> Any:
    """With these records of parts, several if it has to be, which only a hostile end writes."""
    bare = message_to_proto(remove_content_from_message(sent))
    for each in records:
        other = remove_content_from_message(sent)
        other.content[PARTS] = ConfigRecord(each)
        bare.content.items.extend(message_to_proto(other).content.items)
    return bare


def from_site(link: Link, *messages: Any, trees: list[ObjectTree]) -> PushMessagesRequest:
    return PushMessagesRequest(
        node=Node(node_id=link.node), messages_list=messages, message_object_trees=trees
    )


def count(link: Link, table: str) -> int:
    with link.state.session() as session:
        return int(session.execute(text(f"SELECT COUNT(*) FROM {table}")).scalar())


def asked(federation: Federation) -> tuple[Message, Message]:
    """A question that has arrived at the site, and an honest reply."""
    question = message(federation.link, 9)
    federation.send([question])
    assert len(federation.at_site()) == 1
    for name in get_all_nested_objects(question):
        federation.link.state.object_store.delete(name)
    return question, message(federation.link, 9, question)


OTHER = ConfigRecord({"other": 1})
HOSTILE: dict[str, Callable[[dict[str, Any]], tuple[dict[str, Any], ...]]] = {
    "parts of no tree": lambda parts: (parts | {OTHER.object_id: OTHER.deflate()},),
    "ids in capitals": lambda parts: ({name.upper(): part for name, part in parts.items()},),
    "too many parts": lambda parts: (parts | {str(n): b"" for n in range(MOST_PARTS)},),
    "another record with their ids": lambda parts: (parts, dict.fromkeys(parts, b"other")),
    "odd ids": lambda parts: ({"": b"x", "\0": b"x", "../x": b"x", "e\u0301" * 99: b"x"},),
    "other kinds": lambda parts: ({name: [b"x"] for name in parts}, dict.fromkeys(parts, 1.5)),
    "parts of each other": lambda parts: (dict(zip(parts, reversed(parts.values()), strict=True)),),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_announcement_stores_parts_of_its_own_tree_alone(
    federation: Federation, kind: str
) -> None:
    link, (question, reply) = federation.link, asked(federation)
    parts = parts_of(reply)
    request = from_site(
        link, announced(reply, *HOSTILE[kind](parts)), trees=[get_object_tree(reply)]
    )
    answer = federation.fleet.push_messages(request=request, state=link.state)
    assert count(link, "objects") == len(parts)
    sound = kind in ("parts of no tree", "another record with their ids")
    assert set(answer.objects_to_push) == (set() if sound else set(parts))
    for name in answer.objects_to_push:
        assert link.state.store_object(link.run, answer.session_id, name, parts[name])
    (received,) = federation.at_app([question])
    assert same(received, reply), "the record is no part of the content"
    assert [count(link, f"message_{each}") for each in ("ins", "res")] == [0, 0]
    assert count(link, "object_push_sessions") == 0


def test_a_part_that_is_none_is_awaited_until_its_session_ends(federation: Federation) -> None:
    """As without `store_parts`: then Flower deletes the message and its parts."""
    link, (_, reply) = federation.link, asked(federation)
    noise = b"no part"
    name, tree = hashlib.sha256(noise).hexdigest(), get_object_tree(reply)
    tree.children.append(ObjectTree(object_id=name))
    request = from_site(link, announced(reply, parts_of(reply) | {name: noise}), trees=[tree])
    answer = federation.fleet.push_messages(request=request, state=link.state)
    assert list(answer.objects_to_push) == [name]
    with link.state.session() as session:
        session.execute(text("UPDATE object_push_sessions SET expires_at = '2020-01-01 00:00:00'"))
    assert link.state.get_object(link.run, name) is None
    tables = ("objects", "object_push_sessions", "message_res")
    assert [count(link, each) for each in tables] == [0, 0, 0]


def test_what_is_brought_counts_as_what_is_asked_for() -> None:
    """Before a site or a coordinator builds anything."""
    flower().local_run(1)
    array = Array("uint8", (9999,), "raw", bytes(9999))
    sent = Message(RecordDict({"a": ArrayRecord({"x": array})}), 7, "train")
    answer = SimpleNamespace(messages_list=[announced(sent, parts_of(sent))])
    stub = take_parts(SimpleNamespace(PullMessages=lambda _: answer, PullObject=None))
    stub.PullMessages(None)
    pull = limited(
        lambda name: stub.PullObject(PullObjectRequest(object_id=name)).object_content, 5000
    )
    with pytest.raises(SurrogateError, match="more than 5000 bytes"):
        list(map(pull, parts_of(sent)))


@pytest.mark.parametrize("kind", ["no message", "no tree", "an error with parts"])
def test_requests_are_refused_as_flower_refuses_them(federation: Federation, kind: str) -> None:
    link, (question, reply) = federation.link, asked(federation)
    failed = Message(Error(1, "x"), reply_to=question)
    both = announced(reply, parts_of(reply))
    both.error.CopyFrom(message_to_proto(failed).error)
    messages = {"no message": [], "no tree": [announced(reply)], "an error with parts": [both]}
    request = from_site(link, *messages[kind], trees=[])
    app = PushAppMessagesRequest(messages_list=messages[kind])

    def refusals(fleet: Any, apps: Any) -> list[tuple[type[Exception], str]]:
        found = []
        for call in (
            lambda: fleet.push_messages(request=request, state=link.state),
            lambda: apps.push_messages(app, link.state, federation.task),
        ):
            with pytest.raises(Exception) as refused:  # noqa: PT011
                call()
            found.append((refused.type, str(refused.value)))
        return found

    assert refusals(federation.fleet, federation.apps) == refusals(
        message_handler, runtime_handlers
    )


@pytest.mark.usefixtures("as_before")
def test_who_lets_his_push_fail_hides_no_task_that_has_fallen_silent(link: Link) -> None:
    """The look that his push makes is undone with it; the task is of another run."""
    ask_the_database_less()
    store_parts(message_handler)
    _, reply = asked(Federation(link, brings=True, stores=False, takes=True))
    silent = active_run(link.state)
    with link.state.session() as session:
        quiet = "UPDATE task SET active_until = '2020-01-01 00:00:00' WHERE run_id = :run"
        session.execute(text(quiet), {"run": uint64_to_int64(silent)})
    time.sleep(own.LOOK_SECONDS)
    with pytest.raises(IndexError):
        message_handler.push_messages(
            request=from_site(link, announced(reply), trees=[]), state=link.state
        )
    assert link.state.get_run_status({silent})[silent].status == Status.FINISHED


@pytest.mark.usefixtures("long_hold")
def test_one_site_takes_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "MOST_HELD", 2)
    bells, servicer = Bells(), type("Own", (Servicer,), {})
    bells.hold(servicer, "Pull", lambda request: request, lambda answer: answer)
    one: Any = servicer()
    context = SimpleNamespace(is_active=lambda: True)
    greedy = [threading.Thread(target=one.Pull, args=("greedy", context)) for _ in range(20)]
    for each in greedy:
        each.start()
    while sum(each.is_alive() for each in greedy) > 1:
        time.sleep(0.01)

    def later() -> None:
        one.work.append("x")
        bells.ring("honest")

    threading.Timer(0.1, later).start()
    assert one.Pull("honest", context) == ["x"], "his question is kept open beside the greedy one's"
    bells.ring("greedy")
    for each in greedy:
        each.join()


@pytest.mark.usefixtures("as_before", "long_hold")
def test_a_question_of_a_key_that_is_taken_back_meanwhile_is_given_nothing(link: Link) -> None:
    store_parts(runtime_handlers)
    hold_pulls()
    ask_the_database_less()
    federation, state = Federation(link, brings=True, stores=False, takes=True), link.state
    federation.apps.push_messages = runtime_handlers.push_messages
    servicer: Any = FleetServicer(
        SimpleNamespace(state=lambda: state),
        SimpleNamespace(store=lambda: state.object_store),
        True,
    )
    assert state.get_node_id_by_public_key(b"key") == link.node

    def taken_back() -> None:
        state.delete_node(NOOP_FLWR_AID, link.node)
        federation.send([message(link, 9)])

    threading.Timer(0.1, taken_back).start()
    request = PullMessagesRequest(node=Node(node_id=link.node))
    answer = servicer.PullMessages(request, SimpleNamespace(is_active=lambda: True))
    assert not answer.messages_list
    assert [count(link, each) for each in ("objects", "message_ins")] == [0, 0]
    assert state.get_node_id_by_public_key(b"key") is None


def test_a_server_that_is_stopped_ends_at_most_a_hold_later() -> None:
    bells, servicer = Bells(), type("Own", (Servicer,), {})
    bells.hold(servicer, "Pull", lambda request: request, lambda answer: answer)
    one: Any = servicer()
    form = grpc.unary_unary_rpc_method_handler(lambda name, call: b"".join(one.Pull(name, call)))
    threads = futures.ThreadPoolExecutor(40)
    server = grpc.server(threads)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("own", {"Pull": form}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        pull = channel.unary_unary("/own/Pull")
        calls = [pull.future(str(number).encode(), wait_for_ready=True) for number in range(30)]
        time.sleep(HOLD / 2)
        began = time.monotonic()
        server.stop(grace=1).wait()
        threads.shutdown()
        assert time.monotonic() - began < 10 * HOLD, "not one hold after the other"
        assert all(each.done() or each.cancel() for each in calls)


def test_many_sites_at_a_time_get_no_error_from_the_database(federation: Federation) -> None:
    """One transaction a push, which begins with reading: no other writer makes it fail."""
    link = federation.link
    questions = [message(link, 9) for _ in range(24)]
    federation.send(questions)
    replies = [message(link, 9, each) for each in questions]
    with futures.ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda each: federation.send([each]), replies))
    assert federation.calls["push"] == 0
    received = federation.at_app(questions)
    assert sorted(each.object_id for each in received) == sorted(each.object_id for each in replies)


@pytest.mark.parametrize("more", [0, 1])
def test_no_transaction_stores_the_parts_of_more_messages_than_a_heartbeat_waits_for(
    federation: Federation, more: int
) -> None:
    """Of 200 it took seconds, and nobody else could write."""
    questions = [message(federation.link, 0) for _ in range(MOST_TOGETHER + more)]
    federation.send(questions)
    assert (federation.calls["push"] > 0) == bool(more)
    (received,) = federation.at_site()
    assert (federation.calls["pull"] > 0) == bool(more), "nobody confirms what is being sent"
    assert received.object_id in [each.object_id for each in questions]
