"""Whom the HTTP API for SuperNodes hears, and what is at which address."""

import asyncio
import json
import stat
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message, Metadata
from flwr.proto.node_pb2 import Node
from flwr.supercore import constant
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.v134_fleet import LARGEST_MESSAGE
from fedsurrogate.common.flower.v142_http import (
    FleetGuard,
    open_socket,
    read_addresses,
    without_fleet,
)
from fedsurrogate.server_app.deployment.fleet_guard import refusal

KNOWN, STRANGE = b"key of north", b"key of a stranger"
PUSH, ACTIVATE = "/v1/fleet/push-messages", "/v1/fleet/activate-node"
ELSEWHERE = ["/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/", "/V1/FLEET/x"]


class Peer:
    """Sends one request to an ASGI application; notes what it received and answered."""

    def __init__(
        self, app: Any, path: str, content: bytes = b"", key: bytes | None = KNOWN
    ) -> None:
        headers = [] if key is None else [(b"flwr-public-key", b64encode(key))]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers}
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
    assert header.lower() == "flwr-public-key"
    return FleetGuard(flowers, lambda key: key == KNOWN, refusal)


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


@given(path=st.sampled_from([PUSH, ACTIVATE, "/v1/fleet/", "/v1/fleet/none"]), known=st.booleans())
def test_nothing_of_a_strangers_message_is_received(
    guard: FleetGuard, path: str, known: bool
) -> None:
    peer = Peer(guard, path, b"", KNOWN if known else STRANGE)
    assert (peer.read > 0) == known
    nameless = Peer(guard, path, b"", None)
    assert (nameless.read, nameless.status) == (0, 401)
    if not known:
        assert peer.status == (412 if path == ACTIVATE else 401)


def test_a_site_learns_whether_keys_are_required(guard: FleetGuard) -> None:
    opened = FleetGuard(flowers, None, refusal)
    assert Peer(opened, ACTIVATE, key=None).status == 412
    assert json.loads(Peer(opened, ACTIVATE, key=None).sent[1]["body"])["code"] == 2004
    assert Peer(opened, PUSH, pushed(3, [3]), STRANGE).status == 200


@given(path=st.sampled_from(ELSEWHERE))
def test_there_is_nothing_else_at_the_address_of_supernodes(guard: FleetGuard, path: str) -> None:
    peer = Peer(guard, path)
    assert (peer.status, peer.read) == (404, 0)


@given(path=st.sampled_from([*ELSEWHERE, PUSH, ACTIVATE]))
def test_supernodes_are_heard_at_their_own_address_only(guard: FleetGuard, path: str) -> None:
    assert Peer(without_fleet(flowers), path).status == (404 if path in (PUSH, ACTIVATE) else 200)


def test_a_message_has_a_limit_and_must_be_readable(guard: FleetGuard) -> None:
    content = PullMessagesRequest(node=Node(node_id=1)).SerializeToString()
    assert Peer(guard, "/v1/fleet/pull-messages", content).status == 200
    assert Peer(guard, PUSH, bytes(LARGEST_MESSAGE + 1)).status == 413
    assert Peer(guard, PUSH, b"\xff").status == 400


def test_a_header_that_is_twice_there_or_unreadable_names_no_key(guard: FleetGuard) -> None:
    for named in ([b64encode(KNOWN)] * 2, [b"?"], [b"\xff"]):
        sent = list[dict[str, Any]]()

        async def send(event: dict[str, Any], sent: list[dict[str, Any]] = sent) -> None:
            sent.append(event)

        headers = [(b"flwr-public-key", each) for each in named]
        scope = {"type": "http", "method": "POST", "path": PUSH, "headers": headers}
        asyncio.run(guard(scope, None, send))  # type: ignore[arg-type]
        assert sent[0]["status"] == 401


def test_addresses_are_taken_out_of_a_superlinks_arguments() -> None:
    given = ["--insecure", "--control-api-address", "127.0.0.1:3", "--database", "d"]
    found = read_addresses([*given, "--fleet-http-address=0.0.0.0:5"])
    assert (found.control, found.runtime, found.fleet) == ("127.0.0.1:3", "", "0.0.0.0:5")
    assert found.rest == ["--insecure", "--database", "d", "--host", "127.0.0.1", "--port", "3"]


@pytest.mark.parametrize("option", ["--control-api-address", "--serverappio-api-address"])
@pytest.mark.parametrize("address", ["0.0.0.0:9093", "fl.example.org:9093", "[::]:1"])
def test_apis_without_authentication_stay_on_this_machine(option: str, address: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} .*must be of this machine"):
        read_addresses([option, address])


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
