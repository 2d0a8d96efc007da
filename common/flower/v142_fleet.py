"""The Fleet API of Flower 1.42 over HTTP: whom its SuperLink hears, and how much it receives of
strangers.

Flower reads a whole request before it looks at its signature, which covers the time only, and it
checks neither the senders of messages inside nor the key to be activated. Here a request is refused
by its headers, before its content is received.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.flower.interface import FleetRequest
from fedsurrogate.common.flower.places import Doorkeeper
from fedsurrogate.common.flower.v134_fleet import LARGEST_MESSAGE, fleet_request

FLEET = "/v1/fleet/"
Scope = dict[str, Any]
Call = Callable[..., Any]


@dataclass
class Room:
    """Memory for requests that are being received and answered.

    Attributes:
        key: Bytes for all requests of one key. A SuperNode sends eight pieces of 5 MiB at a time.
        whole: Bytes for all requests.
        seconds: How long a request waits for room, and then how long it may take to arrive.
    """

    key: int = 4 * LARGEST_MESSAGE
    whole: int = 32 * LARGEST_MESSAGE
    seconds: float = 600.0
    _taken: Counter[bytes] = field(default_factory=Counter)

    async def take(self, key: bytes, size: int) -> None:
        """Wait for room for a request of this key, with so many bytes. Raises TimeoutError."""
        async with asyncio.timeout(self.seconds):
            while self._taken[key] + size > self.key or self._taken.total() + size > self.whole:
                await asyncio.sleep(0.05)
        self._taken[key] += size

    def give(self, key: bytes, size: int) -> None:
        """End of a request that has taken room."""
        self._taken[key] -= size
        self._taken += Counter[bytes]()


class FleetGuard:
    """Hears SuperNodes only: an ASGI application around Flower's.

    Args:
        app: Flower's application for all its APIs.
        registered: Whether a public key is registered; None: every key may take part.
        refusal: Why a signed request is refused; empty if it is not.
        door: Learns which connection has which key.
        room: Memory for requests.
    """

    def __init__(
        self,
        app: Call,
        registered: Callable[[bytes], bool] | None,
        refusal: Callable[[FleetRequest], str],
        door: Doorkeeper,
        room: Room | None = None,
    ) -> None:
        self._app, self._registered, self._refusal = app, registered, refusal
        self._door, self._room = door, room or Room()

    async def __call__(self, scope: Scope, receive: Call, send: Call) -> None:
        """Answer a request, or let Flower answer it."""
        from starlette.concurrency import run_in_threadpool

        key = await run_in_threadpool(_signer, scope)
        if status := await run_in_threadpool(self._refused, scope, key):
            await answer(send, *status)
            return
        # Where no keys are required, each connection counts for itself.
        key = key or repr(scope["client"]).encode()
        self._door.accept(scope["client"], key)
        if (size := _stated_size(scope)) > LARGEST_MESSAGE:
            await answer(send, 413, "A message of more than 16 MiB")
            return
        try:
            await self._room.take(key, size)
        except TimeoutError:
            await answer(send, 503, "Too many messages of this site at a time")
            return
        try:
            await self._receive(scope, key, receive, send)
        finally:
            self._room.give(key, size)

    async def _receive(self, scope: Scope, key: bytes, receive: Call, send: Call) -> None:
        """Receive a request's content, and let Flower answer it."""
        from starlette.concurrency import run_in_threadpool

        if (content := await _content(receive, self._room.seconds)) is None:
            await answer(send, 413, "A message of more than 16 MiB, or one that is too slow")
            return
        try:
            request = read_fleet_request(str(scope["path"]), content, key)
        except SurrogateError as error:
            await answer(send, 400, str(error))
            return
        # Flower checks that the node has this key.
        if reason := await run_in_threadpool(self._refusal, request):
            await answer(send, 401, reason)
            return
        await self._app(scope, _given(content, receive), send)

    def _refused(self, scope: Scope, key: bytes | None) -> tuple[int, str] | None:
        """A status and a text for a request whose content is not received."""
        if scope["type"] != "http" or scope["method"] != "POST" or not is_fleet(scope):
            return 404, "Not found"
        if key is None:
            # By this a site knows whether keys are required (`key_standing`).
            return (412 if self._registered is None else 401), ""
        if self._registered is not None and not self._registered(key):
            # As Flower answers each of them, from the message.
            begins = scope["path"].endswith(("/activate-node", "/register-node"))
            return (412 if begins else 401), ""
        return None


def read_fleet_request(path: str, content: bytes, key: bytes) -> FleetRequest:
    """What a request of a SuperNode contains that a guard looks at.

    Args:
        path: Of the request.
        content: A message in protobuf.
        key: Public key that its headers name.

    Raises:
        SurrogateError: It is no such message.
    """
    from flwr.proto import fleet_pb2
    from google.protobuf.message import DecodeError

    kinds: dict[str, Any] = {
        "activate-node": fleet_pb2.ActivateNodeRequest,
        "register-node": fleet_pb2.RegisterNodeFleetRequest,
        "push-messages": fleet_pb2.PushMessagesRequest,
    }
    kind = kinds.get(path.removeprefix(FLEET))
    if kind is None:
        return FleetRequest(key)
    try:
        return fleet_request(kind.FromString(content), key)
    except DecodeError:
        raise SurrogateError("a SuperNode's request is not readable") from None


def is_fleet(scope: Scope) -> bool:
    """Whether a request is one of SuperNodes."""
    return str(scope["path"]).startswith(FLEET)


def _stated_size(scope: Scope) -> int:
    """Bytes of a request's content, to which the server holds it; the most, where none are stated."""
    stated = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return int(stated[0]) if stated else LARGEST_MESSAGE


def _signer(scope: Scope) -> bytes | None:
    """The public key with which a request's headers are signed; None without one."""
    from flwr.supercore import constant

    names: Any = constant
    found = []
    for wanted in (
        names.FLEET_HTTP_PUBLIC_KEY_HEADER,
        names.FLEET_HTTP_SIGNATURE_HEADER,
        _timestamp_header(),
    ):
        values = [value for name, value in scope["headers"] if name.lower() == wanted.encode()]
        if len(values) != 1:
            return None
        found += values
    return signing_key(found, datetime.datetime.now(datetime.UTC))


def _timestamp_header() -> str:
    from flwr.common.constant import TIMESTAMP_HEADER

    return TIMESTAMP_HEADER


def signing_key(values: Sequence[bytes], now: datetime.datetime) -> bytes | None:
    """The public key that has signed a time, as Flower's own check has it.

    Args:
        values: Of three headers: the key and the signature in base64, and the time in ISO 8601.
        now: With a time zone.

    Returns:
        None for any other values, and for a time that is not now.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    try:
        named, signature, time = values
        key = b64decode(named, validate=True)
        age = (now - datetime.datetime.fromisoformat(time.decode())).total_seconds()
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        decoded = b64decode(signature, validate=True)
        signed = verify_signature(bytes_to_public_key(key), time, decoded)
    except (ValueError, TypeError, AttributeError, UnsupportedAlgorithm):
        # AttributeError: a key of another kind, which verifies nothing.
        return None
    return key if signed else None


async def _content(receive: Call, seconds: float) -> bytes | None:
    """The content of a request; None if it is too large or too slow, or its sender has gone."""
    content = bytearray()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while True:
                event = await receive()
                content += event.get("body", b"")
                if event["type"] != "http.request" or len(content) > LARGEST_MESSAGE:
                    return None
                if not event.get("more_body"):
                    return bytes(content)
    return None


def _given(content: bytes, receive: Call) -> Call:
    """A `receive` that gives this content once."""
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def given() -> Any:
        return parts.pop() if parts else await receive()

    return given


async def answer(send: Call, status: int, text: str) -> None:
    """Refuse a request, as Flower does: in JSON, with its code for a node that is not activated."""
    from flwr.supercore.error import ApiErrorCode

    said: dict[str, object] = {"detail": text or "Invalid SuperNode authentication"}
    if status == 412:
        code = int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
        said = {"code": code, "detail": "Failed to activate SuperNode."}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})
