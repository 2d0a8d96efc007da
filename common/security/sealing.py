"""Sealed chain messages: messages between sites that the coordinator can neither read nor change.

X25519 between the sender's and each reader's key, HKDF-SHA256, ChaCha20-Poly1305, and an Ed25519
signature of the whole message, all from the `cryptography` library. The signature proves the sender
also to readers, who share the content key. The `context` is authenticated, so a message cannot be
replayed in another run or chain step. There is no forward secrecy: an attacker who steals a site's
key later can read recorded messages for this site.
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

from ..errors import ConfigError, SealError, SurrogateError
from ..safe_parsing import canonical, read_message
from ..surrogate_pb2 import Sealed

# A private key is a seed. A public key is the X25519 key followed by the Ed25519 key.
SEED_BYTES, PUBLIC_BYTES, NONCE_BYTES = 32, 64, 12
# Content of a signature, whole or in parts, of which large ones are not copied twice.
Signed = bytes | tuple[bytes | memoryview, ...]


def new_key() -> bytes:
    """Make a private key."""
    return os.urandom(SEED_BYTES)


def public_key(private: bytes) -> bytes:
    """The public key of a private key."""
    exchange, signature = _halves(private)
    return exchange.public_key().public_bytes_raw() + signature.public_key().public_bytes_raw()


def seal(content: bytes, private: bytes, readers: Mapping[str, bytes], context: bytes) -> bytes:
    """Encrypt content once for all readers. Each reader can open it.

    Args:
        content: to be encrypted.
        private: the sender's key.
        readers: public keys by name.
        context: of the run and the step, without which the message cannot be opened.

    Returns:
        The sealed message.

    Raises:
        SealError: for a bad key.

    Example:
        >>> sender, reader = new_key(), new_key()
        >>> sealed = seal(b"a surrogate", sender, {"south": public_key(reader)}, b"run 1, step 2")
        >>> open_sealed(sealed, "south", reader, public_key(sender), b"run 1, step 2")
        b'a surrogate'
    """
    key, nonce = ChaCha20Poly1305.generate_key(), os.urandom(NONCE_BYTES)
    sealed = Sealed(nonce=nonce, content=ChaCha20Poly1305(key).encrypt(nonce, content, context))
    for name, public in sorted(readers.items()):
        wrap_nonce = os.urandom(NONCE_BYTES)
        wrapped = ChaCha20Poly1305(_shared(private, public, context)).encrypt(
            wrap_nonce, key, name.encode()
        )
        sealed.readers.append(Sealed.Reader(name=name, nonce=wrap_nonce, key=wrapped))
    sealed.signature = _halves(private)[1].sign(_signed(context, sealed))
    return canonical(sealed)


def open_sealed(payload: bytes, name: str, private: bytes, sender: bytes, context: bytes) -> bytes:
    """Open a sealed message.

    Args:
        payload: the sealed message.
        name: of the reader.
        private: the reader's key.
        sender: the sender's public key.
        context: as in `seal`.

    Returns:
        The content.

    Raises:
        SealError: if the message was changed, is not for this reader, or not from this sender.
    """
    try:
        sealed = read_message(Sealed, payload, "sealed message")
        Ed25519PublicKey.from_public_bytes(sender[SEED_BYTES:]).verify(
            sealed.signature, _signed(context, sealed)
        )
        entry = next(reader for reader in sealed.readers if reader.name == name)
        wrapping = ChaCha20Poly1305(_shared(private, sender, context))
        key = wrapping.decrypt(entry.nonce, entry.key, name.encode())
        return ChaCha20Poly1305(key).decrypt(sealed.nonce, sealed.content, context)
    except StopIteration:
        raise SealError(f"the sealed message is not for {name!r}") from None
    except (SurrogateError, InvalidSignature, InvalidTag, ValueError):
        raise SealError(
            "the sealed message was changed on its way, or comes from another sender"
        ) from None


def read_keys(file: Path) -> Mapping[str, bytes]:
    """Public keys by site.

    Args:
        file: of lines `name = "hex"` as printed by `site offline key`.

    Raises:
        ConfigError: for another file, also if two names have the same key: its owner would count as
            two sites.
    """
    try:
        keys = {
            name: bytes.fromhex(key)
            for name, key in tomllib.loads(file.read_text("utf-8-sig")).items()
        }
        names: dict[bytes, str] = {}
        for name, key in keys.items():
            if len(key) != PUBLIC_BYTES:
                raise ValueError(f"the key of {name!r} has {len(key)} bytes, not {PUBLIC_BYTES}")
            if (other := names.setdefault(key[SEED_BYTES:], name)) != name:
                raise ValueError(f"{other!r} and {name!r} have the same key")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ConfigError(
            f'{str(file)!r} is no valid key file ({error}); write lines such as north = "hex"'
        ) from None
    return keys


def sign(content: Signed, private: bytes, purpose: bytes) -> bytes:
    """An Ed25519 signature of public content.

    Args:
        content: that is signed.
        private: the signer's key.
        purpose: the signature is valid only for it.
    """
    return _halves(private)[1].sign(_named(purpose, content))


def verify(content: Signed, signature: bytes, public: bytes, purpose: bytes) -> None:
    """Check that `sign` made a signature of content and purpose.

    Args:
        content: that was signed.
        signature: of it.
        public: the signer's public key.
        purpose: of the signature.

    Raises:
        SealError: if it did not.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public[SEED_BYTES:]).verify(
            signature, _named(purpose, content)
        )
    except (InvalidSignature, ValueError):
        raise SealError("the signature does not fit the content and the key") from None


def _halves(private: bytes) -> tuple[X25519PrivateKey, Ed25519PrivateKey]:
    return (
        X25519PrivateKey.from_private_bytes(_derived(private, b"exchange")),
        Ed25519PrivateKey.from_private_bytes(_derived(private, b"signature")),
    )


def _signed(context: bytes, sealed: Sealed) -> bytes:
    unsigned = Sealed()
    unsigned.CopyFrom(sealed)
    unsigned.ClearField("signature")
    return _named(context, canonical(unsigned))


def _named(purpose: bytes, content: Signed) -> bytes:
    parts = content if isinstance(content, tuple) else (content,)
    return b"".join((len(purpose).to_bytes(8, "big"), purpose, *parts))


def _shared(private: bytes, public: bytes, context: bytes) -> bytes:
    own = _halves(private)[0]
    other = public[:SEED_BYTES]
    try:
        secret = own.exchange(X25519PublicKey.from_public_bytes(other))
    except ValueError:
        raise SealError("the public key is invalid") from None
    # Sorted, so that both sides derive the same key.
    ends = b"".join(sorted((own.public_key().public_bytes_raw(), other)))
    return _derived(secret, b"relay" + ends + context)


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return HKDF(SHA256(), SEED_BYTES, salt=None, info=b"fedsurrogate " + purpose).derive(secret)
