"""Secure aggregation in memory: exact sums, lost sites, and every message that a lying coordinator could
change.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import PolicyError, SealError, StateError, SurrogateError
from fedsurrogate.common.secure_aggregation.protocol import begin, check_revealed, unmask
from fedsurrogate.common.secure_aggregation.rules import FixedPoint, SumRules
from fedsurrogate.common.secure_aggregation.secrets import (
    announce,
    check_members,
    combine,
    split,
    words,
)
from fedsurrogate.common.security.sealing import new_key, public_key
from fedsurrogate.common.wire.surrogate_proto import (
    pack_dealt,
    pack_state,
    unpack_dealt,
    unpack_state,
)
from tests.common.secure_aggregation.parties import (
    CONTEXT,
    Party,
    complete,
    parties,
    run,
    values_of,
)


def rules_of(
    members: int, colluding: float = 0.0, dropouts: float = 0.4, threshold: int = 0
) -> SumRules:
    return SumRules.of(members, colluding, dropouts, threshold)


def total_of(values: dict[str, np.ndarray], names: list[str]) -> np.ndarray:
    return words(sum(values[name] for name in names))


@settings(max_examples=15, deadline=None)
@given(st.integers(3, 8), st.data())
def test_the_sum_is_exact_whoever_is_lost(count: int, data: st.DataObject) -> None:
    sites, rules = parties(count), rules_of(count)
    names = list(sites)
    lost = data.draw(st.lists(st.sampled_from(names), unique=True, max_size=count - rules.least))
    there = [name for name in names if name not in lost]
    silent = data.draw(
        st.lists(st.sampled_from(there), unique=True, max_size=len(there) - rules.threshold)
    )
    values = values_of(names)
    total, masked = run(sites, values, rules, lost, silent)
    assert (total == total_of(values, there)).all()
    assert not any(
        (masked[name] == words(values[name])).any() for name in there if len(values[name]) < 100
    )


def test_masked_vectors_look_random() -> None:
    """Of zeros, so that every bit comes from masks: half of all bits are set, at every position."""
    sites = parties(4)
    zeros = {name: np.zeros(4000, dtype=np.int64) for name in sites}
    total, masked = run(sites, zeros, rules_of(4))
    assert not total.any()
    for vector in masked.values():
        shares = np.unpackbits(vector.view(np.uint8).reshape(-1, 4), axis=1).mean(0)
        assert (abs(shares - 0.5) < 0.05).all()


def test_too_few_shares_reveal_nothing() -> None:
    sites, rules = parties(5), rules_of(5, dropouts=0.0)
    members = {name: party.member for name, party in sites.items()}
    values = values_of(sites)
    dealt = {name: party.share(members.values(), rules) for name, party in sites.items()}
    masked = {
        name: party.mask(dealt.values(), rules, values[name]) for name, party in sites.items()
    }
    signatures = {name: party.agree(list(masked), rules) for name, party in sites.items()}
    some = list(sites)[: rules.threshold - 1]
    revealed = {name: sites[name].reveal(signatures, rules) for name in some}
    with pytest.raises(SurrogateError, match="secure-aggregation-threshold"):
        unmask(masked, dealt, members, revealed, rules)


def test_a_forged_share_is_noticed_and_its_sender_named() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    masked = {
        name: party.mask(dealt.values(), rules, np.arange(3)) for name, party in sites.items()
    }
    signatures = {name: party.agree(list(masked), rules) for name, party in sites.items()}
    found = sites["site-1"].reveal(signatures, rules)
    check_revealed("site-1", found, dealt, list(masked))
    found["blind"]["site-2"] = bytes(17)
    with pytest.raises(SurrogateError, match="forged share of site 'site-2'"):
        check_revealed("site-1", found, dealt, list(masked))


def test_a_site_that_deals_shares_which_do_not_fit_is_noticed() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    wrong = replace(dealt["site-0"], checks={"blind": bytes(32), "masking": bytes(32)})
    masked = {
        name: party.mask(dealt.values(), rules, np.arange(3)) for name, party in sites.items()
    }
    with pytest.raises(SurrogateError, match="do not fit together"):
        complete(sites, dealt | {"site-0": wrong}, masked, rules, list(sites))


def test_no_step_is_done_twice() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    party = sites["site-0"]
    dealt = {name: each.share(members, rules) for name, each in sites.items()}
    with pytest.raises(StateError):
        party.share(members, rules)
    for each in sites.values():
        each.mask(dealt.values(), rules, np.arange(3))
    with pytest.raises(StateError):
        party.mask(dealt.values(), rules, np.arange(3))
    signatures = {name: each.agree(list(sites), rules) for name, each in sites.items()}
    with pytest.raises(StateError):
        party.agree(["site-0", "site-1", "site-2"], rules)
    party.reveal(signatures, rules)
    with pytest.raises(StateError):
        party.reveal(signatures, rules)
    assert party.state.secrets.blind == b"", "after the last step no secret is left on the disk"
    assert party.state.shares == {}


def test_sites_that_see_different_key_lists_do_not_mask() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    stranger = Party("site-3")
    other = [*members[:3], stranger.member]
    dealt = {
        name: sites[name].share(members if name != "site-0" else other, rules)
        for name in list(sites)[:3]
    }
    with pytest.raises(SealError, match="another key list"):
        sites["site-1"].mask(dealt.values(), rules, np.arange(3))


@pytest.mark.parametrize("change", ["masking", "sharing", "public", "site", "signature", "context"])
def test_a_changed_entry_of_the_key_list_is_refused(change: str) -> None:
    sites, rules = parties(4), rules_of(4)
    members = {name: party.member for name, party in sites.items()}
    if change == "context":
        other = Party("site-2", context=b"another sum")
        members["site-2"] = other.member
    else:
        fresh = Party("mallory").member
        members["site-2"] = replace(members["site-2"], **{change: getattr(fresh, change)})
    with pytest.raises(SealError):
        sites["site-0"].share(members.values(), rules)


@pytest.mark.parametrize("twice", ["site", "public", "masking", "sharing"])
def test_two_sites_of_one_key_are_refused(twice: str) -> None:
    members = [party.member for party in parties(4).values()]
    members[1] = replace(members[1], **{twice: getattr(members[0], twice)})
    with pytest.raises(SealError, match="same"):
        check_members(members, CONTEXT)


def test_two_names_with_one_lasting_key_are_refused() -> None:
    private = new_key()
    members = [
        party.member for party in (Party("north", private), Party("south", private), Party("west"))
    ]
    with pytest.raises(SealError, match="count twice"):
        check_members(members, CONTEXT)


def test_a_site_that_pins_keys_refuses_a_key_of_the_coordinator() -> None:
    sites, rules = parties(4), rules_of(4)
    pinned = {name: public_key(party.private) for name, party in sites.items()}
    impostor = Party("site-2")
    members = [party.member for party in sites.values() if party.name != "site-2"]
    with pytest.raises(SealError, match="not the one in peers"):
        sites["site-0"].share([*members, impostor.member], rules, pinned=pinned)
    sites["site-1"].share([*members, sites["site-2"].member], rules, pinned=pinned)


def test_a_site_refuses_a_list_without_its_own_keys() -> None:
    sites, rules = parties(4), rules_of(4)
    copy = begin("site-0", sites["site-0"].private, CONTEXT)[1]
    members = [party.member for party in sites.values() if party.name != "site-0"]
    with pytest.raises(SealError, match="own keys"):
        sites["site-0"].share([*members, copy], rules)
    with pytest.raises(SealError, match="own keys"):
        sites["site-0"].share([*members, Party("fourth").member], rules)


def test_a_claimed_loss_of_sites_does_not_make_a_small_sum() -> None:
    sites, rules = parties(6), rules_of(6, dropouts=0.2)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    with pytest.raises(StateError, match="needs 5"):
        sites["site-0"].mask([dealt[name] for name in list(sites)[:4]], rules, np.arange(3))
    for party in sites.values():
        party.mask(dealt.values(), rules, np.arange(3))
    for few in (["site-0"], ["site-0", "site-1"], list(sites)[:4]):
        with pytest.raises(SealError, match="reveals nothing below 5"):
            sites["site-0"].agree(few, rules)
    with pytest.raises(SealError, match="this one among them"):
        sites["site-0"].agree(list(sites)[1:], rules)
    with pytest.raises(SealError, match="each once"):
        sites["site-0"].agree(["site-0", *list(sites)], rules)


def test_sites_that_see_different_lists_of_summed_sites_reveal_nothing() -> None:
    """The coordinator says to one half that site-5 is lost, and to the other that it is not: it
    wants both secrets.
    """
    sites, rules = parties(6), rules_of(6, dropouts=0.2)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    for party in sites.values():
        party.mask(dealt.values(), rules, np.arange(3))
    everyone, without = list(sites), list(sites)[:5]
    first = {name: sites[name].agree(everyone, rules) for name in everyone[3:]}
    second = {name: sites[name].agree(without, rules) for name in everyone[:3]}
    for name, signatures in (("site-0", second), ("site-3", first)):
        with pytest.raises(SealError, match="4 are needed"):
            sites[name].reveal(signatures, rules)
        with pytest.raises(SealError, match="signature"):
            sites[name].reveal(first | second, rules)


def test_a_site_never_reveals_both_shares_of_one_site() -> None:
    sites, rules = parties(5), rules_of(5)
    members = {name: party.member for name, party in sites.items()}
    dealt = {name: party.share(members.values(), rules) for name, party in sites.items()}
    summed = list(sites)[:4]
    masked = {name: sites[name].mask(dealt.values(), rules, np.arange(3)) for name in summed}
    signatures = {name: sites[name].agree(list(masked), rules) for name in summed}
    found = sites["site-0"].reveal(signatures, rules)
    assert found["blind"].keys() == set(summed)
    assert found["masking"].keys() == {"site-4"}


def test_a_replayed_list_of_another_sum_is_refused() -> None:
    """Signatures of an earlier sum with the same sites do not open this one."""
    first, second, rules = parties(4), parties(4), rules_of(4)
    second = {name: Party(name, first[name].private) for name in first}
    found = {}
    for sites in (first, second):
        members = [party.member for party in sites.values()]
        dealt = {name: party.share(members, rules) for name, party in sites.items()}
        for party in sites.values():
            party.mask(dealt.values(), rules, np.arange(3))
        found[id(sites)] = {name: party.agree(list(sites), rules) for name, party in sites.items()}
    with pytest.raises(SealError, match="signature"):
        second["site-0"].reveal(found[id(first)], rules)


@pytest.mark.parametrize(
    ("rules", "smallest", "message"),
    [
        (rules_of(1), 1, "2 to"),
        (rules_of(2), 3, "smallest-sum = 3"),
        (rules_of(5, dropouts=0.5, threshold=3), 4, "smallest-sum = 4"),
        (SumRules(5, 1, 3, 5), 3, "secure-aggregation-threshold = 3"),
        (SumRules(4, 0, 2, 4), 3, "secure-aggregation-threshold = 2"),
        (SumRules(4, 0, 5, 5), 3, "only 4"),
    ],
)
def test_rules_that_do_not_protect_are_refused(
    rules: SumRules, smallest: int, message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        rules.check(smallest)


def test_two_groups_of_honest_sites_never_both_reach_the_threshold() -> None:
    for members in range(2, 40):
        for colluding in (0.0, 0.1, 1 / 3, 0.5, 0.9):
            rules = SumRules.of(members, colluding, 0.1)
            honest = members - rules.colluding
            both = [
                p
                for p in range(honest + 1)
                if min(p, honest - p) + rules.colluding >= rules.threshold
            ]
            assert not both


def test_a_flipped_bit_is_at_worst_noise() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    values = values_of(sites)
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    masked = {
        name: party.mask(dealt.values(), rules, values[name]) for name, party in sites.items()
    }
    masked["site-1"][7] ^= np.uint32(1 << 5)
    total = complete(sites, dealt, masked, rules, list(sites))
    apart = (total - total_of(values, list(sites))).astype(np.int32)
    assert abs(int(apart[7])) == 32
    assert not np.delete(apart, 7).any()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 100), st.integers(1, 10**6), st.floats(1e-3, 1e3))
def test_the_modulus_holds_the_sum_of_all_sites(sites: int, records: int, bound: float) -> None:
    import torch

    fixed = FixedPoint.of(bound, records, sites)
    top = torch.full((3,), bound * records, dtype=torch.float64)
    total = words(sum(fixed.encode(top) for _ in range(sites)))
    assert torch.allclose(fixed.decode(total), sites * top, rtol=1e-6)
    assert torch.allclose(fixed.decode(words(-fixed.encode(top))), -top, rtol=1e-6)


def test_a_modulus_too_small_is_refused() -> None:
    from fedsurrogate.common.errors import ConfigError

    with pytest.raises(ConfigError, match="secure-aggregation-records"):
        FixedPoint.of(1.0, 10**9, 100)


def test_state_and_shares_survive_the_disk() -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    assert {name: unpack_dealt(pack_dealt(each)) for name, each in dealt.items()} == dealt
    for party in sites.values():
        party.mask(dealt.values(), rules, np.arange(3))
        assert unpack_state(pack_state(party.state)) == party.state
    with pytest.raises(StateError):
        unpack_state(b"\x01\x02")


def test_a_site_can_announce_only_its_own_key() -> None:
    private, other = new_key(), new_key()
    secrets = begin("north", private, CONTEXT)[0].secrets
    stolen = announce("north", secrets, private, public_key(other), CONTEXT)
    with pytest.raises(SealError, match="signature"):
        check_members([stolen, Party("south").member], CONTEXT)


@pytest.mark.parametrize(("threshold", "count"), [(1, 1), (2, 2), (3, 5), (67, 100)])
def test_shares_give_the_secret_and_one_fewer_does_not(threshold: int, count: int) -> None:
    for secret in (bytes(16), b"\xff" * 16, new_key()[:16]):
        shares = split(secret, threshold, count)
        assert combine(dict(list(shares.items())[-threshold:])) == secret
        if threshold > 1:
            fewer = dict(list(shares.items())[: threshold - 1])
            try:
                assert combine(fewer) != secret
            except SurrogateError:
                continue


def test_numbers_fill_nine_tenths_of_the_modulus_and_counts_are_whole() -> None:
    import torch

    assert FixedPoint.of(1.0, 1, 1).largest == math.floor(0.9 * 2**31)
    assert FixedPoint.of(0.5, 1000, 10, whole=True).step == 1.0
    fixed, value = FixedPoint(3e-9, 2**31), torch.tensor([1.1])
    assert fixed.encode(value).tolist() == [round(float(value) / 3e-9)], (
        "not rounded in single precision"
    )


def test_a_sum_of_one_site_is_refused_by_default_and_one_as_small_as_allowed_is_not() -> None:
    with pytest.raises(PolicyError, match="smallest-sum = 2"):
        SumRules(3, 0, 2, 1).check()
    rules_of(3, dropouts=0.0).check(3)


@pytest.mark.parametrize("wrong", ["twice", "stranger", "without its own"])
def test_shares_that_are_not_those_of_the_sites_each_once_are_refused(wrong: str) -> None:
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    dealt = [party.share(members, rules) for party in sites.values()]
    delivered = {
        "twice": [*dealt, dealt[3]],
        "stranger": [*dealt, replace(dealt[3], site="stranger")],
        "without its own": dealt[1:],
    }[wrong]
    with pytest.raises(SealError, match="each once, and its own"):
        sites["site-0"].mask(delivered, rules, np.arange(3))


def test_a_share_without_the_digest_that_its_sender_published_is_refused() -> None:
    """Otherwise the sender could later call an honest share a forged one."""
    sites, rules = parties(4), rules_of(4)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    dealt["site-1"] = replace(
        dealt["site-1"],
        digests={**dealt["site-1"].digests, "site-0": {"blind": b"", "masking": b""}},
    )
    with pytest.raises(SealError, match="do not have the digests"):
        sites["site-0"].mask(dealt.values(), rules, np.arange(3))


def test_the_signature_of_a_list_does_not_depend_on_its_order() -> None:
    sites, rules = parties(9), rules_of(9)
    members = [party.member for party in sites.values()]
    dealt = {name: party.share(members, rules) for name, party in sites.items()}
    for party in sites.values():
        party.mask(dealt.values(), rules, np.arange(3))
    signatures = {
        name: party.agree(list(sites)[:: -1 if index % 2 else 1], rules)
        for index, (name, party) in enumerate(sites.items())
    }
    assert all(party.state.summed == tuple(sorted(sites)) for party in sites.values())
    assert sites["site-0"].reveal(signatures, rules)["blind"].keys() == sites.keys()


@pytest.mark.parametrize(("threshold", "count"), [(1, 3), (4, 7)])
def test_every_site_has_the_share_of_its_own_number(threshold: int, count: int) -> None:
    assert list(split(bytes(16), threshold, count)) == list(range(1, count + 1))
