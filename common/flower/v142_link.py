"""What a SuperLink of Flower 1.42 knows, over HTTP: its runs, its nodes, and their keys."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import UNIX, is_loopback
from fedsurrogate.common.flower.interface import Control, Standing, UnreachableError
from fedsurrogate.common.flower.v134_link import SECONDS, Control134, Link134

if TYPE_CHECKING:
    import httpx
    from cryptography.hazmat.primitives.asymmetric import ec

AGAIN = 0.3
"""Seconds between two attempts to reach a SuperLink that starts."""


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
            address,
            pem is None,
            pem,
            [RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
        bypass_proxy(client, address)
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
    ) -> Standing:
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

        def refusal(*signers: NodeAuthHttpInterceptor) -> int:
            """Flower's code, or that of HTTP; 0 without an answer."""
            with FleetHttpClient.from_server_address(
                address, authority is None, authority, list(signers)
            ) as client:
                client._client.timeout = httpx.Timeout(seconds)
                try:
                    client.ActivateNode(request)
                except httpx.HTTPStatusError as error:
                    return code(error)
                except (httpx.HTTPError, ValueError):
                    pass
                return 0

        if (unsigned := refusal()) != httpx.codes.UNAUTHORIZED:
            is_open = unsigned == ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED
            return "open" if is_open else "silent"
        by_code: dict[int, Standing] = {
            ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL: "registered",
            ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: "unknown",
            httpx.codes.UNAUTHORIZED: "clock",
        }
        return by_code.get(refusal(NodeAuthHttpInterceptor(key, key.public_key())), "silent")


class Control142(Control134):
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


def bypass_proxy(client: Any, address: str) -> None:
    """Let a client of Flower's HTTP APIs use no proxy to an address of this machine."""
    if is_loopback(address):
        client._client._mounts.clear()


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
