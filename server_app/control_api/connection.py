"""A connection to the Control API of a SuperLink."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.flower_environment import no_proxy_option

SECONDS = 30.0


class UnreachableError(RunError):
    """No SuperLink answers at the address."""


@contextmanager
def control_api(address: str, authority: Path | None) -> Iterator[Any]:
    """A stub of the Control API at host:port. authority: ca.crt, None without TLS. Raises RunError if a request fails."""
    import grpc
    from flwr.proto.control_pb2_grpc import ControlStub
    from flwr.supercore.interceptors import RuntimeVersionClientInterceptor

    options = no_proxy_option(address)
    channel = grpc.insecure_channel(address, options)
    if authority is not None:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(authority.read_bytes()), options)
    stub: Callable[..., Any] = ControlStub
    with channel:
        try:
            yield stub(grpc.intercept_channel(channel, RuntimeVersionClientInterceptor(component_name="flwr CLI")))
        except grpc.RpcError as error:
            why = f"{error.code().name}: {error.details()}"[:300]
            kind = UnreachableError if error.code() == grpc.StatusCode.UNAVAILABLE else RunError
            raise kind(f"the SuperLink at {address} has failed a request ({why})") from None
