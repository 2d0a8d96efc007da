"""Checks of the connection from a site to its coordinator, step by step: the way, TLS, packets,
clock, the site's key.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from fedsurrogate.client_app.diagnostics.certificate_check import check_certificate
from fedsurrogate.client_app.diagnostics.findings import SECONDS, Finding, Link
from fedsurrogate.client_app.diagnostics.large_packets import large_packets_arrive
from fedsurrogate.client_app.diagnostics.presented_certificates import inspector, presented
from fedsurrogate.client_app.diagnostics.proxies import Proxy, capitals_only, open_tunnel, proxy_for
from fedsurrogate.client_app.diagnostics.way_checks import check_way
from fedsurrogate.common.errors import ConfigError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.security.enrolment import read_node_key

PROBE_SECONDS = 3.0
SOON = datetime.timedelta(days=30)


def check_link(link: Link) -> Iterator[Finding]:
    """Check each step to the coordinator; stop at the first that fails. Takes the proxy that gRPC
    takes.
    """
    try:
        proxy = proxy_for(link.host, os.environ)
    except ConfigError as error:
        yield Finding(
            "proxy",
            "FAIL",
            str(error),
            "correct the variable, or remove it if this site needs no proxy",
        )
        return
    for step in check_way(link, proxy):
        yield step
        if step.state == "FAIL":
            if ignored := capitals_only(os.environ):
                remedy = (
                    f"set {ignored.lower()}, in small letters (PROXY in a kit's .env), if "
                    "this site needs the proxy"
                )
                yield Finding(
                    "proxy",
                    "WARN",
                    f"{ignored} is in capital letters, which gRPC does not read",
                    remedy,
                )
            return
    if link.authority is None and _speaks_tls(link, proxy):
        remedy = "give --root-certificates with ca.crt of the site kit, and leave --insecure out"
        yield Finding(
            "TLS", "FAIL", "the coordinator requires TLS, and no certificate is given", remedy
        )
        return
    if link.authority is None:
        remedy = "give --root-certificates; the coordinator's `certs` command makes them"
        yield Finding(
            "TLS",
            "WARN",
            "not used: anyone on the network path can read and change all messages",
            remedy,
        )
    else:
        trusted = _shake_hands(link, link.authority, proxy)
        yield trusted
        if trusted.state == "FAIL":
            return
        if (stuck := _large_packets(link, link.authority, proxy)) is not None:
            yield stuck
    yield from _key_checks(link)


def _key_checks(link: Link) -> Iterator[Finding]:
    """Of this site's certificate, if it has one and, unless that has expired, of its key."""
    certificate = check_certificate(link.key) if link.key else None
    if certificate is not None:
        yield certificate
        if certificate.state == "FAIL":
            return
    yield _standing(link)


def _speaks_tls(link: Link, proxy: Proxy | None) -> bool:
    try:
        with open_tunnel(proxy, link.host, link.port, SECONDS) as plain:
            plain.settimeout(PROBE_SECONDS)
            presented(plain, link.host)
    except OSError:
        return False
    return True


def _shake_hands(link: Link, authority: Path, proxy: Proxy | None) -> Finding:
    try:
        context = ssl.create_default_context(cafile=str(authority.expanduser()))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        return Finding(
            "TLS",
            "FAIL",
            f"{authority} cannot be read as a certificate ({reason})",
            "take ca.crt from the site kit",
        )
    context.set_alpn_protocols(["h2"])
    try:
        with open_tunnel(proxy, link.host, link.port, SECONDS) as plain:
            plain.settimeout(SECONDS)
            with context.wrap_socket(plain, server_hostname=link.host) as secured:
                certificate = secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if device := _inspector(link, authority, proxy):
            facts = (
                f"a device on the way inspects TLS: it presents a certificate of {device!r} "
                f"for {link.host}"
            )
            remedy = (
                f"ask the administrators of this network to exempt {link.host} port "
                f"{link.port} from TLS inspection"
            )
            return Finding("TLS", "FAIL", facts, remedy)
        return Finding(
            "TLS",
            "FAIL",
            f"the certificate is refused: {error.verify_message}",
            _remedy(error.verify_message),
        )
    except ssl.SSLError as error:
        remedy = (
            "check that the coordinator runs with its certificate, and that no proxy on the "
            "path intercepts TLS"
        )
        return Finding(
            "TLS", "FAIL", f"no TLS at {link.host} port {link.port} ({error.reason})", remedy
        )
    except OSError as error:
        remedy = "check that no proxy on the path intercepts TLS"
        return Finding(
            "TLS", "FAIL", f"{link.host} port {link.port} closed the connection ({error})", remedy
        )
    until = datetime.datetime.fromtimestamp(
        ssl.cert_time_to_seconds(str(certificate["notAfter"])), datetime.UTC
    )
    facts = f"the certificate is for {link.host}, trusted, and valid until {until:%Y-%m-%d}"
    if until - datetime.datetime.now(datetime.UTC) < SOON:
        return Finding(
            "TLS",
            "WARN",
            facts,
            "ask the coordinator to renew it: `coordinator certs FOLDER --renew`",
        )
    return Finding("TLS", "PASS", facts)


def _inspector(link: Link, authority: Path, proxy: Proxy | None) -> str:
    try:
        with open_tunnel(proxy, link.host, link.port, SECONDS) as plain:
            return inspector(presented(plain, link.host), authority)
    except OSError:
        return ""


def _large_packets(link: Link, authority: Path, proxy: Proxy | None) -> Finding | None:
    """Whether large packets pass; None if that could not be tried."""
    context = ssl.create_default_context(cafile=str(authority.expanduser()))
    context.set_alpn_protocols(["h2"])
    try:
        with (
            open_tunnel(proxy, link.host, link.port, SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=link.host) as secured,
        ):
            arrive = large_packets_arrive(secured, SECONDS)
    except OSError:
        return None
    if arrive is None:
        return None
    if arrive:
        return Finding("packets", "PASS", f"large packets arrive at {link.host}")
    remedy = (
        "a VPN or tunnel on the way may need a smaller MTU: set it on this machine, and for "
        "the containers' network"
    )
    return Finding(
        "packets", "WARN", f"small packets arrive at {link.host}, large ones do not", remedy
    )


def _remedy(error: str) -> str:
    if "expired" in error:
        return (
            "ask the coordinator to renew it (`coordinator certs FOLDER --renew`), and check "
            "this machine's clock"
        )
    if "not yet valid" in error:
        return "check this machine's clock"
    if "mismatch" in error:
        return (
            "use the name in the certificate, or ask the coordinator: `coordinator certs "
            "FOLDER --renew --host NAME`"
        )
    return (
        "take ca.crt from the site kit again; it is of another federation, or the coordinator "
        "has a new authority"
    )


def _standing(link: Link) -> Finding:
    if link.key is None:
        remedy = (
            "give --auth-supernode-private-key; without it the coordinator cannot identify "
            "registered sites"
        )
        return Finding("key", "WARN", "no key of this site is given", remedy)
    authority = link.authority.expanduser().read_bytes() if link.authority else None
    host = f"[{link.host}]" if ":" in link.host else link.host
    try:
        standing = flower().key_standing(
            f"{host}:{link.port}", authority, read_node_key(link.key), SECONDS
        )
    except ConfigError as error:
        return Finding("key", "FAIL", str(error), "take site.key from the site kit")
    return {
        "registered": Finding(
            "key", "PASS", "the coordinator knows this site's key, and the clocks agree"
        ),
        "unknown": Finding(
            "key",
            "FAIL",
            "the coordinator does not know this site's key",
            "ask the coordinator to add it with `coordinator register`; a key that it has revoked "
            "stays barred, and this site then needs a new kit",
        ),
        "clock": Finding(
            "key",
            "FAIL",
            "the coordinator refuses this site's signature; the clocks are more than 5 seconds "
            "apart, or it has another key",
            "set both clocks by NTP",
        ),
        "open": Finding(
            "key",
            "WARN",
            "the coordinator requires no keys of sites",
            "ask to start it with --enable-supernode-auth",
        ),
        "silent": Finding(
            "key",
            "FAIL",
            "the reply is not that of a coordinator to this site's Flower",
            "check the port: a coordinator has one for sites of Flower 1.34 (gRPC), and may have "
            "another for sites of 1.42 (HTTP)",
        ),
    }[standing]
