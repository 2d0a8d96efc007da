"""Requests to sites without a network connection: a file with the settings of a run, signed by the
coordinator.

The first line of the file contains the signature of all following bytes. A site first checks the
signature with its pinned public key and only then reads the rest. So any change of the file on its
way is detected.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import asdict, field
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..errors import ConfigError, SealError
from ..run import Run, parse_run
from ..settings.base import Scalar
from ..settings.heads import AUTO
from .documents import Day, Flat, document, hexadecimal, json_object, read_at_most
from .sealing import sign, verify

VERSION = 2
PURPOSE = b"request"
# A setting whose default has changed.
PROJECTION = "features.projection"
# Enough for a public centre (a few bytes per dimension) and ten thousand class names (two million
# characters).
LARGEST_REQUEST, MOST_SETTINGS = 2**23, 1000
FIRST_LINE = f"fedsurrogate-request {VERSION} "
SIGNATURE = re.compile(r"[0-9a-f]{128}")


@document
class Request:
    """A request to sites.

    Attributes:
        id: 16 hexadecimal digits, new for each request.
        settings: the run's settings, flat.
        centre: bytes of the public centre, if the run has one.
        expires: the last day, in UTC, on which a site replies (YYYY-MM-DD); empty for no limit.
        receipts: the latest receipts of the sites' ledgers, by site.

    Raises:
        ConfigError: for invalid values.
    """

    id: Annotated[str, hexadecimal(16)]
    settings: Annotated[Flat, Field(max_length=MOST_SETTINGS)]
    centre: bytes | None
    expires: Day | Literal[""] = ""
    receipts: dict[str, str] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls,
        settings: Mapping[str, Scalar],
        centre: bytes | None,
        days: int = 0,
        receipts: Mapping[str, str] | None = None,
    ) -> Request:
        """A new request.

        Args:
            settings: of the run, flat.
            centre: bytes of the public centre, if the run has one.
            days: after which the request expires; 0: never.
            receipts: the latest receipts of the sites' ledgers, by site.

        Raises:
            ConfigError: if a file cannot answer the settings.
        """
        expires = f"{datetime.now(UTC).date() + timedelta(days):%Y-%m-%d}" if days else ""
        written = dict(settings)
        if parse_run(written).plan.own_mean:
            # Requests of earlier versions, which meant another value, do not say it.
            written.setdefault(PROJECTION, AUTO)
        elif written.get(PROJECTION) == "":
            # What requests of earlier versions meant; sites of these can answer.
            del written[PROJECTION]
        request = cls(secrets.token_hex(8), written, centre, expires, dict(receipts or {}))
        request.run()
        return request

    def flat(self) -> dict[str, Scalar]:
        """The run's settings, with what they meant where an earlier version wrote them."""
        flat = dict(self.settings)
        earlier = PROJECTION not in flat and parse_run(flat).plan.own_mean
        return flat | {PROJECTION: ""} if earlier else flat

    def run(self) -> Run:
        """The run's settings. Raises ConfigError."""
        config = parse_run(self.flat())
        if not config.plan.answers_files:
            raise ConfigError(
                f"method = {config.settings.method!r}, fedpft.topology = "
                f"{config.settings.fedpft.topology!r}, secure-sum = "
                f"{str(config.settings.secure_sum).lower()}: a request needs a run in which every "
                "site replies once and alone; use `coordinator offline exchange`, which carries every "
                "message as a file"
            )
        return config

    def body(self) -> bytes:
        """The signed bytes. The same request always gives the same bytes."""
        centre = None if self.centre is None else base64.b64encode(self.centre).decode()
        return (
            json.dumps(asdict(self) | {"centre": centre}, indent=2, sort_keys=True) + "\n"
        ).encode()

    def digest(self) -> str:
        """SHA-256 of the body, hex."""
        return hashlib.sha256(self.body()).hexdigest()

    def signed(self, private: bytes) -> bytes:
        """The content of a request file.

        Args:
            private: the coordinator's key.

        Raises:
            ConfigError: if it is too large for sites.
        """
        body = self.body()
        content = FIRST_LINE.encode() + sign(body, private, PURPOSE).hex().encode() + b"\n" + body
        if len(content) > LARGEST_REQUEST:
            raise ConfigError(
                f"a request of {len(content)} bytes; sites read at most {LARGEST_REQUEST}"
            )
        return content


def read_request(file: Path, public: bytes | None) -> Request:
    """Read a signed request.

    Args:
        file: of `coordinator offline request`.
        public: the coordinator's public key; None skips the check, as the coordinator reads its own
            file.

    Raises:
        ConfigError: for a file that is no request or has expired.
        SealError: if the signature does not fit.
    """
    content = read_at_most(file, LARGEST_REQUEST)
    first, _, body = content.partition(b"\n")
    signature = first.decode("ascii", "replace").removeprefix(FIRST_LINE)
    if not first.startswith(FIRST_LINE.encode()) or not SIGNATURE.fullmatch(signature):
        raise ConfigError(
            f"{file} is no request of `coordinator offline request`: its first line is not {FIRST_LINE!r} "
            "followed by a signature"
        )
    if public is not None:
        try:
            verify(body, bytes.fromhex(signature), public, PURPOSE)
        except SealError:
            raise SealError(
                f"{file} was changed on its way, or another coordinator has made it: its signature "
                "does not fit the coordinator's key that this site has pinned; get the file "
                "again, and compare the key with the output of `coordinator sites key` there"
            ) from None
    request = _parsed(file, body)
    expired = request.expires and datetime.now(UTC).date() > date.fromisoformat(request.expires)
    if public is not None and expired:
        raise ConfigError(
            f"{file}: request {request.id} expired on {request.expires}; ask the coordinator for a "
            "new one"
        )
    return request


def _parsed(file: Path, body: bytes) -> Request:
    try:
        content = json_object(body)
        if (centre := content["centre"]) is not None:
            centre = base64.b64decode(centre, validate=True)
        request = Request(**(content | {"centre": centre}))
        # The signed bytes must be exactly the parsed content: no duplicate names, other order or
        # other number formats.
        if request.body() != body:
            raise ValueError("it is not in canonical form")
        return request
    except (ValueError, TypeError, KeyError, ConfigError) as error:
        raise ConfigError(
            f"{file} is no request of `coordinator offline request` ({str(error)[:200]})"
        ) from None
