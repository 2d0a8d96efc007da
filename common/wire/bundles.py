"""Bundles: the reply of a site without a network connection, as a file.

A bundle contains the same surrogate as over the network, and a manifest. The manifest describes the
surrogate, its request (`fedsurrogate.common.security.signed_requests`) and its entry in the site's ledger. The
site signs both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.safe_parsing import canonical, varint
from fedsurrogate.common.security.sealing import sign, verify
from fedsurrogate.common.security.signed_requests import Request
from fedsurrogate.common.surrogate_pb2 import Bundle as BundleMessage

VERSION = 2
PURPOSE = b"bundle"
LARGEST_BUNDLE, LARGEST_MANIFEST = 2**30, 2**20
# Bytes of a signature at most; one that is longer fits nothing.
MOST_SIGNED = 1024


@dataclass(frozen=True)
class Bundle:
    """A surrogate with its manifest.

    Attributes:
        manifest: of the site, which describes the surrogate, its request and its ledger entry.
        payload: the surrogate's bytes.
    """

    manifest: Mapping[str, Any]
    payload: bytes

    @property
    def site(self) -> str:
        """The site that made the bundle."""
        return str(self.manifest["site"])


def pack_bundle(
    request: Request, site: str, payload: bytes, ledger: Mapping[str, object], private: bytes
) -> bytes:
    """Sign a surrogate for a request.

    Args:
        request: that the surrogate answers.
        site: its name.
        payload: the surrogate's bytes.
        ledger: the site's ledger entry for this release, without its private parts.
        private: the site's key.

    Returns:
        The content of a bundle.
    """
    manifest = {
        "version": VERSION,
        "request": request.id,
        "request-sha256": request.digest(),
        "run": request.run().digest,
        "site": site,
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
        "ledger": dict(ledger),
    }
    text = json.dumps(manifest, sort_keys=True).encode()
    message = BundleMessage(
        manifest=text, payload=payload, signature=sign(signed_part(text, payload), private, PURPOSE)
    )
    return canonical(message)


def unpack_bundle(content: bytes, request: Request, keys: Mapping[str, bytes]) -> Bundle:
    """Parse and check a bundle.

    Args:
        content: of the file.
        request: that the bundle must answer.
        keys: public keys by site.

    Raises:
        SurrogateError: if it was changed, is not for this request, or was not signed by the site
            that it names.
    """
    try:
        text, payload, signature = signed_parts(content, LARGEST_MANIFEST)
        manifest = json.loads(text)
        site = manifest["site"]
        if manifest["version"] != VERSION:
            raise ValueError(f"its version is {str(manifest['version'])[:20]!r}, not {VERSION}")
    except (SurrogateError, ValueError, TypeError, LookupError, RecursionError) as error:
        raise SurrogateError(f"no bundle of `site release` ({str(error)[:120]})") from None
    if not isinstance(site, str) or not SITE_NAME.fullmatch(site):
        raise SurrogateError(f"a bundle of site {str(site)[:64]!r}, which is not a valid site name")
    if site not in keys:
        raise SurrogateError(
            f"a bundle of site {site!r}, whose key is unknown here; `site key` at the site prints "
            "it"
        )
    try:
        verify(signed_part(text, payload), signature, keys[site], PURPOSE)
    except SealError:
        raise SurrogateError(
            f"a bundle that was changed on its way, or that site {site!r} has not signed"
        ) from None
    if manifest.get("request") != request.id:
        raise SurrogateError(
            f"a bundle for request {str(manifest.get('request'))[:40]!r}, this is request "
            f"{request.id!r}"
        )
    if manifest.get("request-sha256") != request.digest():
        raise SurrogateError(
            f"the site has answered request {request.id!r} with other settings than this file holds"
        )
    return Bundle(manifest, bytes(payload))


def signed_part(manifest: bytes, payload: bytes | memoryview) -> tuple[bytes | memoryview, ...]:
    """What a signature of a manifest and its payload covers, in parts."""
    return len(manifest).to_bytes(8, "big"), manifest, payload


def signed_parts(content: bytes, most: int) -> tuple[bytes, memoryview, bytes]:
    """The manifest, the payload and the signature of a signed file; the payload is not copied, because
    nobody has signed it yet.

    Args:
        content: of the file, in canonical form: another one might be signed too, and be read anew.
        most: bytes of the manifest.

    Raises:
        SurrogateError: for other content.
    """
    whole, at, parts = memoryview(content), 0, dict[int, memoryview]()
    with suppress(IndexError, DecodeError):
        while at < len(content):
            start = at
            tag, at = varint(content, at)
            length, at = varint(content, at)
            # In order and each once, not empty, with numbers as short as they can be.
            if tag & 7 != 2 or tag >> 3 in parts or tag >> 3 < max(parts, default=1) or not length:
                break
            if at - start != 1 + max(1, (length.bit_length() + 6) // 7) or at + length > len(
                content
            ):
                break
            parts[tag >> 3], at = whole[at : at + length], at + length
        else:
            manifest, signature = parts.get(1, whole[:0]), parts.get(3, whole[:0])
            if (
                parts.keys() <= {1, 2, 3}
                and len(manifest) <= most
                and len(signature) <= MOST_SIGNED
            ):
                return bytes(manifest), parts.get(2, whole[:0]), bytes(signature)
    raise SurrogateError(
        f"{len(content)} bytes that are no signed file in canonical form, or have a manifest of more "
        f"than {most} bytes"
    )
