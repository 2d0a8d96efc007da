"""The result of a check, and the connection that is checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fedsurrogate.common.errors import ConfigError

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
