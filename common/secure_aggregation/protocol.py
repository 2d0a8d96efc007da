"""Secure aggregation without files and messages: a site's part, in which every step is possible once, in this
order: keys -> shares -> masked -> agreed -> done; and the coordinator's, which adds masked vectors and
removes the masks with the shares that sites reveal.

Source: Bonawitz et al. 2017, figure 4, with the consistency check for a coordinator that does not follow
the protocol.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError, DisputeError, SealError, StateError, SurrogateError
from ..privacy.gaussian_mechanism import CONTINUOUS, Integers, discrete_gaussian, seeded
from ..privacy.mechanism import Mechanism
from ..security.sealing import SEED_BYTES, public_key, sign, verify
from .rules import FILLED, HALF, FixedPoint, SumRules
from .secrets import (
    KINDS,
    Dealt,
    Member,
    Secrets,
    Words,
    announce,
    check_members,
    deal,
    list_digest,
    masking_key,
    open_share,
    own_mask,
    pair_masks,
    pair_secrets,
    public_half,
    quoted,
    recover,
    share_digest,
    words,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .secrets import Words


# Standard deviations of the noise that the modulus has room for. Beyond it the sum wraps around,
# which costs no privacy.
ROOM = 8
# Covers the rounding of exact sums to double precision before they are rounded to steps.
SLACK = 1e-3
Shapes = Mapping[str, tuple[int, ...]]


def site_variances(
    claim: Mechanism, numbers: Mapping[str, FixedPoint], shapes: Shapes, rules: SumRules
) -> dict[str, int]:
    """Variance of one site's noise in every entry of each statistic. Depends on public numbers
    only.

    A unit changes a statistic by a vector of norm at most 1 / step. Rounding moves an entry by less
    than one more, so all of them by less than the root of their number. The `honest` sites alone
    give the noise of the claim. Each adds CONTINUOUS once more, because what discrete noise costs
    beyond continuous noise grows with the number of sites.

    Args:
        claim: the mechanism, with the noise of the sum.
        numbers: fixed-point numbers of each statistic.
        shapes: of each statistic.
        rules: of the sum.

    Returns:
        Variances in squared steps, by statistic.

    Raises:
        ConfigError: if the modulus has no room for the noise.
        KeyError: for a statistic of which the claim says no noise.
    """
    variances = {}
    # Of a claim for several rounds, the statistics of this one.
    for name in shapes:
        (sigma, bound), fixed = claim.noise[name], numbers[name]
        sensitivity = bound / fixed.step + (1 + SLACK) * math.sqrt(math.prod(shapes[name]))
        shared = ((sigma / bound * sensitivity) ** 2 + CONTINUOUS) / rules.honest
        variances[name] = math.ceil(shared) + CONTINUOUS
        if ROOM * math.sqrt(rules.members * variances[name]) > (1 - FILLED) * HALF:
            raise ConfigError(
                f"secure-aggregation-records: the noise on {name} does not fit into the modulus; set more "
                "records of a site, or a larger epsilon"
            )
    return variances


def spare_variances(
    claim: Mechanism, numbers: Mapping[str, FixedPoint], shapes: Shapes, rules: SumRules
) -> dict[str, int]:
    """Variance of the part of one site's noise that is for lost sites.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.

    Returns:
        Variances in squared steps, by statistic; empty where no site may be lost.
    """
    if rules.lasting == rules:
        return {}
    whole, lasting = (
        site_variances(claim, numbers, shapes, each) for each in (rules, rules.lasting)
    )
    # Two parts cost discreteness twice.
    return {name: whole[name] + CONTINUOUS - lasting[name] for name in whole}


def noise_of_site(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    seed: bytes,
) -> dict[str, Integers]:
    """One site's noise for each statistic.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        seed: of the part for lost sites, 32 bytes.

    Returns:
        Noise by statistic, flat, in steps.
    """
    lasting, spare = (
        site_variances(claim, numbers, shapes, rules.lasting),
        spare_of(claim, numbers, shapes, rules, seed),
    )
    noise = {
        name: discrete_gaussian(variance, math.prod(shapes[name]))
        for name, variance in lasting.items()
    }
    return {name: drawn + spare[name] if name in spare else drawn for name, drawn in noise.items()}


def spare_of(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    seed: bytes,
) -> dict[str, Integers]:
    """The part of a site's noise that is for lost sites: the same at site and coordinator.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        seed: of this part, 32 bytes.

    Returns:
        Noise by statistic, flat, in steps; empty where no site may be lost.
    """
    source = seeded(seed)
    variances = sorted(spare_variances(claim, numbers, shapes, rules).items())
    return {
        name: discrete_gaussian(variance, math.prod(shapes[name]), source)
        for name, variance in variances
    }


def noise_of_sum(
    claim: Mechanism,
    numbers: Mapping[str, FixedPoint],
    shapes: Shapes,
    rules: SumRules,
    summed: int,
    removed: int = 0,
) -> dict[str, float]:
    """Standard deviation of the noise in a sum.

    Args:
        claim: as in `site_variances`.
        numbers: as in `site_variances`.
        shapes: as in `site_variances`.
        rules: as in `site_variances`.
        summed: number of sites in the sum.
        removed: number of sites whose part for lost sites was taken out.

    Returns:
        Standard deviations by statistic, in the units of the statistics.
    """
    lasting = site_variances(claim, numbers, shapes, rules.lasting)
    spare = spare_variances(claim, numbers, shapes, rules)
    return {
        name: math.sqrt(summed * variance + (summed - removed) * spare.get(name, 0))
        * numbers[name].step
        for name, variance in lasting.items()
    }


Phase = Literal["keys", "shares", "masked", "agreed", "done"]
PHASES: tuple[Phase, ...] = ("keys", "shares", "masked", "agreed", "done")
PURPOSE = b"secure aggregation of these sites"
GONE = Secrets(b"", b"", b"")


@dataclass(frozen=True)
class SumState:
    """What a site keeps of one sum.

    Attributes:
        site: its name.
        context: digest of the run and the sum.
        phase: its last step.
        secrets: of this sum.
        members: the key list.
        shares: what the sites whose shares it has have dealt to it, by sender and kind.
        summed: the sites that it has signed to be in the sum.
        public: digest of the public map of the features.
        spare: seed of this site's noise for lost sites, if it has any.
        pairs: `pair_secrets` one after the other, until the shares are opened.
    """

    site: str
    context: bytes
    phase: Phase
    secrets: Secrets
    members: tuple[Member, ...] = ()
    shares: Mapping[str, Mapping[str, bytes]] = field(default_factory=dict)
    summed: tuple[str, ...] = ()
    public: bytes = b""
    spare: bytes = b""
    pairs: bytes = b""

    @property
    def by_name(self) -> dict[str, Member]:
        """The key list by site."""
        return {member.site: member for member in self.members}

    @property
    def summed_keys(self) -> list[bytes]:
        """The lasting keys of the sites that it has signed to be in the sum."""
        return [self.by_name[name].public for name in self.summed]

    @property
    def digest(self) -> bytes:
        """Digest of the key list and the map, the same at all sites that work together."""
        return list_digest(self.members, self.context + self.public)

    def at(self, phase: Phase) -> None:
        """Check the last step.

        Args:
            phase: that it must be.

        Raises:
            StateError: if it is another.
        """
        if self.phase != phase:
            raise StateError(
                f"a step of secure aggregation that follows {phase!r}, but this site is at "
                f"{self.phase!r}: no step is done twice"
            )


def begin(site: str, private: bytes, context: bytes) -> tuple[SumState, Member]:
    """Make new keys for one sum.

    Args:
        site: its name.
        private: its lasting key.
        context: digest of the run and the sum.

    Returns:
        The site's state, and its entry in the key list.
    """
    secrets = Secrets.fresh()
    return SumState(site, context, "keys", secrets), announce(
        site, secrets, private, public_key(private), context
    )


def share(
    state: SumState,
    members: Sequence[Member],
    rules: SumRules,
    own: bytes,
    smallest_sum: int,
    pinned: Mapping[str, bytes] | None = None,
    public: bytes = b"",
) -> tuple[SumState, Dealt]:
    """Check the key list and deal shares of this site's secrets.

    Args:
        state: after `begin`.
        members: the key list.
        rules: of the sum.
        own: the site's lasting public key.
        smallest_sum: fewest sites that this site's policy allows in a sum.
        pinned: the lasting keys that it knows, by name; None if any key is accepted.
        public: digest of the public map. With another map for one site, the sum would show what
            that site adds to it.

    Returns:
        The state after this step, and the shares.

    Raises:
        SealError: for a list that the coordinator or a site has changed.
        DisputeError: for sites whose keys are not the pinned ones.
        PolicyError: if its sum would be of too few sites.
        StateError: if this step does not follow.
    """
    state.at("keys")
    rules.check(smallest_sum)
    known = None if pinned is None else {**pinned, state.site: own}
    check_members(members, state.context, known)
    mine = [member for member in members if member.site == state.site]
    if len(mine) != 1 or mine[0].public != own or not _has_keys(mine[0], state.secrets):
        raise SealError(
            "this site's own keys are not in the key list of the secure aggregation, or were changed"
        )
    listed = tuple(sorted(members, key=lambda each: each.site))
    by_name = {member.site: member for member in listed}
    pairs = pair_secrets(state.secrets.sharing, by_name)
    kept = b"".join(pairs.values())
    after = replace(state, phase="shares", members=listed, public=public, pairs=kept)
    return after, deal(state.site, state.secrets, pairs, by_name, rules.threshold, after.digest)


def mask(
    state: SumState, delivered: Sequence[Dealt], rules: SumRules, values: NDArray[np.int64]
) -> tuple[SumState, Words]:
    """Mask a vector of whole numbers.

    Args:
        state: after `share`.
        delivered: the shares that the other sites and this one have dealt to this site.
        rules: of the sum.
        values: the vector (n,).

    Returns:
        The state after this step, and the masked vector (n,) modulo 2^32.

    Raises:
        SealError: unless the shares are those of sites in the list.
        StateError: when there are too few, or if this step does not follow.
        DisputeError: which names the senders, for shares that cannot be used: this site would hold
            no share of their secrets, and a sum with their masks might never be completed. It then
            keeps its state, and may be asked again without these senders.
    """
    state.at("shares")
    members, digest = state.by_name, state.digest
    senders = [dealt.site for dealt in delivered]
    if (
        len(set(senders)) < len(senders)
        or not set(senders) <= members.keys()
        or state.site not in senders
    ):
        raise SealError(
            "the shares for this site are not those of sites in the key list, each once, and its "
            "own"
        )
    if len(senders) < rules.least:
        raise StateError(
            f"shares of {len(senders)} sites for secure aggregation that needs {rules.least}"
        )
    shares, unreadable = {}, {}
    kept = (state.pairs[at : at + SEED_BYTES] for at in range(0, len(state.pairs), SEED_BYTES))
    pairs = dict(zip(sorted(members), kept, strict=True))
    for dealt in delivered:
        try:
            shares[dealt.site] = open_share(dealt, state.site, pairs, members, digest)
        except SealError as error:
            unreadable[dealt.site] = str(error)
    if unreadable:
        first = next(iter(unreadable.values()))
        places = [place for place, name in enumerate(sorted(members)) if name in unreadable]
        raise DisputeError(
            f"the shares of {quoted(sorted(unreadable))} cannot be used: {first}", places
        )
    others = [name for name in senders if name != state.site]
    total = words(values) + own_mask(state.secrets.blind, digest, len(values))
    total += pair_masks(state.site, state.secrets.masking, members, others, digest, len(values))
    return replace(state, phase="masked", shares=shares, pairs=b""), total


def agree(
    state: SumState, summed: Collection[str], rules: SumRules, private: bytes
) -> tuple[SumState, bytes]:
    """Sign the list of the sites in the sum, once.

    Args:
        state: after `mask`.
        summed: names of the sites.
        rules: of the sum.
        private: the site's lasting key.

    Returns:
        The state after this step, and the signature.

    Raises:
        SealError: for a list without this site, or of too few sites.
        StateError: if this step does not follow.
    """
    state.at("masked")
    names = tuple(sorted(set(summed)))
    if (
        len(names) != len(summed)
        or not set(names) <= state.shares.keys()
        or state.site not in names
    ):
        raise SealError(
            "the list of summed sites does not consist of sites with shares, this one among them, "
            "each once"
        )
    if len(names) < rules.least:
        raise SealError(
            f"a sum of {len(names)} sites; this site reveals nothing below {rules.least}"
        )
    after = replace(state, phase="agreed", summed=names)
    return after, sign(signed_list(after.digest, names), private, PURPOSE)


def reveal(
    state: SumState, signatures: Mapping[str, bytes], rules: SumRules
) -> tuple[SumState, dict[str, dict[str, bytes]]]:
    """The shares that complete the sum: of the own mask of each summed site, of the pair masks of
    each lost one. Never both of one site.

    Args:
        state: after `agree`.
        signatures: of the list of summed sites, by site.
        rules: of the sum.

    Returns:
        The state after this step, and the shares by kind and site.

    Raises:
        SealError: unless `threshold` sites have signed the list that this site has signed.
        StateError: if this step does not follow.
    """
    state.at("agreed")
    content, members = signed_list(state.digest, state.summed), state.by_name
    for name, signature in signatures.items():
        if name not in state.summed:
            raise SealError(f"a signature of {name[:64]!r}, which is not in the sum")
        _check_signed(content, signature, members[name].public)
    if len(signatures) < rules.threshold:
        raise SealError(
            f"{len(signatures)} sites have signed the list of summed sites; {rules.threshold} are "
            "needed"
        )
    kinds = {name: "blind" if name in state.summed else "masking" for name in state.shares}
    revealed = {
        kind: {name: state.shares[name][kind] for name in kinds if kinds[name] == kind}
        for kind in KINDS
    }
    return replace(state, phase="done", secrets=GONE, shares={}, spare=b""), revealed


@lru_cache(maxsize=1024)
def _check_signed(content: bytes, signature: bytes, public: bytes) -> None:
    """In a simulation all sites ask, so what passed is kept."""
    verify(content, signature, public, PURPOSE)


def spare_seed(state: SumState) -> bytes:
    """The seed of this site's noise for lost sites if the list that it has signed shows that none
    is lost; else empty.

    Reveal it only after `reveal` has accepted the signatures of that list.
    """
    return state.spare if state.summed == tuple(state.by_name) else b""


def signed_list(digest: bytes, summed: Sequence[str]) -> bytes:
    """The bytes that sites sign.

    Args:
        digest: of the key list.
        summed: names of the sites in the sum.
    """
    return digest + b"".join(
        len(name.encode()).to_bytes(4, "big") + name.encode() for name in summed
    )


def _has_keys(member: Member, secrets: Secrets) -> bool:
    return member.masking == public_half(
        masking_key(secrets.masking)
    ) and member.sharing == public_half(secrets.sharing)


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
                "the revealed shares are not those of the sites of this secure aggregation"
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
