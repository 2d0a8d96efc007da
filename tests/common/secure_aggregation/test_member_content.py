"""What a site signs of its keys for secure aggregation: all of them, and its name."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.common.secure_aggregation.secrets import Member


def keys(length: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=length, max_size=length)


MEMBERS = st.builds(
    Member, st.sampled_from(["north", "ö st"]), keys(64), keys(32), keys(32), keys(64)
)


@given(MEMBERS, MEMBERS, st.sampled_from(["site", "public", "masking", "sharing", "signature"]))
def test_a_signature_covers_every_key_and_the_name(one: Member, other: Member, part: str) -> None:
    changed = replace(one, **{part: getattr(other, part)})
    same = part == "signature" or changed == one
    assert (changed.content == one.content) == same
    assert one.content == one.public + one.masking + one.sharing + one.site.encode()
