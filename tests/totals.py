"""The sum in a run folder, which the coordinator only writes."""

from __future__ import annotations

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.surrogate_proto import (
    Words,
    unpack_claim,
    unpack_header,
    unpack_words,
)


def unpack_total(payload: bytes) -> tuple[Header, tuple[str, ...], Words, Mechanism | None]:
    """Header, sites, sum and claim of what `pack_total` wrote."""
    message = pb.SumTotal.FromString(payload)
    claim = unpack_claim(message.claim) if message.HasField("claim") else None
    return unpack_header(message.header), tuple(message.sites), unpack_words(message.numbers), claim
