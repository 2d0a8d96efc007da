"""Sealed relays: only those they are for can read them, and nobody can change them unseen."""

import pytest

from common.errors import SealError
from common.sealing import new_key, open_sealed, public_key, seal

CONTENT = b"means and covariances" * 20
CONTEXT = b"run\0lineage\0north\x001"
NORTH, SOUTH, WEST = (new_key() for _ in range(3))
READERS = {"south": public_key(SOUTH), "west": public_key(WEST)}
SEALED = seal(CONTENT, NORTH, READERS, CONTEXT)


def test_every_reader_can_open_it_alone() -> None:
    for name, key in (("south", SOUTH), ("west", WEST)):
        assert open_sealed(SEALED, name, key, public_key(NORTH), CONTEXT) == CONTENT


def test_nothing_of_the_content_shows_and_no_two_are_alike() -> None:
    assert b"means" not in SEALED
    assert seal(CONTENT, NORTH, READERS, CONTEXT) != SEALED


def test_any_changed_byte_is_noticed_by_every_reader() -> None:
    for place in range(len(SEALED)):
        for bit in (1, 128):
            changed = bytearray(SEALED)
            changed[place] ^= bit
            for name, key in (("south", SOUTH), ("west", WEST)):
                with pytest.raises(SealError):
                    open_sealed(bytes(changed), name, key, public_key(NORTH), CONTEXT)


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
        ("south", SOUTH, bytes(32), CONTEXT),
    ):
        with pytest.raises(SealError):
            open_sealed(SEALED, name, key, sender, context)


def test_who_carries_it_cannot_pass_off_a_message_as_a_sites() -> None:
    carrier = new_key()
    forged = seal(CONTENT, carrier, READERS, CONTEXT)
    with pytest.raises(SealError, match="somebody else"):
        open_sealed(forged, "south", SOUTH, public_key(NORTH), CONTEXT)
