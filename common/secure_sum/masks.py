"""Masks modulo 2^32: those between pairs cancel in the sum, a site's own mask is recovered from
shares.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", section 4. All pairs have a mask. With hundreds of sites, a sparse graph as in Bell et
al. 2020 would save most of the work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedsurrogate.common.secure_sum.keys import Member, agreed, derived, masking_key
from fedsurrogate.common.secure_sum.words import Words


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
    private = masking_key(seed)
    for other in sorted(others):
        mask = keystream(agreed(private, members[other].masking, b"pair mask" + digest), count)
        total = total + mask if site < other else total - mask
    return total
