"""Parts of messages: whatever a sender states, what is built of it has bounds; and what an honest sender
makes is always accepted.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    inflate_object_from_contents,
    pull_objects,
)
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.flower import parts as own
from fedsurrogate.common.flower.interface import FleetRequest
from fedsurrogate.common.flower.parts import (
    LARGEST_PROJECT,
    LARGEST_REST,
    MOST_PARTS,
    bound_received,
    bound_replies,
    check_contents,
    check_tree,
)
from fedsurrogate.server_app.deployment.fleet_guard import refusal
from tests.attacks.parts import (
    Parts,
    doubling_tree,
    part,
    question,
    wide_tree,
    with_payload,
    with_repeated_piece,
)

MIB = 2**20
NAMES = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(6)]
TREES = st.recursive(
    st.sampled_from(NAMES).map(lambda name: ObjectTree(object_id=name)),
    lambda below: st.builds(
        lambda name, children: ObjectTree(object_id=name, children=children),
        st.sampled_from(NAMES),
        st.lists(below, max_size=3),
    ),
    max_leaves=40,
)


def accepted(tree: ObjectTree) -> bool:
    try:
        check_tree(tree)
    except SurrogateError:
        return False
    return True


@settings(max_examples=300)
@given(TREES)
def test_a_node_keeps_no_more_parts_than_were_stated(tree: ObjectTree) -> None:
    """Flower keeps the first form of a part, and repeats it wherever its id stands."""
    assume(accepted(tree))
    store = InMemoryObjectStore()
    store.preregister(1, tree)
    kept = sum(1 for _ in iterate_object_tree(store.get_object_tree(tree.object_id)))
    assert kept <= sum(1 for _ in iterate_object_tree(tree)) <= MOST_PARTS


@pytest.mark.parametrize(
    "tree",
    [
        doubling_tree(90),
        wide_tree(MOST_PARTS + 1),
        ObjectTree(object_id="../x"),
        ObjectTree(object_id=NAMES[0], children=[ObjectTree(object_id=NAMES[0])]),
    ],
    ids=["doubling", "wide", "no hash", "in itself"],
)
def test_hostile_trees_are_refused_by_a_site_and_by_the_superlink(tree: ObjectTree) -> None:
    assert not accepted(tree)
    assert accepted(wide_tree(MOST_PARTS))
    from flwr.proto.fleet_pb2 import PushMessagesRequest

    from fedsurrogate.common.flower.v134_fleet import fleet_request

    fleet = fleet_request(PushMessagesRequest(message_object_trees=[wide_tree(9), tree]), b"key")
    assert refusal(fleet)
    assert not refusal(FleetRequest(b"key", None, 0, ()))


RECORDS = st.dictionaries(
    st.text(min_size=1, max_size=4),
    st.one_of(
        st.dictionaries(st.text(min_size=1, max_size=3), st.integers(0, 9), min_size=1).map(
            ConfigRecord
        ),
        st.dictionaries(st.text(min_size=1, max_size=3), st.floats(), min_size=1).map(MetricRecord),
        st.lists(st.integers(0, 3000), min_size=1, max_size=3).map(
            lambda sizes: ArrayRecord({str(n): Array(np.zeros(n)) for n in sizes})
        ),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=100, deadline=None)
@given(RECORDS)
def test_what_an_honest_sender_makes_is_accepted_and_arrives(records: dict[str, Any]) -> None:
    sent = question(RecordDict(records), 1, 2)
    check_tree(sent.tree)
    check_contents(sent.contents, 9 * MIB)
    (received,) = replies([sent], 9 * MIB)
    assert list(received.content) == list(records)
    assert {name: array.data for name, array in arrays_of(received).items()} == {
        name: array.data for name, array in arrays_of_records(records).items()
    }


def arrays_of(message: Message) -> dict[tuple[str, str], Array]:
    return arrays_of_records(dict(message.content))


def arrays_of_records(records: dict[str, Any]) -> dict[tuple[str, str], Array]:
    return {
        (name, key): array
        for name, record in records.items()
        if isinstance(record, ArrayRecord)
        for key, array in record.items()
    }


def replies(sent: list[Parts], largest: int) -> list[Any]:
    """What a grid makes of these messages; Flower's error for one that it does not make."""
    grid = SimpleNamespace(
        pull_objects=pull_objects, inflate_object_from_contents=inflate_object_from_contents
    )
    forgotten: list[str] = []
    bound_replies(grid, largest, forgotten.append)
    found: list[Any] = []
    for each in sent:
        names = [tree.object_id for tree in iterate_object_tree(each.tree)]
        try:
            pulled = grid.pull_objects(object_ids=names, pull_object_fn=each.contents.__getitem__)
        except ObjectPullError as error:
            found.append(error)
        else:
            found.append(grid.inflate_object_from_contents(each.root, pulled))
    refused = [
        each.root for each, reply in zip(sent, found, strict=True) if not isinstance(reply, Message)
    ]
    assert forgotten == refused, "the SuperLink keeps no reply that nobody reads"
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-1, 40), max_size=40), st.integers(0, 40))
def test_arrays_take_no_more_memory_than_allowed(listed: list[int], largest: int) -> None:
    """Whichever pieces an array lists, and how often."""
    sound = question(with_payload(LARGEST_REST // 16), 1, 2)
    body = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": listed}
    forged = sound.with_body("Array", json.dumps(body).encode())
    (found,) = replies([forged], largest * MIB)
    if isinstance(found, Message):
        built = sum(len(array.data) for array in arrays_of(found).values())
        assert built <= largest * MIB + LARGEST_REST
    else:
        assert isinstance(found, ObjectPullError)


def nested_arrays(message: Parts) -> Parts:
    """The piece of an array replaced by an array of it, for which Flower has the same field."""
    (piece,) = (n for n, each in message.contents.items() if each.startswith(b"ArrayChunk"))
    stated = {"dtype": "uint8", "shape": [1], "stype": "x", "arraychunk_ids": [0, 0]}
    inner = part("Array", [piece], json.dumps(stated).encode())
    body = json.dumps(stated).encode()
    outer = message.with_body("Array", body)
    name = next(n for n, each in outer.contents.items() if each.startswith(b"Array "))
    new = part("Array", [hashlib.sha256(inner).hexdigest()], body)
    contents = outer.contents | {hashlib.sha256(inner).hexdigest(): inner, name: new}
    return Parts(outer.announced, outer.tree, contents)


HOSTILE: dict[str, Callable[[Parts], Parts]] = {
    "a piece that is listed a thousand times": lambda sound: with_repeated_piece(sound, 1000),
    "arrays of arrays": nested_arrays,
    "lists that end nowhere": lambda sound: sound.with_body("Array", b"[" * 10_000),
    "no JSON": lambda sound: sound.with_body("Array", b"\xff"),
    "pieces that are not there": lambda sound: sound.with_body("Array", b'{"arraychunk_ids": [9]}'),
    "values of another form": lambda sound: sound.with_body("ConfigRecord", b"\xff\xff"),
    "many values": lambda sound: sound.with_body("ConfigRecord", bytes(LARGEST_REST + 1)),
    "no message": lambda sound: sound.with_body("Message", b"\xff"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_reply_that_cannot_be_read_is_an_error_of_its_sender(name: str) -> None:
    """And not an exception in the coordinator's app, which ended the run for all sites."""
    sound = question(with_payload(5 * MIB), 1, 2)
    hostile = HOSTILE[name](question(with_payload(5 * MIB), 1, 2))
    assert len(hostile.contents) >= len(sound.contents)
    found = replies([hostile, sound], 64 * MIB)
    assert [type(each) for each in found] == [ObjectPullError, Message]


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60),
    st.sampled_from(["Message", "RecordDict", "ArrayRecord", "Array", "ConfigRecord"]),
)
def test_no_bytes_of_a_part_end_a_run(body: bytes, kind: str) -> None:
    sound = question(with_payload(9), 1, 2)
    (found,) = replies([sound.with_body(kind, body)], MIB)
    assert isinstance(found, ObjectPullError | Message)


def packed(text: bytes) -> bytes:
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pyproject.toml", text)
    return stream.getvalue()


def node_that(pull: Callable[..., int | None]) -> Any:
    """A SuperNode whose way to receive a message is this."""
    node = SimpleNamespace(_pull_and_store_message=pull, get_fused_config_from_fab=len)
    node.get_fused_config_from_fab = lambda content, run: zipfile.ZipFile(BytesIO(content)).read(
        "pyproject.toml"
    )
    bound_received(node, ConnectionError)
    return node


def test_a_site_unpacks_settings_only_and_not_more_than_a_mebibyte(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = node_that(lambda **_: None)
    assert node.get_fused_config_from_fab(packed(b"a = 1"), None) == b"a = 1"
    for text in (b"#" * (LARGEST_PROJECT + 1), b"#" * (64 * MIB)):
        with pytest.raises(SurrogateError, match="settings of more than"):
            node.get_fused_config_from_fab(packed(text), None)


def test_a_site_goes_on_after_a_message_that_it_cannot_read_but_not_after_a_lost_connection() -> (
    None
):
    def receive_and_pull(receive: Any, pull_object: Any) -> int | None:
        receive()
        for name in "abc":
            pull_object(1, name)
        return 1

    node = node_that(receive_and_pull)
    sound, doubled = wide_tree(3), doubling_tree(50)
    small, large = (lambda run, name: b"x"), (lambda run, name: bytes(own.LARGEST_MESSAGE // 2))

    def received(tree: Any, pull: Callable[[int, str], bytes]) -> int | None:
        found: int | None = node._pull_and_store_message(
            receive=lambda: (None, tree), pull_object=pull
        )
        return found

    def lost(run: int, name: str) -> bytes:
        raise ConnectionError

    assert [received(sound, small), received(doubled, small), received(sound, large)] == [
        1,
        None,
        None,
    ]
    with pytest.raises(ConnectionError):
        received(sound, lost)
