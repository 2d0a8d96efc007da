"""Real replies of a run, spoiled one table at a time, and the check that the method's strategy
makes of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from fedsurrogate import Model
from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import SumsSurrogate, Surrogate, Synthetic
from fedsurrogate.common.wire.model_proto import pack_classifier, unpack_classifier, unpack_relay
from fedsurrogate.common.wire.tensors import pack, unpack
from fedsurrogate.strategies import strategy_of
from fedsurrogate.strategies.base.chain import Chain
from fedsurrogate.strategies.base.one_shot import OneShot
from fedsurrogate.strategies.base.rounds import Rounds
from tests.grid import FIRST_NODE, InProcessGrid
from tests.hostile import mutate, payload_of, tables

MESSAGES: dict[type[Any], type[Any]] = {
    Parameters: pb.Parameters,
    Surrogate: pb.Surrogate,
    SumsSurrogate: pb.Surrogate,
    Synthetic: pb.Synthetic,
}
Check = Callable[[bytes], object]


def replies(config: Run, grid: InProcessGrid) -> Iterator[tuple[bytes, type[Any], Check]]:
    """The replies of a site in a run over this grid: payload, type of message, and a check.

    The check is that of the method's strategy, and then, without the method's own part, that of its
    base class: a method whose author forgets a check refuses the same replies.
    """
    for own in (True, False):
        strategy = strategy_of(config.plan)(config)
        if not own and isinstance(strategy, OneShot | Rounds):
            strategy.check = lambda *_: None  # type: ignore[method-assign]
        yield from _replies(strategy, config, grid)


def _replies(
    strategy: object, config: Run, grid: InProcessGrid
) -> Iterator[tuple[bytes, type[Any], Check]]:
    if isinstance(strategy, OneShot):
        payload = payload_of(grid.replies(0)[0].content)
        yield payload, MESSAGES[type(strategy.parse(payload))], strategy.unpack
    elif isinstance(strategy, Rounds):
        training = strategy._begin(grid, 60.0)
        for number, reply in enumerate(grid.replies(0)[:2]):
            training.round, payload = number, payload_of(reply.content)
            kind = MESSAGES[type(strategy.parse(payload, training))]
            yield payload, kind, lambda changed: strategy.read(changed, training)
    elif isinstance(strategy, Chain):
        first = grid.asked("train")[0]
        strategy._group = strategy.identify(grid, 60.0)
        nodes = strategy._group.nodes
        (name,) = (name for name, node in nodes.items() if node == FIRST_NODE + first)
        payload = payload_of(grid.replies(first)[0].content)
        relayed = config.settings.method == "fedpft"
        own = unpack_relay(payload)[0] if relayed else payload

        def check(changed: bytes) -> None:
            whole = pb.Relay(surrogates=[changed]).SerializeToString() if relayed else changed
            strategy._check(whole, None, name)

        yield own, pb.Surrogate if relayed else pb.Parameters, check


def left_out(payload: bytes) -> int:
    """Bytes of the zeros that tensors leave out, such as pixels that are always dark, without the bits
    that mark the others; 0 for other messages.
    """
    try:
        tensors = pb.Parameters.FromString(payload).tensors
    except DecodeError:
        return 0
    return sum(
        2 * math.prod(each.shape) - len(each.values.data) - len(each.kept)
        for each in tensors
        if each.kept
    )


def spoiled(payload: bytes, kind: type[Any]) -> Iterator[tuple[str, bytes]]:
    """The reply with one change to one table of numbers, with a count below zero, and without a
    tensor.
    """
    for index in range(len(tables(kind.FromString(payload)))):
        for name, change in CHANGES.items():
            message = kind.FromString(payload)
            change(tables(message)[index])
            yield f"{name} in table {index}", message.SerializeToString(deterministic=True)
    if (below := _with_count(payload, kind, -1.0)) is not None:
        yield "a count of -1", below
    if kind is pb.Parameters:
        message = kind.FromString(payload)
        del message.tensors[0]
        yield "a tensor less", message.SerializeToString(deterministic=True)


def _first(value: float) -> Callable[[Any], None]:
    def change(table: Any) -> None:
        table.data = np.array([value], "<f2").tobytes() + table.data[2:]

    return change


def _reshaped(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def reshape(table: Any) -> None:
        shape = tuple(table.shape)
        values = torch.from_numpy(np.frombuffer(table.data, "<f2").astype(np.float32)).reshape(
            shape
        )
        new = change(values)
        table.shape[:], table.data = list(new.shape), new.numpy().astype("<f2").tobytes()

    return reshape


CHANGES: dict[str, Callable[[Any], None]] = {
    "a NaN": _first(float("nan")),
    "an infinity": _first(float("inf")),
    "a row less": _reshaped(lambda values: values[:-1]),
    "an axis more": _reshaped(lambda values: values[None]),
}


def _with_count(payload: bytes, kind: type[Any], value: float) -> bytes | None:
    """The reply with this count of records of one class; None if it has no counts that can be below
    zero.
    """
    message, found = kind.FromString(payload), []
    if kind is pb.Parameters:
        found = [tensor.values for tensor in message.tensors if tensor.name == "counts"]
    elif kind is pb.Surrogate and message.HasField("sums"):
        found = [message.sums.counts]
    for halves in found:
        counts = unpack(halves, "counts", tuple(halves.shape))
        counts.flatten()[0] = value
        halves.CopyFrom(pack(counts))
    return message.SerializeToString(deterministic=True) if found else None


def mutations(payload: bytes, kind: type[Any], count: int) -> Iterator[bytes]:
    """The reply with up to three changes of any field; by chance some are valid."""
    for number in range(count):
        message = kind.FromString(payload)
        mutate(message, random.Random(number))
        yield message.SerializeToString(deterministic=True)


def refused(check: Check, payload: bytes) -> bool:
    """Whether the check raises SurrogateError."""
    try:
        check(payload)
    except SurrogateError:
        return True
    return False


def as_received(model: Model) -> Model:
    """The model as sites receive it, in 16 bits."""
    return Model(unpack_classifier(pack_classifier(model.classifier)))
