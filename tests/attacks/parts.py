"""Messages as their parts, forged: what a hostile sender gives to Flower, whose own classes would not."""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from flwr.app import Message, RecordDict
from flwr.app.message.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_head_values_from_object_content,
)

from fedsurrogate.common.flower import flower
from fedsurrogate.common.wire.records import to_record


@dataclass(frozen=True)
class Parts:
    """A message on its way: what announces it, the tree of its parts, and their contents by id."""

    announced: Any
    tree: ObjectTree
    contents: dict[str, bytes]

    @property
    def root(self) -> str:
        """Id of the message."""
        return str(self.tree.object_id)

    def with_tree(self, tree: ObjectTree) -> Parts:
        """The same message with another tree."""
        self.announced.metadata.message_id = tree.object_id
        return replace(self, tree=tree)

    def with_body(self, kind: str, body: bytes, below: list[str] | None = None) -> Parts:
        """Another body for its first part of this kind, and other parts below it; the ids of those
        above follow.
        """
        contents = dict(self.contents)
        name = next(each for each, content in contents.items() if _head(content)[0] == kind)
        content = contents.pop(name)
        renamed = {name: part(kind, _head(content)[1] if below is None else below, body)}
        while renamed:
            old, new = renamed.popitem()
            contents[identity := hashlib.sha256(new).hexdigest()] = new
            for above in [each for each, content in contents.items() if old.encode() in content]:
                renamed[above] = contents.pop(above).replace(old.encode(), identity.encode())
        return self._of(identity, contents)

    def _of(self, root: str, contents: dict[str, bytes]) -> Parts:
        def tree(name: str) -> ObjectTree:
            below = dict.fromkeys(_head(contents[name])[1])
            return ObjectTree(object_id=name, children=[tree(each) for each in below])

        self.announced.metadata.message_id = root
        return Parts(self.announced, tree(root), contents)


def part(kind: str, below: list[str], body: bytes) -> bytes:
    """A part as Flower writes it."""
    return f"{kind} {','.join(below)} {len(body)}".encode() + b"\0" + body


def _head(content: bytes) -> tuple[str, list[str]]:
    kind, below, _ = get_object_head_values_from_object_content(content)
    return kind, below


def parts_of(message: Message) -> Parts:
    """The parts of a sound message."""
    contents = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
    message.metadata.__dict__["_message_id"] = message.object_id
    announced = message_to_proto(remove_content_from_message(message))
    return Parts(announced, ObjectTree(), contents)._of(message.object_id, contents)


def question(record: RecordDict, run: int, node: int, kind: str = "train") -> Parts:
    """A message of a coordinator."""
    # From now on, this process may make messages of the run.
    flower().local_run(run)
    message = Message(record, node, kind, group_id=secrets.token_hex(16))
    message.metadata.__dict__.update(_run_id=run, _src_node_id=1)
    return parts_of(message)


def with_repeated_piece(message: Parts, times: int) -> Parts:
    """One piece of 5 MiB, which its array lists so often."""
    contents = message.contents
    (array,) = (each for each in contents.values() if _head(each)[0] == "Array")
    stated = json.loads(array.partition(b"\0")[2])
    size = len(next(each for each in contents.values() if _head(each)[0] == "ArrayChunk"))
    body = stated | {"arraychunk_ids": [0] * times, "shape": [size * times]}
    return message.with_body("Array", json.dumps(body).encode())


def with_pieces(message: Parts, count: int, size: int) -> Parts:
    """An array of so many pieces, all of this size, and different."""
    pieces = [
        part("ArrayChunk", [], secrets.token_bytes(8) + bytes(size - 8)) for _ in range(count)
    ]
    named = {hashlib.sha256(piece).hexdigest(): piece for piece in pieces}
    stated = {"dtype": "uint8", "shape": [count * size], "stype": "x"}
    body = json.dumps(stated | {"arraychunk_ids": list(range(count))}).encode()
    whole = replace(message, contents=message.contents | named)
    return whole.with_body("Array", body, list(named))


def doubling_tree(depth: int) -> ObjectTree:
    """Of which each part has the one below it twice, but only once with those below that: 2^depth
    parts where each keeps its first form.
    """
    names = [hashlib.sha256(f"{secrets.token_hex(4)}".encode()).hexdigest() for _ in range(depth)]
    tree = ObjectTree(object_id=names[0])
    for below, name in pairwise(names):
        tree = ObjectTree(object_id=name, children=[tree, ObjectTree(object_id=below)])
    return tree


def wide_tree(count: int) -> ObjectTree:
    """A message with so many parts."""
    ids = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(count)]
    return ObjectTree(object_id=ids[0], children=[ObjectTree(object_id=each) for each in ids[1:]])


def with_payload(size: int, **info: Any) -> RecordDict:
    """A record with a payload of zeros."""
    return to_record(bytes(size), {"bytes": size, **info})
