"""The coordinator's part of a secure sum: add masked vectors, and remove the masks with the shares
that sites reveal.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.secure_sum.keys import Member, masking_key, public_half
from fedsurrogate.common.secure_sum.masks import own_mask, pair_masks
from fedsurrogate.common.secure_sum.rules import SumRules
from fedsurrogate.common.secure_sum.shares import KINDS, Dealt, recover, share_digest
from fedsurrogate.common.secure_sum.words import Words

Shares = Mapping[str, Mapping[str, bytes]]


def check_revealed(
    reader: str, revealed: Shares, dealt: Mapping[str, Dealt], summed: Sequence[str]
) -> None:
    """Check that a site reveals exactly the shares it must, each with its digest.

    Args:
        reader: the site that reveals them.
        revealed: shares by kind and site.
        dealt: of all sites whose shares were delivered, by site.
        summed: names of the sites in the sum.

    Raises:
        SurrogateError: otherwise.
    """
    wanted = {"blind": set(summed), "masking": set(dealt) - set(summed)}
    for kind in KINDS:
        if set(revealed[kind]) != wanted[kind]:
            raise SurrogateError(
                "the revealed shares are not those of the sites of this secure sum"
            )
        for site, share in revealed[kind].items():
            if (
                share_digest(share, site, reader, kind, dealt[site].digest)
                != dealt[site].digests[reader][kind]
            ):
                raise SurrogateError(f"a forged share of site {site!r}")


def unmask(
    masked: Mapping[str, Words],
    dealt: Mapping[str, Dealt],
    members: Mapping[str, Member],
    revealed: Mapping[str, Shares],
    rules: SumRules,
    delivered: Mapping[str, Collection[str]] | None = None,
) -> Words:
    """The sum of vectors, without their masks.

    Args:
        masked: vectors (n,) modulo 2^32, by site in the sum.
        dealt: of all sites whose shares were delivered, by site.
        members: the key list by name.
        revealed: shares by reader, kind and site, after `check_revealed`.
        rules: of the sum.
        delivered: by site in the sum, the sites whose shares it has, with which its vector is
            masked; by default all.

    Returns:
        The sum (n,) modulo 2^32.

    Raises:
        SurrogateError: when shares are missing or do not fit.
    """
    total: Words = np.zeros_like(next(iter(masked.values())))
    for vector in masked.values():
        total = total + vector
    readers = sorted(members)
    for site, each in dealt.items():
        kind = "blind" if site in masked else "masking"
        with_it = [name for name in masked if delivered is None or site in delivered[name]]
        if not with_it:
            continue
        shares = {reader: own[kind][site] for reader, own in revealed.items() if site in own[kind]}
        secret = recover(each, kind, shares, readers, rules.threshold)
        if kind == "blind":
            total = total - own_mask(secret, each.digest, len(total))
        else:
            if public_half(masking_key(secret)) != members[site].masking:
                raise SurrogateError(f"site {site!r} has dealt shares of another key than its own")
            # The masks that the lost site would have added are what is missing for those of the
            # others to cancel.
            total = total + pair_masks(site, secret, members, with_it, each.digest, len(total))
    return total
