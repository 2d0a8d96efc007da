"""What a SuperLink of Flower 1.34 knows, over gRPC: its runs, its nodes, and their keys."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.environment import UNIX, no_proxy_option
from fedsurrogate.common.flower.interface import (
    Control,
    FlowerLink,
    FlowerNode,
    FlowerRun,
    Standing,
    UnreachableError,
)

if TYPE_CHECKING:
    import grpc
    from cryptography.hazmat.primitives.asymmetric import ec

    from fedsurrogate.common.settings.flat import Scalar

SECONDS = 30.0
# The SuperLink packs its own app first, to compare.
START_SECONDS = 300.0
"""How long a request to the Control API may take."""


class Link134(FlowerLink):
    """Connections to a SuperLink of Flower 1.34."""

    @contextmanager
    def control(self, address: str, authority: Path | None) -> Iterator[Control]:
        """The SuperLink refuses clients that do not name their version."""
        import grpc
        from flwr.proto.control_pb2_grpc import ControlStub
        from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

        stub: Callable[..., Any] = ControlStub
        version = RuntimeVersionClientInterceptor(component_name="flwr CLI")
        pem = None if authority is None or address.startswith(UNIX) else authority.read_bytes()
        with _channel(address, pem, no_proxy_option(address)) as channel:
            try:
                yield Control134(stub(grpc.intercept_channel(channel, version)))
            except grpc.RpcError as error:
                why = f"{error.code().name}: {error.details()}"[:300]
                kind = UnreachableError if error.code() == grpc.StatusCode.UNAVAILABLE else RunError
                raise kind(f"the SuperLink at {address} has failed a request ({why})") from None

    def key_bytes(self, key: ec.EllipticCurvePublicKey) -> bytes:
        """PEM."""
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        return public_key_to_bytes(key)

    def read_key(self, stored: bytes) -> ec.EllipticCurvePublicKey:
        """From PEM."""
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key

        return bytes_to_public_key(stored)

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
        import grpc
        from flwr.client.grpc_rere_client import node_auth_client_interceptor
        from flwr.proto.fleet_pb2 import ActivateNodeRequest
        from flwr.proto.fleet_pb2_grpc import FleetStub

        public = self.key_bytes(key.public_key())
        request = ActivateNodeRequest(public_key=public, heartbeat_interval=0.0)
        signer = node_auth_client_interceptor.NodeAuthClientInterceptor(key, key.public_key())

        def refusal(channel: grpc.Channel) -> grpc.StatusCode | None:
            try:
                FleetStub(channel).ActivateNode(request, timeout=seconds)
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
            return None

        with _channel(address, authority) as channel:
            if (unsigned := refusal(channel)) != grpc.StatusCode.UNAUTHENTICATED:
                return "open" if unsigned == grpc.StatusCode.FAILED_PRECONDITION else "silent"
            signed = refusal(grpc.intercept_channel(channel, signer))
        by_status: dict[grpc.StatusCode | None, Standing] = {
            grpc.StatusCode.INVALID_ARGUMENT: "registered",
            grpc.StatusCode.FAILED_PRECONDITION: "unknown",
            grpc.StatusCode.UNAUTHENTICATED: "clock",
        }
        return by_status.get(signed, "silent")


class Control134(Control):
    """Requests over a stub of the Control API."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def runs(self) -> list[FlowerRun]:
        """In no order."""
        from flwr.proto.control_pb2 import ListRunsRequest

        reply = self._stub.ListRuns(ListRunsRequest(), timeout=SECONDS)
        return [_run(number, each) for number, each in reply.run_dict.items()]

    def start(self, app: Path, settings: Mapping[str, Scalar], sites: Mapping[str, Scalar]) -> str:
        """As `flwr run` does."""
        from flwr.cli.build import build_fab_from_disk
        from flwr.common.serde import fab_to_proto, user_config_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab
        from flwr.supercore.utils import simulation_config_from_json

        packed = build_fab_from_disk(app)
        fab = Fab(hashlib.sha256(packed).hexdigest(), packed, {})
        request = StartRunRequest(
            fab=fab_to_proto(fab),
            override_config=user_config_to_proto(dict(settings)),
            override_federation_config=simulation_config_from_json(dict(sites)) if sites else None,
        )
        return str(self._stub.StartRun(request, timeout=START_SECONDS).run_id)

    def log(self, run: str) -> str:
        """In pieces."""
        from flwr.proto.control_pb2 import StreamLogsRequest

        request = StreamLogsRequest(run_id=int(run))
        pieces = self._stub.StreamLogs(request, timeout=SECONDS)
        return "".join(piece.log_output for piece in pieces)

    def stop(self, run: str) -> bool:
        """The SuperLink refuses to stop a run that has ended."""
        from flwr.proto.control_pb2 import StopRunRequest

        return bool(self._stub.StopRun(StopRunRequest(run_id=int(run)), timeout=SECONDS).success)

    def nodes(self, wait: float = 0.0) -> list[FlowerNode]:
        """Also those whose key was taken back."""
        from flwr.proto.control_pb2 import ListNodesRequest

        seconds = wait or SECONDS
        reply = self._stub.ListNodes(ListNodesRequest(), timeout=seconds, wait_for_ready=wait > 0)
        return [_node(each) for each in reply.nodes_info]

    def register(self, key: bytes) -> int:
        """The SuperLink refuses a key that it has ever known."""
        from flwr.proto.control_pb2 import RegisterNodeRequest

        request = RegisterNodeRequest(public_key=key)
        return int(self._stub.RegisterNode(request, timeout=SECONDS).node_id)

    def unregister(self, node: int) -> None:
        """Its status is "unregistered" from then on."""
        from flwr.proto.control_pb2 import UnregisterNodeRequest

        self._stub.UnregisterNode(UnregisterNodeRequest(node_id=node), timeout=SECONDS)


def _channel(
    address: str,
    authority: bytes | None,
    options: list[tuple[str, int]] | None = None,
) -> grpc.Channel:
    import grpc

    if authority is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(authority), options)


def _run(number: int, run: Any) -> FlowerRun:
    status = ":".join(part for part in (run.status.status, run.status.sub_status) if part)
    begun, ended = _time(run.pending_at), _time(run.finished_at)
    return FlowerRun(str(number), status or "unknown", begun, ended)


def _node(node: Any) -> FlowerNode:
    return FlowerNode(
        node.node_id,
        node.public_key,
        online=node.status == "online",
        revoked=node.status == "unregistered",
        activated=_time(node.last_activated_at),
        deactivated=_time(node.last_deactivated_at),
        online_until=node.online_until,
        heartbeat_interval=node.heartbeat_interval,
    )


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
