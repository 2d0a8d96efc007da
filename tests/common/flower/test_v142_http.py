"""Whom the HTTP API for SuperNodes hears, and what is at which address."""

import asyncio
import datetime
import json
import socket
import stat
import time
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore import constant
from flwr.supercore.primitives.asymmetric import (
    generate_key_pairs,
    public_key_to_bytes,
    sign_message,
)
from hypothesis import given
from hypothesis import strategies as st
from psutil import Process

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.interface import Doorkeeper, Places
from fedsurrogate.common.flower.v134_fleet import LARGEST_MESSAGE
from fedsurrogate.common.flower.v142_fleet import (
    FleetGuard,
    Room,
    in_background,
    open_socket,
    read_addresses,
)
from fedsurrogate.server_app.deployment.fleet_guard import refusal

OWN, OTHER = generate_key_pairs(), generate_key_pairs()
KNOWN, STRANGE = (public_key_to_bytes(public) for _, public in (OWN, OTHER))
NAMES = (b"flwr-public-key", b"flwr-signature", TIMESTAMP_HEADER.encode())
PUSH, ACTIVATE = "/v1/fleet/push-messages", "/v1/fleet/activate-node"
ELSEWHERE = ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/V1/FLEET/x"]
Headers = list[tuple[bytes, bytes]]


def headers(key: bytes = KNOWN, signer: Any = None, age: float = 0.0) -> Headers:
    """As a SuperNode signs them. signer: a private key; that of `key` by default."""
    time = (datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=age)).isoformat()
    private = signer or (OWN if key == KNOWN else OTHER)[0]
    signature = sign_message(private, time.encode())
    return list(zip(NAMES, (b64encode(key), b64encode(signature), time.encode()), strict=True))


class Peer:
    """Sends one request to an ASGI application; notes what it received and answered."""

    def __init__(
        self, app: Any, path: str, content: bytes = b"", signed: Headers | None = None
    ) -> None:
        named = [*(headers() if signed is None else signed), (b"host", b"127.0.0.1:9095")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": named}
        scope |= {"client": ("192.0.2.7", 5001)}
        self.read, self.sent, self._content = 0, list[dict[str, Any]](), content
        asyncio.run(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        self.read += 1
        return {"type": "http.request", "body": self._content, "more_body": False}

    async def _send(self, event: dict[str, Any]) -> None:
        self.sent.append(event)

    @property
    def status(self) -> int:
        """Of the answer."""
        return int(self.sent[0]["status"])


async def flowers(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Stands for Flower's application: answers with what it received."""
    event = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": event["body"]})


@pytest.fixture(scope="module")
def guard() -> FleetGuard:
    """Of a SuperLink that hears registered keys only."""
    header = getattr(constant, "FLEET_HTTP_PUBLIC_KEY_HEADER", None)
    if header is None:
        pytest.skip("needs the newest Flower: make flower-newest")
    assert (header.encode(), constant.FLEET_HTTP_SIGNATURE_HEADER.encode()) == NAMES[:2]
    return FleetGuard(flowers, lambda key: key == KNOWN, refusal, Doorkeeper())


def pushed(node: int, senders: list[int]) -> bytes:
    """A node's request that sends messages with these ids as their senders."""
    found = [Message(metadata=Metadata(src_node_id=each)) for each in senders]
    return PushMessagesRequest(node=Node(node_id=node), messages_list=found).SerializeToString()


@given(node=st.integers(1, 5), senders=st.lists(st.integers(1, 5), max_size=4))
def test_a_message_is_accepted_only_from_the_node_that_it_names(
    guard: FleetGuard, node: int, senders: list[int]
) -> None:
    content = pushed(node, senders)
    peer = Peer(guard, PUSH, content)
    assert peer.status == (200 if set(senders) <= {node} else 401)
    assert (peer.sent[1]["body"] == content) == (peer.status == 200)


def test_no_node_activates_another_ones_key(guard: FleetGuard) -> None:
    for key, status in ((KNOWN, 200), (STRANGE, 401)):
        content = ActivateNodeRequest(public_key=key).SerializeToString()
        assert Peer(guard, ACTIVATE, content).status == status


SIGNERS = {
    "own": lambda: headers(),
    "stranger": lambda: headers(STRANGE),
    "stranger with a known key": lambda: headers(KNOWN, OTHER[0]),
    "replayed": lambda: headers(age=400.0),
    "early": lambda: headers(age=-60.0),
    "none": list,
    "one missing": lambda: headers()[:2],
    "one twice": lambda: [*headers(), headers()[0]],
    "no time": lambda: [*headers()[:2], (NAMES[2], b"now")],
    "no zone": lambda: [*headers()[:2], (NAMES[2], b"2026-01-01T00:00:00")],
    "no base64": lambda: [(NAMES[0], b"?"), *headers()[1:]],
    "no key": lambda: [(NAMES[0], b64encode(b"key")), *headers()[1:]],
}


@pytest.mark.parametrize("who", SIGNERS)
@pytest.mark.parametrize("path", [PUSH, ACTIVATE, "/v1/fleet/", "/v1/fleet/none"])
def test_nothing_of_a_message_is_received_without_a_registered_signature(
    guard: FleetGuard, path: str, who: str
) -> None:
    peer = Peer(guard, path, b"", SIGNERS[who]())
    assert (peer.read > 0) == (who == "own")
    if who == "stranger":
        assert peer.status == (412 if path == ACTIVATE else 401)
    elif who != "own":
        assert peer.status == 401


def test_a_site_learns_whether_keys_are_required(guard: FleetGuard) -> None:
    opened = FleetGuard(flowers, None, refusal, Doorkeeper())
    assert Peer(opened, ACTIVATE, b"", []).status == 412
    assert json.loads(Peer(opened, ACTIVATE, b"", []).sent[1]["body"])["code"] == 2004
    assert Peer(opened, PUSH, pushed(3, [3]), headers(STRANGE)).status == 200
    assert Peer(opened, PUSH, pushed(3, [3]), headers(STRANGE, OWN[0])).status == 412


@given(path=st.sampled_from(ELSEWHERE))
def test_there_is_nothing_else_at_the_address_of_supernodes(guard: FleetGuard, path: str) -> None:
    peer = Peer(guard, path)
    assert (peer.status, peer.read) == (404, 0)


def test_a_message_has_a_limit_and_must_be_readable(guard: FleetGuard) -> None:
    content = PullMessagesRequest(node=Node(node_id=1)).SerializeToString()
    assert Peer(guard, "/v1/fleet/pull-messages", content).status == 200
    assert Peer(guard, PUSH, bytes(LARGEST_MESSAGE + 1)).status == 413
    assert Peer(guard, PUSH, b"\xff").status == 400


def test_a_message_whose_sender_has_gone_is_not_used(guard: FleetGuard) -> None:
    events = [
        {"type": "http.request", "body": pushed(1, [1]), "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(event: dict[str, Any]) -> None:
        sent.append(event)

    scope = {"type": "http", "method": "POST", "path": PUSH, "headers": headers()}
    scope |= {"client": ("192.0.2.7", 5001)}
    asyncio.run(guard(scope, receive, send))
    assert sent[0]["status"] == 413


def test_addresses_are_taken_out_of_a_superlinks_arguments() -> None:
    given = ["--insecure", "--control-api-address", "127.0.0.1:3", "--database", "d"]
    addresses, rest = read_addresses([*given, "--fleet-http-address=0.0.0.0:5"])
    assert addresses == ("127.0.0.1:3", "", "0.0.0.0:5")
    assert rest == ["--insecure", "--database", "d"]


def test_only_this_account_may_open_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "app:9091"
    path.write_text("of a killed process")
    found = open_socket(f"unix:{path}")
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
    found.close()


def test_an_address_in_use_is_named() -> None:
    taken = open_socket("127.0.0.1:0")
    address = f"127.0.0.1:{taken.getsockname()[1]}"
    taken.listen()
    with pytest.raises(ConfigError, match=f"{address}: cannot be listened on"):
        open_socket(address)
    taken.close()


@contextmanager
def listening(app: Any, door: Doorkeeper) -> Iterator[tuple[str, int]]:
    """The address of a server for SuperNodes, in this process."""
    place = open_socket("127.0.0.1:0")
    place.listen()
    server = in_background(uvicorn, app, place, {"log_config": None, "access_log": False})
    door.watch(place.getsockname()[1])
    try:
        yield place.getsockname()
    finally:
        server.should_exit = True


def request(size: int, signed: Headers, path: str = "/v1/fleet/pull-messages") -> bytes:
    """What begins a request with a content of so many bytes."""
    named = [*signed, (b"host", b"here"), (b"content-length", str(size).encode())]
    lines = [f"POST {path} HTTP/1.1".encode(), *(name + b": " + value for name, value in named)]
    return b"\r\n".join([*lines, b"", b""])


@pytest.mark.parametrize(
    "said",
    [b"", b"POST /v1/fleet/push-messages HTTP/1.1\r\nflwr-public-key: "],
    ids=["none", "part"],
)
def test_a_connection_without_a_key_is_closed_and_one_with_a_key_stays(said: bytes) -> None:
    if not hasattr(constant, "FLEET_HTTP_PUBLIC_KEY_HEADER"):
        pytest.skip("needs the newest Flower: make flower-newest")
    door = Doorkeeper(Places(seconds=0.5, pause=0.1))
    guard = FleetGuard(flowers, lambda key: key == KNOWN, refusal, door)
    with listening(guard, door) as address:
        with socket.create_connection(address, timeout=60) as other:
            other.sendall(said)
            assert other.recv(100) == b"", "closed"
        with socket.create_connection(address, timeout=60) as site:
            for _ in range(2):  # Its second request comes later.
                site.sendall(request(0, headers()))
                assert site.recv(15) == b"HTTP/1.1 200 OK"
                time.sleep(1)
                site.recv(1000)


def test_a_site_that_sends_many_messages_at_a_time_takes_its_share_of_memory() -> None:
    """60 requests of a registered site, none of which ended, took 1.2 GiB; others wait for nothing."""
    if not hasattr(constant, "FLEET_HTTP_PUBLIC_KEY_HEADER"):
        pytest.skip("needs the newest Flower: make flower-newest")
    size, keys = LARGEST_MESSAGE - 1, (KNOWN, STRANGE)
    door, room = Doorkeeper(Places(key=60)), Room(key=3 * LARGEST_MESSAGE, seconds=4)
    with ExitStack() as stack:
        guard = FleetGuard(flowers, lambda key: key in keys, refusal, door, room)
        address = stack.enter_context(listening(guard, door))
        before = Process().memory_info().rss
        hostile = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(40)]
        for each in hostile:
            each.setblocking(False)
            each.send(request(size, headers(STRANGE)))
        # All but the last byte, as far as it is taken.
        part, moved, left = bytes(2**18), time.monotonic(), dict.fromkeys(hostile, size - 1)
        while time.monotonic() < moved + 0.5:
            for each in hostile:
                with suppress(BlockingIOError):
                    left[each] -= (sent := each.send(part[: left[each]]))
                    moved = time.monotonic() if sent else moved
        assert Process().memory_info().rss - before < 8 * LARGEST_MESSAGE
        with socket.create_connection(address, 60) as site:
            site.sendall(request(0, headers()))
            assert site.recv(15) == b"HTTP/1.1 200 OK"
        answers = [each for each in hostile if _status(each)]
        assert len(answers) == len(hostile), "none is held for ever"


def _status(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    try:
        return connection.recv(15)
    except ConnectionError:
        return b"closed"


@given(st.lists(st.tuples(st.sampled_from([KNOWN, STRANGE]), st.integers(0, 9)), max_size=30))
def test_no_order_of_requests_takes_more_room_than_there_is(asked: list[tuple[bytes, int]]) -> None:
    room = Room(key=9, whole=12, seconds=600)
    held, most = Counter[bytes](), Counter[object]()

    async def one(key: bytes, size: int) -> None:
        await room.take(key, size)
        held[key] += size
        most[key], most[None] = max(most[key], held[key]), max(most[None], held.total())
        await asyncio.sleep(0)
        held[key] -= size
        room.give(key, size)

    async def every() -> None:
        async with asyncio.TaskGroup() as group:
            for key, size in asked:
                group.create_task(one(key, size))

    with pytest.MonkeyPatch.context() as patch:
        sleep = asyncio.sleep
        patch.setattr(asyncio, "sleep", lambda _: sleep(0))
        asyncio.run(every())
    assert max(most[KNOWN], most[STRANGE]) <= 9
    assert most[None] <= 12
    assert not room._taken
