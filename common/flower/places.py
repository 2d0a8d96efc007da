"""How many connections to the Fleet API one key or one address may hold, and for how long without a
registered key.

gRPC counts a refused call as use of its connection, and its limit on connections knows no callers.
So this process looks at its own connections several times a second: one has a key as soon as a call
of it was signed with a registered key. A part of the places is for connections that have one, and
where there are too many of a kind, the oldest of them goes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from urllib.parse import unquote

Peer = tuple[str, int]
"""Address and port at the other end of a connection."""


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
