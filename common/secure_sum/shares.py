"""Shares of a site's two secrets: Shamir's secret sharing, each share encrypted for one site and
fixed by a digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.secure_sum.keys import Member, Secrets, agreed
from fedsurrogate.common.secure_sum.shamir import SHARE_BYTES, combine, split

KINDS = ("blind", "masking")
# A key encrypts one message only.
NONCE = bytes(12)
TAG_BYTES, DIGEST_BYTES = 16, 32


@dataclass(frozen=True)
class Dealt:
    """The shares that one site deals.

    Attributes:
        site: its name.
        content: both shares, encrypted, by reader.
        digests: of each share, by reader and kind.
        checks: digests of the secrets themselves, by kind.
        digest: of the key list that the site has seen.
    """

    site: str
    content: Mapping[str, bytes]
    digests: Mapping[str, Mapping[str, bytes]]
    checks: Mapping[str, bytes]
    digest: bytes


def deal(
    site: str, secrets: Secrets, members: Mapping[str, Member], threshold: int, digest: bytes
) -> Dealt:
    """Share both secrets of a site among all members, itself included.

    Args:
        site: its name.
        secrets: of this sum.
        members: the key list by name.
        threshold: number of shares that recover a secret.
        digest: of the key list.
    """
    dealt = {kind: split(getattr(secrets, kind), threshold, len(members)) for kind in KINDS}
    content, digests = {}, {}
    for index, reader in enumerate(sorted(members), 1):
        both = {kind: dealt[kind][index] for kind in KINDS}
        digests[reader] = {
            kind: share_digest(both[kind], site, reader, kind, digest) for kind in KINDS
        }
        key = _key(secrets.sharing, members[reader], site, reader, digest)
        content[reader] = ChaCha20Poly1305(key).encrypt(
            NONCE, both["blind"] + both["masking"], digest
        )
    checks = {
        kind: share_digest(getattr(secrets, kind), site, site, f"{kind} secret", digest)
        for kind in KINDS
    }
    return Dealt(site, content, digests, checks, digest)


def check_dealt(dealt: Dealt) -> None:
    """Check that readers could open shares, as far as this shows without their keys.

    Args:
        dealt: by one site.

    Raises:
        SurrogateError: for shares or digests of a wrong length.
    """
    sizes = {len(both) for both in dealt.content.values()}
    digests = {
        len(each) for both in (dealt.checks, *dealt.digests.values()) for each in both.values()
    }
    if sizes != {2 * SHARE_BYTES + TAG_BYTES} or digests != {DIGEST_BYTES}:
        raise SurrogateError("encrypted shares or digests of shares of the wrong length")


def open_share(
    dealt: Dealt, reader: str, sharing: bytes, members: Mapping[str, Member], digest: bytes
) -> dict[str, bytes]:
    """The two shares that a site has dealt to a reader.

    Args:
        dealt: by the site.
        reader: its name.
        sharing: the reader's private key.
        members: the key list by name.
        digest: of the key list.

    Returns:
        The shares by kind.

    Raises:
        SealError: if they were changed, are for another sum, or the sender has seen another key
            list.
    """
    key = _key(sharing, members[dealt.site], dealt.site, reader, digest)
    try:
        both = ChaCha20Poly1305(key).decrypt(NONCE, dealt.content[reader], digest)
    except (InvalidTag, KeyError):
        raise SealError(
            f"the shares of site {dealt.site[:64]!r} cannot be opened: they were changed, or that "
            "site has another key list"
        ) from None
    shares = {"blind": both[:SHARE_BYTES], "masking": both[SHARE_BYTES:]}
    for kind in KINDS:
        if dealt.digests.get(reader, {}).get(kind) != share_digest(
            shares[kind], dealt.site, reader, kind, digest
        ):
            raise SealError(
                f"the shares of site {dealt.site[:64]!r} do not have the digests that it has sent"
            )
    return shares


def recover(
    dealt: Dealt, kind: str, shares: Mapping[str, bytes], readers: list[str], threshold: int
) -> bytes:
    """A secret of a site from its shares.

    Args:
        dealt: by the site.
        kind: of the secret.
        shares: by reader, whose digests were checked.
        readers: all members, sorted.
        threshold: number of shares that recover a secret.

    Raises:
        SurrogateError: when they are too few, or the site has dealt shares that do not fit
            together.
    """
    if len(shares) < threshold:
        raise SurrogateError(
            f"{len(shares)} shares of site {dealt.site!r}, but secure-sum-threshold needs "
            f"{threshold} to complete the sum"
        )
    try:
        secret = combine(
            {readers.index(reader) + 1: shares[reader] for reader in sorted(shares)[:threshold]}
        )
    except SurrogateError:
        raise SurrogateError(
            f"site {dealt.site!r} has dealt shares that do not fit together"
        ) from None
    if share_digest(
        secret, dealt.site, dealt.site, f"{kind} secret", dealt.digest
    ) != dealt.checks.get(kind):
        raise SurrogateError(f"site {dealt.site!r} has dealt shares that do not fit together")
    return secret


def share_digest(share: bytes, site: str, reader: str, kind: str, digest: bytes) -> bytes:
    """Digest that fixes a share without revealing it: a share is a random number of 130 bits.

    Args:
        share: its bytes.
        site: that has dealt it.
        reader: that it is for.
        kind: of the secret.
        digest: of the key list.
    """
    return hashlib.sha256(
        b"\0".join((digest, share, kind.encode(), site.encode(), reader.encode()))
    ).digest()


def _key(private: bytes, other: Member, site: str, reader: str, digest: bytes) -> bytes:
    """The key for shares from `site` to `reader`. other: the one of the two whose public key is
    used.
    """
    return agreed(
        private, other.sharing, b"shares" + digest + site.encode() + b"\0" + reader.encode()
    )
