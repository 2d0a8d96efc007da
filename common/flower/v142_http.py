"""The HTTP APIs of Flower 1.42: where its servers listen, and whom the SuperLink hears.

Flower serves the SuperNodes, the coordinator's commands and its apps on one port, and authenticates
only the first. Here SuperNodes have an address of their own, at which there is nothing else, and are
not served at the other. A request there is refused by its headers, before its content is received.
"""

from __future__ import annotations

import json
import socket
import threading
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsurrogate.common.errors import ConfigError, SurrogateError
from fedsurrogate.common.flower.environment import UNIX, is_loopback
from fedsurrogate.common.flower.interface import HTTP_OPTION, FleetRequest
from fedsurrogate.common.flower.v134_fleet import LARGEST_MESSAGE, fleet_request

FLEET = "/v1/fleet/"
HEADERS = 2**14
"""Bytes of the headers of a request, which come before any check."""
OPEN = 800
"""Connections at a time, below the 1024 open files that a process may usually have."""
IDLE = 60
"""Seconds for which a connection without a request stays open."""

Scope = dict[str, Any]
Call = Callable[..., Any]


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


@dataclass(frozen=True)
class Addresses:
    """Addresses of a SuperLink, and the other arguments of `flower-superlink`.

    Attributes:
        control: Of its HTTP API for the coordinator's commands.
        runtime: Of the same API for its apps.
        fleet: Of its HTTP API for SuperNodes; empty without one.
        rest: The other arguments, and those that Flower takes in place of the above.
    """

    control: str
    runtime: str
    fleet: str
    rest: list[str]


CONTROL_OPTION = "--control-api-address"
RUNTIME_OPTION = "--serverappio-api-address"
DEFAULTS = {CONTROL_OPTION: "127.0.0.1:9093", RUNTIME_OPTION: "", HTTP_OPTION: ""}


def read_addresses(arguments: Sequence[str]) -> Addresses:
    """Take the addresses out of a SuperLink's arguments.

    Args:
        arguments: Those of `flower-superlink` 1.34, and `--fleet-http-address`.

    Raises:
        ConfigError: The coordinator's commands would be open to other machines.
    """
    found, rest, words = dict(DEFAULTS), list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in found:
            found[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    control, runtime = found[CONTROL_OPTION], found[RUNTIME_OPTION]
    if control.startswith(UNIX):
        raise ConfigError(
            f"{CONTROL_OPTION} {control!r}: must be host:port; Flower's commands reach no socket"
        )
    for option, address in ((CONTROL_OPTION, control), (RUNTIME_OPTION, runtime)):
        if address and not address.startswith(UNIX) and not is_loopback(address):
            raise ConfigError(
                f"{option} {address!r}: must be of this machine, such as 127.0.0.1:9093, or a Unix "
                "socket; Flower's HTTP API asks for no authentication there, and starts code"
            )
    host, _, port = control.rpartition(":")
    rest += ["--host", host.strip("[]"), "--port", port]
    return Addresses(control, runtime, found[HTTP_OPTION], rest)


class FleetGuard:
    """Hears SuperNodes only: an ASGI application around Flower's.

    Args:
        app: Flower's application for all its APIs.
        registered: Whether a public key is registered; None: every key may take part.
        refusal: Why a signed request is refused; empty if it is not.
    """

    def __init__(
        self,
        app: Call,
        registered: Callable[[bytes], bool] | None,
        refusal: Callable[[FleetRequest], str],
    ) -> None:
        self._app, self._registered, self._refusal = app, registered, refusal

    async def __call__(self, scope: Scope, receive: Call, send: Call) -> None:
        """Answer a request, or let Flower answer it."""
        from starlette.concurrency import run_in_threadpool

        status = await run_in_threadpool(self._refused, scope)
        if status:
            await _answer(send, *status)
            return
        if (content := await _content(receive)) is None:
            await _answer(send, 413, "A message of more than 16 MiB")
            return
        try:
            request = read_fleet_request(str(scope["path"]), content, _key(scope) or b"")
        except SurrogateError as error:
            await _answer(send, 400, str(error))
            return
        # Flower checks the signature, and that the node has this key.
        if reason := await run_in_threadpool(self._refusal, request):
            await _answer(send, 401, reason)
            return
        await self._app(scope, _given(content, receive), send)

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        """A status and a text for a request whose content is not received."""
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_fleet(scope):
            return 404, "Not found"
        key = _key(scope)
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


def without_fleet(app: Call) -> Call:
    """Flower's application without its API for SuperNodes."""

    async def served(scope: Scope, receive: Call, send: Call) -> None:
        if scope["type"] == "http" and _is_fleet(scope):
            await _answer(send, 404, "SuperNodes have an address of their own")
        else:
            await app(scope, receive, send)

    return served


def serve(
    uvicorn: Any,
    addresses: Addresses,
    refusal: Callable[[FleetRequest], str],
    registered_only: bool,
) -> Any:
    """Flower's `uvicorn` for the SuperLink, whose `run` serves at these addresses.

    Args:
        uvicorn: The package.
        addresses: Where it listens.
        refusal: Why a signed request of a SuperNode is refused; empty if it is not.
        registered_only: Whether nothing is received from a key that is not registered.
    """

    def run(app: Any, *, host: str, port: int, workers: int, reload: bool, **named: Any) -> None:
        places = [open_socket(addresses.control)]
        plain = named | {"ssl_keyfile": None, "ssl_certfile": None}
        if addresses.runtime:
            # As before 1.42: without TLS, on this machine.
            _in_background(uvicorn, without_fleet(app), open_socket(addresses.runtime), plain)
        if addresses.fleet:
            states = app.state.linkstate_factory

            def registered(key: bytes) -> bool:
                return states.state().get_node_id_by_public_key(key) is not None

            guard = FleetGuard(app, registered if registered_only else None, refusal)
            _in_background(uvicorn, guard, open_socket(addresses.fleet), named)
        uvicorn.Server(uvicorn.Config(without_fleet(app), **named)).run(places)

    return SimpleNamespace(run=run)


def _in_background(uvicorn: Any, app: Call, place: socket.socket, named: dict[str, Any]) -> None:
    config = uvicorn.Config(
        app,
        **named,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        ws="none",
        http="h11",
        h11_max_incomplete_event_size=HEADERS,
        limit_concurrency=OPEN,
        timeout_keep_alive=IDLE,
    )
    threading.Thread(
        target=uvicorn.Server(config).run, args=([place],), daemon=True, name="http-api"
    ).start()


def _is_fleet(scope: Scope) -> bool:
    return str(scope["path"]).startswith(FLEET)


def _key(scope: Scope) -> bytes | None:
    """The public key that a request's headers name."""
    from flwr.supercore import constant

    names: Any = constant
    wanted = names.FLEET_HTTP_PUBLIC_KEY_HEADER.lower().encode()
    return read_fleet_key([value for name, value in scope["headers"] if name.lower() == wanted])


def read_fleet_key(values: Sequence[bytes]) -> bytes | None:
    """The public key in a header that must be there once; None for any other values."""
    try:
        return b64decode(values[0], validate=True) if len(values) == 1 else None
    except (Base64Error, ValueError):
        return None


async def _content(receive: Call) -> bytes | None:
    """The content of a request; None if it is too large."""
    content = bytearray()
    while True:
        event = await receive()
        content += event.get("body", b"")
        if len(content) > LARGEST_MESSAGE:
            return None
        if not event.get("more_body"):
            return bytes(content)


def _given(content: bytes, receive: Call) -> Call:
    """A `receive` that gives this content once."""
    parts = [{"type": "http.request", "body": content, "more_body": False}]

    async def given() -> Any:
        return parts.pop() if parts else await receive()

    return given


async def _answer(send: Call, status: int, text: str) -> None:
    """Refuse a request, as Flower does: in JSON, with its code for a node that is not activated."""
    from flwr.supercore.error import ApiErrorCode

    said: dict[str, object] = {"detail": text or "Invalid SuperNode authentication"}
    if status == 412:
        code = int(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED)
        said = {"code": code, "detail": "Failed to activate SuperNode."}
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})
