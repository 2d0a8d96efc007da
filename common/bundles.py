"""Store and forward: what a coordinator asks for, and what a site answers with, as files that people carry.

A request holds the settings of a run and an id of its own. A bundle is the very surrogate that would have travelled over the
network, with a manifest that says what it is, for which request, and what the site's ledger says of it; the site signs both.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from common.checks import SITE_NAME
from common.config import RunConfig, Scalar, parse_run_config, run_digest
from common.errors import ConfigError, SealError, SurrogateError
from common.sealing import sign, verify
from common.surrogate_pb2 import Bundle as BundleMessage

VERSION = 1
PURPOSE = b"bundle"
LARGEST_BUNDLE, LARGEST_MANIFEST, LARGEST_REQUEST = 2**30, 2**20, 2**26


@dataclass(frozen=True)
class Request:
    """What sites are asked for. settings: of the run, flat. centre: bytes of the public centre, where the run has one.
    receipts: what was last seen of each site's ledger, by site.
    """

    id: str
    settings: Mapping[str, Scalar]
    centre: bytes | None
    receipts: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def fresh(
        cls, settings: Mapping[str, Scalar], centre: bytes | None, receipts: Mapping[str, str] | None = None
    ) -> Request:
        """A request nobody has made before. Raises ConfigError for settings whose answer is no single file."""
        request = cls(secrets.token_hex(8), dict(settings), centre, dict(receipts or {}))
        request.run()
        return request

    def run(self) -> RunConfig:
        """The run's settings. Raises ConfigError."""
        config = parse_run_config(self.settings)
        if config.method != "fedpft" or config.fedpft.topology == "chain":
            raise ConfigError(
                f"method = {config.method!r}, fedpft.topology = {config.fedpft.topology!r}: files can be carried where "
                "every site answers once and alone; that is method = 'fedpft' with topology = 'star'"
            )
        return config

    def text(self) -> str:
        """As it stands in a file."""
        centre = None if self.centre is None else base64.b64encode(self.centre).decode()
        content = {"version": VERSION, "id": self.id, "settings": dict(self.settings), "centre": centre}
        return json.dumps(content | {"receipts": dict(self.receipts)}, indent=2) + "\n"


def read_request(file: Path) -> Request:
    """Read a request. Raises ConfigError."""
    try:
        if file.stat().st_size > LARGEST_REQUEST:
            raise ValueError("it is too large")
        content = json.loads(file.read_text())
        if content["version"] != VERSION:
            raise ValueError(f"its version is {content['version']!r}, not {VERSION}")
        centre = None if content["centre"] is None else base64.b64decode(content["centre"], validate=True)
        settings = dict(content["settings"])
        request = Request(str(content["id"]), settings, centre, dict(content.get("receipts", {})))
    except (OSError, ValueError, TypeError, LookupError, binascii.Error, RecursionError) as error:
        raise ConfigError(f"{file} is no request of `coordinator request` ({str(error)[:120]})") from None
    request.run()
    return request


@dataclass(frozen=True)
class Bundle:
    """A surrogate's bytes, and what its site says of them."""

    manifest: Mapping[str, Any]
    payload: bytes

    @property
    def site(self) -> str:
        """Which site has made it."""
        return str(self.manifest["site"])


def pack_bundle(request: Request, site: str, payload: bytes, ledger: Mapping[str, object], private: bytes) -> bytes:
    """Sign a surrogate for a request. ledger: the site's own entry for this release, without what must stay there."""
    manifest = {
        "version": VERSION,
        "request": request.id,
        "run": run_digest(request.run()),
        "site": site,
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "ledger": dict(ledger),
    }
    text = json.dumps(manifest, sort_keys=True).encode()
    message = BundleMessage(manifest=text, payload=payload, signature=sign(_signed(text, payload), private, PURPOSE))
    return message.SerializeToString(deterministic=True)


def unpack_bundle(content: bytes, request: Request, keys: Mapping[str, bytes]) -> Bundle:
    """Undo `pack_bundle`. keys: public keys by site. Raises SurrogateError for what was changed, is not for this request, or
    was not signed by the site it names.
    """
    message = BundleMessage()
    try:
        message.ParseFromString(content)
        message.DiscardUnknownFields()
        if message.SerializeToString(deterministic=True) != content:
            raise ValueError("it holds more than a bundle, or is written otherwise")
        if len(message.manifest) > LARGEST_MANIFEST:
            raise ValueError("its manifest is too large")
        manifest = json.loads(message.manifest)
        site = manifest["site"]
        if manifest["version"] != VERSION:
            raise ValueError(f"its version is {str(manifest['version'])[:20]!r}, not {VERSION}")
    except (DecodeError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise SurrogateError(f"no bundle of `site release` ({str(error)[:120]})") from None
    if not isinstance(site, str) or not SITE_NAME.fullmatch(site):
        raise SurrogateError(f"a bundle of site {str(site)[:64]!r}, which is no name of a site")
    if site not in keys:
        raise SurrogateError(f"a bundle of site {site!r}, whose key is not known here; `site key` there prints it")
    try:
        verify(_signed(message.manifest, message.payload), message.signature, keys[site], PURPOSE)
    except SealError:
        raise SurrogateError(f"a bundle that was changed on its way, or that site {site!r} has not signed") from None
    if manifest.get("request") != request.id:
        raise SurrogateError(f"a bundle for request {str(manifest.get('request'))[:40]!r}, this is request {request.id!r}")
    return Bundle(manifest, message.payload)


def _signed(manifest: bytes, payload: bytes) -> bytes:
    return len(manifest).to_bytes(8, "big") + manifest + payload
