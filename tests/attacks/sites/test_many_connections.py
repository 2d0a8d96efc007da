"""Who opens many connections to the Fleet API, without a key or with one, keeps no other site out.

The limits are small ones of the product; the connections are real.
"""

from __future__ import annotations

import fcntl
import socket
import subprocess
import sys
import time
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from hypothesis import example, given
from hypothesis import strategies as st

from fedsurrogate.common.flower.interface import Doorkeeper, Peer, Places, connections, peer_of
from tests.attacks.sites.signing import Signer
from tests.attacks.sites.test_strangers import Server, channel_of, fleet_api
from tests.e2e.processes import until

SMALL = Places(most=24, strangers=12, address=12, key=3, seconds=3, answer=0.5, pause=0.05)
PATH = "/flwr.proto.Fleet/ActivateNode"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fleet_api(tmp_path_factory.mktemp("fleet"), SMALL) as found:
        yield found


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that closes no connection for its age."""
    with fleet_api(tmp_path_factory.mktemp("fleet"), replace(SMALL, seconds=3600)) as found:
        yield found


def status(channel: grpc.Channel, content: bytes = b"", seconds: float = 5) -> grpc.StatusCode:
    """Of a call, at once: a connection that is refused is not tried again."""
    raw = channel.unary_unary(PATH, bytes, bytes)
    try:
        raw(content, timeout=seconds)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


def calling(server: Server, over: Event, secret: ec.EllipticCurvePrivateKey | None) -> None:
    """A peer with a connection of its own, which it uses for a small call now and then."""
    with channel_of(server, secret) as channel:
        while not over.wait(0.3):
            status(channel)


def silent(server: Server, over: Event) -> None:
    """A peer that connects again whenever it is closed."""
    host, port = server.address.split(":")
    while not over.wait(0.1):
        with suppress(OSError), socket.create_connection((host, int(port)), 5) as each:
            each.settimeout(0.3)
            while not over.is_set():
                with suppress(TimeoutError):
                    if not each.recv(2**16):
                        break


@contextmanager
def attacked(server: Server, attack: Callable[[Server, Event], None]) -> Iterator[None]:
    """As many of them as there are places, and more."""
    over = Event()
    peers = [Thread(target=attack, args=(server, over), daemon=True) for _ in range(30)]
    for each in peers:
        each.start()
    time.sleep(2)
    try:
        yield
    finally:
        over.set()
        for each in peers:
            each.join()


STRANGE = ec.generate_private_key(ec.SECP384R1())
ATTACKS: dict[str, Callable[[Server, Event], None]] = {
    "calls without a key": lambda server, over: calling(server, over, None),
    "calls with an unknown key": lambda server, over: calling(server, over, STRANGE),
    "calls with another site's own key": lambda server, over: calling(server, over, server.other),
    "nothing": silent,
}


def sound(server: Server) -> bytes:
    """A message that passes all checks, and that Flower itself refuses."""
    public = public_key_to_bytes(server.secret.public_key())
    return ActivateNodeRequest(public_key=public, heartbeat_interval=0.0).SerializeToString()


PASSED = grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("kind", ATTACKS)
def test_no_number_of_connections_keeps_a_site_out(server: Server, kind: str) -> None:
    """800 strangers, each with a refused call every 35 seconds, kept a site out for minutes: a call
    that is refused is a use of its connection, and only unused ones were closed.
    """
    states: list[grpc.ChannelConnectivity] = []
    with channel_of(server, server.secret) as known:
        assert status(known, sound(server)) == PASSED
        known.subscribe(states.append)
        with attacked(server, ATTACKS[kind]):
            for _ in range(5):
                answers = [grpc.StatusCode.OK]
                while answers[-1] != PASSED and len(answers) < 10:
                    # A new connection each time, as after an interruption.
                    with channel_of(server, server.secret) as site:
                        answers.append(status(site, sound(server)))
                assert answers[-1] == PASSED, answers
                assert status(known, sound(server)) == PASSED
    assert set(states) <= {grpc.ChannelConnectivity.READY}, "it was never closed"


@pytest.mark.parametrize("secret", [None, STRANGE], ids=["no key", "unknown key"])
def test_a_refused_connection_is_closed_though_it_is_used(
    patient: Server, secret: ec.EllipticCurvePrivateKey | None
) -> None:
    states: list[grpc.ChannelConnectivity] = []
    with channel_of(patient, secret) as stranger:
        stranger.subscribe(states.append)
        refused = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.FAILED_PRECONDITION}
        assert status(stranger) in refused, "it learns why"
        until(lambda: grpc.ChannelConnectivity.READY in states)
        end, begun = time.monotonic() + 10, states.index(grpc.ChannelConnectivity.READY)
        while len(states) == begun + 1 and time.monotonic() < end:
            status(stranger)
            time.sleep(0.1)
    # Idle, or connecting again where the next call came before anybody looked.
    assert set(states[begun:]) - {grpc.ChannelConnectivity.READY}, "it was never closed"


def test_a_site_may_send_a_message_for_longer_than_a_stranger_may_stay(server: Server) -> None:
    """On a slow line, as the first call after an interruption."""
    signed = list[Any]()
    details = namedtuple("details", "metadata")([])
    Signer(server.secret).intercept_unary_unary(
        lambda of, _: signed.extend(of.metadata), details, b""
    )

    def slowly() -> Iterator[bytes]:
        time.sleep(SMALL.seconds + 1)
        yield sound(server)

    with channel_of(server, None) as site, pytest.raises(grpc.RpcError) as error:
        site.stream_unary(PATH, bytes, bytes)(slowly(), metadata=signed, timeout=60)
    assert error.value.code() == PASSED


PEERS = st.integers(0, 30).map(lambda n: (f"192.0.2.{n % 5}", n))
EVENTS = st.lists(
    st.tuples(
        st.sampled_from([*["opened"] * 4, "closed", "accepted", "refused"]),
        PEERS,
        st.sampled_from([b"a", b"b"]),
    ),
    max_size=60,
)
# More strangers than all limits allow together.
MANY = [("opened", (f"192.0.2.{n % 5}", n), b"a") for n in range(31)]
# One alone, which stays longer than strangers may.
OLD = [("opened", ("192.0.2.1", 1), b"a")] + [("closed", ("192.0.2.9", 9), b"a")] * 40


@given(EVENTS)
@example(MANY)
@example(OLD)
def test_the_limits_hold_for_all_events_and_a_known_site_stays(events: list[Any]) -> None:
    door = Doorkeeper(Places(strangers=7, address=4, key=3, seconds=30, answer=0))
    there, keys, refused, latest = dict[Peer, float](), dict[Peer, bytes](), set[Peer](), 0.0
    for number, (event, peer, key) in enumerate(events):
        latest = time.monotonic() + number
        if event == "opened":
            there.setdefault(peer, latest)
        elif event == "closed" or peer not in there:
            for each in (there, keys):
                each.pop(peer, None)
            refused.discard(peer)
            door.surplus(there, latest)
            door.surplus(there, latest)
        elif event == "accepted":
            door.accept(f"ipv4:{peer[0]}:{peer[1]}", key)
            keys[peer] = key
        else:
            door.refuse(f"ipv4:{peer[0]}:{peer[1]}")
            refused.add(peer)
    gone = set(door.surplus(there, latest + 1))
    left = there.keys() - gone
    strangers = left - keys.keys()
    assert len(strangers) <= 7
    assert max(Counter(peer[0] for peer in strangers).values(), default=0) <= 4
    assert max(Counter(keys[peer] for peer in left & keys.keys()).values(), default=0) <= 3
    assert not left & refused
    assert all(there[peer] + 30 >= latest + 1 for peer in strangers)
    # Whoever went was refused, too old, or older than enough others of its kind.
    for peer in gone - refused:
        alike = [p for p in there if keys.get(p) == keys.get(peer)]
        newer = [p for p in alike if there[p] >= there[peer] and p != peer]
        assert len(newer) >= 3 or (peer not in keys and there[peer] + 30 < latest + 1)


def test_further_calls_do_not_keep_a_connection_that_was_refused() -> None:
    door, peer = Doorkeeper(Places(answer=0)), ("192.0.2.7", 1)
    door.refuse(peer)
    time.sleep(0.001)
    now = time.monotonic()
    time.sleep(0.001)
    door.refuse(peer)
    assert door.surplus({peer: now}, now) == [peer]


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("ipv4:192.0.2.7:5", ("192.0.2.7", 5)),
        ("ipv6:%5B2001:db8::1%5D:5", ("2001:db8::1", 5)),
        ("ipv6:[::ffff:192.0.2.7]:5", ("192.0.2.7", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5", ("fe80::1", 5)),
    ],
)
def test_a_connection_has_one_name(text: str, peer: Peer) -> None:
    assert peer_of(text) == peer


def test_addresses_of_one_network_of_ipv6_count_as_one() -> None:
    door = Doorkeeper(Places(address=3))
    there = {(f"2001:db8::{n}", n): float(n) for n in range(9)} | {("2001:db9::1", 1): 0.0}
    assert set(door.surplus(there, 9.0)) == {(f"2001:db8::{n}", n) for n in range(6)}


def test_no_file_of_the_process_is_closed_or_loses_a_lock(tmp_path: Path) -> None:
    """A database holds locks, which end where a copy of one of its files is closed."""
    lock = (tmp_path / "lock").open("w")
    fcntl.lockf(lock, fcntl.LOCK_EX)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0] as each:
            assert connections(port) == {client.getsockname(): each.fileno()}
            assert each.fileno() >= 0
            client.sendall(b"x")
            assert each.recv(1) == b"x"
    probe = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run(
        [sys.executable, "-c", probe, lock.name], capture_output=True, check=False
    )
    assert b"BlockingIOError" in done.stderr
