"""Messages as files: what was packed is what is read, and every other file has one kind of error."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common import message_files
from fedsurrogate.common.errors import ConfigError, SealError, SurrogateError
from fedsurrogate.common.message_files import (
    MessageReply,
    MessageRequest,
    digest,
    pack_reply,
    pack_request,
    unpack_reply,
    unpack_request,
)
from fedsurrogate.common.safe_parsing import canonical
from fedsurrogate.common.security.sealing import new_key, public_key, sign
from fedsurrogate.common.surrogate_pb2 import Bundle

KEY, OTHER = new_key(), new_key()
PUBLIC = public_key(KEY)
few = settings(max_examples=60, deadline=None)
LIMIT = 2**63
NUMBERS = st.integers(-LIMIT, LIMIT - 1)
VALUES = st.one_of(
    st.text(max_size=5),
    NUMBERS,
    st.booleans(),
    st.floats(allow_nan=False),
    st.lists(NUMBERS, min_size=1, max_size=3),
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=3),
)
INFO = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
PAYLOADS = st.none() | st.binary(max_size=9)
SITES = st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
REQUEST = MessageRequest(
    "a" * 64, "77", "north", "query", {"seed": 1}, {"a": 1}, "2026-03-31", b"x"
)
REPLY = MessageReply("a" * 64, "b" * 64, "north", {"a": 1}, b"x")


def signed(manifest: object, purpose: bytes, payload: bytes = b"x", key: bytes = KEY) -> bytes:
    """A file with any manifest, with a signature that fits."""
    text = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    content = len(text).to_bytes(8, "big") + text + payload
    return canonical(Bundle(manifest=text, payload=payload, signature=sign(content, key, purpose)))


@few
@given(
    run=st.from_regex(r"\A[0-9]{1,20}\Z"),
    site=SITES,
    flat=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | NUMBERS, max_size=3),
    info=INFO,
    payload=PAYLOADS,
)
def test_a_message_is_read_as_it_was_packed(
    run: str, site: str, flat: dict[str, Any], info: dict[str, Any], payload: bytes | None
) -> None:
    """A message without a payload is not one with an empty one."""
    request = MessageRequest("0a" * 32, run, site, "query", flat, info, "2026-12-01", payload)
    content = pack_request(request, KEY)
    assert content == pack_request(replace(request, info=dict(reversed(info.items()))), KEY)
    assert unpack_request(content, PUBLIC) == request
    reply = MessageReply(request.id, digest(content), site, info, payload)
    assert unpack_reply(pack_reply(reply, KEY), PUBLIC) == reply
    # Neither is taken for the other, or as one of another key.
    for read, packed in (
        (unpack_request, pack_reply(reply, KEY)),
        (unpack_reply, content),
        (unpack_request, pack_request(request, OTHER)),
        (unpack_reply, pack_reply(reply, OTHER)),
    ):
        with pytest.raises(SealError, match="signature does not fit"):
            read(packed, PUBLIC)


MANIFEST: dict[str, Any] = {
    "id": "a" * 64, "flower_run": "77", "site": "north", "kind": "query", "settings": {}, "info": {},
    "expires": "2026-03-31", "has-payload": True,
}  # fmt: skip
SHORT = {name: MANIFEST[name] for name in ("id", "site", "info", "has-payload")} | {"request": ""}


@pytest.mark.parametrize(
    "wrong",
    [
        {"id": "A" * 64}, {"id": "a" * 63}, {"id": "a" * 65}, {"id": 1}, {"flower_run": ""}, {"flower_run": "1" * 21},
        {"flower_run": "-1"}, {"flower_run": 77}, {"site": "../north"}, {"site": ""}, {"site": None}, {"kind": 3},
        {"settings": []}, {"settings": None}, {"info": []}, {"info": {"a": None}}, {"expires": "soon"},
        {"expires": "2026-02-30"}, {"expires": 20260331}, {"more": 1}, {"payload": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_a_signed_request_in_another_form_is_refused(wrong: dict[str, Any]) -> None:
    purpose = message_files.REQUEST
    assert unpack_request(signed(MANIFEST, purpose), PUBLIC).id == "a" * 64
    with pytest.raises(ConfigError, match="no request of `coordinator offline exchange`"):
        unpack_request(signed(MANIFEST | wrong, purpose), PUBLIC)
    for name in MANIFEST:
        less = {key: value for key, value in MANIFEST.items() if key != name}
        with pytest.raises(ConfigError, match="no request of `coordinator offline exchange`"):
            unpack_request(signed(less, purpose), PUBLIC)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[]", b"3", b'"a"', b"null", b"{}", b"[" * 100_000], ids=len
)
def test_a_signed_manifest_that_cannot_be_read_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigError, match="a manifest that cannot be read"):
        unpack_request(signed(text, message_files.REQUEST), PUBLIC)
    with pytest.raises(SurrogateError, match="a manifest that cannot be read"):
        unpack_reply(signed(text, message_files.REPLY), PUBLIC)


@few
@given(
    value=st.sampled_from(
        [
            LIMIT - 1, -LIMIT, LIMIT, -LIMIT - 1, None, {}, [], [1], [1, 2.0], [1, True], ["a"], [["a"]], [[1]],
            [1.5], [LIMIT], [LIMIT - 1, -LIMIT], [1, LIMIT], [None], "", "a", 1.5, True, [True, False],
        ]
    )
)  # fmt: skip
def test_a_value_is_a_text_or_numbers_of_64_bits_of_one_type(value: Any) -> None:
    def sound(each: Any) -> bool:
        whole = isinstance(each, int) and -LIMIT <= each < LIMIT
        return whole or isinstance(each, str | float)

    fits = sound(value)
    if isinstance(value, list):
        fits = len({type(each) for each in value}) == 1 and all(
            sound(each) and not isinstance(each, str) for each in value
        )
    content = signed(SHORT | {"info": {"fine": 1, "x": value}}, message_files.REPLY)
    if fits:
        assert unpack_reply(content, PUBLIC).info == {"fine": 1, "x": value}
        return
    with pytest.raises(SurrogateError, match="a value that no message over the network may have"):
        unpack_reply(content, PUBLIC)


@pytest.mark.parametrize("has", [True, False, 1, "true", None])
def test_only_true_says_that_there_is_a_payload(has: object) -> None:
    content = signed(SHORT | {"has-payload": has}, message_files.REPLY, b"")
    assert unpack_reply(content, PUBLIC).payload == (b"" if has is True else None)


def test_a_manifest_has_sixteen_mebibytes_at_most() -> None:
    assert message_files.LARGEST_FILE == 1024**3
    text = json.dumps(SHORT).encode()
    full = text + b" " * (16 * 1024**2 - len(text))
    assert unpack_reply(signed(full, message_files.REPLY), PUBLIC).site == "north"
    with pytest.raises(SurrogateError, match="a manifest of more than 16777216 bytes"):
        unpack_reply(signed(full + b" ", message_files.REPLY), PUBLIC)


@few
@given(st.data())
def test_no_byte_of_a_file_can_be_changed_or_added(data: st.DataObject) -> None:
    content = pack_reply(REPLY, KEY)
    at = data.draw(st.integers(0, len(content) - 1))
    bit = data.draw(st.integers(0, 7))
    more = data.draw(
        st.binary(min_size=1, max_size=9) | st.sampled_from([b"\x12\x01x", b"\x0a\x00"])
    )
    changed = bytes([*content[:at], content[at] ^ 1 << bit, *content[at + 1 :]])
    for other in (changed, content[:at], content + more, more + content):
        with pytest.raises((SealError, SurrogateError)):
            unpack_reply(other, PUBLIC)
    request = pack_request(REQUEST, KEY)
    with pytest.raises((SealError, ConfigError)):
        unpack_request(request[: data.draw(st.integers(0, len(request) - 1))], PUBLIC)


@pytest.mark.parametrize("later", [-30, -1, 0, 1, 30])
def test_a_request_may_be_answered_to_the_end_of_its_last_day(
    later: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 3, 31, 23, 59, 59, tzinfo=tz) + timedelta(later)

    monkeypatch.setattr(message_files, "datetime", Clock)
    assert REQUEST.expired() == (later > 0)
