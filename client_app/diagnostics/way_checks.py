"""The way from a site to its coordinator, below TLS: name, address family, port; with a proxy its
own, and its tunnel.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence

from fedsurrogate.client_app.diagnostics.findings import SECONDS, Finding, Link
from fedsurrogate.client_app.diagnostics.proxies import Proxy, ProxyError, open_tunnel

NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
DNS = (
    "check the name, and this machine's DNS; if other machines here know it, the containers have "
    "another DNS server: set dns or extra_hosts for node in compose.yml"
)


def check_way(link: Link, proxy: Proxy | None) -> Iterator[Finding]:
    """The steps to a connection with the coordinator, up to the first that fails.

    Args:
        link: to the coordinator.
        proxy: that gRPC takes; None without one.
    """
    if proxy is None:
        yield from _to(
            link.host,
            link.port,
            "check that the coordinator is running and that this is its Fleet port (usually 9092)",
        )
        return
    for step in _to(proxy.host, proxy.port, f"check the proxy, and the variable {proxy.variable}"):
        yield step
        if step.state == "FAIL":
            return
    yield _tunnel(link, proxy)


def _to(host: str, port: int, if_refused: str) -> Iterator[Finding]:
    try:
        addresses = list(
            dict.fromkeys(
                str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            )
        )
    except (OSError, UnicodeError) as error:
        yield Finding("name", "FAIL", f"{host} has no address ({error})", DNS)
        return
    yield Finding("name", "PASS", f"{host} is {', '.join(sorted(addresses))}")
    yield _port(host, port, addresses, if_refused)


def _port(host: str, port: int, addresses: Sequence[str], if_refused: str) -> Finding:
    failed: dict[str, OSError] = {}
    for address in addresses:
        try:
            socket.create_connection((address, port), SECONDS / min(len(addresses), 4)).close()
        except OSError as error:
            failed[address] = error
    if not failed:
        return Finding("port", "PASS", f"{host} answers on port {port}")
    if len(failed) < len(addresses):
        facts = f"{host} answers on port {port}, but not at {', '.join(sorted(failed))}"
        return Finding(
            "port",
            "WARN",
            facts,
            "connections may begin slowly; remove the address from DNS, or mend its route",
        )
    if all(":" in address for address in failed) and any(
        error.errno in NO_ROUTE for error in failed.values()
    ):
        facts = f"{host} has IPv6 addresses only, and there is no IPv6 route from here"
        remedy = (
            "give this machine and its containers IPv6 (Docker: enable_ipv6), or ask for a "
            "name with an IPv4 address"
        )
        return Finding("port", "FAIL", facts, remedy)
    first = next(iter(failed.values()))
    if all(isinstance(each, ConnectionRefusedError) for each in failed.values()):
        return Finding("port", "FAIL", f"{host} refuses connections to port {port}", if_refused)
    remedy = f"allow outgoing connections to {host}, TCP port {port}; no incoming ones are needed"
    return Finding("port", "FAIL", f"no reply from {host} port {port} ({first})", remedy)


def _tunnel(link: Link, proxy: Proxy) -> Finding:
    target = f"{link.host} port {link.port}"
    try:
        open_tunnel(proxy, link.host, link.port, SECONDS).close()
    except ProxyError as error:
        if error.status == 407:
            what = (
                "refuses this user and password"
                if proxy.credentials
                else "requires a user and password"
            )
            remedy = (
                f"set {proxy.variable}=http://USER:PASSWORD@{proxy.host}:{proxy.port} (PROXY "
                "in the .env of a kit)"
            )
            return Finding("proxy", "FAIL", f"the proxy {proxy} {what}", remedy)
        if error.status in (502, 503, 504):
            remedy = (
                "check the name of the coordinator: the proxy resolves it; and that the "
                "proxy may reach it"
            )
            return Finding(
                "proxy", "FAIL", f"the proxy {proxy} cannot reach {target} ({error})", remedy
            )
        remedy = (
            f"ask its administrators to allow the method CONNECT to {target}, without inspection"
        )
        return Finding(
            "proxy", "FAIL", f"the proxy {proxy} gives no tunnel to {target} ({error})", remedy
        )
    except OSError as error:
        return Finding(
            "proxy",
            "FAIL",
            f"the proxy {proxy} gives no tunnel to {target} ({error})",
            "check the proxy",
        )
    return Finding("proxy", "PASS", f"the proxy {proxy} gives a tunnel to {target}")
