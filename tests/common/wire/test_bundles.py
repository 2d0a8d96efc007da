"""A bundle is read only if its site signed exactly it for this request; all others are refused with
a reason.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.security.documents import Request
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from fedsurrogate.common.surrogate_pb2 import Bundle
from fedsurrogate.common.wire.records import PURPOSE, VERSION, pack_bundle, unpack_bundle

SITE, PAYLOAD = new_key(), b"a surrogate"
KEYS = {"north": public_key(SITE)}
REQUEST = Request.fresh({}, None)
MANIFEST: dict[str, Any] = {
    "version": VERSION,
    "request": REQUEST.id,
    "request-sha256": REQUEST.digest(),
    "run": REQUEST.run().digest,
    "site": "north",
    "bytes": len(PAYLOAD),
    "sha256": hashlib.sha256(PAYLOAD).hexdigest(),
    "ledger": {},
}


def signed(manifest: object) -> bytes:
    """A bundle with any manifest, signed by the site itself."""
    text = manifest
    if not isinstance(text, bytes):
        text = json.dumps(manifest, sort_keys=True).encode()
    content = len(text).to_bytes(8, "big") + text + PAYLOAD
    return Bundle(
        manifest=text, payload=PAYLOAD, signature=sign(content, SITE, PURPOSE)
    ).SerializeToString(deterministic=True)


def test_what_a_site_packs_is_read_back_whole() -> None:
    assert pack_bundle(REQUEST, "north", PAYLOAD, {}, SITE) == signed(MANIFEST)
    found = unpack_bundle(signed(MANIFEST), REQUEST, KEYS)
    assert (found.site, found.payload, dict(found.manifest)) == ("north", PAYLOAD, MANIFEST)


@pytest.mark.parametrize(
    "manifest",
    [
        *(MANIFEST | {'site': site} for site in (5, None, ['north'], {}, '', '../north', 'n' * 65, 'south')),
        *(MANIFEST | {'version': version} for version in (VERSION - 1, VERSION + 1, str(VERSION), None)),
        *(MANIFEST | {'request': other} for other in ('', None, Request.fresh({}, None).id)),
        *(MANIFEST | {'request-sha256': other} for other in ('', None, '0' * 64)),
        *(
            {key: value for key, value in MANIFEST.items() if key != left_out}
            for left_out in ("site", "version", "request")
        ),
    ],
    ids=lambda manifest: json.dumps(manifest)[-30:],
)  # fmt: skip
def test_a_manifest_of_another_form_is_refused_although_its_site_signed_it(
    manifest: object,
) -> None:
    with pytest.raises(SurrogateError):
        unpack_bundle(signed(manifest), REQUEST, KEYS)


def test_a_manifest_has_a_mebibyte_at_most_and_is_read_whatever_it_holds() -> None:
    text = json.dumps(MANIFEST).encode()
    fits = text + b" " * (2**20 - len(text))
    assert unpack_bundle(signed(fits), REQUEST, KEYS).site == "north"
    whole = signed(text)
    for content in (
        *map(signed, (fits + b" ", b"[" * 100_000, b"{", b"\xff", b"[]", b"{}", b"3", b'"a"', b"")),
        *(b"", b"\xff", whole[:-1], whole + b"\x7b\x7c", whole * 2),
    ):
        with pytest.raises(SurrogateError, match="no bundle of `site offline release`"):
            unpack_bundle(content, REQUEST, KEYS)
