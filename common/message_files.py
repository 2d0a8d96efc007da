"""Messages of a run as signed files, for sites without a network connection to the coordinator.

A request file has one message to one site, signed with the coordinator's key; a reply file has what
the site answers, signed with the site's key. A signature is checked before anything else is read.
The values and the payload are those of the same message over the network.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from datetime import UTC, date, datetime
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from .errors import ConfigError, SealError, SurrogateError
from .security import documents
from .wire.records import Info

REQUEST, REPLY = b"message-request", b"message-reply"
# In bytes. A manifest has the settings and the values next to a payload, as large as over the
# network.
LARGEST_FILE, LARGEST_MANIFEST = 2**30, 2**24


def _sound(value: object) -> bool:
    """Whether a value may stand next to a payload: a text, or numbers of 64 bits, alone or as a
    list of one type.
    """
    if isinstance(value, list):
        return (
            len(set(map(type, value))) == 1
            and not isinstance(value[0], str | list)
            and all(map(_sound, value))
        )
    return isinstance(value, str | float) or (isinstance(value, int) and -(2**63) <= value < 2**63)


def _values(info: Info) -> Info:
    if not all(map(_sound, info.values())):
        raise ValueError("a value that no message over the network may have")
    return info


Values = Annotated[dict[str, Any], AfterValidator(_values)]


@documents.document
class MessageRequest:
    """One message to one site.

    Attributes:
        id: of the message, 64 hexadecimal digits.
        flower_run: the run, as in ledgers.
        site: its name.
        kind: the type of Flower's message.
        settings: of the run, flat.
        info: values next to the payload.
        expires: the last day, in UTC, on which the site replies (YYYY-MM-DD).
        payload: of the message, if it has one.
    """

    id: Annotated[str, documents.hexadecimal(64)]
    flower_run: Annotated[str, Field(pattern="^[0-9]{1,20}$")]
    site: documents.SiteName
    kind: str
    settings: documents.Flat
    info: Values
    expires: documents.Day
    payload: bytes | None = None

    def expired(self) -> bool:
        """Whether the last day is over."""
        return datetime.now(UTC).date() > date.fromisoformat(self.expires)


@documents.document
class MessageReply:
    """A site's answer to a request.

    Attributes:
        id: of the request.
        request: SHA-256 of the request, hexadecimal.
        site: its name.
        info: values next to the payload.
        payload: of the message, if it has one.
    """

    id: str
    request: str
    site: str
    info: Values
    payload: bytes | None = None


def pack_request(request: MessageRequest, private: bytes) -> bytes:
    """The content of a request file.

    Args:
        request: to one site.
        private: the coordinator's key.
    """
    return _pack(request, private, REQUEST)


def unpack_request(content: bytes, public: bytes) -> MessageRequest:
    """Check the signature of a request file and read it.

    Args:
        content: of the file.
        public: the coordinator's key.

    Raises:
        SealError: if the signature does not fit.
        ConfigError: for a file of another kind.
    """
    try:
        return MessageRequest(**_unpack(content, public, REQUEST))
    except (SurrogateError, ConfigError) as error:
        raise ConfigError(
            f"no request of `coordinator offline exchange` ({str(error)[:120]})"
        ) from None


def pack_reply(reply: MessageReply, private: bytes) -> bytes:
    """The content of a reply file.

    Args:
        reply: of the site.
        private: the site's key.
    """
    return _pack(reply, private, REPLY)


def unpack_reply(content: bytes, public: bytes) -> MessageReply:
    """Check the signature of a reply file and read it.

    Args:
        content: of the file.
        public: the site's key.

    Raises:
        SealError: if the signature does not fit.
        SurrogateError: for a file of another kind.
    """
    try:
        return MessageReply(**_unpack(content, public, REPLY))
    except ConfigError as error:
        raise SurrogateError(f"no reply of `site offline release` ({str(error)[:120]})") from None


def digest(content: bytes) -> str:
    """SHA-256 of a request file, hexadecimal: a reply names the very request that it answers."""
    return hashlib.sha256(content).hexdigest()


def _pack(message: MessageRequest | MessageReply, private: bytes, purpose: bytes) -> bytes:
    content = asdict(message)
    payload = content.pop("payload")
    fields = content | {"has-payload": payload is not None}
    return documents.pack_file(fields, payload or b"", private, purpose)


def _unpack(content: bytes, public: bytes, purpose: bytes) -> dict[str, Any]:
    # The digest of a request is of its bytes: others with the same signature must not be answered in
    # its place.
    signed = documents.open_file(content, LARGEST_MANIFEST)
    try:
        signed.verify(public, purpose)
    except SealError:
        raise SealError(
            "the file was changed on its way, or another key signed it: its signature does not fit"
        ) from None
    try:
        fields = documents.json_object(signed.text)
        has_payload = fields.pop("has-payload") is True
        if "payload" in fields:
            raise ValueError("a payload among its values")
    except (ValueError, LookupError) as error:
        raise SurrogateError(f"a manifest that cannot be read ({str(error)[:120]})") from None
    return fields | {"payload": bytes(signed.payload) if has_payload else None}
