"""Sealed relays: what one site sends to others so that whoever carries it can neither read nor change it.

X25519 between the sender's and each reader's key, HKDF-SHA256, ChaCha20-Poly1305, all from the `cryptography` library. The
keys of both ends go into every secret, so a message is known to come from the sender; `context` is bound in, so that it
cannot be played into another run or place of the chain. There is no forward secrecy: who takes a site's key later can read
what was recorded for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from google.protobuf.message import DecodeError

from common.errors import SealError
from common.surrogate_pb2 import Sealed

KEY_BYTES, NONCE_BYTES = 32, 12


def new_key() -> bytes:
    """A private key."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public half of a private key."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def seal(content: bytes, private: bytes, readers: Mapping[str, bytes], context: bytes) -> bytes:
    """Encrypt once for all readers (name: public key), each of whom can open it alone. Raises SealError for a bad key."""
    key, nonce = os.urandom(KEY_BYTES), os.urandom(NONCE_BYTES)
    sealed = Sealed(nonce=nonce)
    for name, public in sorted(readers.items()):
        wrap_nonce = os.urandom(NONCE_BYTES)
        wrapped = ChaCha20Poly1305(_shared(private, public, context)).encrypt(wrap_nonce, key, name.encode())
        sealed.readers.append(Sealed.Reader(name=name, nonce=wrap_nonce, key=wrapped))
    # The entries of all readers are bound in: not even what only another reader needs can be changed unseen.
    sealed.content = ChaCha20Poly1305(key).encrypt(nonce, content, _bound(context, sealed))
    return sealed.SerializeToString(deterministic=True)


def open_sealed(payload: bytes, name: str, private: bytes, sender: bytes, context: bytes) -> bytes:
    """Undo `seal` as reader `name`. Raises SealError when it was changed, is not for us, or not from the sender."""
    sealed = Sealed()
    try:
        sealed.ParseFromString(payload)
        entry = next(reader for reader in sealed.readers if reader.name == name)
        wrapping = ChaCha20Poly1305(_shared(private, sender, context))
        key = wrapping.decrypt(entry.nonce, entry.key, name.encode())
        return ChaCha20Poly1305(key).decrypt(sealed.nonce, sealed.content, _bound(context, sealed))
    except StopIteration:
        raise SealError(f"a sealed message that is not for {name!r}") from None
    except (DecodeError, InvalidTag, ValueError):
        raise SealError("a sealed message that was changed on its way, or comes from somebody else") from None


def _bound(context: bytes, sealed: Sealed) -> bytes:
    entries = Sealed(readers=sealed.readers)
    return context + b"\0" + entries.SerializeToString(deterministic=True)


def _shared(private: bytes, public: bytes, context: bytes) -> bytes:
    try:
        own = X25519PrivateKey.from_private_bytes(private)
        secret = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise SealError("a public key that is none") from None
    # The order of the two must not matter: both ends derive the same.
    ends = b"".join(sorted((own.public_key().public_bytes_raw(), public)))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"fedsurrogate relay" + ends + context).derive(secret)
