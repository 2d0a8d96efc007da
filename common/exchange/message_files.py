"""Messages of a run as signed files, for sites without a network connection to the coordinator.

A request file has one message to one site, signed with the coordinator's key; a reply file has what
the site answers, signed with the site's key. A signature is checked before anything else is read.
The values and the payload are those of the same message over the network.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from typing import Any

from fedsurrogate.common.errors import ConfigError, SealError, SurrogateError
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.safe_parsing import canonical
from fedsurrogate.common.security.sealing import sign, verify
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.common.surrogate_pb2 import Bundle as SignedFile
from fedsurrogate.common.wire.bundles import signed_part, signed_parts
from fedsurrogate.common.wire.records import Info

REQUEST, REPLY = b"message-request", b"message-reply"
# In bytes. A manifest has the settings and the values next to a payload, as large as over the
# network.
LARGEST_FILE, LARGEST_MANIFEST = 2**30, 2**24
ID, RUN = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True)
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

    id: str
    flower_run: str
    site: str
    kind: str
    settings: Mapping[str, Scalar]
    info: Info
    expires: str
    payload: bytes | None = None

    def expired(self) -> bool:
        """Whether the last day is over."""
        return datetime.now(UTC).date() > date.fromisoformat(self.expires)


@dataclass(frozen=True)
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
    info: Info
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
        request = MessageRequest(**_unpack(content, public, REQUEST, MessageRequest))
        date.fromisoformat(request.expires)
        # The run becomes part of file names at the site.
        named = (
            ID.fullmatch(request.id)
            and RUN.fullmatch(request.flower_run)
            and SITE_NAME.fullmatch(request.site)
        )
        if not (named and isinstance(request.settings, dict)):
            raise SurrogateError("its id, run, site or settings are not in form")
    except (SurrogateError, TypeError, ValueError) as error:
        raise ConfigError(f"no request of `coordinator exchange` ({str(error)[:120]})") from None
    return request


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
        return MessageReply(**_unpack(content, public, REPLY, MessageReply))
    except TypeError as error:
        raise SurrogateError(f"no reply of `site release` ({str(error)[:120]})") from None


def digest(content: bytes) -> str:
    """SHA-256 of a request file, hexadecimal: a reply names the very request that it answers."""
    return hashlib.sha256(content).hexdigest()


def _pack(message: MessageRequest | MessageReply, private: bytes, purpose: bytes) -> bytes:
    content = asdict(message)
    payload = content.pop("payload")
    manifest = json.dumps(content | {"has-payload": payload is not None}, sort_keys=True).encode()
    signature = sign(signed_part(manifest, payload or b""), private, purpose)
    return canonical(SignedFile(manifest=manifest, payload=payload or b"", signature=signature))


def _unpack(content: bytes, public: bytes, purpose: bytes, kind: type[Any]) -> dict[str, Any]:
    # The digest of a request is of its bytes: others with the same signature must not be answered in
    # its place.
    text, payload, signature = signed_parts(content, LARGEST_MANIFEST)
    try:
        verify(signed_part(text, payload), signature, public, purpose)
    except SealError:
        raise SealError(
            "the file was changed on its way, or another key signed it: its signature does not fit"
        ) from None
    try:
        manifest: dict[str, Any] = json.loads(text)
        has_payload = manifest.pop("has-payload")
        texts = [
            each.name for each in fields(kind) if each.name not in ("settings", "info", "payload")
        ]
        if set(manifest) != {each.name for each in fields(kind)} - {"payload"} or not isinstance(
            manifest["info"], dict
        ):
            raise ValueError("its fields are not those of a message")
        if not all(isinstance(manifest[name], str) for name in texts):
            raise ValueError("a field that is no text")
        if not all(map(_sound, manifest["info"].values())):
            raise ValueError("a value that no message over the network may have")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise SurrogateError(f"a manifest that cannot be read ({str(error)[:120]})") from None
    return manifest | {"payload": bytes(payload) if has_payload is True else None}


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
