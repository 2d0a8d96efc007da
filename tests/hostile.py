"""Hostile replies, made by hypothesis from a valid reply, and a grid on which many nodes send them.

A recipe is drawn independently of the reply it changes, so that one federation can have many of
them. `forged` recipes always make a reply that must be refused. `mutated` recipes change any field
of the message, and by chance may make a plausible reply.
"""

from __future__ import annotations

import io
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.safe_parsing import MOST_FIELDS, MOST_PACKED
from fedsurrogate.common.wire.records import INFO, PAYLOAD, STORED_AS
from tests.grid import FIRST_NODE, InProcessGrid, NodeConfig

# Part of every text that a hostile site chooses.
MARK = "h0st1le"
NAMES = (
    f"<script>{MARK}</script>",
    f"<img src=x onerror={MARK}>",
    f"../../{MARK}",
    f"/etc/{MARK}",
    f"a\0{MARK}",
    f"\x1b[31m{MARK}\r\n",
    f"\u202e{MARK}",
    f"{{{{ {MARK} }}}}",
    MARK * 150_000,
    "9" * 5000 + MARK,
    "",
)


@dataclass(frozen=True)
class Recipe:
    """A change of a valid reply: `name` describes it, `change` applies it to the record in place.
    signed: the site then puts its own name on the result.
    """

    name: str
    change: Callable[[RecordDict, type[Any]], None] = field(repr=False)
    signed: bool = False


def payload_of(record: RecordDict) -> bytes:
    return record.array_records[PAYLOAD][PAYLOAD].data


def put(record: RecordDict, payload: bytes, **fields: Any) -> None:
    """Put another payload, correctly announced, in an array of this form."""
    form: dict[str, Any] = {
        "dtype": "uint8",
        "shape": (len(payload),),
        "stype": STORED_AS,
        "data": payload,
    }
    record[PAYLOAD] = ArrayRecord({PAYLOAD: Array(**(form | fields))})
    record[INFO] = ConfigRecord(dict(record.config_records[INFO]) | {"bytes": len(payload)})


def of_payload(name: str, change: Callable[[bytes], bytes]) -> Recipe:
    return Recipe(name, lambda record, kind: put(record, change(payload_of(record))))


def replay(name: str, *payloads: bytes) -> Recipe:
    """Replay replies that were valid elsewhere, in turn, with the site's own name."""
    left = itertools.cycle(payloads)
    return Recipe(name, lambda record, kind: put(record, next(left)), signed=True)


def of_array(**fields: Any) -> Recipe:
    name = f"an array with {', '.join(f'{key} {str(value)[:40]}' for key, value in fields.items())}"
    return Recipe(name, lambda record, kind: put(record, payload_of(record), **fields))


def of_info(key: str, value: Any) -> Recipe:
    def change(record: RecordDict, kind: type[Any]) -> None:
        record[INFO] = ConfigRecord(dict(record.config_records[INFO]) | {key: value})

    return Recipe(f"{key} = {str(value)[:40]!r}", change)


def of_record(key: str, make: Callable[[], Any]) -> Recipe:
    def change(record: RecordDict, kind: type[Any]) -> None:
        record.pop(key, None)
        record[key] = make()

    return Recipe(f"record {key[:20]!r} is a {type(make()).__name__}", change)


def pickled() -> bytes:
    """A pickle whose code np.load would run, if it were called with pickles allowed."""
    buffer = io.BytesIO()
    np.save(buffer, np.array([{MARK: print}], dtype=object), allow_pickle=True)
    return buffer.getvalue()


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def numbered(number: int, wire: int) -> bytes:
    return varint(number << 3 | wire)


def nested(depth: int) -> bytes:
    """Nested messages in a field that no message has."""
    body = b""
    for _ in range(depth):
        body = numbered(15, 2) + varint(len(body)) + body
    return body


BYTE_BOMBS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda valid: b"",
    "a deep nesting of unknown messages": lambda valid: valid + nested(300),
    "a deep nesting of groups": lambda valid: valid + numbered(15, 3) * 5000,
    "a group that is known": lambda valid: valid + numbered(1, 3) + numbered(1, 4),
    "an unknown field": lambda valid: valid + numbered(99, 2) + varint(5) + MARK[:5].encode(),
    "a field of another type": lambda valid: valid + numbered(1, 0) + b"\x01",
    "the largest field number": lambda valid: valid + numbered(2**29 - 1, 0) + b"\x01",
    "a declared length of 2 GiB": lambda valid: valid + numbered(1, 2) + varint(2**31 - 1) + b"x",
    "a declared length of 2**63": lambda valid: valid + numbered(1, 2) + varint(2**63) + b"x",
    "a number that does not end": lambda valid: valid + b"\xff" * 100,
    "headers by the hundred thousand": lambda valid: (
        valid + (numbered(1, 2) + b"\0") * (MOST_FIELDS + 1)
    ),
    "nameless classes by the hundred thousand": lambda valid: (
        valid
        + numbered(1, 2)
        + varint(2 * MOST_FIELDS + 2)
        + (numbered(6, 2) + b"\0") * (MOST_FIELDS + 1)
    ),
    "pickled": lambda valid: pickled(),
    "an archive": lambda valid: b"PK\x03\x04" + valid,
    "twice": lambda valid: valid[: len(valid) // 2] * 3,
}
RECORDS = [
    of_record(PAYLOAD, lambda: MetricRecord({"payload": 1.0})),
    of_record(PAYLOAD, lambda: ConfigRecord({"payload": b"x"})),
    of_record(PAYLOAD, lambda: ArrayRecord({"other": Array(np.zeros(3))})),
    of_record(
        PAYLOAD,
        lambda: ArrayRecord({str(i): Array("uint8", (1,), STORED_AS, b"x") for i in range(60)}),
    ),
    of_record(PAYLOAD, lambda: ArrayRecord({PAYLOAD: Array(np.zeros((2, 2), np.float32))})),
    of_record(INFO, lambda: ArrayRecord({PAYLOAD: Array(np.zeros(3))})),
    of_record(INFO, lambda: MetricRecord({"bytes": 10})),
    of_record(INFO, lambda: ConfigRecord({f"{MARK}{i}": 1 for i in range(500)})),
    of_record("extra", lambda: ConfigRecord({MARK: 1})),
    of_record("extra", lambda: MetricRecord({MARK: [1.0] * 1000})),
    of_record(f"../{MARK}", lambda: ArrayRecord({"x": Array(np.zeros(3))})),
]


def forged() -> SearchStrategy[Recipe]:
    """Replies that are invalid in any reading."""
    wrong = st.sampled_from(
        [0, -1, 2**62, True, 1.5, MARK, b"1", [1, 2], f"<script>{MARK}</script>"]
    )
    shapes = st.lists(st.sampled_from([0, 1, 2, 2**31 - 1, -1]), max_size=6).map(tuple)
    cut = st.floats(0, 0.99).map(
        lambda at: of_payload(f"cut off at {at:.2f}", lambda p: p[: int(len(p) * at)])
    )
    noise = st.binary(min_size=1, max_size=300).map(
        lambda b: of_payload(f"{len(b)} random bytes", lambda p: b)
    )
    return st.one_of(
        st.sampled_from(RECORDS),
        st.sampled_from([of_payload(name, change) for name, change in BYTE_BOMBS.items()]),
        st.sampled_from(["float16", "object", "uint8 ", f"<b>{MARK}"]).map(
            lambda dtype: of_array(dtype=dtype)
        ),
        st.sampled_from(["numpy.ndarray", "pickle", "", MARK * 1000]).map(
            lambda stype: of_array(stype=stype)
        ),
        shapes.map(lambda shape: of_array(shape=shape)),
        wrong.map(lambda value: of_info("bytes", value)),
        st.sampled_from(["policy", "OK", 7, 1.5, [1, 2], f"<script>{MARK}"]).map(
            lambda value: of_info("status", value)
        ),
        st.sampled_from(["", [], b""]).map(lambda value: of_info(MARK, value)),
        st.just(of_info(MARK, MARK * 700_000)),
        cut,
        noise,
        forged_fields(),
    )


def forged_fields() -> SearchStrategy[Recipe]:
    """Messages of the right form with one impossible field."""
    name = st.sampled_from(NAMES)
    header = {
        "method": name,
        "run": name,
        "site": name,
        "fingerprint": name,
        "schema": st.sampled_from([0, 2, 2**32 - 1]),
    }
    return st.one_of(
        *(made.map(lambda value, key=key: of_header(key, value)) for key, made in header.items()),
        name.map(lambda value: of_header("classes", [value])),
        st.just(of_header("classes", ["0", "0"])),
        st.just(of_header("classes", [str(n) for n in range(20_000)])),
        st.just(of_header("classes", [])),
        st.sampled_from([np.nan, np.inf, -np.inf]).map(lambda value: of_halves("data", value)),
        st.sampled_from([float("nan"), float("inf"), 0.0, -1.0, 3e38]).map(
            lambda value: of_halves("scale", value)
        ),
        st.sampled_from(
            [[2**32 - 1] * 5, [2**31, 2**31, 0], [2**20, 2**20], [], [0], [1] * 3000]
        ).map(lambda shape: of_halves("shape", shape)),
        st.sampled_from([b"", b"\0", b"\xff" * 4000]).map(lambda data: of_halves("bytes", data)),
        st.sampled_from([0, 2**27, 2**63, 2**64 - 1]).map(of_count),
        st.just(of_message("a mask that asks for terabytes", mask)),
        st.just(of_message("labels by the million", labels)),
        st.just(of_message("components by the million", components)),
    )


def of_message(name: str, change: Callable[[Any], None]) -> Recipe:
    """Change the message inside the reply; for a relay, the last site's own message."""

    def rewrite(record: RecordDict, kind: type[Any]) -> None:
        message = kind.FromString(payload_of(record))
        if kind is pb.Relay:
            own = pb.Surrogate.FromString(message.surrogates[-1])
            change(own)
            message.surrogates[-1] = own.SerializeToString(deterministic=True)
        else:
            change(message)
        put(record, message.SerializeToString(deterministic=True))

    return Recipe(name, rewrite)


def of_header(key: str, value: Any) -> Recipe:
    def change(message: Any) -> None:
        if isinstance(value, list):
            del message.header.classes[:]
            message.header.classes.extend(value)
        else:
            setattr(message.header, key, value)

    return of_message(f"header.{key} = {str(value)[:40]!r}", change)


def tables(message: Any) -> list[Any]:
    """All tables of numbers in a message."""
    found = []
    for what, value in message.ListFields():
        if what.message_type is None:
            continue
        for each in value if what.is_repeated else [value]:
            found += [each] if isinstance(each, pb.Halves) else tables(each)
    return found


def of_halves(key: str, value: Any) -> Recipe:
    def change(message: Any) -> None:
        for table in tables(message):
            if key == "data":
                # A logarithm of minus infinity would be a valid zero.
                number = np.nan if table.logarithm else value
                table.data = np.array([number], "<f2").tobytes() + table.data[2:]
            elif key == "scale":
                table.scale = value
            elif key == "shape":
                table.shape[:] = value
            else:
                table.data = value

    return of_message(f"{key} of every table = {str(value)[:40]}", change)


def of_count(value: int) -> Recipe:
    def change(message: Any) -> None:
        if isinstance(message, pb.Surrogate):
            if message.HasField("sums"):
                message.sums.counts.scale = float("nan")
            else:
                message.mixtures.counts[0] = value
        else:
            message.records = value

    return of_message(f"a count of {value}", change)


def mask(message: Any) -> None:
    if isinstance(message, pb.Parameters):
        for tensor in message.tensors:
            tensor.shape[:], tensor.kept = [2**22], b"\xff" * 2**19
    else:
        table = tables(message)[0]
        table.shape[:] = [2**20, 2**20]


def labels(message: Any) -> None:
    if isinstance(message, pb.Synthetic):
        message.labels.extend([0] * (MOST_PACKED + 1))
    else:
        tables(message)[0].shape.extend([1] * (MOST_PACKED + 1))


def components(message: Any) -> None:
    if isinstance(message, pb.Surrogate) and message.HasField("mixtures"):
        message.mixtures.components[:] = [2**32 - 1] * len(message.mixtures.components)
    else:
        message.header.classes.extend([""] * 1000)


INTEGERS = (0, 1, 2, 7, 2**16, 2**31 - 1, 2**31, 2**32 - 1)
REALS = (0.0, -0.0, 1.0, -1.0, 1e-30, 1e15, 1e38, float("inf"), float("-inf"), float("nan"))


def mutated() -> SearchStrategy[Recipe]:
    """Up to three changes of any field of the message, or of the bytes of its tables."""
    return st.integers(0, 2**32).map(
        lambda number: of_message(f"mutation {number}", lambda m: mutate(m, random.Random(number)))
    )


def mutate(message: Any, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 3)):
        at = message
        while True:
            what = chance.choice(at.DESCRIPTOR.fields)
            if what.message_type is None:
                break
            if what.is_repeated:
                inside = getattr(at, what.name)
                if chance.random() < 0.2 or not inside:
                    inside.add() if chance.random() < 0.5 else at.ClearField(what.name)
                    return
                at = chance.choice(inside)
            elif chance.random() < 0.1:
                at.ClearField(what.name)
                return
            else:
                at = getattr(at, what.name)
        _set(at, what, chance)


def _set(message: Any, what: FieldDescriptor, chance: random.Random) -> None:
    if not what.is_repeated:
        setattr(message, what.name, _value(what, getattr(message, what.name), chance))
        return
    values = getattr(message, what.name)
    match chance.randint(0, 3):
        case 0:
            message.ClearField(what.name)
        case 1:
            values.extend([_value(what, None, chance)] * chance.choice([1, 5, 3000]))
        case _ if values:
            values[chance.randrange(len(values))] = _value(what, values[0], chance)


def _value(what: FieldDescriptor, old: Any, chance: random.Random) -> Any:
    if what.type in (what.TYPE_FLOAT, what.TYPE_DOUBLE):
        return (
            float(np.float32(chance.choice(REALS)))
            if chance.random() < 0.7
            else (old or 1.0) * chance.uniform(-3, 3)
        )
    if what.type == what.TYPE_BOOL:
        return chance.random() < 0.5
    if what.type == what.TYPE_STRING:
        return chance.choice(NAMES)
    if what.type == what.TYPE_BYTES:
        changed = bytearray(old or b"")
        for _ in range(chance.choice([0, 1, 1, 20])):
            if changed:
                changed[chance.randrange(len(changed))] = chance.choice(
                    [0, 1, 0x7C, 0xFC, 0xFF, chance.randrange(256)]
                )
        return bytes(
            changed[: chance.choice([len(changed), len(changed), 0, 1, len(changed) // 2])]
        )
    return (
        chance.choice(INTEGERS)
        if chance.random() < 0.7
        else min(2**32 - 1, max(0, (old or 0) + chance.choice([-1, 1])))
    )


def drawn(strategy: SearchStrategy[Recipe], count: int, number: int = 0) -> list[Recipe]:
    """This many recipes, always the same for the same number."""
    found: list[Recipe] = []
    quiet = settings(
        max_examples=count,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )

    @seed(number)
    @quiet
    @given(strategy)
    def collect(recipe: Recipe) -> None:
        found.append(recipe)

    while len(found) < count:
        collect()
    return found[:count]


class HostileGrid(InProcessGrid):
    """Honest nodes first, then one node per recipe. A hostile node answers "hello" like an honest
    node with another name. To other messages it sends an honest site's reply with its own name,
    changed by its recipe. Hostile replies arrive before honest ones.
    """

    def __init__(
        self, honest: Sequence[NodeConfig], recipes: Sequence[Recipe], kind: type[Any]
    ) -> None:
        super().__init__([*honest, *({"site": f"hostile-{i}"} for i in range(len(recipes)))])
        self.first, self.recipes, self.kind = FIRST_NODE + len(honest), recipes, kind
        self._held: list[Message] = []
        self._pattern: dict[str, RecordDict] = {}

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        names = list(super().push_messages(messages))
        held, self._held = self._held, []
        for message in held:
            self._forge(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        arrived = super().pull_messages(message_ids)
        return sorted(
            arrived,
            key=lambda reply: (reply.metadata.src_node_id < self.first, reply.metadata.src_node_id),
        )

    def _deliver(self, message: Message) -> None:
        if message.metadata.dst_node_id >= self.first:
            self._held.append(message)
            return
        super()._deliver(message)
        self._pattern[message.metadata.message_type] = self._waiting[
            message.metadata.message_id
        ].content

    def _forge(self, message: Message) -> None:
        kind, index = message.metadata.message_type, message.metadata.dst_node_id - self.first
        pattern = self._pattern[kind]
        record = RecordDict({key: type(value)(dict(value)) for key, value in pattern.items()})  # type: ignore[arg-type,call-arg]
        own = f"hostile-{index}"
        record[INFO] = ConfigRecord(dict(record.config_records[INFO]) | {"site": own})
        if PAYLOAD in record:
            rename(own).change(record, self.kind)
            self.recipes[index].change(record, self.kind)
            if self.recipes[index].signed:
                rename(own).change(record, self.kind)
        self._waiting[message.metadata.message_id] = self._transported(
            Message(record, reply_to=message), "up"
        )


def rename(site: str) -> Recipe:
    return of_header("site", site)
