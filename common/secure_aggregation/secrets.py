"""The secrets of one secure aggregation: a site's keys, made new for each sum and signed with its lasting key; the
shares of its secrets; and the masks that hide its numbers.

Sharing is Shamir's ("How to Share a Secret", 1979), modulo a prime, so that a hundred secrets take
milliseconds; the sharing over bit polynomials in Flower's helpers takes minutes for that. Each share is
encrypted for one site and fixed by a digest.

Masks between pairs cancel in the sum modulo 2^32, and a site's own mask is recovered from shares.
Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine Learning",
section 4. All pairs have a mask. With hundreds of sites, a sparse graph as in Bell et al. 2020 would save
most of the work.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from ..errors import DisputeError, SealError, SurrogateError
from ..security.sealing import PUBLIC_BYTES, SEED_BYTES, sign, verify

Words = NDArray[np.uint32]


def words(values: NDArray[np.int64]) -> Words:
    """Whole numbers modulo 2^32.

    Args:
        values: int64, of any shape.

    Returns:
        The numbers, uint32, in the same shape.

    Example:
        >>> words(np.array([5, -1])).tolist()
        [5, 4294967295]
        >>> unpack_words(pack_words(words(np.array([5, -1])))).tolist()
        [5, 4294967295]
    """
    return values.astype(np.uint64).astype(np.uint32)


def pack_words(values: Words) -> bytes:
    """Four bytes for each number, little endian."""
    return values.astype("<u4").tobytes()


def unpack_words(data: bytes) -> Words:
    """The numbers of `pack_words`."""
    return np.frombuffer(data, dtype="<u4").astype(np.uint32)


PRIME = 2**130 - 5
SECRET_BYTES, SHARE_BYTES = 16, 17


def split(secret: bytes, threshold: int, count: int) -> dict[int, bytes]:
    """Shares of a secret: values of a random polynomial whose constant term is the secret.

    Args:
        secret: 16 bytes.
        threshold: number of shares that give the secret.
        count: number of shares.

    Returns:
        Shares of 17 bytes by point, 1 to count.

    Example:
        >>> shares = split(b"sixteen bytes...", threshold=2, count=3)
        >>> combine({1: shares[1], 3: shares[3]})
        b'sixteen bytes...'
    """
    polynomial = [
        int.from_bytes(secret, "big"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    shares = {}
    for point in range(1, count + 1):
        value = 0
        for coefficient in reversed(polynomial):
            value = (value * point + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes:
    """The secret, from some of its shares.

    Args:
        shares: `threshold` of them, by point.

    Returns:
        The secret, 16 bytes.

    Raises:
        SurrogateError: if these are not shares of one secret.
    """
    weights = _at_zero(tuple(sorted(shares)))
    value = (
        sum(weights[point] * int.from_bytes(share, "big") for point, share in shares.items())
        % PRIME
    )
    if value >= 2 ** (8 * SECRET_BYTES):
        raise SurrogateError("shares that do not fit together")
    return value.to_bytes(SECRET_BYTES, "big")


@cache
def _at_zero(points: tuple[int, ...]) -> dict[int, int]:
    """Lagrange's weights of the values at these points in the value at zero."""
    weights = {}
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above, below = above * other % PRIME, below * (other - point) % PRIME
        weights[point] = above * pow(below, -1, PRIME) % PRIME
    return weights


PURPOSE = b"secure aggregation keys"
# Any private key: whether another key gives a secret with it does not depend on it.
PROBE = X25519PrivateKey.from_private_bytes(bytes(SEED_BYTES))
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
                "a hospital that you know, put the line that `site offline key` prints there into the "
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
                f"two sites of this secure aggregation have the same {what}: one of them would count twice"
            )
    if len({member.public[SEED_BYTES:] for member in members}) < len(members):
        raise SealError(
            "two sites of this secure aggregation have the same signature key: one of them would count "
            "twice"
        )


@lru_cache(maxsize=1024)
def check_member(member: Member, context: bytes) -> None:
    """Check that an entry is signed by its own lasting key, and that other sites can agree on
    secrets with its keys. In a simulation all sites ask, so what passed is kept.

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
                f"a key of site {member.site[:64]!r} for this secure aggregation is not a valid X25519 key"
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


def agreed(own: X25519PrivateKey, other: bytes, purpose: bytes) -> bytes:
    """A key that two sites share.

    Args:
        own: the private key of one site, made from its bytes once for all sites: that takes longer than
            an agreement.
        other: X25519, the public key of the other site.
        purpose: of the key; other purposes give other keys.

    Returns:
        32 bytes, the same at both sites.

    Raises:
        SealError: for an invalid public key.
    """
    return _of_pair(_exchanged(own, other), own.public_key().public_bytes_raw(), other, purpose)


def pair_secrets(sharing: bytes, members: Mapping[str, Member]) -> dict[str, bytes]:
    """What a site shares with each member by the keys for shares: to send it shares, and to open its.

    Args:
        sharing: the site's private key for shares.
        members: the key list by name.

    Returns:
        32 bytes by name, in the order of the names.

    Raises:
        SealError: for an invalid public key.
    """
    own = X25519PrivateKey.from_private_bytes(sharing)
    return {name: _exchanged(own, members[name].sharing) for name in sorted(members)}


def _exchanged(own: X25519PrivateKey, other: bytes) -> bytes:
    try:
        return own.exchange(_public_key(other))
    except ValueError:
        raise SealError("a public key of this secure aggregation is invalid") from None


def _of_pair(secret: bytes, one: bytes, other: bytes, purpose: bytes) -> bytes:
    """The key of two sites, given their public keys, for a purpose."""
    return derived(secret, purpose + b"".join(sorted((one, other))))


@lru_cache(maxsize=4096)
def _public_key(content: bytes) -> X25519PublicKey:
    return X25519PublicKey.from_public_bytes(content)


def derived(secret: bytes, purpose: bytes) -> bytes:
    """A key from a secret, by HKDF-SHA256.

    Args:
        secret: of any length.
        purpose: of the key; other purposes give other keys.

    Returns:
        32 bytes.
    """
    return HKDF(
        SHA256(), SEED_BYTES, salt=None, info=b"fedsurrogate secure aggregation " + purpose
    ).derive(secret)


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
    site: str,
    secrets: Secrets,
    pairs: Mapping[str, bytes],
    members: Mapping[str, Member],
    threshold: int,
    digest: bytes,
) -> Dealt:
    """Share both secrets of a site among all members, itself included.

    Args:
        site: its name.
        secrets: of this sum.
        pairs: its `pair_secrets`.
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
        key = _key(pairs[reader], members, site, reader, digest)
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
    dealt: Dealt,
    reader: str,
    pairs: Mapping[str, bytes],
    members: Mapping[str, Member],
    digest: bytes,
) -> dict[str, bytes]:
    """The two shares that a site has dealt to a reader.

    Args:
        dealt: by the site.
        reader: its name.
        pairs: `pair_secrets` of the reader.
        members: the key list by name.
        digest: of the key list.

    Returns:
        The shares by kind.

    Raises:
        SealError: if they were changed, are for another sum, or the sender has seen another key
            list.
    """
    key = _key(pairs[dealt.site], members, dealt.site, reader, digest)
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
            f"{len(shares)} shares of site {dealt.site!r}, but the sum needs {threshold}"
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


def _key(
    secret: bytes, members: Mapping[str, Member], site: str, reader: str, digest: bytes
) -> bytes:
    """The key for shares from `site` to `reader`, of what both share."""
    purpose = b"shares" + digest + site.encode() + b"\0" + reader.encode()
    return _of_pair(secret, members[site].sharing, members[reader].sharing, purpose)


def keystream(key: bytes, count: int) -> Words:
    """Numbers of a ChaCha20 keystream. Each key is used once, so the nonce is zero.

    Args:
        key: 32 bytes.
        count: of numbers.

    Returns:
        Numbers modulo 2^32, (count,).
    """
    stream = bytearray(4 * count)
    Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update_into(
        bytes(4 * count), stream
    )
    return np.frombuffer(stream, dtype="<u4").astype(np.uint32, copy=False)


def own_mask(blind: bytes, digest: bytes, count: int) -> Words:
    """A site's own mask.

    Args:
        blind: the site's secret for it.
        digest: of the key list.
        count: of numbers.

    Returns:
        Numbers modulo 2^32, (count,).
    """
    return keystream(derived(blind, b"own mask" + digest), count)


def pair_masks(
    site: str,
    seed: bytes,
    members: Mapping[str, Member],
    others: Collection[str],
    digest: bytes,
    count: int,
) -> Words:
    """Sum of the masks of a site with others. The first name of a pair adds.

    Args:
        site: its name.
        seed: of its masking key.
        members: the key list by name.
        others: names of the sites that it has masks with.
        digest: of the key list.
        count: of numbers.

    Returns:
        Numbers modulo 2^32, (count,).
    """
    total = np.zeros(count, dtype=np.uint32)
    own = X25519PrivateKey.from_private_bytes(masking_key(seed))
    for other in sorted(others):
        mask = keystream(agreed(own, members[other].masking, b"pair mask" + digest), count)
        total = total + mask if site < other else total - mask
    return total
