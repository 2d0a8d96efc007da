"""Public maps, claims, headers, and messages of secure aggregation come back as they were sent; others are
refused.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import StateError, SurrogateError
from fedsurrogate.common.identity import normal
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.secure_aggregation.protocol import PHASES, SumState
from fedsurrogate.common.secure_aggregation.secrets import Dealt, Member, Secrets
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.surrogates.mixtures import PublicMap
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire import surrogate_proto
from fedsurrogate.common.wire.surrogate_proto import (
    SCHEMA,
    centre_digest,
    map_digest,
    pack_centre,
    pack_claim,
    pack_header,
    pack_map,
    pack_sums,
    unpack_centre,
    unpack_claim,
    unpack_header,
    unpack_map,
    unpack_projection,
    unpack_sums,
)
from fedsurrogate.common.wire.tensors import pack
from tests.totals import unpack_total

SIDES = st.integers(0, 3)
BAD = st.sampled_from([math.nan, math.inf, -math.inf])


@settings(max_examples=40)
@given(rows=SIDES, columns=SIDES, centred=st.booleans(), known=SIDES, bad=st.none() | BAD)
def test_a_map_comes_back_where_it_reduces_dimensions(
    rows: int, columns: int, centred: bool, known: int, bad: float | None
) -> None:
    projection = torch.randn(rows, columns)
    fits = 1 <= rows <= columns and known in (0, rows)
    if fits:
        assert torch.allclose(unpack_projection(pack(projection), known), projection, atol=1e-2)
    else:
        with pytest.raises(SurrogateError, match="k from 1 to d"):
            unpack_projection(pack(projection), known)
    if not 1 <= rows <= columns:
        return
    for matrix in (None, projection):
        public = PublicMap(matrix, torch.randn(columns) if centred else None)
        packed = pack_map(public)
        found = unpack_map(packed)
        for one, other in ((found.projection, matrix), (found.centre, public.centre)):
            assert (one is None) == (other is None)
            assert one is None or other is None or torch.allclose(one, other, atol=1e-2)
        assert bool(map_digest(packed)) == (matrix is not None or centred)
        assert pack_map(public) == packed
    if bad is not None:
        spoiled = pack(projection)
        spoiled.data = torch.full((rows, columns), bad).half().numpy().tobytes()
        with pytest.raises(SurrogateError, match="not finite"):
            unpack_projection(spoiled)


@settings(max_examples=40)
@given(st.lists(SIDES, max_size=3), st.none() | BAD)
def test_a_centre_is_one_row_of_finite_numbers(shape: list[int], bad: float | None) -> None:
    mean = torch.randn(shape)
    sent = pack_centre(mean)
    if bad is not None:
        sent.mean.data = torch.full(shape, bad).half().numpy().tobytes()
    if len(shape) != 1 or not shape[0] or bad is not None:
        with pytest.raises(SurrogateError, match="public mean"):
            unpack_centre(sent)
        return
    assert torch.allclose(unpack_centre(sent), mean, atol=1e-2)
    assert centre_digest(mean) == centre_digest(mean.clone()) != centre_digest(mean + 1)
    assert centre_digest(None) == ""


POSITIVE = st.floats(1e-6, 1e6)
CLAIMS = st.builds(
    Mechanism,
    name=st.sampled_from(["sums", "dp-sgd"]),
    epsilon=POSITIVE,
    delta=st.floats(1e-9, 0.1),
    unit=st.sampled_from(["record", "patient"]),
    noise_multiplier=POSITIVE,
    clip=POSITIVE,
    noise=st.dictionaries(st.sampled_from("abc"), st.tuples(POSITIVE, POSITIVE)),
    centre=st.sampled_from(["", "c" * 16]),
)


@settings(max_examples=60)
@given(
    CLAIMS, st.sampled_from([0.0, -1.0, math.nan, math.inf]), st.integers(0, 1), st.text(max_size=9)
)
def test_a_claim_comes_back_and_noise_that_hides_nothing_is_refused(
    claim: Mechanism, wrong: float, at: int, unit: str
) -> None:
    sent = pack_claim(claim)
    assert sent is not None
    assert unpack_claim(sent) == claim
    turned = pack_claim(replace(claim, noise=dict(reversed(claim.noise.items()))))
    assert turned == sent, "equal claims have equal bytes"
    for name, pair in claim.noise.items():
        spoiled = (wrong, pair[1]) if at == 0 else (pair[0], wrong)
        with pytest.raises(SurrogateError, match="not a positive number"):
            unpack_claim(pack_claim(replace(claim, noise={**claim.noise, name: spoiled})))  # type: ignore[arg-type]
    if unit not in ("record", "patient"):
        with pytest.raises(SurrogateError, match="for unit"):
            unpack_claim(pack_claim(replace(claim, unit=unit)))  # type: ignore[arg-type]
    assert pack_claim(None) is None


@settings(max_examples=30)
@given(
    st.lists(st.text(max_size=5), min_size=4, max_size=4),
    st.lists(st.text(max_size=5).filter(normal), min_size=1, max_size=3, unique_by=normal),
    st.integers(0, 2 * SCHEMA + 1),
)
def test_a_header_is_read_in_its_schema_only(
    texts: list[str], classes: list[str], schema: int
) -> None:
    header = Header(*texts, classes=tuple(classes))
    sent = pack_header(header)
    assert unpack_header(sent) == header
    sent.schema = schema
    if schema != SCHEMA:
        with pytest.raises(SurrogateError, match=f"schema version {schema};"):
            unpack_header(sent)


STATISTICS = ("counts", "sums", "squares", "another")


@settings(max_examples=60)
@given(
    classes=SIDES,
    dimension=SIDES,
    squares=st.sampled_from(["none", "diagonal", "full"]),
    named=st.sets(st.sampled_from(STATISTICS)) | st.just({"counts", "sums", "squares"}),
)
def test_noisy_sums_come_back_with_noise_claimed_for_all_of_them_and_nothing_else(
    classes: int, dimension: int, squares: str, named: set[str]
) -> None:
    length = {"none": 0, "diagonal": dimension, "full": dimension * (dimension + 1) // 2}[squares]
    moments = None if squares == "none" else torch.randn(length)
    sent = Sums(torch.randn(classes), torch.randn(classes, dimension), moments, {})
    noise = {name: (1.0 + at, 1.0) for at, name in enumerate(sorted(named))}
    claim = Mechanism("sums", 1.0, 1e-5, "record", 3.0, 1.0, noise)
    wanted = {"counts", "sums"} | (set() if moments is None else {"squares"})
    if not (classes and dimension) or named != wanted:
        with pytest.raises(SurrogateError):
            unpack_sums(pack_sums(sent), classes, claim)
        return
    found = unpack_sums(pack_sums(sent), classes, claim)
    assert found.sigmas == {name: sigma for name, (sigma, _) in noise.items()}
    for one, other in (
        (found.counts, sent.counts),
        (found.sums, sent.sums),
        (found.squares, moments),
    ):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.allclose(one, other, atol=1e-2)


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
).map(
    # 32 bytes for each member, from this step until the shares are opened.
    lambda state: replace(state, pairs=bytes(32 * len(state.members) * (state.phase == "shares")))
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
    kept = pb.SumState.FromString(surrogate_proto.pack_state(state))
    kept.pairs += b"p"
    for wrong in (kept.SerializeToString(), b"\xff" + surrogate_proto.pack_state(state)):
        with pytest.raises(StateError, match="damaged"):
            surrogate_proto.unpack_state(wrong)
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
