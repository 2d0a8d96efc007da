"""A client of the Fleet API over gRPC that signs its calls, as SuperNodes of Flower 1.34 do. Later
versions hear them, and have no such client of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import PUBLIC_KEY_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER
from flwr.server.superlink.fleet.grpc_rere import node_auth_server_interceptor as flowers
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message


class Signer(grpc.UnaryUnaryClientInterceptor):  # type: ignore[misc]
    """Signs each call with a node's key."""

    def __init__(self, secret: ec.EllipticCurvePrivateKey) -> None:
        self._secret = secret

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], client_call_details: Any, request: Any
    ) -> Any:
        """The call with the key, the time, and its signature in its metadata."""
        time = now().isoformat()
        metadata = [
            *(client_call_details.metadata or ()),
            (PUBLIC_KEY_HEADER, public_key_to_bytes(self._secret.public_key())),
            (TIMESTAMP_HEADER, time),
            (SIGNATURE_HEADER, sign_message(self._secret, time.encode())),
        ]
        return continuation(client_call_details._replace(metadata=metadata), request)


def restore_flower(monkeypatch: pytest.MonkeyPatch) -> None:
    """What guards of Flower's own replace is Flower's again after the test."""
    for place, name in (
        (flowers.NodeAuthServerInterceptor, "_wrap_method_handler"),
        (flowers.NodeAuthServerInterceptor, "intercept_service"),
        (flowers, "_unary_unary_rpc_terminator"),
    ):
        monkeypatch.setattr(place, name, getattr(place, name))
