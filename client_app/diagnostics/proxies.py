"""HTTP proxies between a site and its coordinator: which one gRPC takes, and connections through
it.

gRPC reads `grpc_proxy`, `https_proxy` and `http_proxy` in this order, in small letters only, and
asks the proxy with the method CONNECT for a tunnel to the coordinator. `no_grpc_proxy`, or else
`no_proxy`, lists hosts that need no proxy.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower.environment import PROXIES

MOST_BYTES = 65536


@dataclass(frozen=True)
class Proxy:
    """A proxy.

    Attributes:
        variable: of the environment, that names it.
        host: of the proxy.
        port: of the proxy.
        credentials: "user:password", "" without any.
    """

    variable: str
    host: str
    port: int
    credentials: str = ""

    def __str__(self) -> str:
        """Without the password."""
        return f"{self.host}:{self.port} ({self.variable})"


class ProxyError(OSError):
    """The proxy gives no tunnel.

    Args:
        status: of its reply, 0 if that is not HTTP.
        reply: its first line.
    """

    def __init__(self, status: int, reply: str) -> None:
        super().__init__(f"the proxy answered {reply!r}")
        self.status = status


def proxy_for(host: str, environment: Mapping[str, str]) -> Proxy | None:
    """The proxy by which gRPC reaches a host.

    Args:
        host: of the coordinator.
        environment: variables of the process.

    Returns:
        The proxy; None without one.

    Raises:
        ConfigError: for one that gRPC cannot use.

    Example:
        >>> str(proxy_for("fl.example.org", {"https_proxy": "http://proxy.example.org:3128"}))
        'proxy.example.org:3128 (https_proxy)'
    """
    name = next((name for name in PROXIES if name in environment), "")
    if not (name and environment[name]) or _is_exempt(host, environment):
        return None
    try:
        url = urlsplit(environment[name])
        port = url.port or 80
    except ValueError:
        url, port = urlsplit(""), 0
    if url.scheme != "http" or not url.hostname:
        shown = environment[name].rpartition("@")[2]
        raise ConfigError(
            f"{name} = '{shown}': gRPC takes http://HOST:PORT or http://USER:PASSWORD@HOST:PORT "
            "only"
        )
    credentials = f"{unquote(url.username)}:{unquote(url.password or '')}" if url.username else ""
    return Proxy(name, url.hostname, port, credentials)


def capitals_only(environment: Mapping[str, str]) -> str:
    """A variable that names a proxy in capital letters, which gRPC does not read; empty if there is
    none.
    """
    if any(name in environment for name in PROXIES):
        return ""
    return next((name.upper() for name in PROXIES if environment.get(name.upper())), "")


def open_tunnel(proxy: Proxy | None, host: str, port: int, seconds: float) -> socket.socket:
    """A connection to the coordinator.

    Args:
        proxy: through which it goes; None for a direct one.
        host: of the coordinator.
        port: of the coordinator.
        seconds: to wait for each step.

    Raises:
        ProxyError: if the proxy gives no tunnel.
        OSError: if the connection fails.
    """
    if proxy is None:
        return socket.create_connection((host, port), seconds)
    tunnel = socket.create_connection((proxy.host, proxy.port), seconds)
    try:
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if proxy.credentials:
            lines.append(
                "Proxy-Authorization: Basic "
                f"{base64.b64encode(proxy.credentials.encode()).decode()}"
            )
        tunnel.settimeout(seconds)
        tunnel.sendall("\r\n".join([*lines, "", ""]).encode())
        reply = b""
        while b"\r\n\r\n" not in reply:
            # One byte at a time: what follows belongs to the coordinator.
            if not (byte := tunnel.recv(1)) or len(reply) > MOST_BYTES:
                break
            reply += byte
        line = reply.split(b"\r\n")[0].decode("latin-1")[:80]
        words = line.split()
        status = (
            int(words[1])
            if line.startswith("HTTP/") and len(words) > 1 and words[1].isdecimal()
            else 0
        )
        if status != 200:
            raise ProxyError(status, line)
    except BaseException:
        tunnel.close()
        raise
    return tunnel


def _is_exempt(host: str, environment: Mapping[str, str]) -> bool:
    """Whether gRPC takes no proxy to a host."""
    listed = environment.get("no_grpc_proxy", environment.get("no_proxy", ""))
    for entry in filter(None, (part.strip() for part in listed.split(","))):
        if host.lower().endswith(entry.lower()):
            return True
        try:
            if ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False):
                return True
        except ValueError:
            continue
    return False
