"""What nobody has signed is not unpacked: neither its memory nor its form."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.errors import SealError, SurrogateError
from fedsurrogate.common.message_files import MessageReply, pack_reply, unpack_reply
from fedsurrogate.common.safe_parsing import canonical
from fedsurrogate.common.security.documents import open_file
from fedsurrogate.common.security.sealing import public_key
from fedsurrogate.common.surrogate_pb2 import Bundle
from tests.children import ran

KEY = bytes(range(32))
READ = """
import resource, sys, tempfile
from fedsurrogate.common.errors import SealError
from fedsurrogate.common.message_files import MessageReply, pack_reply, unpack_reply
from fedsurrogate.common.security.sealing import public_key, sign
from fedsurrogate.common.surrogate_pb2 import Bundle
content = Bundle(manifest=b"{}", payload=b"x", signature=bytes(64)).SerializeToString()
head, tail = content.split(b"\\x12\\x01x")
# Made in a file: what it takes to make it in memory would hide what it takes to read it.
with tempfile.TemporaryFile() as file:
    file.write(head + b"\\x12\\x80\\x80\\x80\\x40")
    file.seek(2**27, 1)
    file.write(tail)
    file.seek(0)
    content = file.read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    unpack_reply(content, public_key(bytes(32)))
except SealError:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_badly_signed_file_takes_the_memory_of_one_copy() -> None:
    """128 MiB took 257 more before the signature was looked at."""
    done = ran([sys.executable, "-c", READ], check=True)
    assert int(done.stdout) < 160


@given(st.binary(max_size=200), st.binary(max_size=200), st.binary(max_size=80))
def test_the_parts_of_a_file_are_those_that_protobuf_reads(
    manifest: bytes, payload: bytes, signature: bytes
) -> None:
    content = canonical(Bundle(manifest=manifest, payload=payload, signature=signature))
    assert open_file(content, 200) == (manifest, payload, signature)
    if manifest:
        with pytest.raises(SurrogateError, match="no signed file in canonical form"):
            open_file(content, len(manifest) - 1)


@given(st.data())
def test_bytes_in_another_form_than_the_canonical_one_are_refused(data: st.DataObject) -> None:
    """Whatever is accepted is what would be written again."""
    content = canonical(Bundle(manifest=b"{}", payload=bytes(130), signature=bytes(64)))
    at = data.draw(st.integers(0, len(content)))
    cut = data.draw(st.integers(0, 3))
    changed = content[:at] + data.draw(st.binary(max_size=4)) + content[at + cut :]
    try:
        manifest, payload, signature = open_file(changed, 200)
    except SurrogateError:
        return
    assert (
        canonical(Bundle(manifest=manifest, payload=bytes(payload), signature=signature)) == changed
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c + b"\x1a\x00",
        lambda c: b"\x0a\x00" + c,
        lambda c: c + c,
        lambda c: c[:-1],
        lambda c: c.replace(b"\x12\x05", b"\x12\x85\x00"),
        lambda c: b"\x8a\x00" + c[1:],
        lambda c: c + b"\x22\x01x",
        lambda c: c + b"\x20\x01",
    ],
)
def test_a_reply_that_was_written_otherwise_is_none(change: object) -> None:
    content = pack_reply(MessageReply("a" * 64, "b" * 64, "north", {}, b"12345"), KEY)
    assert unpack_reply(content, public_key(KEY)).payload == b"12345"
    with pytest.raises((SurrogateError, SealError)):
        unpack_reply(change(content), public_key(KEY))  # type: ignore[operator]
