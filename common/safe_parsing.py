"""Safe parsing of received protobuf messages: their size in memory is estimated before parsing.

Two bytes on the wire can become an empty message of a hundred bytes in memory, so a payload limit
alone is not enough.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from .errors import SurrogateError

M = TypeVar("M", bound=Message)
# Maximum number of fields: ten times the need of ten thousand classes, or of a chain message with a
# thousand surrogates.
MOST_FIELDS = 2**17
# Maximum bytes of packed integers: two per label, for at most 2**20 synthetic records.
MOST_PACKED = 2**21

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_WIRE = {
    FieldDescriptor.TYPE_DOUBLE: _EIGHT,
    FieldDescriptor.TYPE_FLOAT: _FOUR,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}


def canonical(message: Message) -> bytes:
    """The bytes of a message: the same message always gives the same bytes."""
    return message.SerializeToString(deterministic=True)


def read_message(kind: type[M], payload: bytes, name: str) -> M:
    """Parse a message.

    Args:
        kind: its class.
        payload: the bytes.
        name: the kind of message, for the error text.

    Raises:
        SurrogateError: for bytes that are no such message, have fields outside the schema, or would
            become far larger in memory.
    """
    message = kind()
    try:
        _count(message, payload)
        message.ParseFromString(payload)
    except (DecodeError, IndexError):
        raise SurrogateError(f"{len(payload)} bytes that are not a valid {name}") from None
    return message


def _count(message: Message, payload: bytes) -> None:
    """Count the fields without building any object. Raises SurrogateError, DecodeError or
    IndexError.
    """
    waiting = [(message.DESCRIPTOR, 0, len(payload))]
    fields = packed = 0
    while waiting:
        kind, at, end = waiting.pop()
        while at < end:
            tag, at = varint(payload, at)
            wires, scalar, within = _fields(kind).get(tag >> 3, ((), False, None))
            wire, fields = tag & 7, fields + 1
            if wire not in wires:
                raise DecodeError("a field that the schema does not know")
            start = at
            if wire == _LENGTH:
                length, start = varint(payload, at)
                at = start + length
                packed += length * scalar
                if within is not None:
                    waiting.append((within, start, at))
            else:
                at = (
                    varint(payload, at)[1] if wire == _VARINT else at + (8 if wire == _EIGHT else 4)
                )
            if at > end:
                raise DecodeError("a field that ends after its message")
            if fields > MOST_FIELDS or packed > MOST_PACKED:
                raise SurrogateError(
                    f"{len(payload)} bytes that would become a message of more than {MOST_FIELDS} "
                    f"fields, or {MOST_PACKED} bytes of packed numbers"
                )


@cache
def _fields(kind: Any) -> dict[int, tuple[tuple[int, ...], bool, Any]]:
    """Of each field of a message by its number: allowed wire types, whether it is packed where it has a
    length, and the message within. Repeated numbers may also be packed.
    """
    found = dict[int, tuple[tuple[int, ...], bool, Any]]()
    for each in kind.fields:
        wire = _WIRE.get(each.type, _VARINT)
        wires = (wire, _LENGTH) if each.is_repeated else (wire,)
        found[each.number] = wires, each.type not in _WIRE, each.message_type
    return found


def varint(payload: bytes, at: int) -> tuple[int, int]:
    """A number and its end position. Raises IndexError at the end of the bytes, DecodeError for
    more than 64 bits.
    """
    # Most numbers have one byte.
    if (byte := payload[at]) < 128:
        return byte, at + 1
    value = shift = 0
    while True:
        byte = payload[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise DecodeError("a number of more than 64 bits")
