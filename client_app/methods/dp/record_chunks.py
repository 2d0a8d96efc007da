"""Records through a model in chunks of one shape, so that a record's gradient depends on no other record, to the last bit.

How a product of matrices rounds depends on its shape, and with many kernels also on where a row lies: at the edge of a
tile, or at an odd address. A model with large weights that cancel, which a coordinator may send, turns such a last digit
into another gradient; one record more would then change what the others contribute, and the sensitivity would be more than
the clip. So every call has the same shape, on fresh memory: the last chunk is filled up with zeros. Whether a row's place
matters is measured once for each kind of model on this machine: random records, under random weights, in several orders.
Where a single bit differs, records go through one at a time: then every record has the same calls on the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

import torch
from torch import Tensor

# Records that go through a model together. A power of two: rows of a chunk then begin at even addresses.
TOGETHER = 64
ORDERS = 4
# From inputs of records, each (n, ...), to what is found of every record, each (n, ...).
PerRecord = Callable[..., list[Tensor]]
_together: dict[Hashable, int] = {}


def per_record(
    each: PerRecord, inputs: Sequence[Tensor], kind: object, parameters: Sequence[Tensor], chunks: int = 1
) -> Iterator[list[Tensor]]:
    """Yield what `each` finds of all records, those of so many chunks at a time.

    inputs: tensors (n, ...) of the records. kind: names what `each` computes, a module say. parameters: those that `each`
    uses; random numbers stand in them for a moment, where the kind is new.
    """
    count, group = len(inputs[0]), chunks * TOGETHER
    rows = _rows(each, inputs, kind, parameters) if count else 1
    for start in range(0, count, group):
        ends = range(start, min(start + group, count), rows)
        parts = [_chunk(each, [tensor[at : at + rows] for tensor in inputs], rows) for at in ends]
        yield parts[0] if len(parts) == 1 else [torch.cat(same) for same in zip(*parts, strict=True)]


def _chunk(each: PerRecord, inputs: Sequence[Tensor], rows: int) -> list[Tensor]:
    count = len(inputs[0])
    filled = [torch.cat([part, part.new_zeros(rows - count, *part.shape[1:])]) for part in inputs]
    return [found[:count] for found in each(*filled)]


def _rows(each: PerRecord, inputs: Sequence[Tensor], kind: object, parameters: Sequence[Tensor]) -> int:
    """How many records may go through together: TOGETHER, or one where the place of a record matters."""
    shapes = tuple((tensor.shape[1:], tensor.dtype, tensor.device) for tensor in inputs)
    place = tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in parameters)
    key = (each.__qualname__, str(kind), shapes, place, torch.get_num_threads(), TOGETHER)
    if key not in _together:
        _together[key] = TOGETHER if _places_are_alike(each, inputs, parameters) else 1
    return _together[key]


def _places_are_alike(each: PerRecord, inputs: Sequence[Tensor], parameters: Sequence[Tensor]) -> bool:
    generator = torch.Generator().manual_seed(0)

    def drawn(shape: torch.Size, like: Tensor) -> Tensor:
        # Labels are zeros: any class will do.
        random = torch.randn(shape, generator=generator) if like.is_floating_point() else torch.zeros(shape)
        return random.to(like)

    kept = [parameter.detach().clone() for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                # Outputs of about one: where a loss is saturated, no digit of them shows in a gradient.
                size = max(1, parameter[0].numel() if parameter.ndim else 1) ** 0.5
                parameter.copy_(drawn(parameter.shape, parameter) / size)
        probe = [drawn(torch.Size((TOGETHER, *tensor.shape[1:])), tensor) for tensor in inputs]
        found = [part.detach().clone() for part in each(*probe)]
        for _ in range(ORDERS):
            order = torch.randperm(TOGETHER, generator=generator)
            moved = each(*(tensor[order.to(tensor.device)] for tensor in probe))
            if not all(torch.equal(part[order.to(part.device)], other) for part, other in zip(found, moved, strict=True)):
                return False
        return True
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)
