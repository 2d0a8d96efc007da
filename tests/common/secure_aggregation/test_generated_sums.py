"""Secure aggregation with generated members, losses and lies of the coordinator at every step.

Whatever it asks, a site accepts no key that it does not know, reveals one kind of share of each
site, and its seed only if nobody is lost; and what is opened is the sum of the sites in it.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import DisputeError, FedSurrogateError
from fedsurrogate.common.secure_aggregation import secrets as shamir
from fedsurrogate.common.secure_aggregation.protocol import (
    PURPOSE,
    begin,
    check_revealed,
    signed_list,
    spare_seed,
    unmask,
)
from fedsurrogate.common.secure_aggregation.rules import SumRules
from fedsurrogate.common.secure_aggregation.secrets import (
    KINDS,
    Dealt,
    Member,
    Words,
    deal,
    pair_secrets,
    words,
)
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from tests.common.secure_aggregation.parties import CONTEXT, Party, values_of

# The step after which a site is lost.
STEPS = ("keys", "shares", "vector", "signature", "never")
FORGERIES = ("own", "other", "garbage", "stranger", "too few", "another list", "another sum")


@dataclass
class Scene:
    """The sites and the coordinator of one sum.

    Attributes:
        draw: chooses what happens.
        parties: the sites.
        rules: of the sum.
        lost: the step after which each site is lost.
        pinned: the keys that each site knows; None if it accepts any.
        dealt, masked, signatures, revealed: what sites have sent.
    """

    draw: Callable[..., object]
    parties: dict[str, Party]
    rules: SumRules
    lost: Mapping[str, object]
    pinned: Mapping[str, Mapping[str, bytes] | None]
    stranger: Party = field(default_factory=lambda: Party("stranger"))
    dealt: dict[str, Dealt] = field(default_factory=dict)
    masked: dict[str, Words] = field(default_factory=dict)
    signatures: dict[str, bytes] = field(default_factory=dict)
    revealed: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    spares: dict[str, bytes] = field(default_factory=dict)

    @property
    def members(self) -> dict[str, Member]:
        return {name: party.member for name, party in self.parties.items()}

    def there(self, step: str) -> list[str]:
        """The sites that are not lost before they have taken this step."""
        return [n for n in self.parties if STEPS.index(str(self.lost[n])) >= STEPS.index(step)]

    def chosen(self, options: tuple[str, ...]) -> list[str]:
        """Lies that are told before the truth."""
        return self.draw(st.lists(st.sampled_from(options), max_size=2))  # type: ignore[return-value]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    names = [f"site-{index}" for index in range(draw(st.integers(3, 5)))]
    rules = SumRules.of(
        len(names), draw(st.sampled_from((0.0, 1 / 3))), draw(st.sampled_from((0.0, 0.25, 0.4)))
    )
    parties = {name: Party(name) for name in names}
    keys = {name: public_key(party.private) for name, party in parties.items()}
    lost = {name: draw(st.sampled_from((*STEPS, *["never"] * 12))) for name in names}
    pinned: dict[str, dict[str, bytes] | None] = {}
    for name in names:
        missing = draw(st.sampled_from([None, "", "", "", *names]))
        pinned[name] = (
            None
            if missing is None
            else {other: key for other, key in keys.items() if other != missing}
        )
    return Scene(draw, parties, rules, lost, pinned)


def refused(call: Callable[..., object], *given: object) -> bool:
    try:
        call(*given)
    except FedSurrogateError:
        return True
    return False


def send_lists(scene: Scene) -> None:
    """Key lists, false ones first."""
    for name in scene.there("shares"):
        party, pinned, members = scene.parties[name], scene.pinned[name], scene.members
        others = [each for each in members if each != name]
        victim = scene.draw(st.sampled_from(others))
        # The stranger's keys under its own name, and under that of a site.
        mask = Party(str(victim))
        lies = {
            "invented": [*members.values(), scene.stranger.member],
            "replaced": [*(m for m in members.values() if m.site != victim), mask.member],
            "twice": [*members.values(), members[str(victim)]],
            "without itself": [members[each] for each in others],
            "with other keys of its own": [
                *(members[each] for each in others),
                begin(name, party.private, CONTEXT)[1],
            ],
            "forged": [
                replace(m, signature=bytes(len(m.signature))) if m.site == victim else m
                for m in members.values()
            ],
        }
        for lie in scene.chosen(tuple(lies)):
            if lie in ("invented", "replaced") and pinned is None:
                continue
            rules = SumRules.of(len(lies[lie]), 0.0, 0.0)
            assert refused(party.share, lies[lie], rules, 2, pinned), lie
        listed = sorted(members)
        unknown = [] if pinned is None else [each for each in others if each not in pinned]
        if not unknown:
            scene.dealt[name] = party.share(members.values(), scene.rules, 2, pinned)
            assert refused(party.share, members.values(), scene.rules, 2, pinned), "shared twice"
            continue
        with pytest.raises(DisputeError) as dispute:
            party.share(members.values(), scene.rules, 2, pinned)
        assert sorted(dispute.value.places) == sorted(map(listed.index, unknown))


def deliver(scene: Scene, values: Mapping[str, np.ndarray]) -> None:
    """Shares to each site, false ones first."""
    dealt = [scene.dealt[name] for name in sorted(scene.dealt)]
    for name in [each for each in scene.there("vector") if each in scene.dealt]:
        party, own = scene.parties[name], scene.dealt[name]
        other = next((each for each in dealt if each.site != name), own)
        broken = replace(other, content={**other.content, name: bytes(len(own.content[name]))})
        keys = scene.parties[other.site].state.secrets
        pairs = pair_secrets(keys.sharing, scene.members)
        lies = {
            "twice": [*dealt, other],
            "without its own": [each for each in dealt if each.site != name],
            "too few": dealt[: scene.rules.least - 1],
            **{
                lie: [each if each.site != other.site else changed for each in dealt]
                for lie, changed in (
                    ("broken", broken),
                    (
                        "of another key list",
                        deal(other.site, keys, pairs, scene.members, 2, bytes(32)),
                    ),
                    (
                        # Otherwise the sender could later call an honest share a forged one.
                        "with digests that were not published",
                        replace(other, digests={**other.digests, name: dict.fromkeys(KINDS, b"")}),
                    ),
                )
            },
            "of a stranger": [*dealt, replace(other, site="stranger")],
        }
        for lie in scene.chosen(tuple(lies)):
            if other is own and lie not in ("twice", "without its own", "too few"):
                continue
            assert refused(party.mask, lies[lie], scene.rules, values[name]), lie
        if len(dealt) < scene.rules.least:
            assert refused(party.mask, dealt, scene.rules, values[name])
            continue
        vector = party.mask(dealt, scene.rules, values[name])
        party.state = replace(party.state, spare=os.urandom(32))
        assert refused(party.mask, dealt, scene.rules, values[name]), "a second vector"
        scene.masked[name] = vector


def sign_lists(scene: Scene) -> None:
    """Lists of summed sites, false ones first."""
    summed = sorted(scene.masked)
    for name in [each for each in scene.there("signature") if each in scene.masked]:
        party = scene.parties[name]
        lies = {
            "without itself": [each for each in summed if each != name],
            "too few": [name, *(each for each in summed if each != name)][: scene.rules.least - 1],
            "twice": [*summed, name],
            "a stranger": [*summed, "stranger"],
        }
        for lie in scene.chosen(tuple(lies)):
            assert refused(party.agree, lies[lie], scene.rules), lie
        if len(summed) < scene.rules.least:
            assert refused(party.agree, summed, scene.rules)
            continue
        listed = scene.draw(st.permutations(summed))
        scene.signatures[name] = party.agree(listed, scene.rules)  # type: ignore[arg-type]
        assert refused(party.agree, summed, scene.rules), "a second list"


def open_sums(scene: Scene) -> None:
    """Signatures of the list, false ones first."""
    summed, genuine = tuple(sorted(scene.masked)), scene.signatures
    for name in [each for each in scene.there("never") if each in genuine]:
        party = scene.parties[name]
        digest = party.state.digest
        other = next((each for each in summed if each != name), name)
        content = signed_list(digest, summed)
        lies = {
            "own": genuine | {name: sign(content, new_key(), PURPOSE)},
            "other": genuine | {other: sign(content, new_key(), PURPOSE)},
            "garbage": genuine | {name: bytes(len(genuine[name]))},
            "stranger": genuine | {"stranger": sign(content, scene.stranger.private, PURPOSE)},
            "too few": dict(list(genuine.items())[: scene.rules.threshold - 1]),
            "another sum": {
                each: sign(signed_list(bytes(32), summed), scene.parties[each].private, PURPOSE)
                for each in genuine
            },
            "another list": genuine
            | {name: sign(signed_list(digest, summed[:-1]), party.private, PURPOSE)},
        }
        for lie in scene.chosen(FORGERIES):
            assert refused(party.reveal, lies[lie], scene.rules), lie
        if len(genuine) < scene.rules.threshold:
            assert refused(party.reveal, genuine, scene.rules)
            continue
        scene.spares[name] = spare_seed(party.state)
        scene.revealed[name] = party.reveal(genuine, scene.rules)
        assert refused(party.reveal, genuine, scene.rules), "revealed twice"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes())
def test_no_order_of_losses_and_lies_shows_more_than_the_sum(scene: Scene) -> None:
    values = values_of(scene.parties, 5)
    send_lists(scene)
    deliver(scene, values)
    sign_lists(scene)
    open_sums(scene)
    for name, found in scene.revealed.items():
        assert not found["blind"].keys() & found["masking"].keys()
        assert found["blind"].keys() == scene.masked.keys()
        assert found["masking"].keys() == scene.dealt.keys() - scene.masked.keys()
        check_revealed(name, found, scene.dealt, sorted(scene.masked))
        assert bool(scene.spares[name]) == (scene.masked.keys() == scene.parties.keys()), (
            "noise for lost sites is taken out only if no site is lost, at any step"
        )
        state = scene.parties[name].state
        assert (state.spare, state.secrets.blind, state.shares) == (b"", b"", {}), "on the disk"
    if len(scene.revealed) >= scene.rules.threshold:
        total = unmask(scene.masked, scene.dealt, scene.members, scene.revealed, scene.rules)
        assert (total == words(sum(values[name] for name in scene.masked))).all()
        assert len(scene.masked) >= scene.rules.least
    elif scene.revealed:
        given = (scene.masked, scene.dealt, scene.members, scene.revealed, scene.rules)
        assert refused(unmask, *given), "opened with too few shares"


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(scenes(), st.data())
def test_two_lists_are_never_both_opened(scene: Scene, data: st.DataObject) -> None:
    """The coordinator shows each site one of two lists of summed sites, and colluding sites sign and
    reveal everything.
    """
    scene = replace(
        scene,
        lost=dict.fromkeys(scene.parties, "never"),
        pinned=dict.fromkeys(scene.parties),
    )
    values = values_of(scene.parties, 5)
    send_lists(scene)
    deliver(scene, values)
    names = sorted(scene.parties)
    colluding = set(data.draw(st.permutations(names))[: scene.rules.colluding])
    lists = [names, [name for name in names if name != data.draw(st.sampled_from(names))]]
    signed: list[dict[str, bytes]] = [{}, {}]
    states = {}
    for name, party in scene.parties.items():
        states[name] = party.state
        for which in (0, 1) if name in colluding else (data.draw(st.integers(0, 1)),):
            party.state = states[name]
            if not refused(party.agree, lists[which], scene.rules):
                party.state = states[name]
                signed[which][name] = party.agree(lists[which], scene.rules)
    kinds: Counter[tuple[str, str]] = Counter()
    for name, party in scene.parties.items():
        if name in colluding:
            kinds.update((kind, site) for kind in KINDS for site in names)
            continue
        for signatures in signed:
            try:
                found = party.reveal(signatures, scene.rules)
            except FedSurrogateError:
                continue
            kinds.update((kind, site) for kind in KINDS for site in found[kind])
    for site in names:
        both = [kinds[kind, site] >= scene.rules.threshold for kind in KINDS]
        assert not all(both), "both secrets of one site"


@pytest.mark.parametrize("threshold", [2, 3])
def test_fewer_shares_have_one_distribution_for_every_secret(
    threshold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exhaustive in a small field: over all coefficients, each choice of threshold - 1 shares takes
    every value equally often, whatever the secret is.
    """
    prime = 7
    monkeypatch.setattr(shamir, "PRIME", prime)
    for secret in range(prime):
        seen: dict[tuple[int, ...], Counter[tuple[int, ...]]] = {}
        for drawn in itertools.product(range(prime), repeat=threshold - 1):
            numbers = iter(drawn)
            monkeypatch.setattr(secrets, "randbelow", lambda most, n=numbers: next(n))
            shares = shamir.split(secret.to_bytes(16, "big"), threshold, 4)
            for points in itertools.combinations(shares, threshold - 1):
                content = tuple(int.from_bytes(shares[point], "big") for point in points)
                seen.setdefault(points, Counter())[content] += 1
        for counts in seen.values():
            assert counts == dict.fromkeys(itertools.product(range(prime), repeat=threshold - 1), 1)


@settings(max_examples=20, deadline=None)
@given(
    st.binary(min_size=16, max_size=16) | st.sampled_from((bytes(16), b"\xff" * 16)),
    st.integers(2, 6),
    st.integers(1, 6),
)
def test_a_share_is_uniform_in_the_whole_field(secret: bytes, threshold: int, point: int) -> None:
    """With smaller coefficients the top bits of a share are those of the secret."""
    draws, bins = 400, 8
    shares = [shamir.split(secret, threshold, point)[point] for _ in range(draws)]
    counts = Counter(int.from_bytes(share, "big") * bins // shamir.PRIME for share in shares)
    statistic = sum((counts[each] - draws / bins) ** 2 / (draws / bins) for each in range(bins))
    # Chi-square with seven degrees of freedom: exceeded once in 10^9.
    assert statistic < 56
