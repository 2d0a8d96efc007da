"""Checks of the connection from a site to its coordinator, step by step up to the first that fails: the
name, the port, a proxy and its tunnel, TLS, packets, and the site's certificate and key.
"""

from __future__ import annotations

import base64
import errno
import ipaddress
import os
import socket
import ssl
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.escapes import human_seconds
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.environment import PROXIES
from fedsurrogate.common.security.enrolment import CERTIFICATE, read_node_key

SECONDS = 10.0
State = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Attributes:
        what: was checked.
        state: whether it is good enough.
        found: facts, in one line.
        remedy: what to do, in one line; empty if nothing.
    """

    what: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Link:
    """Address of the coordinator, and the files by which both authenticate each other; as for `site
    join`.

    Attributes:
        host: of the coordinator.
        port: of its Fleet API.
        authority: file of the certificate that signs the coordinator's; None without TLS.
        key: file of this site's private key; None without one.
    """

    host: str
    port: int
    authority: Path | None
    key: Path | None

    @classmethod
    def parse(cls, address: str, authority: Path | None, key: Path | None) -> Link:
        """The link to an address; files as for `site join`.

        Args:
            address: host:port.
            authority: see the attribute.
            key: see the attribute.

        Raises:
            ConfigError: for another form of address.

        Example:
            >>> Link.parse("fl.example.org:9092", None, None).port
            9092
        """
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
            raise ConfigError(
                f"--superlink {address!r}: must be HOST:PORT, such as fl.example.org:9092"
            )
        return cls(host.strip("[]"), int(port), authority, key)


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
        status = 0
        if line.startswith("HTTP/") and len(words) > 1 and words[1].isdecimal():
            status = int(words[1])
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


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, UNKNOWN, ACK = 4, 6, 0xFA, 1
# Several packets; a frame may have 16,384 bytes.
PROBE = 12_000
MARK = b"fedprobe"


def large_packets_arrive(stream: socket.socket | ssl.SSLSocket, seconds: float) -> bool | None:
    """Whether large packets arrive.

    Send a frame of a kind that HTTP/2 servers ignore, then a ping, and wait for the answer to the
    ping. Raises no OSError.

    Args:
        stream: to the coordinator.
        seconds: to wait for an answer.

    Returns:
        Whether the answer came; None if the server does not speak HTTP/2.
    """
    stream.settimeout(seconds)
    with suppress(OSError):
        stream.sendall(PREFACE + _frame(SETTINGS, 0, b""))
        # The server speaks first; its settings are small.
        if _await(stream, SETTINGS, 0) is None:
            return None
        stream.sendall(
            _frame(SETTINGS, ACK, b"") + _frame(UNKNOWN, 0, bytes(PROBE)) + _frame(PING, 0, MARK)
        )
        return _await(stream, PING, ACK) == MARK
    return False


def _frame(kind: int, flags: int, content: bytes) -> bytes:
    return struct.pack(">I", len(content))[1:] + bytes([kind, flags]) + bytes(4) + content


def _await(stream: socket.socket, kind: int, flags: int) -> bytes | None:
    """The content of the next frame of this kind; None if the stream ends, or is not HTTP/2."""
    while True:
        head = _exactly(stream, 9)
        if head is None:
            return None
        length = int.from_bytes(head[:3], "big")
        if length > 2**14 or head[3] > 9:
            return None
        content = _exactly(stream, length)
        if content is None or (head[3], head[4] & ACK) == (kind, flags):
            return content


def _exactly(stream: socket.socket, count: int) -> bytes | None:
    content = b""
    while len(content) < count:
        if not (part := stream.recv(count - len(content))):
            return None
        content += part
    return content


PROBE_SECONDS = 3.0
SOON = timedelta(days=30)
NO_ROUTE = (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
DNS = (
    "check the name, and this machine's DNS; if other machines here know it, the containers have "
    "another DNS server: set dns or extra_hosts for node in compose.yml"
)
FLEET = "check that the coordinator is running and that this is its Fleet port (usually 9092)"
INTERCEPTED = "that no proxy on the path intercepts TLS"
CLOCK = "check this machine's clock"
# Seconds by which a clock may differ that is no reason for a refusal: Flower allows 305 and 5.
OLDEST, AHEAD = 300.0, 3.0
RENEW_SITE = (
    "renew it: `site enrol SITE --hospital NAME --contact ADDRESS` in the folder above this site's, "
    "and send the file SITE.csr to the coordinator"
)
RENEW = "ask the coordinator to renew it"
# What to do about a certificate that is refused, by words of the reason.
REFUSED = {
    "expired": f"{RENEW} (`coordinator sites certs FOLDER --renew`), and {CLOCK}",
    "not yet valid": CLOCK,
    "mismatch": "use the name in the certificate, or ask the coordinator: `coordinator sites certs FOLDER "
    "--renew --host NAME`",
    "": "take ca.crt from the site kit again; it is of another federation, or the coordinator has a new "
    "authority",
}
STANDING = {
    "registered": Finding(
        "key", "PASS", "the coordinator knows this site's key, and the clocks agree"
    ),
    "unknown": Finding(
        "key", "FAIL", "the coordinator does not know this site's key",
        "ask the coordinator to add it with `coordinator sites register`; a key that it has revoked stays "
        "barred, and this site then needs a new kit",
    ),
    "expired": Finding(
        "key", "FAIL", "the time has ended for which the coordinator accepts this site's key", RENEW_SITE,
    ),
    "refused": Finding(
        "key", "FAIL", "the coordinator refuses this site's signature", "take site.key from the site kit",
    ),
    "open": Finding(
        "key", "WARN", "the coordinator requires no keys of sites",
        "ask to start it with --enable-supernode-auth",
    ),
    "silent": Finding(
        "key", "FAIL", "the reply is not that of a coordinator to this site's Flower",
        "check the port: a coordinator has one for sites of Flower 1.34 (gRPC), and may have another for "
        "sites of 1.42 (HTTP)",
    ),
}  # fmt: skip


class _FailedError(Exception):
    """A step that has failed; no later one is tried."""

    def __init__(self, what: str, found: str, remedy: str) -> None:
        super().__init__(found)
        self.finding = Finding(what, "FAIL", found, remedy)


def check_link(link: Link) -> Iterator[Finding]:
    """Check each step to the coordinator; stop at the first that fails. Takes the proxy that gRPC
    takes.
    """
    try:
        yield from _steps(link)
    except _FailedError as failed:
        yield failed.finding
        if failed.finding.what in ("name", "port") and (ignored := capitals_only(os.environ)):
            facts = f"{ignored} is in capital letters, which gRPC does not read"
            setting = f"set {ignored.lower()}, in small letters (PROXY in a kit's .env)"
            yield Finding("proxy", "WARN", facts, f"{setting}, if this site needs the proxy")


def _steps(link: Link) -> Iterator[Finding]:
    try:
        proxy = proxy_for(link.host, os.environ)
    except ConfigError as error:
        remedy = "correct the variable, or remove it if this site needs no proxy"
        raise _FailedError("proxy", str(error), remedy) from None
    if proxy is None:
        yield from _reached(link.host, link.port, FLEET)
    else:
        remedy = f"check the proxy, and the variable {proxy.variable}"
        yield from _reached(proxy.host, proxy.port, remedy)
        yield _tunnel(link, proxy)
    if link.authority is not None:
        yield from _secured(link, link.authority, proxy)
    elif _presented(link, proxy):
        facts = "the coordinator requires TLS, and no certificate is given"
        remedy = "give --root-certificates with ca.crt of the site kit, and leave --insecure out"
        raise _FailedError("TLS", facts, remedy)
    else:
        facts = "not used: anyone on the network path can read and change all messages"
        remedy = "give --root-certificates; `coordinator sites certs` makes them"
        yield Finding("TLS", "WARN", facts, remedy)
    if link.key is None:
        remedy = "give --auth-supernode-private-key; without it the coordinator cannot identify "
        yield Finding("key", "WARN", "no key of this site is given", f"{remedy}registered sites")
        return
    if (certificate := check_certificate(link.key)) is not None:
        yield certificate
    if certificate is None or certificate.state != "FAIL":
        yield _standing(link, link.key)


def _reached(host: str, port: int, if_refused: str) -> Iterator[Finding]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise _FailedError("name", f"{host} has no address ({error})", DNS) from None
    addresses = sorted({str(each[4][0]) for each in found})
    yield Finding("name", "PASS", f"{host} is {', '.join(addresses)}")
    failed: dict[str, OSError] = {}
    for address in addresses:
        try:
            socket.create_connection((address, port), SECONDS / min(len(addresses), 4)).close()
        except OSError as error:
            failed[address] = error
    if not failed:
        yield Finding("port", "PASS", f"{host} answers on port {port}")
    elif len(failed) < len(addresses):
        facts = f"{host} answers on port {port}, but not at {', '.join(failed)}"
        remedy = "connections may begin slowly; remove the address from DNS, or mend its route"
        yield Finding("port", "WARN", facts, remedy)
    elif all(":" in address for address in failed) and any(
        error.errno in NO_ROUTE for error in failed.values()
    ):
        facts = f"{host} has IPv6 addresses only, and there is no IPv6 route from here"
        remedy = (
            "give this machine and its containers IPv6 (Docker: enable_ipv6), or ask for a name "
        )
        raise _FailedError("port", facts, f"{remedy}with an IPv4 address")
    elif all(isinstance(each, ConnectionRefusedError) for each in failed.values()):
        raise _FailedError("port", f"{host} refuses connections to port {port}", if_refused)
    else:
        facts = f"no reply from {host} port {port} ({next(iter(failed.values()))})"
        remedy = (
            f"allow outgoing connections to {host}, TCP port {port}; no incoming ones are needed"
        )
        raise _FailedError("port", facts, remedy)


def _tunnel(link: Link, proxy: Proxy) -> Finding:
    target = f"{link.host} port {link.port}"
    try:
        open_tunnel(proxy, link.host, link.port, SECONDS).close()
    except OSError as error:
        facts, status = f"gives no tunnel to {target} ({error})", getattr(error, "status", None)
        remedy = (
            f"ask its administrators to allow the method CONNECT to {target}, without inspection"
        )
        if not isinstance(error, ProxyError):
            remedy = "check the proxy"
        elif status == 407:
            given = "refuses this user and password"
            facts = given if proxy.credentials else "requires a user and password"
            place = f"http://USER:PASSWORD@{proxy.host}:{proxy.port}"
            remedy = f"set {proxy.variable}={place} (PROXY in the .env of a kit)"
        elif status in (502, 503, 504):
            facts = f"cannot reach {target} ({error})"
            remedy = (
                "check the name of the coordinator: the proxy resolves it; and that the proxy may "
            )
            remedy += "reach it"
        raise _FailedError("proxy", f"the proxy {proxy} {facts}", remedy) from None
    return Finding("proxy", "PASS", f"the proxy {proxy} gives a tunnel to {target}")


def _secured(link: Link, authority: Path, proxy: Proxy | None) -> Iterator[Finding]:
    """The handshake, and large packets over the same connection."""
    place = f"{link.host} port {link.port}"
    try:
        context = ssl.create_default_context(cafile=str(authority.expanduser()))
    except (OSError, ssl.SSLError) as error:
        why = f"{authority} cannot be read as a certificate ({error.strerror or error})"
        raise _FailedError("TLS", why, "take ca.crt from the site kit") from None
    context.set_alpn_protocols(["h2"])
    try:
        with open_tunnel(proxy, link.host, link.port, SECONDS) as plain:
            plain.settimeout(SECONDS)
            with context.wrap_socket(plain, server_hostname=link.host) as secured:
                shown = secured.getpeercert() or {}
                arrive = large_packets_arrive(secured, SECONDS)
    except ssl.SSLCertVerificationError as error:
        if device := inspector(_presented(link, proxy), authority):
            facts = (
                f"a device on the way inspects TLS: it presents a certificate of {device!r} for "
            )
            remedy = "ask the administrators of this network to exempt {} from TLS inspection"
            raise _FailedError("TLS", facts + link.host, remedy.format(place)) from None
        why = error.verify_message
        remedy = next(text for words, text in REFUSED.items() if words in why)
        raise _FailedError("TLS", f"the certificate is refused: {why}", remedy) from None
    except ssl.SSLError as error:
        remedy = f"check that the coordinator runs with its certificate, and {INTERCEPTED}"
        raise _FailedError("TLS", f"no TLS at {place} ({error.reason})", remedy) from None
    except OSError as error:
        facts = f"{place} closed the connection ({error})"
        raise _FailedError("TLS", facts, f"check {INTERCEPTED}") from None
    facts = f"the certificate is for {link.host}, trusted, and"
    until = datetime.fromtimestamp(ssl.cert_time_to_seconds(str(shown["notAfter"])), UTC)
    yield _valid("TLS", facts, until, f"{RENEW}: `coordinator sites certs FOLDER --renew`")
    if arrive:
        yield Finding("packets", "PASS", f"large packets arrive at {link.host}")
    elif arrive is False:
        facts = f"small packets arrive at {link.host}, large ones do not"
        remedy = (
            "a VPN or tunnel on the way may need a smaller MTU: set it on this machine, and for "
        )
        yield Finding("packets", "WARN", facts, f"{remedy}the containers' network")


def _presented(link: Link, proxy: Proxy | None) -> bytes:
    """The certificate that is presented, without any check (DER); empty if there is none. Nothing is
    sent over this connection.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with open_tunnel(proxy, link.host, link.port, SECONDS) as plain:
            plain.settimeout(PROBE_SECONDS)
            with context.wrap_socket(plain, server_hostname=link.host) as secured:
                return secured.getpeercert(binary_form=True) or b""
    except OSError:
        return b""


def inspector(der: bytes, authority: Path) -> str:
    """The issuer of a certificate, if that is not an authority of a federation: a device on the way
    inspects TLS.

    Authorities of `coordinator sites certs` have the common name fedsurrogate and a number.

    Args:
        der: the certificate.
        authority: file of the federation's authority.

    Returns:
        The issuer; empty if it is such an authority, or unreadable.
    """
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        issuer = x509.load_der_x509_certificate(der).issuer
        own = x509.load_pem_x509_certificate(authority.expanduser().read_bytes()).subject
        names, organisations = (
            [str(each.value) for each in issuer.get_attributes_for_oid(which)]
            for which in (NameOID.COMMON_NAME, NameOID.ORGANIZATION_NAME)
        )
    # TypeError, KeyError: for a name in a kind of text that is not allowed, or not known.
    except (ValueError, TypeError, KeyError, x509.InvalidVersion, OSError):
        return ""
    if issuer == own or any(name.startswith("fedsurrogate ") for name in names):
        return ""
    return ", ".join(dict.fromkeys([*names, *organisations])) or issuer.rfc4514_string()


def check_certificate(key: Path) -> Finding | None:
    """How long this site's key is accepted.

    Args:
        key: file of the private key, next to which the certificate is.

    Returns:
        None for a site without a certificate, whose key is accepted for as long as it is
        registered.
    """
    from cryptography import x509

    file = key.expanduser().with_name(CERTIFICATE)
    if not file.is_file():
        return None
    try:
        until = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_after_utc
    except (OSError, ValueError, x509.InvalidVersion) as error:
        facts = f"{CERTIFICATE} cannot be read ({type(error).__name__})"
        remedy = f"take {CERTIFICATE} from the site kit again"
        return Finding("certificate", "FAIL", facts, remedy)
    if until <= datetime.now(UTC):
        return Finding("certificate", "FAIL", f"this site's ended on {until:%Y-%m-%d}", RENEW_SITE)
    return _valid("certificate", "this site's is", until, RENEW_SITE)


def _valid(what: str, facts: str, until: datetime, renew: str) -> Finding:
    facts = f"{facts} valid until {until:%Y-%m-%d}"
    if until - datetime.now(UTC) <= SOON:
        return Finding(what, "WARN", facts, renew)
    return Finding(what, "PASS", facts)


def _standing(link: Link, key: Path) -> Finding:
    authority = link.authority.expanduser().read_bytes() if link.authority else None
    host = f"[{link.host}]" if ":" in link.host else link.host
    try:
        own = read_node_key(key)
        standing, ahead = flower().key_standing(f"{host}:{link.port}", authority, own, SECONDS)
    except ConfigError as error:
        raise _FailedError("key", str(error), "take site.key from the site kit") from None
    if standing == "refused" and ahead is not None and not -OLDEST < ahead < AHEAD:
        way = "ahead of" if ahead > 0 else "behind"
        facts = (
            f"this machine's clock is {human_seconds(abs(ahead))} {way} the coordinator's, which "
        )
        facts += "refuses its signature"
        return Finding("key", "FAIL", facts, "set both clocks by NTP")
    return STANDING[standing]
