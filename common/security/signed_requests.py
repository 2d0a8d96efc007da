"""Requests to sites without a network connection: settings of a run in a file that the coordinator signs.

The first line of the file holds the signature of all bytes after it. A site checks the signature first, under the public key
that it has pinned, and reads the rest only after that: whoever has the file on its way can change nothing in it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from common.config.flat_settings import Scalar
from common.config.run_config import RunConfig, parse_run_config
from common.errors import ConfigError, SealError
from common.security.sealing import sign, verify

VERSION = 2
PURPOSE = b"request"
# A public centre has a few bytes a dimension, and names of ten thousand classes are two million letters.
LARGEST_REQUEST, MOST_SETTINGS = 2**23, 1000
FIRST_LINE = f"fedsurrogate-request {VERSION} "
ID, DATE, SIGNATURE = (re.compile(form) for form in (r"[0-9a-f]{16}", r"\d{4}-\d{2}-\d{2}", r"[0-9a-f]{128}"))


@dataclass(frozen=True)
class Request:
    """What sites are asked for. Raises ConfigError for values of another form.

    id: 16 hexadecimal digits, new for each request. settings: of the run, flat. centre: bytes of the public centre, where
    the run has one. expires: the last day, in UTC, on which a site answers (YYYY-MM-DD); empty for no end. receipts: what
    was last seen of each site's ledger, by site.
    """

    id: str
    settings: Mapping[str, Scalar]
    centre: bytes | None
    expires: str = ""
    receipts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.id, str) and ID.fullmatch(self.id)):
            raise ConfigError(
                f"id = {str(self.id)[:40]!r}: must be 16 hexadecimal digits, as `coordinator request` draws them"
            )
        if not isinstance(self.expires, str) or (self.expires and _day(self.expires) is None):
            raise ConfigError(f"expires = {str(self.expires)[:40]!r}: must be a date such as 2026-03-31, or empty")
        flat = isinstance(self.settings, Mapping) and len(self.settings) <= MOST_SETTINGS
        if not flat or not all(isinstance(value, Scalar) for value in self.settings.values()):
            raise ConfigError(f"settings: must be at most {MOST_SETTINGS} texts, numbers, true or false")
        shown = self.receipts
        if not isinstance(shown, Mapping) or not all(isinstance(text, str) for pair in shown.items() for text in pair):
            raise ConfigError("receipts: must be texts by site")

    @classmethod
    def fresh(
        cls,
        settings: Mapping[str, Scalar],
        centre: bytes | None,
        days: int = 0,
        receipts: Mapping[str, str] | None = None,
    ) -> Request:
        """A new request, which expires after `days` (0: never). Raises ConfigError for settings that no file can answer."""
        expires = f"{datetime.now(UTC).date() + timedelta(days):%Y-%m-%d}" if days else ""
        request = cls(secrets.token_hex(8), dict(settings), centre, expires, dict(receipts or {}))
        request.run()
        return request

    def run(self) -> RunConfig:
        """The run's settings. Raises ConfigError."""
        config = parse_run_config(self.settings)
        if not config.spec.answers_files:
            raise ConfigError(
                f"method = {config.method!r}, fedpft.topology = {config.fedpft.topology!r}: a file can answer a run in "
                "which every site answers once and alone; that is method = 'fedpft' with topology = 'star'"
            )
        return config

    def body(self) -> bytes:
        """The bytes that are signed; the same request always gives the same."""
        centre = None if self.centre is None else base64.b64encode(self.centre).decode()
        content = {
            "id": self.id,
            "expires": self.expires,
            "settings": dict(self.settings),
            "centre": centre,
            "receipts": dict(self.receipts),
        }
        return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()

    def digest(self) -> str:
        """SHA-256 of the body, hex."""
        return hashlib.sha256(self.body()).hexdigest()

    def signed(self, private: bytes) -> bytes:
        """The content of a request file. private: the coordinator's key. Raises ConfigError for more than a site reads."""
        body = self.body()
        content = FIRST_LINE.encode() + sign(body, private, PURPOSE).hex().encode() + b"\n" + body
        if len(content) > LARGEST_REQUEST:
            raise ConfigError(f"a request of {len(content)} bytes; sites read at most {LARGEST_REQUEST}")
        return content


def read_request(file: Path, public: bytes | None) -> Request:
    """Read a request that was signed with the private half of `public`.

    None for `public` is for the coordinator, who reads its own file. Raises ConfigError for a file that is no request or has
    expired, and SealError for one that this coordinator has not signed as it is.
    """
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_REQUEST + 1)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror})") from None
    first, _, body = content.partition(b"\n")
    signature = first.decode("ascii", "replace").removeprefix(FIRST_LINE)
    if len(content) > LARGEST_REQUEST or not first.startswith(FIRST_LINE.encode()) or not SIGNATURE.fullmatch(signature):
        raise ConfigError(
            f"{file} is no request of `coordinator request`: it is larger than {LARGEST_REQUEST} bytes, or its first line "
            f"is not {FIRST_LINE!r} and a signature"
        )
    if public is not None:
        try:
            verify(body, bytes.fromhex(signature), public, PURPOSE)
        except SealError:
            raise SealError(
                f"{file} was changed on its way, or another coordinator has made it: its signature does not fit the "
                "coordinator's key that this site has pinned; get the file again, and compare the key with what "
                "`coordinator key` prints there"
            ) from None
    request = _parsed(file, body)
    if public is not None and (last := _day(request.expires)) and datetime.now(UTC).date() > last:
        raise ConfigError(f"{file}: request {request.id} expired on {request.expires}; ask the coordinator for a new one")
    return request


def _parsed(file: Path, body: bytes) -> Request:
    try:
        content = json.loads(body)
        if not isinstance(content, dict) or set(content) != {"id", "expires", "settings", "centre", "receipts"}:
            raise ValueError("it does not hold id, expires, settings, centre and receipts alone")
        centre = None if content["centre"] is None else base64.b64decode(content["centre"], validate=True)
        request = Request(**(content | {"centre": centre}))
        # A name that stands twice, another order or another way to write a number: what was signed must be what is read.
        if request.body() != body:
            raise ValueError("it is written in another way")
        return request
    except (ValueError, TypeError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{file} is no request of `coordinator request` ({str(error)[:200]})") from None


def _day(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if DATE.fullmatch(text) else None
    except ValueError:
        return None
