"""The keys of one secure sum: made new by every site, signed with its lasting key, and checked as
one list.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedsurrogate.common.errors import DisputeError, SealError
from fedsurrogate.common.secure_sum.shamir import SECRET_BYTES
from fedsurrogate.common.security.sealing import PUBLIC_BYTES, SEED_BYTES, sign, verify

PURPOSE = b"secure sum keys"
# Any private key: whether another key gives a secret with it does not depend on it.
PROBE = bytes(SEED_BYTES)
# Most names of sites in one message.
MOST_NAMED = 10


@dataclass(frozen=True)
class Secrets:
    """A site's secrets for one sum.

    Attributes:
        masking: seed of the key for masks between pairs.
        sharing: private key with which shares are encrypted.
        blind: seed of its own mask.
    """

    masking: bytes
    sharing: bytes
    blind: bytes

    @classmethod
    def fresh(cls) -> Secrets:
        """New secrets from the operating system."""
        return cls(os.urandom(SECRET_BYTES), os.urandom(SEED_BYTES), os.urandom(SECRET_BYTES))


@dataclass(frozen=True)
class Member:
    """A site's public keys for one sum.

    Attributes:
        site: its name.
        public: its lasting key.
        masking: X25519, of this sum.
        sharing: X25519, of this sum.
        signature: of these by its lasting key.
    """

    site: str
    public: bytes
    masking: bytes
    sharing: bytes
    signature: bytes

    @property
    def content(self) -> bytes:
        """The signed bytes."""
        return self.public + self.masking + self.sharing + self.site.encode()


def announce(site: str, secrets: Secrets, private: bytes, public: bytes, context: bytes) -> Member:
    """A site's entry in the key list.

    Args:
        site: its name.
        secrets: for this sum.
        private: its lasting private key.
        public: its lasting public key.
        context: digest of the run and the sum.
    """
    masking, sharing = public_half(masking_key(secrets.masking)), public_half(secrets.sharing)
    entry = Member(site, public, masking, sharing, b"")
    return Member(site, public, masking, sharing, sign(context + entry.content, private, PURPOSE))


def check_members(
    members: Sequence[Member], context: bytes, pinned: Mapping[str, bytes] | None = None
) -> None:
    """Check that every entry of a key list passes `check_member`, and no name or key occurs twice.

    Args:
        members: the key list.
        context: digest of the run and the sum.
        pinned: the lasting keys that a site knows, by name; then every entry must have the one of
            its name.

    Raises:
        SealError: for an entry that does not pass, or a name or key that occurs twice.
        DisputeError: for entries with other keys than the pinned ones.
    """
    check_distinct(members)
    if pinned is not None:
        names = sorted(member.site for member in members)
        if unknown := sorted(
            member.site for member in members if pinned.get(member.site) != member.public
        ):
            raise DisputeError(
                f"the key of site {quoted(unknown)} in the key list is not the one in peers; for "
                "a hospital that you know, put the line that `site key` prints there into the "
                "file that peers in the node-config names",
                [names.index(name) for name in unknown],
            )
    for member in members:
        check_member(member, context)


def check_distinct(members: Sequence[Member]) -> None:
    """Raise SealError if a name or key occurs twice."""
    for what in ("site", "public", "masking", "sharing"):
        values = [getattr(member, what) for member in members]
        if len(set(values)) < len(values):
            raise SealError(
                f"two sites of this secure sum have the same {what}: one of them would count twice"
            )
    if len({member.public[SEED_BYTES:] for member in members}) < len(members):
        raise SealError(
            "two sites of this secure sum have the same signature key: one of them would count "
            "twice"
        )


def check_member(member: Member, context: bytes) -> None:
    """Check that an entry is signed by its own lasting key, and that other sites can agree on
    secrets with its keys.

    A key of small order gives no secret: the first site that used it would refuse, and after it all
    others.

    Args:
        member: the entry.
        context: digest of the run and the sum.

    Raises:
        SealError: otherwise.
    """
    if len(member.public) != PUBLIC_BYTES:
        raise SealError(
            f"the key of site {member.site[:64]!r} has {len(member.public)} bytes, not "
            f"{PUBLIC_BYTES}"
        )
    for key in (member.masking, member.sharing):
        try:
            agreed(PROBE, key, b"")
        except SealError:
            raise SealError(
                f"a key of site {member.site[:64]!r} for this secure sum is not a valid X25519 key"
            ) from None
    verify(context + member.content, member.signature, member.public, PURPOSE)


def quoted(names: Sequence[str]) -> str:
    """Names of sites for a message, shortened."""
    return ", ".join(repr(name[:64]) for name in names[:MOST_NAMED]) + (
        ", ..." if len(names) > MOST_NAMED else ""
    )


def list_digest(members: Sequence[Member], context: bytes) -> bytes:
    """Digest of a key list. Sites that see different lists get different digests.

    Args:
        members: in any order; they are taken in the order of names.
        context: of the run and the sum.
    """
    digest = hashlib.sha256(len(context).to_bytes(8, "big") + context)
    for member in sorted(members, key=lambda each: each.site):
        for part in (member.content, member.signature):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def masking_key(seed: bytes) -> bytes:
    """The X25519 private key for masks between pairs."""
    return derived(seed, b"masking key")


def public_half(private: bytes) -> bytes:
    """The public key of an X25519 private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed(private: bytes, other: bytes, purpose: bytes) -> bytes:
    """A key that two sites share.

    Args:
        private: X25519, of one site.
        other: X25519, the public key of the other site.
        purpose: of the key; other purposes give other keys.

    Returns:
        32 bytes, the same at both sites.

    Raises:
        SealError: for an invalid public key.
    """
    own = X25519PrivateKey.from_private_bytes(private)
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SealError("a public key of this secure sum is invalid") from None
    ends = b"".join(sorted((own.public_key().public_bytes_raw(), other)))
    return derived(secret, purpose + ends)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """A key from a secret, by HKDF-SHA256.

    Args:
        secret: of any length.
        purpose: of the key; other purposes give other keys.

    Returns:
        32 bytes.
    """
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fedsurrogate secure sum " + purpose).derive(
        secret
    )
