"""Sealed relays: only their recipients can read them, and every change is detected."""

import pytest
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import SealError
from fedsurrogate.common.security.sealing import (
    _halves,
    _shared,
    _signed,
    new_key,
    open_sealed,
    public_key,
    seal,
)
from fedsurrogate.common.surrogate_pb2 import Sealed

CONTENT = b"means and covariances" * 20
CONTEXT = b"run\0lineage\0north\x001"
NORTH, SOUTH, WEST = (new_key() for _ in range(3))
READERS = {"south": public_key(SOUTH), "west": public_key(WEST)}
SEALED = seal(CONTENT, NORTH, READERS, CONTEXT)


def test_every_reader_can_open_it_alone() -> None:
    for name, key in (("south", SOUTH), ("west", WEST)):
        assert open_sealed(SEALED, name, key, public_key(NORTH), CONTEXT) == CONTENT


@settings(max_examples=20)
@given(st.sets(st.text(max_size=4), max_size=5).flatmap(lambda names: st.permutations(list(names))))
def test_the_order_of_readers_shows_nothing_but_their_names(names: list[str]) -> None:
    """The order in which a sender knows them may be the order in which they arrived."""
    sealed = Sealed()
    sealed.ParseFromString(
        seal(CONTENT, NORTH, {name: public_key(SOUTH) for name in names}, CONTEXT)
    )
    assert [reader.name for reader in sealed.readers] == sorted(names)


def test_nothing_of_the_content_shows_and_no_two_are_alike() -> None:
    assert b"means" not in SEALED
    assert seal(CONTENT, NORTH, READERS, CONTEXT) != SEALED


def test_no_nonce_is_used_twice_within_a_message_or_between_messages() -> None:
    """A second use under one key reveals both contents. Two sites use the same key for every
    message of one place.
    """
    nonces = []
    for _ in range(20):
        sealed = Sealed()
        sealed.ParseFromString(seal(CONTENT, NORTH, READERS, CONTEXT))
        nonces += [sealed.nonce, *(reader.nonce for reader in sealed.readers)]
    assert len(nonces) == len(set(nonces)) == 60
    assert {len(nonce) for nonce in nonces} == {12}
    # Random in every byte, not a counter that restarts with the process.
    assert all(len({nonce[place] for nonce in nonces}) > 20 for place in range(12))


def test_any_changed_byte_is_noticed_by_every_reader() -> None:
    for place in range(len(SEALED)):
        for bit in (1, 128):
            changed = bytearray(SEALED)
            changed[place] ^= bit
            for name, key in (("south", SOUTH), ("west", WEST)):
                with pytest.raises(SealError):
                    open_sealed(bytes(changed), name, key, public_key(NORTH), CONTEXT)


def test_a_reader_cannot_put_other_content_under_the_senders_name() -> None:
    """Readers share the content key, but content that they encrypt with it has no signature of the
    sender.
    """
    sealed = Sealed()
    sealed.ParseFromString(SEALED)
    entry = next(reader for reader in sealed.readers if reader.name == "south")
    key = ChaCha20Poly1305(_shared(SOUTH, public_key(NORTH), CONTEXT)).decrypt(
        entry.nonce, entry.key, b"south"
    )
    sealed.content = ChaCha20Poly1305(key).encrypt(sealed.nonce, b"other means", CONTEXT)
    for private in (None, SOUTH):
        if private is not None:
            sealed.signature = _halves(private)[1].sign(_signed(CONTEXT, sealed))
        with pytest.raises(SealError, match="changed on its way"):
            open_sealed(sealed.SerializeToString(), "west", WEST, public_key(NORTH), CONTEXT)


def test_a_part_is_refused() -> None:
    for length in (0, 1, 50, len(SEALED) - 1):
        with pytest.raises(SealError):
            open_sealed(SEALED[:length], "south", SOUTH, public_key(NORTH), CONTEXT)


def test_another_run_place_sender_or_reader_is_refused() -> None:
    for name, key, sender, context in (
        ("south", SOUTH, public_key(NORTH), CONTEXT + b"x"),
        ("south", SOUTH, public_key(WEST), CONTEXT),
        ("south", WEST, public_key(NORTH), CONTEXT),
        ("west", SOUTH, public_key(NORTH), CONTEXT),
        ("east", SOUTH, public_key(NORTH), CONTEXT),
        ("south", SOUTH, b"short", CONTEXT),
        ("south", SOUTH, bytes(64), CONTEXT),
    ):
        with pytest.raises(SealError):
            open_sealed(SEALED, name, key, sender, context)
