"""Bytes from others as messages: what they would take in memory is counted before anything is parsed.

Two bytes on the wire can become an empty message of a hundred in memory, so a limit on the payload alone bounds nothing.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from common.errors import SurrogateError

# Ten thousand classes, or a thousand surrogates in a relay, and tables beside them: a tenth of this.
MOST_FIELDS = 2**17
# Bytes of integers that stand in a row: a label takes two, and the most synthetic records are 2**20.
MOST_PACKED = 2**21

_VARINT, _EIGHT, _LENGTH, _FOUR = 0, 1, 2, 5
_WIRE = {
    FieldDescriptor.TYPE_DOUBLE: _EIGHT,
    FieldDescriptor.TYPE_FLOAT: _FOUR,
    FieldDescriptor.TYPE_STRING: _LENGTH,
    FieldDescriptor.TYPE_BYTES: _LENGTH,
    FieldDescriptor.TYPE_MESSAGE: _LENGTH,
}


def read_message(message: Message, payload: bytes, name: str) -> None:
    """Fill a message from bytes. Raises SurrogateError for bytes that are none, hold what its schema does not know, or
    would become far larger in memory; `name` says what it should have been.
    """
    try:
        _count(message, payload)
        message.ParseFromString(payload)
    except (DecodeError, IndexError):
        raise SurrogateError(f"{len(payload)} bytes that are no {name}") from None


def _count(message: Message, payload: bytes) -> None:
    """Walk over the fields without building anything. Raises SurrogateError, DecodeError or IndexError."""
    waiting = [(message.DESCRIPTOR, 0, len(payload))]
    fields = packed = 0
    while waiting:
        kind, at, end = waiting.pop()
        while at < end:
            tag, at = _varint(payload, at)
            field, wire, fields = kind.fields_by_number.get(tag >> 3), tag & 7, fields + 1
            if field is None or wire not in _wires(field):
                raise DecodeError("a field that the schema does not know")
            start = at
            if wire == _LENGTH:
                length, start = _varint(payload, at)
                at = start + length
                packed += length * (field.type not in _WIRE)
                if field.message_type is not None:
                    waiting.append((field.message_type, start, at))
            else:
                at = _varint(payload, at)[1] if wire == _VARINT else at + (8 if wire == _EIGHT else 4)
            if at > end:
                raise DecodeError("a field that ends after its message")
            if fields > MOST_FIELDS or packed > MOST_PACKED:
                raise SurrogateError(
                    f"{len(payload)} bytes that would become a message of more than {MOST_FIELDS} fields, or {MOST_PACKED} "
                    "bytes of packed numbers"
                )


def _wires(field: Any) -> tuple[int, ...]:
    """How a field may be written: repeated numbers also in one piece."""
    wire = _WIRE.get(field.type, _VARINT)
    return (wire, _LENGTH) if field.is_repeated else (wire,)


def _varint(payload: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends. Raises IndexError at the end of the bytes, DecodeError for one of more than 64 bits."""
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
