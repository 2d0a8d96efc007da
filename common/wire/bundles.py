"""Bundles: the reply of a site without a network connection, as a file.

A bundle contains the same surrogate as over the network, and a manifest. The manifest describes the
surrogate, its request (`fedsurrogate.common.security.signed_requests`) and its entry in the site's ledger. The
site signs both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.limits import SITE_NAME
from fedsurrogate.common.security.documents import json_object, open_file, pack_file
from fedsurrogate.common.security.signed_requests import Request

VERSION = 2
PURPOSE = b"bundle"
LARGEST_BUNDLE, LARGEST_MANIFEST = 2**30, 2**20


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
    return pack_file(manifest, payload, private, PURPOSE)


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
        signed = open_file(content, LARGEST_MANIFEST)
        manifest = json_object(signed.text)
        site = manifest["site"]
        if manifest["version"] != VERSION:
            raise ValueError(f"its version is {str(manifest['version'])[:20]!r}, not {VERSION}")
    except (SurrogateError, ValueError, TypeError, LookupError) as error:
        raise SurrogateError(f"no bundle of `site release` ({str(error)[:120]})") from None
    if not isinstance(site, str) or not SITE_NAME.fullmatch(site):
        raise SurrogateError(f"a bundle of site {str(site)[:64]!r}, which is not a valid site name")
    if site not in keys:
        raise SurrogateError(
            f"a bundle of site {site!r}, whose key is unknown here; `site key` at the site prints "
            "it"
        )
    try:
        signed.verify(keys[site], PURPOSE)
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
    return Bundle(manifest, bytes(signed.payload))
