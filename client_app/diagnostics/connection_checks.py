"""From a site to its coordinator, step by step: the name, the port, TLS, the clock and the site's key."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import ConfigError
from common.security.key_standing import key_standing

SECONDS, PROBE_SECONDS = 10.0, 3.0
SOON = datetime.timedelta(days=30)
State = Literal["PASS", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. remedy: what to do, in a line; empty where nothing is."""

    what: str
    state: State
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Link:
    """Where the coordinator is, and with which files the site trusts it and shows who it is; as for `site join`."""

    host: str
    port: int
    authority: Path | None
    key: Path | None

    @classmethod
    def parse(cls, address: str, authority: Path | None, key: Path | None) -> Link:
        """The link to `address`, host:port. Raises ConfigError."""
        host, colon, port = address.rpartition(":")
        if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
            raise ConfigError(f"--superlink {address!r}: must be HOST:PORT, such as fl.example.org:9092")
        return cls(host.strip("[]"), int(port), authority, key)


def check_link(link: Link) -> Iterator[Finding]:
    """Every step to the coordinator, as far as the one before it allows."""
    resolved = _resolve(link)
    yield resolved
    if resolved.state == "FAIL":
        return
    connected = _connect(link)
    yield connected
    if connected.state == "FAIL":
        return
    if link.authority is None and _speaks_tls(link):
        remedy = "give --root-certificates with ca.crt of the site kit, and leave --insecure out"
        yield Finding("TLS", "FAIL", "the coordinator speaks TLS only, and no certificate is named", remedy)
        return
    if link.authority is None:
        remedy = "give --root-certificates; the coordinator's `certs` command makes them"
        yield Finding("TLS", "WARN", "not used: anybody on the way reads and changes everything", remedy)
    else:
        trusted = _shake_hands(link, link.authority)
        yield trusted
        if trusted.state == "FAIL":
            return
    yield _standing(link)


def _resolve(link: Link) -> Finding:
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(link.host, link.port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as error:
        return Finding("name", "FAIL", f"{link.host} has no address ({error})", "check the name, and this machine's DNS")
    return Finding("name", "PASS", f"{link.host} is {', '.join(sorted(found))}")


def _connect(link: Link) -> Finding:
    try:
        socket.create_connection((link.host, link.port), SECONDS).close()
    except ConnectionRefusedError:
        remedy = "is the coordinator running, and is this its Fleet port (9092 as a rule)?"
        return Finding("port", "FAIL", f"{link.host} refuses port {link.port}", remedy)
    except OSError as error:
        remedy = f"let this machine reach {link.host} on TCP port {link.port}, outwards; nothing needs to come in"
        return Finding("port", "FAIL", f"nothing from {link.host} port {link.port} ({error})", remedy)
    return Finding("port", "PASS", f"{link.host} answers on port {link.port}")


def _speaks_tls(link: Link) -> bool:
    context = ssl.create_default_context()
    # Nothing is sent over it: only whether there is TLS is of interest.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((link.host, link.port), SECONDS) as plain:
            plain.settimeout(PROBE_SECONDS)
            context.wrap_socket(plain, server_hostname=link.host).close()
    except OSError:
        return False
    return True


def _shake_hands(link: Link, authority: Path) -> Finding:
    try:
        context = ssl.create_default_context(cafile=str(authority.expanduser()))
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        return Finding(
            "TLS", "FAIL", f"{authority} cannot be read as a certificate ({reason})", "take ca.crt from the site kit"
        )
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((link.host, link.port), SECONDS) as plain:
            plain.settimeout(SECONDS)
            with context.wrap_socket(plain, server_hostname=link.host) as secured:
                certificate = secured.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return Finding("TLS", "FAIL", f"the certificate is refused: {error.verify_message}", _remedy(error.verify_message))
    except ssl.SSLError as error:
        remedy = "does the coordinator run with its certificate, and does no proxy on the way break TLS open?"
        return Finding("TLS", "FAIL", f"no TLS at {link.host} port {link.port} ({error.reason})", remedy)
    except OSError as error:
        remedy = "does no proxy on the way break TLS open?"
        return Finding("TLS", "FAIL", f"{link.host} port {link.port} broke off ({error})", remedy)
    until = datetime.datetime.fromtimestamp(ssl.cert_time_to_seconds(str(certificate["notAfter"])), datetime.UTC)
    found = f"the certificate is for {link.host}, trusted, and valid until {until:%Y-%m-%d}"
    if until - datetime.datetime.now(datetime.UTC) < SOON:
        return Finding("TLS", "WARN", found, "ask the coordinator to renew it: `coordinator certs FOLDER --renew`")
    return Finding("TLS", "PASS", found)


def _remedy(error: str) -> str:
    if "expired" in error:
        return "ask the coordinator to renew it (`coordinator certs FOLDER --renew`), and check this machine's clock"
    if "not yet valid" in error:
        return "check this machine's clock"
    if "mismatch" in error:
        return "use the name in the certificate, or ask the coordinator: `coordinator certs FOLDER --renew --host NAME`"
    return "take ca.crt from the site kit anew; if a proxy shows a certificate of its own, have this host excepted"


def _standing(link: Link) -> Finding:
    if link.key is None:
        remedy = "give --auth-supernode-private-key; without it the coordinator cannot tell registered sites from others"
        return Finding("key", "WARN", "no key of this site is named", remedy)
    authority = link.authority.expanduser().read_bytes() if link.authority else None
    host = f"[{link.host}]" if ":" in link.host else link.host
    try:
        standing = key_standing(f"{host}:{link.port}", authority, link.key, SECONDS)
    except ConfigError as error:
        return Finding("key", "FAIL", str(error), "take site.key from the site kit")
    return {
        "registered": Finding("key", "PASS", "the coordinator knows this site's key, and the clocks agree"),
        "unknown": Finding(
            "key",
            "FAIL",
            "the coordinator does not know this site's key",
            "tell the coordinator, whose `coordinator register` lets it in",
        ),
        "clock": Finding(
            "key",
            "FAIL",
            "the coordinator refuses this site's signature; the clocks are more than 5 seconds apart, or it has another key",
            "set both clocks by NTP",
        ),
        "open": Finding(
            "key", "WARN", "the coordinator asks no site for a key", "have it started with --enable-supernode-auth"
        ),
        "silent": Finding(
            "key", "FAIL", "the coordinator gives no answer that Flower 1.34 would", "is this port its Fleet API's?"
        ),
    }[standing]
