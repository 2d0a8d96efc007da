"""Flower 1.42: the HTTP APIs, the Fleet API (whom a SuperLink hears), and what a SuperLink knows
over HTTP.

Flower reads a whole request before it looks at its signature, which covers the time only, and it
checks neither the senders of messages inside nor the key to be activated. Here a request is refused
by its headers, before its content is received.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import socket
import threading
import time
from base64 import b64decode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, RunError, SurrogateError
from .environment import UNIX, is_loopback
from .interface import (
    CONTROL_OPTION,
    HAS_EXPIRED,
    HTTP_OPTION,
    RUNTIME_OPTION,
    Doorkeeper,
    FleetRequest,
    Places,
    Standing,
    UnreachableError,
)
from .v134_fleet import LARGEST_MESSAGE, SECONDS, Control, Link134, fleet_request

if TYPE_CHECKING:
    import httpx
    from cryptography.hazmat.primitives.asymmetric import ec


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
        if (
            scope["type"] != "http"
            or scope["method"] != "POST"
            or not scope["path"].startswith(FLEET)
        ):
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


def _stated_size(scope: Scope) -> int:
    """Bytes of a request's content, to which the server holds it; the most, where none are stated."""
    stated = [value for name, value in scope["headers"] if name.lower() == b"content-length"]
    return int(stated[0]) if stated else LARGEST_MESSAGE


def _signer(scope: Scope) -> bytes | None:
    """The public key with which a request's headers are signed; None without one."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore import constant

    names: Any = constant
    found = []
    for wanted in (
        names.FLEET_HTTP_PUBLIC_KEY_HEADER,
        names.FLEET_HTTP_SIGNATURE_HEADER,
        TIMESTAMP_HEADER,
    ):
        values = [value for name, value in scope["headers"] if name.lower() == wanted.encode()]
        if len(values) != 1:
            return None
        found += values
    return signing_key(found, datetime.datetime.now(datetime.UTC))


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


# Bytes of the headers of a request, which come before any check.
HEADERS = 2**14
# Seconds for which a connection stays open between two requests.
IDLE = 60


def open_socket(address: str) -> socket.socket:
    """A socket bound to an address: host:port, or unix:/path. The file that a killed process has left
    is replaced.

    Raises:
        ConfigError: The address is in use, or not of this machine.
    """
    if address.startswith(UNIX):
        path = Path(address.removeprefix(UNIX))
        path.unlink(missing_ok=True)
        found = socket.socket(socket.AF_UNIX)
        found.bind(str(path))
        # Before it listens: only this account may open it.
        path.chmod(0o600)
        return found
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, int(port)))
    except (OSError, ValueError) as error:
        found.close()
        why = getattr(error, "strerror", None) or "it must be host:port"
        raise ConfigError(
            f"{address}: cannot be listened on ({why}); name a free address of this machine"
        ) from None
    return found


def own_sockets(uvicorn: Any, address: str) -> Any:
    """Flower's `uvicorn` for a module that makes one server, which then listens at this address.

    uvicorn itself would open a Unix socket to every user of the machine.
    """

    class Server(uvicorn.Server):  # type: ignore[misc]
        def run(self, sockets: list[socket.socket] | None = None) -> None:
            super().run(sockets or [open_socket(address)])

    return SimpleNamespace(Config=uvicorn.Config, Server=Server)


OPTIONS = (CONTROL_OPTION, RUNTIME_OPTION, HTTP_OPTION)


def read_addresses(arguments: Sequence[str]) -> tuple[tuple[str, ...], list[str]]:
    """Take the addresses out of a SuperLink's arguments.

    Args:
        arguments: Those of `flower-superlink` 1.34, and `--fleet-http-address`.

    Returns:
        The addresses of its HTTP API for the coordinator's commands, of the same API for its apps, and of
        its HTTP API for SuperNodes, empty without one; and the other arguments.
    """
    found, rest, words = dict.fromkeys(OPTIONS, ""), list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in found:
            found[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    return tuple(found.values()), rest


def serve(
    uvicorn: Any,
    addresses: Sequence[str],
    refusal: Callable[[FleetRequest], str],
    registered_only: bool,
) -> Any:
    """Flower's `uvicorn` for the SuperLink, whose `run` serves at these addresses.

    Args:
        uvicorn: The package.
        addresses: Where it listens, as from `read_addresses`.
        refusal: Why a signed request of a SuperNode is refused; empty if it is not.
        registered_only: Whether nothing is received from a key that is not registered.
    """

    def run(app: Any, *, host: str, port: int, workers: int, reload: bool, **named: Any) -> None:
        control, runtime, fleet = addresses
        places = [open_socket(control)]
        plain = named | {"ssl_keyfile": None, "ssl_certfile": None}
        # Without TLS, on sockets of this account.
        in_background(uvicorn, app, open_socket(runtime), plain)
        if fleet:
            states = app.state.linkstate_factory

            def registered(key: bytes) -> bool:
                return states.state().get_node_id_by_public_key(key) is not None

            door, place = Doorkeeper(), open_socket(fleet)
            guard = FleetGuard(app, registered if registered_only else None, refusal, door)
            in_background(uvicorn, guard, place, named)
            door.watch(place.getsockname()[1])
        uvicorn.Server(uvicorn.Config(app, **plain)).run(places)

    return SimpleNamespace(run=run)


def in_background(uvicorn: Any, app: Call, place: socket.socket, named: dict[str, Any]) -> Any:
    """Serve an application in a thread, with limits; return uvicorn's server.

    Args:
        uvicorn: The package.
        app: An ASGI application.
        place: Where it listens.
        named: Settings of uvicorn.
    """
    config = uvicorn.Config(
        app,
        **named,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        ws="none",
        http="h11",
        h11_max_incomplete_event_size=HEADERS,
        limit_concurrency=Places().most,
        timeout_keep_alive=IDLE,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([place],), daemon=True, name="http-api").start()
    return server


# Seconds between two attempts to reach a SuperLink that starts.
AGAIN = 0.3


class Link142(Link134):
    """Connections to a SuperLink of Flower 1.42."""

    @contextmanager
    def control(self, address: str, authority: Path | None) -> Iterator[Control]:
        """Over HTTP, as Flower's own commands speak since 1.42."""
        import httpx
        from flwr.supercore.control.control_http_client import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        reach_unix_sockets()
        pem = None if authority is None or address.startswith(UNIX) else authority.read_bytes()
        client = ControlHttpClient.from_server_address(
            address, pem is None, pem, [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
        )
        if is_loopback(address):
            client._client._mounts.clear()  # No proxy to an address of this machine.
        with client:
            try:
                yield Control142(_Stub(client))
            except httpx.HTTPError as error:
                kind = UnreachableError if isinstance(error, httpx.TransportError) else RunError
                raise kind(
                    f"the SuperLink at {address} has failed a request ({reason(error)})"
                ) from None

    def key_standing(
        self,
        address: str,
        authority: bytes | None,
        key: ec.EllipticCurvePrivateKey,
        seconds: float,
    ) -> tuple[Standing, float | None]:
        """Request an activation with an invalid heartbeat.

        The SuperLink looks up the key before it refuses this.
        """
        import httpx
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.supercore.error import ApiErrorCode
        from flwr.supernode.fleet_http_client import FleetHttpClient
        from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

        public = self.key_bytes(key.public_key())
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=0.0)

        ahead: float | None = None
        why = ""

        def refusal(*signers: NodeAuthHttpInterceptor) -> int:
            """Flower's code, or that of HTTP; 0 without an answer."""
            nonlocal ahead, why
            with FleetHttpClient.from_server_address(
                address, authority is None, authority, list(signers)
            ) as client:
                client._client.timeout = httpx.Timeout(seconds)
                try:
                    client.ActivateNode(request)
                except httpx.HTTPStatusError as error:
                    with suppress(KeyError, ValueError):
                        told = parsedate_to_datetime(error.response.headers["date"])
                        ahead = time.time() - told.timestamp()
                    why = error.response.text
                    return code(error)
                except (httpx.HTTPError, ValueError):
                    pass
                return 0

        if (unsigned := refusal()) != httpx.codes.UNAUTHORIZED:
            is_open = unsigned == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
            return "open" if is_open else "silent", ahead
        signed = refusal(NodeAuthHttpInterceptor(key, key.public_key()))
        by_code: dict[int, Standing] = {
            ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL: "registered",
            ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: "unknown",
            httpx.codes.UNAUTHORIZED: "expired" if HAS_EXPIRED in why else "refused",
        }
        return by_code.get(signed, "silent"), ahead


class Control142(Control):
    """Requests over HTTP."""

    def nodes(self, wait: float = 0.0) -> Any:
        """HTTP does not wait until something listens."""
        import httpx

        end = time.monotonic() + wait
        while True:
            try:
                return super().nodes()
            except httpx.TransportError:
                if time.monotonic() > end:
                    raise
                time.sleep(AGAIN)


class _Stub:
    """A client of the Control API with the methods of gRPC's stub, which take a time limit."""

    def __init__(self, client: Any) -> None:
        self._client = client
        client._client.timeout = SECONDS

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        return lambda request, **_: method(request)


def code(error: httpx.HTTPStatusError) -> int:
    """Flower's code of an error; that of HTTP where the body has none."""
    from flwr.supercore.error import FlowerError

    flowers = FlowerError.from_json(error.response.text)
    return error.response.status_code if flowers is None else int(flowers.code)


def reason(error: httpx.HTTPError) -> str:
    """What an error says, in at most 300 characters."""
    import httpx
    from flwr.supercore.error import FlowerError

    if isinstance(error, httpx.HTTPStatusError):
        flowers = FlowerError.from_json(error.response.text)
        said = error.response.text if flowers is None else flowers.message
        return f"{error.response.status_code}: {said}"[:300]
    return f"{type(error).__name__}: {error}"[:300]


@cache
def reach_unix_sockets() -> None:
    """Let clients of Flower's HTTP APIs reach an address unix:/path, in this process from now on."""
    import httpx
    from flwr.supercore.protobuf import client as module

    clients: Any = module.ProtobufClient
    make = clients.from_server_address.__func__

    def from_server_address(cls: Any, server_address: str, *given: Any, **named: Any) -> Any:
        if not server_address.startswith(UNIX):
            return make(cls, server_address, *given, **named)
        client = make(cls, "localhost", *given, **named)
        client._client = httpx.Client(
            transport=httpx.HTTPTransport(uds=server_address.removeprefix(UNIX)),
            timeout=client._client.timeout,
            # No proxy.
            trust_env=False,
        )
        return client

    clients.from_server_address = classmethod(from_server_address)
