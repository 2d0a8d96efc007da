"""Fingerprints of sites' public keys, and the part of them that people compare."""

from __future__ import annotations

import re

from cryptography.hazmat.primitives import hashes, serialization

# How many hexadecimal digits of a fingerprint people compare: 128 bits.
COMPARED = 32


def key_fingerprint(public: bytes) -> str:
    """SHA-256 of a public key (one line, as ssh writes it), hex."""
    key = serialization.load_ssh_public_key(public)
    digest = hashes.Hash(hashes.SHA256())
    digest.update(
        key.public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
    return digest.finalize().hex()


def in_groups(fingerprint: str) -> str:
    """What people compare of a fingerprint, in groups of four.

    Example:
        >>> in_groups("0123456789abcdef" * 4)
        '0123 4567 89ab cdef 0123 4567 89ab cdef'
    """
    digits = fingerprint[:COMPARED]
    return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4))


def is_fingerprint(text: str, fingerprint: str) -> bool:
    """Whether a text that a person has typed is this fingerprint: its first 32 digits at least.

    Example:
        >>> is_fingerprint("0123 4567 89AB cdef 0123 4567 89ab cdef", "0123456789abcdef" * 4)
        True
        >>> is_fingerprint("0123 4567", "0123456789abcdef" * 4)
        False
    """
    digits = re.sub(r"[\s:]", "", text).lower()
    return len(digits) >= COMPARED and fingerprint.startswith(digits)
