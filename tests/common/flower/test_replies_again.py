"""A reply that is announced again because its receipt was lost: a SuperLink's real database."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager

from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.v134_fleet import take_replies_again

# Of a message: itself, its records, and each record.
RECORDS = 3
PARTS = 2 + RECORDS


@dataclass
class Link:
    """A SuperLink's state, and an active run in it with a node."""

    state: Any
    run: int
    node: int

    def message(self, text: str, reply_to: Message | None = None) -> Message:
        flower().local_run(self.run)
        records = {f"{number}": ConfigRecord({text: number}) for number in range(RECORDS)}
        made = (
            Message(RecordDict(records), self.node, "train")
            if reply_to is None
            else Message(RecordDict(records), reply_to=reply_to)
        )
        source = SUPERLINK_NODE_ID if reply_to is None else self.node
        made.metadata.__dict__.update(_run_id=self.run, _src_node_id=source)
        made.metadata.__dict__["_message_id"] = made.object_id
        return made

    def announce(self, reply: Message) -> tuple[str, list[str]]:
        """As a SuperNode: the session, and the parts that it shall send."""
        session = self.state.start_session(self.run)
        _, missing = self.state.store_message_and_object_tree(
            reply, get_object_tree(reply), session
        )
        return session, missing

    def send(self, session: str, reply: Message, parts: list[str]) -> None:
        """As a SuperNode: these parts."""
        contents = get_all_nested_objects(reply)
        for part in parts:
            assert self.state.store_object(self.run, session, part, contents[part].deflate())

    def take(self, question: Message) -> None:
        """As the coordinator's app: once it has the announcement of a reply, Flower forgets both."""
        self.state.delete_messages({question.metadata.message_id})


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Link:
    name = "store_message_and_object_tree"
    monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))
    return active_link(str(tmp_path / "state.db"), ObjectStoreFactory())


def active_link(database: str, objects: ObjectStoreFactory) -> Link:
    state: Any = LinkStateFactory(database, NoOpFederationManager(), objects).state()
    node = state.create_node(NOOP_FLWR_AID, "", b"key", 30.0)
    assert state.acknowledge_node_heartbeat(node, 30.0)
    return Link(state, active_run(state), node)


def active_run(state: Any) -> int:
    run: int = state.create_run(
        "a/b", "1", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
    )
    task = state.get_run_info(run_ids=[run])[0].primary_task_id
    assert state.claim_task(task)
    assert state.activate_task(task)
    return run


@pytest.fixture
def announced(link: Link) -> Callable[[str], tuple[Message, str, list[str]]]:
    def announce(text: str) -> tuple[Message, str, list[str]]:
        question = link.message(f"question {text}")
        assert link.state.store_message_ins(question)
        reply = link.message(f"reply {text}", question)
        session, missing = link.announce(reply)
        assert len(missing) == PARTS
        link.take(question)
        return reply, session, missing

    return announce


@pytest.mark.parametrize("sent", range(PARTS))
def test_a_reply_that_is_announced_again_is_asked_for_the_parts_that_are_missing(
    link: Link, announced: Callable[[str], tuple[Message, str, list[str]]], sent: int
) -> None:
    take_replies_again()
    reply, session, missing = announced("a")
    link.send(session, reply, missing[:sent])
    again, asked = link.announce(reply)
    assert sorted(asked) == sorted(missing[sent:])
    link.send(again, reply, asked)
    for name, part in get_all_nested_objects(reply).items():
        assert link.state.get_object(link.run, name) == part.deflate()
    assert link.announce(reply)[1] == [], "nothing is missing any more"


def test_flower_alone_asks_for_nothing_and_the_reply_is_lost(
    link: Link, announced: Callable[[str], tuple[Message, str, list[str]]]
) -> None:
    """If Flower mends it, `take_replies_again` can go."""
    assert link.announce(announced("a")[0])[1] == []


def test_a_reply_to_no_question_is_refused_as_before(
    link: Link, announced: Callable[[str], tuple[Message, str, list[str]]]
) -> None:
    take_replies_again()
    announced("a")
    question = link.message("never asked")
    reply = link.message("forged", question)
    stored = link.state.store_message_and_object_tree(
        reply, get_object_tree(reply), link.state.start_session(link.run)
    )
    assert stored == (False, [])
