"""What two sites, or a site and its coordinator of another version, must compute alike: keys and masks,
by RFC 5869 written out, RFC 7748 and RFC 8439 from the library; and numbers modulo 2^32.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, DisputeError, SealError, SurrogateError
from fedsurrogate.common.methods.method import BITS
from fedsurrogate.common.secure_aggregation import protocol, rules
from fedsurrogate.common.secure_aggregation import secrets as functions
from fedsurrogate.common.secure_aggregation.protocol import check_revealed, signed_list
from fedsurrogate.common.secure_aggregation.rules import FixedPoint, SumRules
from fedsurrogate.common.secure_aggregation.secrets import (
    Member,
    Secrets,
    agreed,
    announce,
    check_dealt,
    check_members,
    combine,
    deal,
    derived,
    keystream,
    list_digest,
    masking_key,
    open_share,
    own_mask,
    pack_words,
    pair_masks,
    pair_secrets,
    public_half,
    quoted,
    recover,
    split,
    unpack_words,
    words,
)
from fedsurrogate.common.security import sealing
from fedsurrogate.common.security.sealing import new_key, open_sealed, public_key, seal, sign
from fedsurrogate.common.surrogate_pb2 import Sealed
from tests.common.secure_aggregation.parties import Party

few = settings(max_examples=25, deadline=None)
SEEDS = st.binary(min_size=32, max_size=32)
SECRETS = st.binary(min_size=16, max_size=16)
DIGESTS = st.binary(min_size=32, max_size=32)


def hkdf(secret: bytes, info: bytes) -> bytes:
    """32 bytes, without salt."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


private = X25519PrivateKey.from_private_bytes


def exchanged(own: bytes, public: bytes) -> bytes:
    return private(own).exchange(X25519PublicKey.from_public_bytes(public))


def raw(own: bytes) -> bytes:
    return private(own).public_key().public_bytes_raw()


def chacha(key: bytes, count: int) -> list[int]:
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    stream = cipher.update(bytes(4 * count))
    return [int.from_bytes(stream[4 * at : 4 * at + 4], "little") for at in range(count)]


@few
@given(SECRETS, SEEDS, SEEDS, DIGESTS, st.integers(0, 9))
def test_keys_and_masks_are_those_of_the_standards(
    seed: bytes, one: bytes, other: bytes, digest: bytes, count: int
) -> None:
    label = b"fedsurrogate secure aggregation "
    assert derived(seed, b"purpose") == hkdf(seed, label + b"purpose")
    assert masking_key(seed) == hkdf(seed, label + b"masking key")
    assert public_half(one) == raw(one)
    ends = b"".join(sorted((raw(one), raw(other))))
    shared = hkdf(exchanged(one, raw(other)), label + b"purpose" + ends)
    for own, theirs in ((one, raw(other)), (other, raw(one))):
        assert agreed(private(own), theirs, b"purpose") == shared
    assert keystream(one, count).tolist() == chacha(one, count)
    blind = hkdf(seed, label + b"own mask" + digest)
    assert own_mask(seed, digest, count).tolist() == chacha(blind, count)


@few
@given(st.integers(2, 5), DIGESTS, st.integers(1, 5), st.data())
def test_masks_of_pairs_are_added_by_the_first_name_and_cancel(
    sites: int, digest: bytes, count: int, data: st.DataObject
) -> None:
    names = data.draw(st.permutations([f"s{at}" for at in range(sites)]))
    seeds = {name: data.draw(SECRETS) for name in names}
    members = {
        name: Member(name, b"", raw(masking_key(seed)), b"", b"") for name, seed in seeds.items()
    }
    label = b"fedsurrogate secure aggregation pair mask"
    total = np.zeros(count, dtype=np.uint32)
    for name in names:
        others = [each for each in names if each != name]
        found = pair_masks(name, seeds[name], members, others, digest, count)
        wanted = [0] * count
        for other in others:
            public = members[other].masking
            ends = b"".join(sorted((members[name].masking, public)))
            key = hkdf(exchanged(masking_key(seeds[name]), public), label + digest + ends)
            sign_of = 1 if name < other else -1
            wanted = [
                (a + sign_of * b) % 2**32 for a, b in zip(wanted, chacha(key, count), strict=True)
            ]
        assert found.tolist() == wanted
        total = total + found
    if len(set(seeds.values())) == sites:
        assert total.tolist() == [0] * count


@few
@given(SEEDS, SEEDS, st.binary(max_size=9), st.binary(max_size=9))
def test_sealed_messages_are_those_of_the_standards(
    sender: bytes, reader: bytes, content: bytes, context: bytes
) -> None:
    label = b"fedsurrogate "
    halves = {
        key: (hkdf(key, label + b"exchange"), hkdf(key, label + b"signature"))
        for key in (sender, reader)
    }
    for key, (exchange, signature) in halves.items():
        own = Ed25519PrivateKey.from_private_bytes(signature).public_key().public_bytes_raw()
        assert public_key(key) == raw(exchange) + own
    sealed = Sealed.FromString(seal(content, sender, {"south": public_key(reader)}, context))
    (entry,) = sealed.readers
    secret = exchanged(halves[reader][0], raw(halves[sender][0]))
    ends = b"".join(sorted((raw(halves[reader][0]), raw(halves[sender][0]))))
    wrapping = ChaCha20Poly1305(hkdf(secret, label + b"relay" + ends + context))
    key = wrapping.decrypt(entry.nonce, entry.key, b"south")
    assert ChaCha20Poly1305(key).decrypt(sealed.nonce, sealed.content, context) == content
    unsigned = Sealed()
    unsigned.CopyFrom(sealed)
    unsigned.ClearField("signature")
    named = len(context).to_bytes(8, "big") + context + unsigned.SerializeToString()
    Ed25519PrivateKey.from_private_bytes(halves[sender][1]).public_key().verify(
        sealed.signature, named
    )
    opened = open_sealed(sealed.SerializeToString(), "south", reader, public_key(sender), context)
    assert opened == content
    assert (sealing.SEED_BYTES, sealing.PUBLIC_BYTES, sealing.NONCE_BYTES) == (32, 64, 12)


@few
@given(st.lists(st.text(min_size=1, max_size=3), unique=True, max_size=4), st.binary(max_size=40))
def test_the_digest_of_a_key_list_has_the_length_of_each_part(
    names: list[str], context: bytes
) -> None:
    members = [
        Member(name, b"p" * 64, b"m" * 32, b"s" * 32, name.encode() + b"signature")
        for name in names
    ]
    wanted = hashlib.sha256(len(context).to_bytes(8, "big") + context)
    for each in sorted(members, key=lambda member: member.site):
        content = b"p" * 64 + b"m" * 32 + b"s" * 32 + each.site.encode()
        for part in (content, each.signature):
            wanted.update(len(part).to_bytes(8, "big") + part)
    assert list_digest(members, context) == wanted.digest()
    assert list_digest(members[::-1], context) == wanted.digest()


@few
@given(st.data())
def test_a_key_list_has_each_site_and_each_key_once_and_the_pinned_ones(
    data: st.DataObject,
) -> None:
    context = b"context"
    privates = {name: new_key() for name in ("north", "south", "west")}
    public = {name: public_key(key) for name, key in privates.items()}
    members = [
        announce(name, Secrets.fresh(), key, public[name], context)
        for name, key in privates.items()
    ]
    check_members(members, context)
    check_members(members, context, public)
    at = data.draw(st.integers(0, 2))
    other = (at + data.draw(st.integers(1, 2))) % 3
    kind = data.draw(
        st.sampled_from(
            ["site", "public", "masking", "sharing", "signature key", "context", "small", "length", "pinned", "new"]
        )
    )  # fmt: skip
    one = members[at]
    changed = {name: getattr(one, name) for name in ("site", "public", "masking", "sharing")}
    pinned, bound, reason = public, context, "the same"
    if kind in changed:
        changed[kind] = getattr(members[other], kind)
        reason = f"the same {kind}"
    elif kind == "signature key":
        changed["public"] = one.public[:32] + members[other].public[32:]
        reason = "the same signature key"
    elif kind == "small":
        changed[data.draw(st.sampled_from(["masking", "sharing"]))] = bytes(32)
        reason = "is not a valid X25519 key"
    elif kind == "length":
        changed["public"] = one.public + b"0"
        reason = "65 bytes, not 64"
    elif kind == "context":
        bound, reason = b"another", "does not fit"
    else:
        pinned = {name: key for name, key in public.items() if name != one.site}
        if kind == "pinned":
            pinned[one.site] = public_key(new_key())
        with pytest.raises(
            DisputeError, match=f"key of site '{one.site}' in the key list"
        ) as found:
            check_members(members, context, pinned)
        assert found.value.places == (sorted(privates).index(one.site),)
        return
    content = changed["public"] + changed["masking"] + changed["sharing"] + changed["site"].encode()
    signature = sign(context + content, privates[one.site], functions.PURPOSE)
    listed = [*members[:at], Member(**changed, signature=signature), *members[at + 1 :]]
    with pytest.raises(SealError, match=reason):
        check_members(listed, bound)


@few
@given(st.integers(2, 5), st.data())
def test_shares_are_sealed_and_digested_by_the_standards_and_give_the_secrets_of_their_site(
    sites: int, data: st.DataObject
) -> None:
    names = data.draw(st.permutations([f"s{at}" for at in range(sites)]))
    secrets = {name: Secrets.fresh() for name in names}
    members = {name: Member(name, b"", b"", raw(own.sharing), b"") for name, own in secrets.items()}
    digest, threshold = data.draw(DIGESTS), data.draw(st.integers(1, sites))
    site = names[0]
    dealt = deal(
        site,
        secrets[site],
        pair_secrets(secrets[site].sharing, members),
        members,
        threshold,
        digest,
    )
    check_dealt(dealt)
    assert (dealt.site, dealt.digest, set(dealt.content)) == (site, digest, set(names))
    for kind in ("blind", "masking"):
        secret = getattr(secrets[site], kind)
        parts = (digest, secret, f"{kind} secret".encode(), site.encode(), site.encode())
        assert dealt.checks[kind] == hashlib.sha256(b"\0".join(parts)).digest()
    opened: dict[str, dict[str, bytes]] = {}
    for reader in names:
        ends = b"".join(sorted((raw(secrets[site].sharing), raw(secrets[reader].sharing))))
        label = (
            b"fedsurrogate secure aggregation shares"
            + digest
            + site.encode()
            + b"\0"
            + reader.encode()
        )
        key = hkdf(exchanged(secrets[site].sharing, raw(secrets[reader].sharing)), label + ends)
        both = ChaCha20Poly1305(key).decrypt(bytes(12), dealt.content[reader], digest)
        pairs = pair_secrets(secrets[reader].sharing, members)
        opened[reader] = open_share(dealt, reader, pairs, members, digest)
        assert opened[reader] == {"blind": both[:17], "masking": both[17:]}
        for kind, share in opened[reader].items():
            parts = (digest, share, kind.encode(), site.encode(), reader.encode())
            assert dealt.digests[reader][kind] == hashlib.sha256(b"\0".join(parts)).digest()
            revealed = {"blind": {}, "masking": {}} | {kind: {site: share}}
            check_revealed(reader, revealed, {site: dealt}, [site] if kind == "blind" else [])
            other = {"blind": {}, "masking": {}} | {kind: {site: bytes(17)}}
            for wrong in (other, {"blind": {}, "masking": {}}):
                with pytest.raises(SurrogateError):
                    check_revealed(reader, wrong, {site: dealt}, [site] if kind == "blind" else [])
        sealed = dealt.content[reader]
        for content in ({}, {reader: sealed[:-1] + bytes([sealed[-1] ^ 1])}, {reader: b""}):
            with pytest.raises(SealError, match=f"shares of site {site!r} cannot be opened"):
                open_share(replace(dealt, content=content), reader, pairs, members, digest)
        for digests in ({}, {reader: {}}, {reader: dealt.digests[reader] | {"masking": b""}}):
            with pytest.raises(SealError, match=f"{site!r} do not have the digests"):
                open_share(replace(dealt, digests=digests), reader, pairs, members, digest)
    chosen = data.draw(st.lists(st.sampled_from(names), unique=True))
    for kind in ("blind", "masking"):
        own = {reader: opened[reader][kind] for reader in chosen}
        if len(own) < threshold:
            with pytest.raises(SurrogateError, match=f"{len(own)} shares of site"):
                recover(dealt, kind, own, sorted(names), threshold)
            continue
        assert recover(dealt, kind, own, sorted(names), threshold) == getattr(secrets[site], kind)
        # A share too many is not looked at, and one that counts must fit.
        first = min(own)
        with pytest.raises(SurrogateError, match="do not fit together"):
            recover(dealt, kind, own | {first: bytes(17)}, sorted(names), threshold)


@pytest.mark.parametrize("change", ["", "content", "digest", "check", "none", "long"])
def test_shares_and_digests_have_their_lengths(change: str) -> None:
    own = Secrets.fresh()
    members = {name: Member(name, b"", b"", raw(own.sharing), b"") for name in ("a", "b")}
    dealt = deal("a", own, pair_secrets(own.sharing, members), members, 2, bytes(32))
    changed = {
        "": dealt,
        "content": replace(dealt, content=dealt.content | {"b": dealt.content["b"][:-1]}),
        "long": replace(dealt, content={name: each + b"0" for name, each in dealt.content.items()}),
        "digest": replace(
            dealt, digests=dealt.digests | {"b": {"blind": bytes(31), "masking": bytes(32)}}
        ),
        "check": replace(dealt, checks={"blind": bytes(32), "masking": bytes(33)}),
        "none": replace(dealt, content={}),
    }[change]
    if not change:
        check_dealt(changed)
        assert {len(each) for each in changed.content.values()} == {2 * 17 + 16}
        return
    with pytest.raises(SurrogateError, match="of the wrong length"):
        check_dealt(changed)


@few
@given(st.lists(st.text(max_size=3), max_size=4), DIGESTS, st.lists(st.integers(-(2**40), 2**40)))
def test_lists_and_numbers_have_these_bytes(
    names: list[str], digest: bytes, values: list[int]
) -> None:
    content = digest
    for name in names:
        content += len(name.encode()).to_bytes(4, "big") + name.encode()
    assert signed_list(digest, names) == content
    found = words(np.array(values, dtype=np.int64))
    assert found.tolist() == [each % 2**32 for each in values]
    packed = pack_words(found)
    assert packed == b"".join((each % 2**32).to_bytes(4, "little") for each in values)
    assert unpack_words(packed).tolist() == found.tolist()


@given(st.integers(0, 14))
def test_a_message_names_ten_sites_at_most(count: int) -> None:
    names = [f"{'s' * 70}{at}" for at in range(count)]
    found = quoted(names)
    assert found.endswith(", ...") == (count > 10)
    assert found.removesuffix(", ...").split(", ") == (
        [repr("s" * 64)] * min(10, count) if count else [""]
    )


# Numbers.


@few
@given(
    bound=st.sampled_from([0.5, 1.0, 7.0]),
    sites=st.integers(1, 1000),
    over=st.integers(-2, 2),
    whole=st.booleans(),
)
def test_the_largest_sum_fills_nine_tenths_of_the_modulus(
    bound: float, sites: int, over: int, whole: bool
) -> None:
    largest = math.floor(Fraction(9, 10) * 2**31 / sites)
    records = largest + over
    if over > 0:
        with pytest.raises(ConfigError, match=f"set at most {largest}"):
            FixedPoint.of(bound, records, sites, whole)
        return
    found = FixedPoint.of(bound, records, sites, whole)
    assert found == FixedPoint(1.0 if whole else bound * records / largest, largest)
    assert FixedPoint.of(bound, records, sites) == FixedPoint(bound * records / largest, largest)
    values = torch.tensor([[0.0, 1.4], [-1.6, 1e30]]) * found.step
    assert found.encode(values).tolist() == [0, 1, -2, largest]
    assert found.encode(-values).tolist() == [0, -1, 2, -largest]
    total = words(found.encode(values)) + words(found.encode(-values * 0.0 - found.step))
    assert found.decode(total).tolist() == pytest.approx(
        [-found.step, 0.0, -3 * found.step, (largest - 1) * found.step]
    )


@few
@given(
    members=st.integers(2, 600),
    colluding=st.integers(0, 99),
    dropouts=st.integers(0, 99),
)
def test_shares_of_sites_are_counted_as_written_in_decimals(
    members: int, colluding: int, dropouts: int
) -> None:
    """0.29 of 100 are 29, which the product of the floating-point numbers is not."""
    found = SumRules.of(members, colluding / 100, dropouts / 100)
    together, lost = members * colluding // 100, members * dropouts // 100
    chosen = (members + together) // 2 + 1
    assert found == SumRules(members, together, chosen, max(members - lost, chosen))
    assert found.honest == found.least - together


@few
@given(SECRETS, st.integers(1, 6), st.integers(0, 4), st.data())
def test_shares_are_values_of_one_polynomial_and_no_more_than_needed_give_the_secret(
    secret: bytes, threshold: int, more: int, data: st.DataObject
) -> None:
    prime = 2**130 - 5
    random = [data.draw(st.integers(0, prime - 1)) for _ in range(threshold - 1)]
    waiting = list(random)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions.secrets, "randbelow", lambda limit: waiting.pop(0) % limit)
        dealt = split(secret, threshold, threshold + more)
    assert sorted(dealt) == list(range(1, threshold + more + 1))
    coefficients = [int.from_bytes(secret, "big"), *random]
    for point, share in dealt.items():
        value = sum(each * point**power for power, each in enumerate(coefficients)) % prime
        assert share == value.to_bytes(17, "big")
    chosen = data.draw(st.permutations(sorted(dealt)))[:threshold]
    assert combine({point: dealt[point] for point in chosen}) == secret


@given(st.integers(0, 2**130 - 6))
def test_a_value_that_is_no_secret_does_not_fit(value: int) -> None:
    share = {1: value.to_bytes(17, "big")}
    if value < 2**128:
        assert combine(share) == value.to_bytes(16, "big")
        return
    with pytest.raises(SurrogateError, match="do not fit together"):
        combine(share)


@pytest.mark.parametrize("value", [2**128 - 1, 2**128])
def test_the_largest_secret_has_sixteen_bytes(value: int) -> None:
    test_a_value_that_is_no_secret_does_not_fit.hypothesis.inner_test(value)  # type: ignore[attr-defined]


def test_numbers_of_the_protocol_are_those_of_other_versions() -> None:
    assert (rules.MOST_MEMBERS, rules.MOST_SPARED) == (1000, 500)
    assert (BITS, rules.HALF, rules.FILLED) == (32, 2**31, 0.9)
    assert (rules.DIMENSIONS, rules.MOST_DIMENSIONS) == (7.5, 512)
    assert (protocol.ROOM, protocol.SLACK) == (8, 1e-3)
    assert (bytes(12), 16, 32) == (functions.NONCE, functions.TAG_BYTES, functions.DIGEST_BYTES)
    assert (functions.PRIME, functions.SECRET_BYTES, functions.SHARE_BYTES) == (2**130 - 5, 16, 17)
    assert keystream(bytes(32), 1).dtype == np.uint32
    assert {len(each) for each in (Secrets.fresh().masking, Secrets.fresh().blind)} == {16}
    assert len(Secrets.fresh().sharing) == 32


def test_masked_vectors_look_random() -> None:
    """Of zeros, so that every bit comes from masks: half of all bits are set, at every position."""
    sites, rules = [Party(name) for name in "abcd"], SumRules.of(4, 0.0, 0.4)
    dealt = [site.share([each.member for each in sites], rules) for site in sites]
    for site in sites:
        vector = site.mask(dealt, rules, np.zeros(4000, dtype=np.int64))
        shares = np.unpackbits(vector.view(np.uint8).reshape(-1, 4), axis=1).mean(0)
        assert (abs(shares - 0.5) < 0.05).all()


def test_numbers_are_not_rounded_in_single_precision() -> None:
    fixed, value = FixedPoint(3e-9, 2**31), torch.tensor([1.1])
    assert fixed.encode(value).tolist() == [round(float(value) / 3e-9)]


def of_length(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


KEYS = (of_length(64), of_length(32), of_length(32), of_length(64))
MEMBERS = st.builds(Member, st.sampled_from(["north", "ö st"]), *KEYS)


@given(MEMBERS, MEMBERS, st.sampled_from(["site", "public", "masking", "sharing", "signature"]))
def test_a_signature_covers_every_key_and_the_name(one: Member, other: Member, part: str) -> None:
    changed = replace(one, **{part: getattr(other, part)})
    same = part == "signature" or changed == one
    assert (changed.content == one.content) == same
    assert one.content == one.public + one.masking + one.sharing + one.site.encode()
