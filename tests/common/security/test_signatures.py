"""A signature holds for its content, purpose and key, and a key file names each key once."""

import json

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common.errors import ConfigError, SealError
from fedsurrogate.common.security.sealing import (
    PUBLIC_BYTES,
    SEED_BYTES,
    new_key,
    public_key,
    read_keys,
    seal,
    sign,
    verify,
)

KEYS = [new_key() for _ in range(3)]
PUBLIC = [public_key(key) for key in KEYS]


@settings(max_examples=50)
@given(st.binary(max_size=20), st.integers(0, 20), st.integers(0, 20), st.sampled_from([0, 1]))
def test_a_signature_holds_for_one_content_purpose_and_key(
    whole: bytes, at: int, other: int, key: int
) -> None:
    """The same bytes, divided elsewhere into purpose and content, are something else."""
    purpose, content = whole[:at], whole[at:]
    signature = sign(content, KEYS[0], purpose)
    assert signature == sign(content, KEYS[0], purpose)
    if (whole[:other], key) == (purpose, 0):
        verify(content, signature, PUBLIC[0], purpose)
    else:
        with pytest.raises(SealError, match="does not fit"):
            verify(whole[other:], signature, PUBLIC[key], whole[:other])
    Ed25519PublicKey.from_public_bytes(PUBLIC[0][SEED_BYTES:]).verify(
        signature, len(purpose).to_bytes(8, "big") + purpose + content
    )


@settings(max_examples=50)
@given(st.binary(max_size=70), st.binary(max_size=70), st.booleans())
def test_bytes_that_are_no_signature_or_no_key_do_not_fit(
    signature: bytes, public: bytes, whole: bool
) -> None:
    if whole:
        signature = sign(b"content", KEYS[0], b"purpose")
    with pytest.raises(SealError, match="does not fit"):
        verify(b"content", signature, public, b"purpose")
    with pytest.raises(SealError, match="does not fit"):
        verify(b"content", signature[:-1], PUBLIC[0], b"purpose")


# The points of Curve25519 whose order is small, and with which every secret is zero.
@pytest.mark.parametrize("point", [bytes(32), (1).to_bytes(32, "little"), b"short", bytes(31)])
def test_a_key_with_which_nothing_is_secret_is_refused(point: bytes) -> None:
    with pytest.raises(SealError, match="public key is invalid"):
        seal(
            b"content",
            KEYS[0],
            {"south": point + PUBLIC[1][SEED_BYTES:]} if len(point) == 32 else {"south": point},
            b"",
        )


ENTRIES = st.lists(
    st.tuples(st.sampled_from(["north", "south", "west", "a b"]), st.integers(0, 2)),
    max_size=4,
    unique_by=lambda entry: entry[0],
)


@settings(max_examples=60)
@given(
    entries=ENTRIES,
    wrong=st.sampled_from(
        ["", "", "", "cut", "longer", "digit", "number", "twice", "half", "encoding", "no file"]
    ),
    mark=st.booleans(),
)
def test_a_key_file_is_read_only_where_each_name_has_a_key_of_its_own(
    tmp_path_factory: pytest.TempPathFactory,
    entries: list[tuple[str, int]],
    wrong: str,
    mark: bool,
) -> None:
    """mark: the file begins with the byte order mark of some editors."""
    lines = [f'{json.dumps(name)} = "{PUBLIC[number].hex()}"' for name, number in entries]
    more = {
        "cut": f'x = "{new_key().hex()}"',
        "longer": f'x = "{PUBLIC[0].hex()}00"',
        "digit": f'x = "{"g" * 2 * PUBLIC_BYTES}"',
        "number": "x = 5",
        "twice": "x = 1\nx = 2",
        # Another key for secrets does not make it another owner.
        "half": "\n".join(
            f'{name} = "{(half + PUBLIC[2][SEED_BYTES:]).hex()}"'
            for name, half in (("x", bytes(32)), ("y", b"1" * 32))
        ),
    }.get(wrong, "")
    file = tmp_path_factory.mktemp("keys") / "peers.toml"
    text = "\n".join([*lines, more])
    if wrong != "no file":
        file.write_bytes(
            (b"\xff" if wrong == "encoding" else b"")
            + text.encode("utf-8-sig" if mark else "utf-8")
        )
    numbers = [number for _, number in entries]
    if wrong or len(set(numbers)) < len(numbers):
        with pytest.raises(ConfigError, match="no valid key file"):
            read_keys(file)
    else:
        assert read_keys(file) == {name: PUBLIC[number] for name, number in entries}
