"""Who has no registered key can neither fill the SuperLink's memory nor hold its connections.

The Fleet API runs in a process of its own, as `coordinator superlink` starts it.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor,
)
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.flower.interface import Places
from fedsurrogate.common.flower.v134_fleet import LARGEST_MESSAGE, guard_fleet
from tests.attacks.sites.signing import Signer, restore_flower
from tests.e2e.processes import free_ports, until

ROOT = Path(__file__).parents[3]
SERVER = """
import importlib, sys
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import (
    NodeAuthServerInterceptor)
from flwr.server.superlink.linkstate.linkstate_factory import LinkStateFactory
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation.noop_federation_manager import NoOpFederationManager
from fedsurrogate.common.flower.interface import Doorkeeper, Places
from fedsurrogate.common.flower import v134_fleet
from fedsurrogate.common.flower.v134_fleet import guard_fleet, limit_fleet
# Connections close after a tenth of the time, so that a test need not wait for a minute.
closing = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")
v134_fleet.LIMITS = tuple(
    (name, value // 10 if name in closing else value) for name, value in v134_fleet.LIMITS)
address, database, key, places = sys.argv[1:5]
guard_fleet(lambda request: "", True)
limit_fleet(Doorkeeper(eval(places)), True)
objects = ObjectStoreFactory()
links = LinkStateFactory(database, NoOpFederationManager(), objects)
for each in key.split():
    links.state().create_node("", "", bytes.fromhex(each), 30.0)
superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")
server = superlink._run_fleet_api_grpc_rere(
    address, links, objects, True, None, [NodeAuthServerInterceptor(links)])
print("ready", flush=True)
sys.stdin.read()
"""
MIB = 2**20


@dataclass(frozen=True)
class Server:
    """A Fleet API in another process, and the keys of its two registered nodes."""

    process: subprocess.Popen[str]
    address: str
    secret: ec.EllipticCurvePrivateKey
    other: ec.EllipticCurvePrivateKey

    def status(self, field: str) -> int:
        """Bytes that the kernel reports for the process."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(rf"{field}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) * 1024

    def call(self, channel: grpc.Channel, method: str, content: bytes) -> grpc.StatusCode:
        """The status of one call with these bytes as its message."""
        raw = channel.unary_unary(f"/flwr.proto.Fleet/{method}", bytes, bytes)
        with pytest.raises(grpc.RpcError) as refused:
            raw(content, timeout=60)
        code: grpc.StatusCode = refused.value.code()
        return code


@contextmanager
def fleet_api(folder: Path, places: Places) -> Iterator[Server]:
    """A Fleet API with these limits on connections."""
    secrets = [ec.generate_private_key(ec.SECP384R1()) for _ in "12"]
    address = f"127.0.0.1:{free_ports(1)[0]}"
    keys = " ".join(public_key_to_bytes(each.public_key()).hex() for each in secrets)
    command = [sys.executable, "-c", SERVER, address, str(folder / "state.db"), keys, repr(places)]
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Server(process, address, *secrets)
        process.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with fleet_api(tmp_path_factory.mktemp("fleet"), Places()) as found:
        yield found


def channel_of(server: Server, secret: ec.EllipticCurvePrivateKey | None) -> grpc.Channel:
    """One with a connection of its own, which signs calls with a key if it has one."""
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.insecure_channel(server.address, unlimited)
    if secret is None:
        return channel
    return grpc.intercept_channel(channel, Signer(secret))


@pytest.mark.parametrize("method", ["PushMessages", "PushObject", "ActivateNode", "RegisterNode"])
@pytest.mark.parametrize("signed", [False, True])
def test_a_stranger_fills_no_memory(server: Server, method: str, signed: bool) -> None:
    """Two messages of 150 MiB took 659 MiB before their signature was missed."""
    channel = channel_of(server, ec.generate_private_key(ec.SECP384R1()) if signed else None)
    before = server.status("VmRSS")
    # From now on, the peak is that of these calls.
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    for _ in range(2):
        assert server.call(channel, method, bytes(150 * MIB)) in (
            grpc.StatusCode.UNAUTHENTICATED,
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    channel.close()
    assert server.status("VmHWM") - before < 30 * MIB


def test_a_registered_node_is_heard_and_its_messages_are_limited(server: Server) -> None:
    channel = channel_of(server, server.secret)
    before = server.status("VmRSS")
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5")
    too_large = server.call(channel, "PushMessages", bytes(150 * MIB))
    assert too_large == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.status("VmHWM") - before < 30 * MIB
    # Past the checks: Flower's own code answers.
    public = public_key_to_bytes(server.secret.public_key())
    sound = ActivateNodeRequest(public_key=public, heartbeat_interval=0.0)
    assert server.call(channel, "ActivateNode", sound.SerializeToString()) in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
    )
    channel.close()
    assert LARGEST_MESSAGE > 2 * 5 * MIB, "a piece of an array, as Flower cuts them"


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed(server: Server) -> None:
    """One that sends nothing; and one that answers like any client, and makes no call, which stayed
    open for ever.
    """
    host, port = server.address.split(":")
    silent = socket.create_connection((host, int(port)))
    silent.setblocking(False)
    states: list[grpc.ChannelConnectivity] = []
    with grpc.insecure_channel(server.address) as idle:
        idle.subscribe(states.append, try_to_connect=True)
        until(lambda: grpc.ChannelConnectivity.READY in states)
        until(lambda: states[-1] == grpc.ChannelConnectivity.IDLE)
    until(lambda: _closed(silent))


def _closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(2**16)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@dataclass(frozen=True)
class Stub:
    """A database that knows one key."""

    known: bytes

    def state(self) -> Stub:
        return self

    def get_node_id_by_public_key(self, key: bytes) -> int | None:
        return 7 if key == self.known else None


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    restore_flower(monkeypatch)
    guard_fleet(lambda _: "", registered_only=True)


SECRET = ec.generate_private_key(ec.SECP384R1())
KEY = public_key_to_bytes(SECRET.public_key())
HEADERS = st.lists(
    st.tuples(
        st.sampled_from([PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, "other"]),
        st.one_of(
            st.binary(max_size=300),
            st.text(max_size=40),
            st.sampled_from([KEY, KEY[:-5], "2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00"]),
        ),
    ),
    max_size=5,
)
# All three, so that each check is reached, and one or more that cannot be read.
COMPLETE = st.tuples(
    st.tuples(st.just(PUBLIC_KEY_HEADER), st.sampled_from([KEY, KEY[:-5], b"", "text", KEY.hex()])),
    st.tuples(st.just(SIGNATURE_HEADER), st.sampled_from([b"", bytes(103), "text"])),
    st.tuples(
        st.just(TIMESTAMP_HEADER),
        st.one_of(
            st.text(max_size=20),
            st.binary(max_size=20),
            st.sampled_from(["2026-01-01T00:00:00", "2026-01-01T00:00:00+00:00", ""]),
        ),
    ),
).map(list)
METHODS = st.sampled_from(["PushMessages", "PullMessages", "ActivateNode", "RegisterNode", "x"])


@pytest.mark.usefixtures("guarded")
def test_no_metadata_without_a_valid_signature_lets_a_message_in() -> None:
    @settings(max_examples=200, deadline=None)
    @given(st.one_of(HEADERS, COMPLETE), METHODS)
    def refused(headers: list[Any], method: str) -> None:
        call = _Details(f"/flwr.proto.Fleet/{method}", headers)
        handler = NodeAuthServerInterceptor(Stub(KEY)).intercept_service(_handler, call)  # type: ignore[arg-type]
        assert handler.request_streaming, "the message would be received first"
        assert handler.unary_unary is None

    refused()


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize("known", [True, False])
def test_a_signed_call_of_a_registered_key_alone_is_received(known: bool) -> None:
    headers: list[Any] = []
    signer = Signer(SECRET)
    signer.intercept_unary_unary(
        lambda details, request: headers.extend(details.metadata),
        _ClientDetails("/flwr.proto.Fleet/PullMessages", []),
        PullMessagesRequest(),
    )
    link: Any = Stub(KEY if known else b"another")
    call = _Details("/flwr.proto.Fleet/PullMessages", headers)
    handler = NodeAuthServerInterceptor(link).intercept_service(_handler, call)
    assert handler.request_streaming is not known


@dataclass(frozen=True)
class _Details:
    method: str
    invocation_metadata: list[Any]


class _ClientDetails(NamedTuple):
    method: str
    metadata: list[Any]


def _handler(_: object) -> grpc.RpcMethodHandler:
    accepted: Callable[..., Any] = lambda request, context: request  # noqa: E731
    return grpc.unary_unary_rpc_method_handler(accepted)
