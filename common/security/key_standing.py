"""Check whether a SuperLink has registered a site's key, without joining the federation."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from common.errors import ConfigError

Standing = Literal["registered", "unknown", "clock", "open", "silent"]


def key_standing(address: str, authority: bytes | None, key_file: Path, seconds: float = 10.0) -> Standing:
    """The status of a site's private key (an OpenSSH file on a NIST curve) at the SuperLink `address` (host:port).

    "clock": the clocks differ too much for its signature. "open": the SuperLink requires no keys. "silent": no useful
    reply. authority: PEM of the CA that signed the SuperLink's certificate, None without TLS. Raises ConfigError for an
    unusable key file.

    The check requests an activation with an invalid heartbeat. The SuperLink looks up the key before it refuses this. So
    nothing changes there, and the site's SuperNode may be running or not.
    """
    import grpc
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.client.grpc_rere_client.node_auth_client_interceptor import NodeAuthClientInterceptor
    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.proto.fleet_pb2_grpc import FleetStub
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    try:
        key = load_ssh_private_key(key_file.expanduser().read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{key_file} cannot be read as a private key in OpenSSH format ({type(error).__name__})") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{key_file} is not a key on a NIST curve; make one with `ssh-keygen -t ecdsa -b 384`")
    request = ActivateNodeRequest(public_key=public_key_to_bytes(key.public_key()), heartbeat_interval=0.0)

    def refusal(channel: grpc.Channel) -> grpc.StatusCode | None:
        try:
            FleetStub(channel).ActivateNode(request, timeout=seconds)
        except grpc.RpcError as error:
            code: grpc.StatusCode = error.code()
            return code
        return None

    channel = grpc.insecure_channel(address)
    if authority is not None:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority))
    with channel:
        if (unsigned := refusal(channel)) != grpc.StatusCode.UNAUTHENTICATED:
            return "open" if unsigned == grpc.StatusCode.FAILED_PRECONDITION else "silent"
        signed = refusal(grpc.intercept_channel(channel, NodeAuthClientInterceptor(key, key.public_key())))
    by_status: dict[grpc.StatusCode | None, Standing] = {
        grpc.StatusCode.INVALID_ARGUMENT: "registered",
        grpc.StatusCode.FAILED_PRECONDITION: "unknown",
        grpc.StatusCode.UNAUTHENTICATED: "clock",
    }
    return by_status.get(signed, "silent")
