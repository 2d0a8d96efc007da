"""The parts of a message, in Flower 1.34 and 1.42: how many, and how large, before they are built.

A message is a tree of objects with ids. Whoever sends it states the tree first, then each object, and
Flower builds what is stated: a part that lists another one twice at each level is 2^levels parts, and
an array that lists one piece a million times is a million times its size. A site does not trust its
coordinator, and a coordinator none of its sites, so both look first.
"""

from __future__ import annotations

import json
import logging
import zipfile
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from typing import TYPE_CHECKING, Any

from ..errors import SurrogateError

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree

# Of a message. Flower cuts an array into pieces of 5 MiB: a payload of 1 GiB has 205.
MOST_PARTS = 1024
# Bytes of a message of Flower's protocols that contains one part.
LARGEST_PART = 2**24
# Bytes of the arrays of a message to a site, built.
LARGEST_CONTENT = 2**30
# Bytes of all other parts of a message; what stands beside a payload has at most 4 MiB.
LARGEST_REST = 2**24
# Bytes of all parts of a message to a site, as they are received.
LARGEST_MESSAGE = LARGEST_CONTENT + LARGEST_REST
# Bytes of the file with a run's settings, unpacked.
LARGEST_PROJECT = 2**20
PIECE, ARRAY = "ArrayChunk", "Array"

Pull = Callable[..., bytes]
log = logging.getLogger("flwr")


def check_tree(tree: ObjectTree) -> None:
    """Check which parts a message is said to have.

    Args:
        tree: as its sender states it.

    Raises:
        SurrogateError: for more than `MOST_PARTS`, for an id that is no hash, or for a part with other
            parts below it at one place than at another: Flower keeps one form, and so may build far
            more parts than are stated.
    """
    from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash

    forms: dict[str, list[str]] = {}
    waiting, count = [tree], 1
    while waiting:
        each = waiting.pop()
        count += len(each.children)
        if count > MOST_PARTS:
            raise SurrogateError(f"a message of more than {MOST_PARTS} parts")
        below = [child.object_id for child in each.children]
        if (
            not is_valid_sha256_hash(each.object_id)
            or forms.setdefault(each.object_id, below) != below
        ):
            raise SurrogateError("a message whose parts contradict each other")
        waiting.extend(each.children)


def check_contents(contents: Mapping[str, bytes], largest: int) -> None:
    """Check how much memory a message will take.

    Args:
        contents: of its parts, by id, as they were received.
        largest: bytes of its arrays, built.

    Raises:
        SurrogateError: for more, for more than `LARGEST_REST` in all other parts, or for parts that
            are not of Flower's form.
    """
    try:
        kinds = {name: _head(part)[0] for name, part in contents.items()}
        rest = sum(len(part) for name, part in contents.items() if kinds[name] != PIECE)
        arrays = 0
        for name, part in contents.items():
            if kinds[name] == ARRAY and rest <= LARGEST_REST:
                pieces = _head(part)[1]
                if any(kinds[each] != PIECE for each in pieces):
                    raise ValueError("an array of other parts than pieces")
                sizes = [len(contents[each]) for each in pieces]
                body = json.loads(part[part.index(b"\0") + 1 :])
                arrays += sum(sizes[index] for index in body["arraychunk_ids"])
    except Exception as error:
        # Of any kind: lists in lists, numbers that are none, ids that were not sent.
        raise SurrogateError(f"parts that cannot be read ({type(error).__name__})") from None
    if rest > LARGEST_REST or arrays > largest + LARGEST_REST:
        raise SurrogateError(
            f"a message of {arrays} bytes in arrays and {rest} in other parts; at most {largest} and "
            f"{LARGEST_REST} are allowed"
        )


def _head(part: bytes) -> tuple[str, list[str]]:
    from flwr.supercore.inflatable import inflatable_object as objects

    kind, below, _ = objects.get_object_head_values_from_object_content(part)
    return kind, below


def limited(pull: Pull, largest: int) -> Pull:
    """A function that receives parts of a message, and raises SurrogateError once they have together
    more than so many bytes.
    """
    received = 0

    def pull_limited(*name: Any) -> bytes:
        nonlocal received
        part = pull(*name)
        received += len(part)
        if received > largest:
            raise SurrogateError(f"a message of more than {largest} bytes")
        return part

    return pull_limited


def bound_received(node: Any, interruptions: type[Exception]) -> None:
    """Let a SuperNode leave a message unread that is too large, or that it cannot read, and go on.

    Args:
        node: The module `flwr.supernode.start_client_internal`.
        interruptions: What a connection raises; it ends the node, as in Flower.
    """
    pull, settings = node._pull_and_store_message, node.get_fused_config_from_fab

    def _pull_and_store_message(
        *, receive: Callable[[], Any], pull_object: Pull, **named: Any
    ) -> int | None:
        def receive_checked() -> Any:
            if (found := receive()) is not None:
                check_tree(found[1])
            return found

        checked = {"receive": receive_checked, "pull_object": limited(pull_object, LARGEST_MESSAGE)}
        try:
            run: int | None = pull(**checked, **named)
        except interruptions:
            raise
        except Exception as error:
            text = error if isinstance(error, SurrogateError) else type(error).__name__
            log.error("Failed to receive a message: %s", text)
            return None
        return run

    def get_fused_config_from_fab(packed: bytes, run: Any) -> Any:
        return settings(settings_only(packed), run)

    node._pull_and_store_message = _pull_and_store_message
    node.get_fused_config_from_fab = get_fused_config_from_fab
    node.GRPC_MAX_MESSAGE_LENGTH = LARGEST_PART


def settings_only(packed: bytes) -> bytes:
    """A packed app with nothing but the file of its settings.

    Args:
        packed: an app as Flower sends it.

    Raises:
        SurrogateError: for settings of more than `LARGEST_PROJECT` bytes, of which no more are
            unpacked, or an archive that cannot be read.
    """
    try:
        with zipfile.ZipFile(BytesIO(packed)) as archive, archive.open("pyproject.toml") as file:
            text = file.read(LARGEST_PROJECT + 1)
    except Exception as error:
        # Of any kind: damage, encryption, ways of packing that this Python lacks.
        raise SurrogateError(f"an app that cannot be unpacked ({type(error).__name__})") from None
    if len(text) > LARGEST_PROJECT:
        raise SurrogateError(f"an app with settings of more than {LARGEST_PROJECT} bytes")
    alone = BytesIO()
    with zipfile.ZipFile(alone, "w") as archive:
        archive.writestr("pyproject.toml", text)
    return alone.getvalue()


def bound_task() -> None:
    """Let the process of a task build no message that is larger than a site allows."""
    from flwr.supercore.inflatable import inflatable_utils

    parts: Any = inflatable_utils
    pull = parts.pull_objects

    def pull_objects(names: list[str], pull_object_fn: Pull, **named: Any) -> dict[str, bytes]:
        contents: dict[str, bytes] = pull(names, pull_object_fn, **named)
        check_contents(contents, LARGEST_CONTENT)
        return contents

    parts.pull_objects = pull_objects


def bound_replies(grid: Any, largest: int, forget: Callable[[str], object]) -> None:
    """Let a grid make an error of a reply that is too large, or that cannot be read.

    Flower builds it whatever its size; an exception there ends the run, for all sites.

    Args:
        grid: The module of a grid that has a connection.
        largest: bytes of a reply's arrays.
        forget: lets the SuperLink delete the parts of the message of this id, which it would keep
            until the run ends.
    """
    from flwr.supercore.inflatable.inflatable_utils import ObjectPullError

    pull, build = grid.pull_objects, grid.inflate_object_from_contents

    def pull_objects(object_ids: list[str], pull_object_fn: Pull) -> dict[str, Any]:
        root = object_ids[-1]
        try:
            if len(object_ids) > MOST_PARTS:
                raise SurrogateError(f"a message of more than {MOST_PARTS} parts")
            contents = pull(object_ids, limited(pull_object_fn, largest + LARGEST_REST))
            check_contents(contents, largest)
            return {root: _built(build, root, contents)}
        except ObjectPullError:
            forget(root)
            raise
        except SurrogateError as error:
            forget(root)
            log.error("A reply is left out: %s", error)
            raise ObjectPullError(root, str(error)) from None

    def inflate_object_from_contents(name: str, built: Mapping[str, Any]) -> Any:
        return built[name]

    grid.pull_objects, grid.inflate_object_from_contents = (
        pull_objects,
        inflate_object_from_contents,
    )


def _built(build: Callable[..., Any], root: str, contents: dict[str, bytes]) -> Any:
    """The message of these parts. Raises SurrogateError for parts of which Flower makes none, or one
    whose records have parts of other kinds than records have.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

    def are(values: Iterable[object], *kinds: type) -> bool:
        return all(isinstance(each, kinds) for each in values)

    try:
        message = build(root, contents)
        whole = isinstance(message, Message) and (
            message.has_error()
            or (
                isinstance(message.content, RecordDict)
                and are(message.content.values(), ArrayRecord, ConfigRecord, MetricRecord)
                and all(
                    are(each.values(), Array)
                    for each in message.content.values()
                    if isinstance(each, ArrayRecord)
                )
            )
        )
    except Exception as error:
        raise SurrogateError(
            f"parts of which no message can be made ({type(error).__name__})"
        ) from None
    if not whole:
        raise SurrogateError("parts of which no message can be made")
    return message
