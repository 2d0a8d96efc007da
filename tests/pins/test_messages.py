"""Every kind of message has the bytes that it had, and what was written before can be read."""

from __future__ import annotations

import json

from fedsurrogate.common import surrogate_pb2
from tests.pins import messages, pinned

# Parts of other messages.
PARTS = {
    "Halves",
    "Header",
    "Levels",
    "Sums",
    "Table",
    "Noise",
    "Claim",
    "Mixtures",
    "Tensor",
    "SumBytes",
}
# By the name of a message: the beginning of a pin's name.
PINNED = {
    **{
        "Surrogate": "surrogate",
        "Counts": "counts",
        "Centre": "public mean",
        "Parameters": "parameters",
    },
    **{
        "Head": "model: head",
        "Heads": "model: ensemble",
        "Network": "model: mlp",
        "Quadratic": "model: quadratic",
    },
    **{
        "Classifier": "model:",
        "Synthetic": "synthetic",
        "Relay": "relay",
        "Bundle": "bundle",
        "PublicMap": "sum: map",
    },
    **{
        "SumMember": "sum: member",
        "SumMembers": "sum: key list",
        "SumDealt": "sum: dealt",
        "SumDelivery": "sum: delivery",
    },
    **{
        "MaskedSum": "sum: masked",
        "SumList": "sum: list",
        "SumRevealed": "sum: revealed",
        "SumState": "sum: state",
    },
    **{"SumTotal": "sum: total"},
}
# A message with random bytes, which was made once: `messages.opened`.
OPENED = {"Sealed"}


def test_every_message_has_the_pinned_bytes() -> None:
    lines = list(pinned.differences(json.loads(pinned.WIRE.read_text()), messages.fingerprints()))
    assert not lines, pinned.report(lines)


def test_every_kind_of_message_is_pinned() -> None:
    kinds = set(surrogate_pb2.DESCRIPTOR.message_types_by_name)
    assert kinds == PARTS | OPENED | set(PINNED), "a new kind of message needs a pin"
    names = json.loads(pinned.WIRE.read_text())
    for kind, beginning in PINNED.items():
        assert any(name.startswith(beginning) for name in names), kind


def test_what_was_written_is_read_and_written_again_without_a_change() -> None:
    written, again = messages.messages(), messages.read_back()
    assert len(again) > 30
    assert not [name for name, content in again.items() if content != written[name]]


def test_a_relay_that_was_sealed_and_a_secret_that_was_shared_before_can_be_opened() -> None:
    assert messages.opened() == {"sealed": "a relay", "shares": bytes(range(16)).hex()}
