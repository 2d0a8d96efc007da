"""What this software needs of Flower beyond its public modules, as types without anything of one
version; and how many connections a key or an address may hold.

Another version of Flower is another class, in a file next to `v134.py`, and a line in `VERSIONS` of
the package. It overrides the methods of `Flower134` in which that version differs, and it keeps these
promises, which the two sides rely on:

* `superlink` asks `refusal` about every request of the Fleet API that registers or activates a node
  or sends messages, on every protocol that the SuperLink speaks, after Flower has checked the
  request's signature. Where only registered keys may take part, nothing of a message is received
  before its metadata show such a key. Messages and connections have limits. Writers of its
  database wait for each other, and its servers listen on Unix sockets where the arguments name
  them. It asks `admit` before it stores any run, however that was submitted.
* `coordinator_apps` and `coordinator_task` start the app that is installed here, and no code that
  arrives with a run.
* `superexec` calls the given starter for tasks of ClientApps, and for no task of another
  kind. Flower 1.42 makes others too (`TaskType.AGENT_APP`), and ignores `--plugin-type`.
* `client_task` neither unpacks nor imports code that arrives with a run.
* A method that cannot keep its promise raises ConfigError with the reason. A server that cannot
  listen on a Unix socket is such a case: its API would be open to every user of the machine.

What Flower 1.42 does otherwise: its servers speak HTTP, and its SuperLink gRPC too, with a variable
of the environment; one address serves the coordinator's commands, its apps and the sites. Its
commands take `--host` and `--port` in place of the addresses of 1.34, which ours take with both.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol
from urllib.parse import unquote

from ..errors import RunError

if TYPE_CHECKING:
    from ..settings.base import Scalar

FINISHED = "finished"
# Of a SuperLink: its addresses for the coordinator's commands, and for its apps.
CONTROL_OPTION, RUNTIME_OPTION = "--control-api-address", "--serverappio-api-address"
# Of a SuperLink: address for SuperNodes that speak HTTP, where its Flower has them.
HTTP_OPTION = "--fleet-http-address"
# Part of a SuperLink's refusal of a key whose time is over.
HAS_EXPIRED = "has expired"
Standing = Literal["registered", "unknown", "expired", "refused", "open", "silent"]
Failure = Literal["raised", "crashed", "unavailable"]


class UnreachableError(RunError):
    """No SuperLink answers at the address."""


@dataclass(frozen=True)
class SuperLinkArguments:
    """What the arguments of a SuperLink mean.

    Attributes:
        certificate: Absolute path of its certificate; None without TLS.
        authenticates: Whether it accepts only nodes with a registered key.
        open_apis: Addresses at which it asks for no key: for the coordinator's commands, for its
            apps, and any other.
        simulates: Whether it runs simulated sites, and no others.
    """

    certificate: Path | None
    authenticates: bool
    open_apis: tuple[str, ...] = ()
    simulates: bool = False


@dataclass(frozen=True)
class FleetRequest:
    """What a request to the Fleet API contains, next to what its signature proves.

    Attributes:
        signed_by: Public key of the signature that Flower has checked, as `key_bytes` writes it.
        key: Public key that the request registers or activates, in the same form; None for other
            requests.
        node: Id of the node that the request is of, which has the key `signed_by`; None where the
            request has none.
        senders: Ids of the nodes that its messages name as their senders.
        fault: What is wrong with the parts that its messages are said to have; empty: nothing.
    """

    signed_by: bytes
    key: bytes | None = None
    node: int | None = None
    senders: tuple[int, ...] = ()
    fault: str = ""


@dataclass(frozen=True)
class SuperNodeLog:
    """Parts of lines of a SuperNode's log, by which its state is known.

    Attributes:
        listens: Its Runtime API listens soon.
        connected: The SuperLink has accepted it.
        receives: It receives a message.
        done: Each of these: it has no message any more.
        inactive: The SuperLink does not let it take part: it does not know the key, or another
            node with it is connected.
    """

    listens: str
    connected: str = "SuperNode ID:"
    receives: str = "Receiving:"
    done: tuple[str, ...] = ("Sent successfully", "Failed to send", "Failed to receive", "Ignoring")
    inactive: str = "Failed to activate SuperNode"


Refusal = Callable[[FleetRequest], str]
Admit = Callable[[str, "Mapping[str, Scalar]"], None]


class TaskGuard(Protocol):
    """What a process does around its one task."""

    def received(self, give_up: Callable[[str], None]) -> None:
        """There is a message. `give_up` sends an error with this text in place of its reply."""

    def sending(self) -> AbstractContextManager[None]:
        """Entered before the reply is sent, and left when it was sent."""

    def unreachable(self) -> None:
        """The SuperNode does not answer a call."""


class TaskStarter(Protocol):
    """What starts a process for each task."""

    def start(self, arguments: Sequence[str]) -> None:
        """Start a process that calls `client_task` with these arguments on its command line."""

    def tend(self) -> None:
        """Called often, between the looks for tasks."""


@dataclass(frozen=True)
class FlowerRun:
    """A run as the SuperLink knows it.

    Attributes:
        id: Its number.
        status: Such as "running" or "finished:completed".
        begun: When it was submitted; None if unknown.
        ended: When it ended; None if it has not.
    """

    id: str
    status: str
    begun: datetime | None
    ended: datetime | None

    @property
    def is_over(self) -> bool:
        """Whether the SuperLink has nothing more to do for it."""
        return self.status.startswith(FINISHED)


@dataclass(frozen=True)
class FlowerNode:
    """A node as the SuperLink knows it.

    Attributes:
        id: Its number.
        key: Its public key, as `key_bytes` writes it; empty for a node without one.
        online: Whether it is connected.
        revoked: Whether its key was taken back. Such a key cannot be registered again.
        activated: When its present or last connection began; None if it never connected.
        deactivated: When it last ended a connection; None if it never did.
        online_until: Unix time until which it counts as online without another heartbeat; 0 if it
            never connected.
        heartbeat_interval: Seconds between two heartbeats.
    """

    id: int
    key: bytes
    online: bool
    revoked: bool
    activated: datetime | None = None
    deactivated: datetime | None = None
    online_until: float = 0.0
    heartbeat_interval: float = 0.0


class SignatureRefusedError(RunError):
    """The SuperLink refuses the signature of a node: its clock is wrong, or its key is another."""


# Address and port at the other end of a connection.
Peer = tuple[str, int]


@dataclass(frozen=True)
class Places:
    """Limits on connections.

    Attributes:
        most: At a time: below the 1024 open files that a process may usually have, which its
            database needs too.
        strangers: Of these without a registered key.
        address: Of these from one address; of IPv6, from one network of 64 bits.
        key: Of one key. A SuperNode has one connection, and `site doctor` another.
        seconds: How long a connection stays without a key.
        answer: Seconds for which a refused one stays, to receive why.
        pause: Seconds between two looks.
    """

    most: int = 800
    strangers: int = 400
    address: int = 64
    key: int = 4
    seconds: float = 60.0
    answer: float = 2.0
    pause: float = 0.25


class Doorkeeper:
    """Closes the connections that are beyond the limits.

    Args:
        places: The limits.
    """

    def __init__(self, places: Places | None = None) -> None:
        self.places = places or Places()
        self._keys: dict[Peer, bytes] = {}
        self._ends: dict[Peer, float] = {}
        self._away: set[Peer] = set()

    def accept(self, peer: str | Peer, key: bytes) -> None:
        """A call on this connection (as for `peer_of`) was signed with a registered key."""
        self._keys[peer_of(peer)] = key

    def refuse(self, peer: str | Peer) -> None:
        """A call on this connection (as for `peer_of`) is refused."""
        self._ends.setdefault(peer_of(peer), time.monotonic() + self.places.answer)

    def surplus(self, there: Mapping[Peer, float], now: float) -> list[Peer]:
        """The connections that have to go.

        Args:
            there: When each connection was first seen; of the same time the newest first.
            now: On the same clock, in seconds.
        """
        # A call may be quicker than the first look at its connection: forgotten at the second one.
        away = (self._keys.keys() | self._ends.keys()) - there.keys()
        for peer in away & self._away:
            self._keys.pop(peer, None)
            self._ends.pop(peer, None)
        self._away = away
        limits, found, gone = self.places, Counter[object](), list[Peer]()
        for peer in sorted(there, key=there.__getitem__, reverse=True):
            key, group = self._keys.get(peer), _network(peer[0])
            found.update([key] if key else [group, None])
            many = found[group] > limits.address or found[None] > limits.strangers
            over = found[key] > limits.key if key else many or now > there[peer] + limits.seconds
            if over or now > self._ends.get(peer, now):
                gone.append(peer)
        return gone

    def watch(self, port: int) -> None:
        """Keep the limits, from a thread, for the connections of this process to this port."""

        def look() -> None:
            seen: dict[Peer, float] = {}
            while True:
                now, found = time.monotonic(), connections(port)
                seen = {peer: seen.get(peer, now) for peer in found}
                for peer in self.surplus(seen, now):
                    with suppress(OSError), _borrowed(found[peer]) as each:
                        if _end(each.getpeername()) == peer:
                            each.shutdown(socket.SHUT_RDWR)
                time.sleep(self.places.pause)

        threading.Thread(target=look, daemon=True, name="doorkeeper").start()


def connections(port: int) -> dict[Peer, int]:
    """Files of this process that are connections to one of its ports, the newest first."""
    found = list[tuple[int, Peer, int]]()
    for file in [int(each.name) for each in Path("/dev/fd").iterdir()]:
        # No socket, one without another end, or closed meanwhile.
        with suppress(OSError), _borrowed(file) as each:
            here, there = each.getsockname(), each.getpeername()
            if isinstance(here, tuple) and here[1] == port:
                found.append((os.fstat(file).st_ino, _end(there), file))
    return {peer: file for _, peer, file in sorted(found, reverse=True)}


def peer_of(named: str | Peer) -> Peer:
    """The one name of a connection.

    Args:
        named: As gRPC writes it, or its address and port.

    Example:
        >>> peer_of("ipv4:192.0.2.7:5001"), peer_of("ipv6:%5B::1%5D:5001")
        (('192.0.2.7', 5001), ('::1', 5001))
    """
    if not isinstance(named, str):
        return _end(named)
    host, _, port = unquote(named).partition(":")[2].rpartition(":")
    return _end((host.strip("[]"), int(port)))


@contextmanager
def _borrowed(file: int) -> Iterator[socket.socket]:
    """A file as a socket, which stays open. Nothing is duplicated: to close a copy of a database's
    file would end the locks on it.
    """
    # The longest of the two kinds of addresses; an address says itself of which kind it is.
    each = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=file)
    try:
        yield each
    finally:
        each.detach()


def _end(address: tuple[str, int]) -> Peer:
    host = ip_address(address[0].partition("%")[0])
    mapped = host.ipv4_mapped if isinstance(host, IPv6Address) else None
    return str(mapped or host), address[1]


def _network(host: str) -> object:
    address = ip_address(host)
    return address if address.version == 4 else int(address) >> 64
