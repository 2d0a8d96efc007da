"""The HTTP APIs of Flower 1.42: where its servers listen.

Flower serves the SuperNodes, the coordinator's commands and its apps on one port, and authenticates
only the first. Here SuperNodes have an address of their own, at which there is nothing else; the
others are sockets of this account.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.flower.interface import (
    CONTROL_OPTION,
    HTTP_OPTION,
    RUNTIME_OPTION,
    FleetRequest,
)
from fedsurrogate.common.flower.places import Doorkeeper, Places
from fedsurrogate.common.flower.v142_fleet import Call, FleetGuard

HEADERS = 2**14
"""Bytes of the headers of a request, which come before any check."""
IDLE = 60
"""Seconds for which a connection stays open between two requests."""


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
        rest: The other arguments.
    """

    control: str
    runtime: str
    fleet: str
    rest: list[str]


OPTIONS = (CONTROL_OPTION, RUNTIME_OPTION, HTTP_OPTION)


def read_addresses(arguments: Sequence[str]) -> Addresses:
    """Take the addresses out of a SuperLink's arguments.

    Args:
        arguments: Those of `flower-superlink` 1.34, and `--fleet-http-address`.
    """
    found, rest, words = dict.fromkeys(OPTIONS, ""), list[str](), iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name in found:
            found[name] = value if equals else next(words, "")
        else:
            rest.append(word)
    return Addresses(found[CONTROL_OPTION], found[RUNTIME_OPTION], found[HTTP_OPTION], rest)


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
        # Without TLS, on sockets of this account.
        in_background(uvicorn, app, open_socket(addresses.runtime), plain)
        if addresses.fleet:
            states = app.state.linkstate_factory

            def registered(key: bytes) -> bool:
                return states.state().get_node_id_by_public_key(key) is not None

            door, place = Doorkeeper(), open_socket(addresses.fleet)
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
