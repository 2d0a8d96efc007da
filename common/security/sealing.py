"""Sealed relays: what one site sends to others so that whoever carries it can neither read nor change it.

X25519 between the sender's and each reader's key, HKDF-SHA256, ChaCha20-Poly1305, and an Ed25519 signature of the whole,
all from the `cryptography` library. So a message is known to come from the sender, also among readers, who share the key
of its content. `context` is bound in: it cannot be played into another run or place of the chain. There is no forward
secrecy: who takes a site's key later can read what was recorded for it.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from common.errors import ConfigError, SealError, SurrogateError
from common.safe_parsing import read_message
from common.surrogate_pb2 import Sealed

# A private key is a seed; the public one is that of X25519 and that of Ed25519, one after the other.
SEED_BYTES, PUBLIC_BYTES, NONCE_BYTES = 32, 64, 12


def new_key() -> bytes:
    """A private key."""
    return os.urandom(SEED_BYTES)


def public_key(private: bytes) -> bytes:
    """The public half of a private key."""
    exchange, signature = _halves(private)
    return exchange.public_key().public_bytes_raw() + signature.public_key().public_bytes_raw()


def seal(content: bytes, private: bytes, readers: Mapping[str, bytes], context: bytes) -> bytes:
    """Encrypt once for all readers (name: public key), each of whom can open it alone. Raises SealError for a bad key."""
    key, nonce = ChaCha20Poly1305.generate_key(), os.urandom(NONCE_BYTES)
    sealed = Sealed(nonce=nonce, content=ChaCha20Poly1305(key).encrypt(nonce, content, context))
    for name, public in sorted(readers.items()):
        wrap_nonce = os.urandom(NONCE_BYTES)
        wrapped = ChaCha20Poly1305(_shared(private, public, context)).encrypt(wrap_nonce, key, name.encode())
        sealed.readers.append(Sealed.Reader(name=name, nonce=wrap_nonce, key=wrapped))
    sealed.signature = _halves(private)[1].sign(_signed(context, sealed))
    return sealed.SerializeToString(deterministic=True)


def open_sealed(payload: bytes, name: str, private: bytes, sender: bytes, context: bytes) -> bytes:
    """Undo `seal` as reader `name`. Raises SealError when it was changed, is not for us, or not from the sender."""
    sealed = Sealed()
    try:
        read_message(sealed, payload, "sealed message")
        Ed25519PublicKey.from_public_bytes(sender[SEED_BYTES:]).verify(sealed.signature, _signed(context, sealed))
        entry = next(reader for reader in sealed.readers if reader.name == name)
        wrapping = ChaCha20Poly1305(_shared(private, sender, context))
        key = wrapping.decrypt(entry.nonce, entry.key, name.encode())
        return ChaCha20Poly1305(key).decrypt(sealed.nonce, sealed.content, context)
    except StopIteration:
        raise SealError(f"a sealed message that is not for {name!r}") from None
    except (SurrogateError, InvalidSignature, InvalidTag, ValueError):
        raise SealError("a sealed message that was changed on its way, or comes from somebody else") from None


def read_keys(file: Path) -> Mapping[str, bytes]:
    """Public keys by site: lines `name = "hex"`, as `site key` prints them.

    Raises ConfigError, also where one key stands under two names: its owner would count as two sites.
    """
    try:
        keys = {name: bytes.fromhex(key) for name, key in tomllib.loads(file.read_text("utf-8-sig")).items()}
        names: dict[bytes, str] = {}
        for name, key in keys.items():
            if len(key) != PUBLIC_BYTES:
                raise ValueError(f"the key of {name!r} has {len(key)} bytes, not {PUBLIC_BYTES}")
            if (other := names.setdefault(key[SEED_BYTES:], name)) != name:
                raise ValueError(f"{other!r} and {name!r} have the same key")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f'{str(file)!r} holds no keys ({error}); write lines such as north = "hex"') from None
    return keys


def sign(content: bytes, private: bytes, purpose: bytes) -> bytes:
    """An Ed25519 signature of content that is not secret. purpose: so that it counts for nothing else."""
    return _halves(private)[1].sign(_named(purpose, content))


def verify(content: bytes, signature: bytes, public: bytes, purpose: bytes) -> None:
    """Raise SealError unless `sign` was called on the same with the private half of this public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public[SEED_BYTES:]).verify(signature, _named(purpose, content))
    except (InvalidSignature, ValueError):
        raise SealError("a signature that does not fit the content and the key") from None


def _halves(private: bytes) -> tuple[X25519PrivateKey, Ed25519PrivateKey]:
    return (
        X25519PrivateKey.from_private_bytes(_derived(private, b"exchange")),
        Ed25519PrivateKey.from_private_bytes(_derived(private, b"signature")),
    )


def _signed(context: bytes, sealed: Sealed) -> bytes:
    unsigned = Sealed()
    unsigned.CopyFrom(sealed)
    unsigned.ClearField("signature")
    return _named(context, unsigned.SerializeToString(deterministic=True))


def _named(purpose: bytes, content: bytes) -> bytes:
    return len(purpose).to_bytes(8, "big") + purpose + content


def _shared(private: bytes, public: bytes, context: bytes) -> bytes:
    own = _halves(private)[0]
    other = public[:SEED_BYTES]
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SealError("a public key that is none") from None
    # The order of the two must not matter: both ends derive the same.
    ends = b"".join(sorted((own.public_key().public_bytes_raw(), other)))
    return _derived(secret, b"relay" + ends + context)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fedsurrogate " + purpose).derive(secret)
