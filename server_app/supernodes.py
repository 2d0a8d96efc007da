"""The SuperLink's nodes by their keys, which Flower's own commands do not show."""

from __future__ import annotations

from pathlib import Path

from common.errors import ConfigError, RunError

SECONDS = 30.0


def forget(key: Path, address: str, authority: Path | None) -> bool:
    """Take back the key in a site.pub: whoever has it is put out, and not let in again. False where it was not known.

    address: of the Control API, host:port. Raises ConfigError where there is no such key, RunError where nobody answers.
    """
    import grpc
    from cryptography.hazmat.primitives import serialization
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest
    from flwr.proto.control_pb2_grpc import ControlStub
    from flwr.supercore.interceptors import RuntimeVersionClientInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    try:
        known_as = public_key_to_bytes(serialization.load_ssh_public_key(key.read_bytes()))  # type: ignore[arg-type]
    except (OSError, ValueError):
        raise ConfigError(f"{str(key)!r} is no public key of a site, which `coordinator certs` makes") from None
    channel = grpc.insecure_channel(address)
    if authority is not None:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.read_bytes()))
    with channel:
        control = ControlStub(grpc.intercept_channel(channel, RuntimeVersionClientInterceptor(component_name="flwr CLI")))
        try:
            for node in control.ListNodes(ListNodesRequest(), timeout=SECONDS).nodes_info:
                if node.public_key == known_as and node.status != "unregistered":
                    control.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id), timeout=SECONDS)
                    return True
        except grpc.RpcError as error:
            raise RunError(f"the SuperLink at {address} does not answer: {error.code().name}") from None
    return False
