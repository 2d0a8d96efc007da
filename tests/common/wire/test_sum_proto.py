"""Messages and states of secure aggregation come back as they were, and damaged ones are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import StateError, SurrogateError
from fedsurrogate.common.secure_aggregation.protocol import PHASES, SumState
from fedsurrogate.common.secure_aggregation.secrets import Dealt, Member, Secrets
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import surrogate_proto
from tests.totals import unpack_total

NAMES = st.lists(st.sampled_from(["north", "south", "west", "ö st"]), unique=True, max_size=4)
BYTES = st.binary(max_size=8)
MEMBERS = st.builds(Member, st.sampled_from(["north", "south"]), BYTES, BYTES, BYTES, BYTES)
BOTH = st.fixed_dictionaries({"blind": BYTES, "masking": BYTES})
STATES = st.builds(
    SumState,
    site=st.sampled_from(["north", "ö st"]),
    context=BYTES,
    phase=st.sampled_from(PHASES),
    secrets=st.builds(Secrets, BYTES, BYTES, BYTES),
    members=st.lists(MEMBERS, max_size=3, unique_by=lambda each: each.site).map(tuple),
    shares=st.dictionaries(st.sampled_from("abc"), BOTH),
    summed=NAMES.map(tuple),
    public=BYTES,
    spare=BYTES,
)
DEALT = st.builds(
    lambda site, shares, checks, digest: Dealt(
        site,
        {reader: content for reader, (content, _) in shares.items()},
        {reader: both for reader, (_, both) in shares.items()},
        checks,
        digest,
    ),
    st.sampled_from(["north", "south"]),
    st.dictionaries(st.sampled_from("abc"), st.tuples(BYTES, BOTH)),
    BOTH,
    BYTES,
)
SIGNED = st.dictionaries(st.sampled_from("abc"), BYTES)
NUMBERS = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)
HEADER = Header("fedpft", "r" * 16, "north", "print", ("a", "b"))


@settings(max_examples=25)
@given(STATES, st.lists(DEALT, max_size=3), SIGNED, SIGNED, NAMES, BYTES)
def test_what_is_packed_comes_back(
    state: SumState,
    dealt: list[Dealt],
    signed: dict[str, bytes],
    other: dict[str, bytes],
    names: list[str],
    public: bytes,
) -> None:
    assert surrogate_proto.unpack_state(surrogate_proto.pack_state(state)) == state
    members = surrogate_proto.pack_members(state.members, public)
    assert surrogate_proto.unpack_members(members) == (state.members, public)
    for each in dealt:
        assert surrogate_proto.unpack_dealt(surrogate_proto.pack_dealt(each)) == each
        for reader in each.content:
            packed = surrogate_proto.pack_delivery([each], reader, public)
            ((found,), kept) = surrogate_proto.unpack_delivery(packed)
            assert kept == public
            assert found.content == {reader: each.content[reader]}, "for one reader only"
            assert found.digests == {reader: each.digests[reader]}
            assert (found.site, found.checks, found.digest) == (each.site, each.checks, each.digest)
    packed = surrogate_proto.pack_list(names, signed)
    assert surrogate_proto.unpack_list(packed) == (tuple(sorted(names)), signed)
    assert packed == surrogate_proto.pack_list(names[::-1], dict(reversed(signed.items())))
    assert surrogate_proto.unpack_list(None) == ((), {})
    for spare in (b"", bytes(32)):
        packed = surrogate_proto.pack_revealed({"blind": signed, "masking": other}, spare)
        assert surrogate_proto.unpack_revealed(packed) == {"blind": signed, "masking": other}
        assert surrogate_proto.unpack_spare(packed) == spare


@settings(max_examples=40)
@given(NUMBERS, NAMES, st.integers(0, 9))
def test_a_vector_has_the_number_of_numbers_that_is_asked_for(
    numbers: list[int], names: list[str], count: int
) -> None:
    vector = np.array(numbers, dtype=np.uint32)
    packed = surrogate_proto.pack_masked(HEADER, vector, None)
    if count != len(numbers):
        with pytest.raises(SurrogateError, match=f"{4 * count} are expected"):
            surrogate_proto.unpack_masked(packed, count)
    header, found, claim = surrogate_proto.unpack_masked(packed, len(numbers))
    assert (header, found.tolist(), claim) == (HEADER, numbers, None)
    total = surrogate_proto.pack_total(HEADER, names, vector, None)
    header, sites, found, claim = unpack_total(total)
    assert (header, sites, found.tolist(), claim) == (HEADER, tuple(names), numbers, None)


@settings(max_examples=40)
@given(STATES, DEALT, SIGNED)
def test_what_names_a_site_twice_or_fits_no_state_is_refused(
    state: SumState, dealt: Dealt, signed: dict[str, bytes]
) -> None:
    kept = pb.SumState.FromString(surrogate_proto.pack_state(state))
    kept.phase = "another"
    with pytest.raises(StateError, match="damaged"):
        surrogate_proto.unpack_state(kept.SerializeToString())
    if state.shares:
        kept = pb.SumState.FromString(surrogate_proto.pack_state(state))
        del kept.shares.masking[0]
        with pytest.raises(StateError, match="damaged"):
            surrogate_proto.unpack_state(kept.SerializeToString())
    sent = pb.SumDealt.FromString(surrogate_proto.pack_dealt(dealt))
    if dealt.content:
        sent.shares.append(sent.shares[0])
        with pytest.raises(SurrogateError, match="a site is named twice"):
            surrogate_proto.unpack_dealt(sent.SerializeToString())
    revealed = pb.SumRevealed.FromString(
        surrogate_proto.pack_revealed({"blind": signed, "masking": signed}, bytes(31))
    )
    with pytest.raises(SurrogateError, match="a seed of 31 bytes"):
        surrogate_proto.unpack_spare(revealed.SerializeToString())
    for entries in (revealed.blind, revealed.masking):
        if signed:
            entries.append(entries[0])
            with pytest.raises(SurrogateError, match="named twice"):
                surrogate_proto.unpack_revealed(revealed.SerializeToString())
            del entries[-1]
    surrogate_proto.unpack_revealed(revealed.SerializeToString())


@settings(max_examples=40)
@given(STATES, STATES)
def test_two_states_have_the_same_bytes_only_if_they_are_the_same(
    one: SumState, two: SumState
) -> None:
    other = replace(two, shares=dict(reversed(two.shares.items())))
    assert surrogate_proto.pack_state(two) == surrogate_proto.pack_state(other)
    assert (surrogate_proto.pack_state(one) == surrogate_proto.pack_state(two)) == (one == two)
