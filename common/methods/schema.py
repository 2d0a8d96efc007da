"""The check of a parsed message against the schema of its method: names, shapes, finite numbers,
ranges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.method import Field, Messages, Sizes

if TYPE_CHECKING:
    from torch import Tensor

Groups = list[tuple[Field, list["Tensor"]]]


def check_fields(fields: Iterable[Field], tensors: Mapping[str, Tensor], sizes: Sizes) -> Sizes:
    """Check that tensors match fields: names, shapes, finite numbers, ranges.

    Args:
        fields: of the schema.
        tensors: by name.
        sizes: sizes of the known symbols. Other symbols get the size in the first tensor that has
            them.

    Returns:
        The sizes of all symbols.

    Raises:
        SurrogateError: if they do not.
    """
    groups = _grouped(tuple(fields), tensors)
    known = _sizes_in(groups, sizes)
    for field, each in groups:
        for tensor in each:
            if not tensor.numel():
                continue
            # A NaN makes both ends NaN.
            low, high = (float(end) for end in tensor.aminmax())
            if not (isfinite(low) and isfinite(high)):
                raise SurrogateError(f"{field.name}: a number that is not finite")
            if low < field.low or high > field.high:
                worst = low if low < field.low else high
                raise SurrogateError(
                    f"{field.name}: {worst:g} is outside {field.low:g} to {field.high:g}"
                )
    return known


def _grouped(fields: tuple[Field, ...], tensors: Mapping[str, Tensor]) -> Groups:
    """The tensors of each field. Raises SurrogateError for a tensor without a field, or a field
    without a tensor.
    """
    own: dict[str, list[Tensor]] = {field.name: [] for field in fields}
    named = {field.name for field in fields if field.prefix is None}
    prefixes = {field.prefix: field.name for field in fields if field.prefix is not None}
    for name, tensor in tensors.items():
        start = max(
            (prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None
        )
        if name not in named and start is None:
            break
        own[name if name in named or start is None else prefixes[start]].append(tensor)
    else:
        if all(own[field.name] or field.optional for field in fields):
            return [(field, own[field.name]) for field in fields if own[field.name]]
    raise SurrogateError(f"tensors {', '.join(sorted(tensors))[:200]}; expected {', '.join(own)}")


def _sizes_in(groups: Groups, sizes: Sizes) -> dict[str, int]:
    """The size of every symbol. Raises SurrogateError for a tensor of another shape."""
    known = dict(sizes)
    for field, tensors in groups:
        symbols, shape = field.shape.split(), tuple(tensors[0].shape)
        if field.prefix is not None:
            shape = (sum(tensor.numel() for tensor in tensors),)
        if len(shape) != len(symbols) or any(
            known.setdefault(s, n) != n for s, n in zip(symbols, shape, strict=True)
        ):
            raise SurrogateError(
                f"{field.name} of shape {shape[:4]}; expected ({', '.join(symbols)}) with {known}"
            )
    return known


def check_schema(
    messages: Messages,
    tables: Mapping[str, Tensor],
    classes: int,
    dimension: int = 0,
    first: bool = False,
) -> None:
    """Raise SurrogateError unless the tensors of a parsed message match the schema of its method.

    Args:
        messages: of the run's plan.
        tables: the tensors by name.
        classes: number of classes of the message.
        dimension: of the features; 0 if the message decides it.
        first: whether it is the message of the first round.

    Raises:
        SurrogateError: for other tensors.
    """
    fields = messages.schema(first)
    known = {"C": classes} | ({"d": dimension} if dimension else {})
    grouped = _sizes_in(_grouped(fields, tables), known)
    sizes = dict(messages.sizes(classes, grouped.get("d", 1), 1))
    # Only the site knows its number of records.
    del sizes["n"]
    check_fields(fields, tables, sizes)
