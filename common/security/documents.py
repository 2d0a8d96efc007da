"""Signed documents: named values for one purpose, and often a payload next to them.

What is signed has one form in bytes, and a reader takes no other: exactly the fields of its kind, each
of its type, none twice. So no two readers see two documents in one signature. A signed file has the
signature behind the values and the payload, and nothing of it is unpacked before the signature fits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, fields
from datetime import date
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, dataclass_transform

from cryptography.hazmat.primitives import hashes, serialization
from google.protobuf.message import DecodeError
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ..errors import SITE_NAME, ConfigError, SurrogateError
from ..safe_parsing import canonical, varint
from ..settings.base import Scalar
from ..surrogate_pb2 import Bundle
from .sealing import sign, verify

# How many hexadecimal digits of a fingerprint people compare: 128 bits.
COMPARED = 32


def key_fingerprint(public: bytes) -> str:
    """SHA-256 of a public key (one line, as ssh writes it), hex."""
    key = serialization.load_ssh_public_key(public)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return digest.finalize().hex()


def in_groups(fingerprint: str) -> str:
    """What people compare of a fingerprint, in groups of four.

    Example:
        >>> in_groups("0123456789abcdef" * 4)
        '0123 4567 89ab cdef 0123 4567 89ab cdef'
    """
    digits = fingerprint[:COMPARED]
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def is_fingerprint(text: str, fingerprint: str) -> bool:
    """Whether a text that a person has typed is this fingerprint: its first 32 digits at least.

    Example:
        >>> is_fingerprint("0123 4567 89AB cdef 0123 4567 89ab cdef", "0123456789abcdef" * 4)
        True
        >>> is_fingerprint("0123 4567", "0123456789abcdef" * 4)
        False
    """
    digits = re.sub(r"[\s:]", "", text).lower()
    return len(digits) >= COMPARED and fingerprint.startswith(digits)


T = TypeVar("T")
# Bytes of a signature at most; one that is longer fits nothing.
MOST_SIGNED = 1024


def _day(text: str) -> str:
    """A date as it is written. Raises ValueError."""
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:
            return text
    raise ValueError("must be a date such as 2026-03-31")


def hexadecimal(digits: int) -> Any:
    """The check of a text of so many hexadecimal digits."""

    form = re.compile(rf"[0-9a-f]{{{digits}}}")

    def check(text: object) -> object:
        if not (isinstance(text, str) and form.fullmatch(text)):
            raise ValueError(f"must be {digits} hexadecimal digits")
        return text

    return BeforeValidator(check)


def _scalar(value: object) -> object:
    if not isinstance(value, Scalar):
        raise ValueError("must be texts, numbers, true or false")
    return value


# Settings of a run.
Flat = dict[str, Annotated[Scalar, BeforeValidator(_scalar)]]
Day = Annotated[str, AfterValidator(_day)]
SiteName = Annotated[str, Field(pattern=f"^(?:{SITE_NAME.pattern})$")]


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def document(kind: type[T]) -> type[T]:
    """A kind of document: a frozen dataclass whose values have exactly the types of its fields. Another
    value raises ConfigError with its name.
    """
    made: Any = dataclass(kind, frozen=True, config=ConfigDict(strict=True, extra="forbid"))
    checked = made.__init__

    @wraps(checked)
    def init(self: Any, *given: Any, **named: Any) -> None:
        try:
            checked(self, *given, **named)
        except ValidationError as error:
            first = error.errors()[0]
            # Of a value without its name, the place among all.
            name = first["loc"][0] if first["loc"] else ""
            name = fields(made)[name].name if isinstance(name, int) else name
            text = first["msg"].removeprefix("Value error, ").replace("should", "must")
            raise ConfigError(f"{name} = {repr(first['input'])[:80]}: {text}") from None

    made.__init__ = init
    kinds: type[T] = made
    return kinds


def canonical_json(values: Mapping[str, object]) -> bytes:
    """A JSON object as people sign it: equal ones give equal bytes."""
    return json.dumps(values, sort_keys=True, separators=(",", ":")).encode()


def json_object(text: str | bytes) -> dict[str, Any]:
    """A JSON object whose names differ: of equal ones people may read one, and programs another.

    Raises:
        ValueError: for any other text.
    """
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no object")
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name that stands twice")
    return found


def read_at_most(file: Path, most: int) -> bytes:
    """The content of a file.

    Args:
        file: that another organisation may have written.
        most: bytes that it may have.

    Raises:
        ConfigError: it cannot be read, is no file, or is larger.
    """
    if file.exists() and not file.is_file():
        # A pipe or a device, also behind a link: reading it may have no end.
        raise ConfigError(f"{file} cannot be read: it is no file")
    try:
        with file.open("rb") as stream:
            content = stream.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    if len(content) > most:
        raise ConfigError(f"{file} is larger than the limit of {most} bytes")
    return content


class SignedFile(NamedTuple):
    """A signed file, of which nothing is unpacked yet.

    Attributes:
        text: its values, JSON.
        payload: next to them; not copied, because nobody has signed it yet.
        signature: of both.
    """

    text: bytes
    payload: memoryview
    signature: bytes

    def verify(self, public: bytes, purpose: bytes) -> None:
        """Raise SealError unless this key has signed the file for this purpose."""
        verify(_covered(self.text, self.payload), self.signature, public, purpose)


def pack_file(
    values: Mapping[str, object], payload: bytes, private: bytes, purpose: bytes
) -> bytes:
    """The content of a signed file.

    Args:
        values: of JSON.
        payload: next to them; empty for none.
        private: the signer's key.
        purpose: the signature is valid only for it.
    """
    text = json.dumps(values, sort_keys=True).encode()
    signature = sign(_covered(text, payload), private, purpose)
    return canonical(Bundle(manifest=text, payload=payload, signature=signature))


def open_file(content: bytes, most: int) -> SignedFile:
    """The parts of a signed file.

    Args:
        content: of the file, in canonical form: another one might be signed too, and be read anew.
        most: bytes of its values.

    Raises:
        SurrogateError: for other content.
    """
    whole, at, parts = memoryview(content), 0, dict[int, memoryview]()
    with suppress(IndexError, DecodeError):
        while at < len(content):
            start = at
            tag, at = varint(content, at)
            length, at = varint(content, at)
            # In order and each once, not empty, with numbers as short as they can be.
            if tag & 7 != 2 or tag >> 3 in parts or tag >> 3 < max(parts, default=1) or not length:
                break
            if at - start != 1 + max(1, (length.bit_length() + 6) // 7) or at + length > len(
                content
            ):
                break
            parts[tag >> 3], at = whole[at : at + length], at + length
        else:
            text, signature = parts.get(1, whole[:0]), parts.get(3, whole[:0])
            if parts.keys() <= {1, 2, 3} and len(text) <= most and len(signature) <= MOST_SIGNED:
                return SignedFile(bytes(text), parts.get(2, whole[:0]), bytes(signature))
    raise SurrogateError(
        f"{len(content)} bytes that are no signed file in canonical form, or have a manifest of more "
        f"than {most} bytes"
    )


def _covered(text: bytes, payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    return len(text).to_bytes(8, "big"), text, payload
