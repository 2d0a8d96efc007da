"""Chunks of one shape for records in a model: to the last bit, a record's gradient depends on no
other record.

The rounding of a matrix product depends on its shape and, with many kernels, on the place of a row:
at the edge of a tile, or at an odd address. A coordinator may send a model with large weights that
cancel. Such a model turns a difference in the last digit into another gradient. One record more
would then change the gradients of others, and the sensitivity would exceed the clip. Therefore
every call has the same shape, on memory aligned as fresh memory is: zeros fill up the last chunk.

A test finds out whether the place of a row matters. It runs once for each kind of model on a
machine, with random records and weights, in several orders. Where a single bit differs, zeros widen
every linear layer to a multiple of WIDTH, or each record gets products of its own. Where that does
not help, records go through the model one at a time: every record then has the same calls on the same
shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from torch.overrides import TorchFunctionMode

# Number of records in a chunk. A power of two: rows of a chunk then begin at even addresses.
TOGETHER = 64
ORDERS = 4
# Kernels use other code for the last few rows or columns of narrow layers; 16 numbers fill a vector
# register.
WIDTH = 16
# Bytes to which torch aligns memory of its own.
ALIGNED = 64
# Maps inputs of records, each (n, ...), to results for every record, each (n, ...).
PerRecord = Callable[..., list[Tensor]]


class WideLinear(TorchFunctionMode):
    """Computes linear layers with inputs and outputs zero-padded to a multiple of WIDTH."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return _wide_linear(*args, **(kwargs or {}))


def _wide_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    out, into = weight.shape
    more, further = -into % WIDTH, -out % WIDTH
    product = pad(input, (0, more)) @ pad(weight, (0, more, 0, further)).T
    return product[..., :out] if bias is None else product[..., :out] + bias


class LinearAlone(TorchFunctionMode):
    """Computes a linear layer for each record by a product of its own, all of them in one call: on a
    GPU, where the place of a row in one product often matters and a call costs more than its work.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not linear:
            return func(*args, **(kwargs or {}))
        return _linear_alone(*args, **(kwargs or {}))


def _linear_alone(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, 1, input.shape[-1])
    product = torch.bmm(rows, weight.T.expand(len(rows), -1, -1))
    product = product.reshape(*input.shape[:-1], len(weight))
    return product if bias is None else product + bias


@dataclass(frozen=True)
class Way:
    """How records go through a model.

    Attributes:
        rows: number of records in a call.
        wide: whether layers are widened.
        alone: whether layers have a product for each record.
    """

    rows: int
    wide: bool = False
    alone: bool = False

    def open(self) -> AbstractContextManager[object]:
        """A context in which linear layers are computed in this way."""
        if self.alone:
            return LinearAlone()
        return WideLinear() if self.wide else nullcontext()


# The way chosen for each kind of model on this machine.
_known: dict[Hashable, Way] = {}


def per_record(
    each: PerRecord,
    inputs: Sequence[Tensor],
    kind: object,
    parameters: Sequence[Tensor],
    chunks: int = 1,
    larger: int = 1,
) -> Iterator[list[Tensor]]:
    """Compute results for all records, so that none depends on another record.

    Args:
        each: maps inputs (n, ...) to results (n, ...).
        inputs: tensors (n, ...) of the records.
        kind: identifies the computation in `each`, for example by its module.
        parameters: those that `each` uses; the test of a new kind fills them with random numbers
            and then restores them.
        chunks: number of chunks whose results are yielded at a time.
        larger: a chunk has so many times TOGETHER records; for cheap models, where a call costs
            more than its arithmetic.

    Yields:
        The results of `each`, those of `chunks` chunks at a time.
    """
    rows = larger * TOGETHER
    count, group = len(inputs[0]), chunks * rows
    way = way_of(each, inputs, kind, parameters, rows) if count else Way(1)
    for start in range(0, count, group):
        ends = range(start, min(start + group, count), way.rows)
        parts = [
            _chunk(each, [tensor[at : at + way.rows] for tensor in inputs], way) for at in ends
        ]
        yield (
            parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]
        )


def _chunk(each: PerRecord, inputs: Sequence[Tensor], way: Way) -> list[Tensor]:
    count = len(inputs[0])
    filled = [_filled(part, way.rows) for part in inputs]
    with way.open():
        results = each(*filled)
    return results if count == way.rows else [result[:count] for result in results]


def _filled(part: Tensor, rows: int) -> Tensor:
    """The records, with zeros behind them, at an address where fresh memory could be."""
    if len(part) == rows and part.is_contiguous() and part.data_ptr() % ALIGNED == 0:
        return part
    return torch.cat([part, part.new_zeros(rows - len(part), *part.shape[1:])])


def way_of(
    each: PerRecord,
    inputs: Sequence[Tensor],
    kind: object,
    parameters: Sequence[Tensor],
    rows: int = TOGETHER,
) -> Way:
    """The fastest way in which the place of a record does not matter.

    Args:
        each: as for `per_record`.
        inputs: as for `per_record`.
        kind: as for `per_record`.
        parameters: as for `per_record`.
        rows: of a chunk.
    """
    shapes = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs)
    place = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in parameters)
    key = (each.__qualname__, str(kind), shapes, place, torch.get_num_threads(), rows)
    if key not in _known:
        ways = Way(rows), Way(rows, wide=True), Way(rows, alone=True)
        alike = (way for way in ways if _places_are_alike(each, inputs, parameters, way))
        _known[key] = next(alike, Way(1))
    return _known[key]


def _places_are_alike(
    each: PerRecord, inputs: Sequence[Tensor], parameters: Sequence[Tensor], way: Way
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size, like: Tensor) -> Tensor:
        # Any class works as a label; zeros are one.
        random = (
            torch.randn(shape, generator=generator)
            if like.is_floating_point()
            else torch.zeros(shape)
        )
        return random.to(like)

    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                # Keeps outputs near one: in a saturated loss a gradient would not show their last
                # digits.
                size = max(1, parameter[0].numel() if parameter.ndim else 1) ** 0.5
                parameter.copy_(drawn(parameter.shape, parameter) / size)
        probe = [drawn(torch.Size((way.rows, *tensor.shape[1:])), tensor) for tensor in inputs]
        with way.open():
            results = [part.detach().clone() for part in each(*probe)]
        for _ in range(ORDERS):
            order = torch.randperm(way.rows, generator=generator)
            with way.open():
                moved = each(*(tensor[order.to(tensor.device)] for tensor in probe))
            if not all(
                torch.equal(part[order.to(part.device)], other)
                for part, other in zip(results, moved, strict=True)
            ):
                return False
        return True
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)
