"""Reading any received bytes needs memory in proportion to their size, and raises no error but
SurrogateError.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.common import safe_parsing
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.safe_parsing import MOST_FIELDS, canonical, read_message
from fedsurrogate.common.wire.model_proto import unpack_parameters
from fedsurrogate.common.wire.records import (
    INFO,
    PAYLOAD,
    STORED_AS,
    check_form,
    from_record,
    to_record,
)

ROOT = Path(__file__).parents[2]
# Sixteen mebibytes each: tensors, classes, tables, noise, masks, numbers in a row.
BOMBS = """
import resource, sys
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.wire.model_proto import unpack_classifier, unpack_parameters, unpack_relay, unpack_synthetic
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.common import surrogate_pb2 as pb

SIZE = 2**24
def inside(number, body):
    size = len(body)
    return bytes([number << 3 | 2, *(size >> shift & 127 | 128 for shift in (0, 7, 14)), size >> 21]) + body
def masked(bits):
    tensor = pb.Tensor(name="w", kept=bytes(bits // 8), shape=[bits])
    tensor.values.shape[:], tensor.values.scale = [0], 1.0
    return pb.Parameters(header=pb.Header(schema=1), tensors=[tensor]).SerializeToString()
bombs = [
    (unpack_parameters, b"\\x22\\x00" * (SIZE // 2)),
    (unpack_surrogate, inside(1, b"\\x32\\x00" * (SIZE // 2))),
    (unpack_surrogate, inside(2, b"\\x32\\x00" * (SIZE // 2))),
    (unpack_surrogate, inside(2, inside(2, b"\\x01" * SIZE))),
    (unpack_surrogate, inside(4, b"\\x3a\\x00" * (SIZE // 2))),
    (unpack_synthetic, inside(5, b"\\x01" * SIZE)),
    (unpack_classifier, inside(2, b"\\x0a\\x00" * (SIZE // 2))),
    (unpack_relay, b"\\x0a\\x00" * (SIZE // 2)),
    (lambda payload: unpack_parameters(payload, most=10_000), masked(8 * SIZE)),
]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for read, payload in bombs:
    try:
        read(payload)
    except SurrogateError:
        continue
    sys.exit("read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_a_payload_never_takes_more_than_four_times_its_size_in_memory() -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BOMBS], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) / 2**10 < 4 * 16


@pytest.mark.parametrize(
    "more",
    [
        b"\x7b" * 100,
        b"\x98\x06\x01",
        b"\x08\x01",
        b"\x0a\xff\xff\xff\xff\x0f",
        b"\x0a\x05",
        b"\xff" * 20,
        b"\x0b\x0c",
    ],
)
def test_what_the_schema_does_not_know_is_refused(more: bytes) -> None:
    good = pb.Parameters(header=pb.Header(schema=1, classes=["a"]), round=3).SerializeToString()
    read_message(pb.Parameters, good, "update")
    with pytest.raises(SurrogateError, match="bytes that are not a valid update"):
        read_message(pb.Parameters, good + more, "update")


def test_numbers_may_stand_in_one_piece_or_alone() -> None:
    found = read_message(pb.Halves, b"\x0a\x02\x03\x04\x08\x05", "table")
    assert list(found.shape) == [3, 4, 5]
    read_message(pb.Header, b"\x32\x01a" * MOST_FIELDS, "header")
    with pytest.raises(SurrogateError, match=f"more than {MOST_FIELDS} fields"):
        read_message(pb.Header, b"\x32\x01a" * (MOST_FIELDS + 1), "header")


@pytest.mark.parametrize("shape", [[2**32 - 1] * 3 + [0], [0] + [2**32 - 1] * 7, [2**31, 0]])
def test_an_empty_table_with_huge_sides_is_refused(shape: list[int]) -> None:
    """torch cannot represent such a shape; its error once ended the run."""
    tensor = pb.Tensor(name="w", values=pb.Halves(shape=shape, scale=1.0))
    with pytest.raises(SurrogateError, match="do not fill the shape"):
        unpack_parameters(
            pb.Parameters(header=pb.Header(schema=1), tensors=[tensor]).SerializeToString()
        )


@pytest.mark.parametrize(
    "make",
    [
        lambda: RecordDict({PAYLOAD: MetricRecord({"a": 1.0})}),
        lambda: RecordDict({INFO: MetricRecord({"a": 1.0})}),
        lambda: RecordDict({"more": ConfigRecord({"a": 1})}),
        lambda: RecordDict({PAYLOAD: ArrayRecord({"other": Array("uint8", (1,), STORED_AS, b"x")})}),
        lambda: RecordDict({PAYLOAD: ArrayRecord({PAYLOAD: Array("uint8", (2,), STORED_AS, b"x")})}),
        lambda: RecordDict({PAYLOAD: ArrayRecord({PAYLOAD: Array("float32", (1,), STORED_AS, b"x")})}),
        lambda: RecordDict({PAYLOAD: ArrayRecord({PAYLOAD: Array("uint8", (1,), "numpy.ndarray", b"x")})}),
        lambda: RecordDict({INFO: ConfigRecord({str(i): 1 for i in range(300)})}),
        lambda: RecordDict({INFO: ConfigRecord({"a": "x" * 2**22})}),
        lambda: RecordDict({INFO: ConfigRecord({"a": [""] * 2**20, "b": [1] * 2**20})}),
        lambda: RecordDict({INFO: ConfigRecord({"a": b""})}),
    ],
)  # fmt: skip
def test_a_record_of_another_form_is_refused(make: Callable[[], RecordDict]) -> None:
    record = make()
    with pytest.raises(SurrogateError):
        check_form(record)
    with pytest.raises(SurrogateError):
        from_record(record, 2**20)


def test_many_tiny_arrays_are_not_even_looked_at() -> None:
    tiny = Array("uint8", (1,), STORED_AS, b"x")
    arrays = ArrayRecord({str(i): tiny for i in range(20_000)})
    record = RecordDict({PAYLOAD: arrays})
    # Without the check, the parser would loop over all of it.
    arrays.values = None  # type: ignore[method-assign, assignment]
    with pytest.raises(SurrogateError, match="20000 arrays"):
        check_form(record)


def test_what_is_announced_is_a_number_and_its_text_is_never_repeated_in_full() -> None:
    for announced in ("x" * 10_000, 3.0, [3]):
        with pytest.raises(SurrogateError) as refused:
            from_record(to_record(b"abc", {"bytes": announced}), 10)
        assert len(str(refused.value)) < 200


HALVES = st.builds(
    lambda shape, data, scale, logarithm: pb.Halves(
        shape=shape, data=data, scale=scale, logarithm=logarithm
    ),
    st.lists(st.integers(0, 2**32 - 1), max_size=3),
    st.binary(max_size=5),
    st.sampled_from([0.0, 1.5]),
    st.booleans(),
)
TENSORS = st.builds(
    lambda name, values, kept, shape: pb.Tensor(name=name, values=values, kept=kept, shape=shape),
    st.text(max_size=3),
    HALVES,
    st.binary(max_size=3),
    st.lists(st.integers(0, 2**32 - 1), max_size=2),
)
MESSAGES = st.builds(
    lambda classes, number, tensors, labels: (
        pb.Parameters(
            header=pb.Header(schema=1, classes=classes),
            round=number,
            records=number,
            tensors=tensors,
        )
        if tensors
        else pb.Synthetic(
            header=pb.Header(classes=classes), labels=labels, radius=0.5, round=number
        )
    ),
    st.lists(st.text(max_size=3), max_size=3),
    st.integers(0, 2**31),
    st.lists(TENSORS, max_size=3),
    st.lists(st.integers(0, 2**20), max_size=4),
)


def fields_and_packed(message: Any) -> tuple[int, int]:
    """Fields on the wire, and bytes of packed numbers, from the message itself."""
    fields = packed = 0
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else [value]:
                inner = fields_and_packed(each)
                fields, packed = fields + 1 + inner[0], packed + inner[1]
        elif field.is_repeated and not isinstance(value[0], str | bytes):
            fields += 1
            packed += sum(max(1, -(-each.bit_length() // 7)) for each in value)
        else:
            fields += len(value) if field.is_repeated else 1
    return fields, packed


@settings(max_examples=150, deadline=None)
@given(MESSAGES, st.integers(-1, 0), st.sampled_from(["MOST_FIELDS", "MOST_PACKED"]))
def test_every_field_and_every_packed_byte_is_counted_once(
    message: Any, spare: int, limit: str
) -> None:
    content = canonical(message)
    fields, packed = fields_and_packed(message)
    most = {"MOST_FIELDS": fields, "MOST_PACKED": packed}[limit] + spare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safe_parsing, limit, most)
        # Where there is nothing of a kind, nothing is looked at.
        if spare == 0 or (limit == "MOST_PACKED" and not fields):
            assert read_message(type(message), content, "message") == message
        elif fields:
            with pytest.raises(SurrogateError, match="would become a message of more than"):
                read_message(type(message), content, "message")
    assert (safe_parsing.MOST_FIELDS, safe_parsing.MOST_PACKED) == (131_072, 2_097_152)


@settings(max_examples=150, deadline=None)
@given(MESSAGES, st.data())
def test_a_message_that_is_cut_or_changed_is_refused_or_another_message(
    message: Any, data: st.DataObject
) -> None:
    """And whatever is read is what the library reads."""
    content = canonical(message)
    at = data.draw(st.integers(0, max(0, len(content) - 1)))
    changed = content[:at] + data.draw(st.binary(max_size=3)) + content[at + 1 :]
    for other in (content[:at], changed):
        try:
            found = read_message(type(message), other, "message")
        except SurrogateError:
            continue
        assert found == type(message).FromString(other)


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (b"\x00", 0), (b"\x7f", 127), (b"\x80\x01", 128), (b"\x80\x00", 0), (b"\xff" * 9 + b"\x01", None),
        (b"\x80" * 9 + b"\x00", 0), (b"\x80" * 10 + b"\x00", "long"), (b"\x80", "cut"), (b"", "cut"),
    ],
)  # fmt: skip
def test_a_number_has_64_bits_at_most(number: bytes, value: object) -> None:
    """As the round of an update, which has 32 bits, and stands last."""
    field = pb.Parameters.DESCRIPTOR.fields_by_name["round"].number << 3
    if isinstance(value, str):
        with pytest.raises(SurrogateError, match="not a valid update"):
            read_message(pb.Parameters, bytes([field]) + number, "update")
        return
    found = read_message(pb.Parameters, bytes([field]) + number, "update")
    assert found.round == (value if value is not None else 2**32 - 1)
