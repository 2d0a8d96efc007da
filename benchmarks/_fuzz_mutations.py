"""Changes of valid messages that keep most of their structure: fields, sizes, shapes, ranks, lengths,
names and types, in protobuf messages, JSON and safetensors files; and changes of single bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from fedsurrogate.common import surrogate_pb2 as pb

Change = Callable[[Random, bytes], bytes]
# Most bytes of a JSON text in which a change makes a list many times as long.
LONG = 2**14
# Sizes at which programs differ from what they state: signs, widths of words, limits of this one.
WHOLE = (0, 1, 2, 3, 7, 255, 2**16, 2**20, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**53,
         2**63 - 1, 2**64 - 1, -1, -(2**31), -(2**63))  # fmt: skip
REAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    1e-300,
    1e-45,
    65504.0,
    3e38,
    1e300,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = ("", "a", "a" * 250, "9" * 5000, "\0", "\x1b[31m", "../x", "é" * 40, "nan", "1e999", "-1",
         str(2**40), "None", "[]", "{}", "a,b", "lowrank", "full", "gram", "diag", "linear", "mlp",
         "convnet")  # fmt: skip
# Half-precision numbers, byte by byte: largest, infinite, no number, smallest.
HALVES = (b"\xff\x7b", b"\x00\x7c", b"\x00\x7e", b"\x01\x00", b"\x00\xbc")
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I8", "U8", "BOOL", "F8_E4M3")
WIDTH = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4}
# Stands for many brackets, which `json` cannot write.
DEEP = "DEEP"


def of_bytes(random: Random, content: bytes) -> bytes:
    """Change, remove, repeat or add bytes anywhere."""
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 5))):
        at = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 1 if at < len(changed):
                changed[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
            case 2:
                del changed[at : at + random.choice((1, 2, 8, 64))]
            case 3:
                changed[at:at] = changed[at : at + random.choice((1, 4, 32))] * random.choice(
                    (1, 50)
                )
            case 4:
                changed[at:at] = random.randbytes(random.choice((1, 3, 9)))
            case _:
                del changed[at:]
    return bytes(changed)


def of_text(random: Random, content: bytes) -> bytes:
    """Change a text: bytes, or one of its words or numbers."""
    parts = content.decode("utf-8", "replace").replace('"', ' " ').split(" ")
    if random.random() < 0.5:
        return of_bytes(random, content)
    parts[random.randrange(len(parts))] = random.choice((*TEXTS, *map(str, WHOLE), "[" * 2000))
    return " ".join(parts).replace(' " ', '"').encode("utf-8", "replace")


def of_message(kind: type[Message], inside: Mapping[str, Change] | None = None) -> Change:
    """A change of some fields of a protobuf message.

    Args:
        kind: of the message.
        inside: changes of bytes fields that hold other messages, by the field's name.
    """

    def change(random: Random, content: bytes) -> bytes:
        message = kind()
        try:
            message.ParseFromString(content)
        except DecodeError:
            return of_bytes(random, content)
        for _ in range(random.choice((1, 1, 1, 2, 3))):
            _change_message(random, message, inside or {})
        return message.SerializeToString(deterministic=True)

    return change


def _change_message(random: Random, message: Any, inside: Mapping[str, Change]) -> None:
    below = list(_parts(message))
    part = random.choice([message, *below, *below])
    if isinstance(part, pb.Halves) and random.random() < 0.5:
        return _change_table(random, part)
    field = random.choice(part.DESCRIPTOR.fields)
    if field.is_repeated:
        return _change_list(random, part, field, inside)
    if field.message_type is not None:
        others = [each for each in below if type(each) is type(getattr(part, field.name))]
        if others and random.random() < 0.5:
            other = random.choice(others).SerializeToString()
            getattr(part, field.name).ParseFromString(other)
        elif random.random() < 0.5:
            part.ClearField(field.name)
        else:
            getattr(part, field.name).SetInParent()
        return None
    setattr(part, field.name, _scalar(random, field, getattr(part, field.name), inside))
    return None


def _parts(message: Any) -> Any:
    """All messages inside a message."""
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                yield each
                yield from _parts(each)


def _change_table(random: Random, table: Any) -> None:
    """Another shape, mostly with as many numbers as it has."""
    shape = _shape(random, list(table.shape))
    if random.random() < 0.8 and all(side < 2**32 for side in shape):
        table.shape[:] = shape
    if (count := _product(table.shape)) < 5000 and random.random() < 0.8:
        table.data = random.choice((*HALVES, b"\x00\x3c")) * count
    if random.random() < 0.2:
        table.scale = random.choice(REAL)


def _product(shape: Sequence[int]) -> int:
    """Number of entries; the product of many sides would take longer than any parser may."""
    return math.prod(shape) if len(shape) < 10 else 2**40


def _shape(random: Random, shape: list[int]) -> list[int]:
    match random.randrange(6):
        case 0:
            return [random.choice((0, 1, 2, 3, 4)) for _ in range(random.randrange(5))]
        case 1:
            return [_product(shape)]
        case 2:
            return [*shape, 1]
        case 3:
            return shape[::-1]
        case 4:
            return [random.choice(WHOLE[:13]) for _ in range(random.choice((1, 2, 3, 9, 3000)))]
        case _:
            return shape[1:]


def _change_list(random: Random, part: Any, field: Any, inside: Mapping[str, Change]) -> None:
    found = getattr(part, field.name)
    if field.message_type is not None:
        match random.randrange(4):
            case 0 if found:
                found.add().CopyFrom(random.choice(found))
            case 1 if found:
                del found[random.randrange(len(found))]
            case 2:
                for _ in range(random.choice((1, 2, 500))):
                    found.add()
            case _:
                del found[:]
        return
    found[:] = _other_values(random, list(found), partial(_scalar, random, field, inside=inside))


def _other_values(random: Random, values: list[Any], another: Callable[[Any], Any]) -> list[Any]:
    """Other numbers, texts or bytes. another: makes one from an old one, or from None."""
    at = random.randrange(len(values) + 1)
    match random.randrange(5):
        case 0:
            return values[:at] + values[at + 1 :]
        case 1:
            return values * (random.choice((2, 2, 300)) if len(values) < 100 else 2)
        case 2:
            return values[::-1]
        case 3:
            return [*values[:at], another(None), *values[at:]]
        case _:
            return [*values[:at], *map(another, values[at : at + 1]), *values[at + 1 :]]


def _scalar(random: Random, field: Any, old: Any, inside: Mapping[str, Change]) -> Any:
    """Another value of a field that is one."""
    match field.type:
        case FieldDescriptor.TYPE_BYTES:
            old = old or b""
            if field.name in inside and random.random() < 0.8:
                return inside[field.name](random, old)
            return of_bytes(random, old)
        case FieldDescriptor.TYPE_STRING:
            return random.choice(TEXTS)
        case FieldDescriptor.TYPE_BOOL:
            return not old
        case FieldDescriptor.TYPE_DOUBLE | FieldDescriptor.TYPE_FLOAT:
            return random.choice(REAL)
        case kind:
            least, most = (0, 2**32) if kind == FieldDescriptor.TYPE_UINT32 else (0, 2**64)
            near = () if old is None else (old - 1, old + 1, 2 * old)
            return random.choice([each for each in (*WHOLE, *near) if least <= each < most])


def of_json(random: Random, content: bytes) -> bytes:
    """Change a value, a key or the length of a list anywhere in a JSON text."""
    try:
        tree = json.loads(content)
    except (ValueError, RecursionError):
        return of_bytes(random, content)
    holder = {"": tree}
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        place, key = random.choice(list(_places(holder)))
        _change_value(random, place, key, holder[""])
    brackets = random.choice((50, 5000))
    return json.dumps(holder[""]).replace(f'"{DEEP}"', "[" * brackets + "]" * brackets).encode()


def _places(tree: Any) -> Any:
    """Every value in a tree, as the list or object that holds it and its key."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _change_value(random: Random, place: Any, key: Any, tree: Any) -> None:
    old = place[key]
    match random.randrange(6):
        case 0 if isinstance(old, dict):
            old[random.choice(TEXTS)] = random.choice((*TEXTS, *WHOLE, None))
        case 1 if isinstance(old, list):
            # Three such changes within each other made gigabytes, which take their time to write.
            times = random.choice((1, 300)) if len(json.dumps(tree)) < LONG else 1
            old += old * times if old else [None]
        case 2 if isinstance(old, str):
            place[key] = of_text(random, old.encode("utf-8", "surrogatepass")).decode(
                "utf-8", "replace"
            )
        case 3 if key != "":
            del place[key]
        case _:
            values: tuple[Any, ...] = (None, True, [], {}, [[]], DEEP, tree, *TEXTS, *WHOLE, *REAL)
            # A copy: a tree that holds itself has no end.
            place[key] = json.loads(json.dumps(random.choice(values)))


def of_tensors(*metadata: str) -> Change:
    """A change of a safetensors file: its header, or shapes and types with numbers to match.

    Args:
        metadata: keys of values in its metadata that are JSON themselves.
    """

    def change(random: Random, content: bytes) -> bytes:
        length = int.from_bytes(content[:8], "little")
        header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
        facts = header.get("__metadata__", {})
        match random.randrange(5):
            case 0:
                text = of_json(random, json.dumps(header).encode())
                return len(text).to_bytes(8, "little") + text + body
            case 1 | 2 if facts:
                key = random.choice(list(facts))
                if key in metadata and random.random() < 0.9:
                    facts[key] = of_json(random, facts[key].encode()).decode()
                else:
                    facts[key] = random.choice((*TEXTS, *map(str, WHOLE)))
            case 3 if facts:
                del facts[random.choice(list(facts))]
            case _:
                body = _change_tensors(random, header, body)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + body

    return change


def _change_tensors(random: Random, header: dict[str, Any], body: bytes) -> bytes:
    """Change some tensors in a header; return the new body."""
    names = [name for name in header if name != "__metadata__"]
    parts = {}
    for name in names:
        start, end = header[name]["data_offsets"]
        parts[name] = body[start:end]
    for _ in range(random.choice((1, 1, 2))):
        if not names:
            break
        name = random.choice(names)
        each = header[name]
        match random.randrange(4):
            case 0:
                names.remove(name)
                del header[name], parts[name]
                continue
            case 1:
                new = name + random.choice(("x", ".weight"))
                header[new], parts[new] = dict(each), parts[name]
                names.append(new)
                continue
            case 2:
                each["dtype"] = random.choice(TYPES)
            case _:
                each["shape"] = _shape(random, each["shape"])
        size = _product(each["shape"]) * WIDTH.get(each["dtype"], 1)
        if size < 2**16:
            parts[name] = random.choice((b"\0", b"\xff", b"\x3c")) * size
    at, new_body = 0, b""
    for name in names:
        header[name]["data_offsets"] = [at, at + len(parts[name])]
        at, new_body = at + len(parts[name]), new_body + parts[name]
    return new_body
