"""Named tensors for training in rounds: the model sent to sites, or an update of a site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from common.errors import SurrogateError
from common.limits import LARGEST_COUNT, LARGEST_NUMBER

if TYPE_CHECKING:
    from common.privacy.mechanism import Mechanism
    from common.surrogates.surrogates import Header

Tensors = Mapping[str, Tensor]
# Prefix of SCAFFOLD's control variates, which are sent together with the parameters, under the same names.
CONTROL = "control."


@dataclass(frozen=True)
class Parameters:
    """Tensors by name. records: the weight of an update in an average; 0 if privacy hides it."""

    header: Header
    round: int
    tensors: Tensors
    records: int = 0
    claim: Mechanism | None = None

    @property
    def tables(self) -> Tensors:
        """Its tensors by the names in the method's schema."""
        return self.tensors


def split_control(tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split tensors into parameters and control variates, both by the parameters' names."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONTROL)}
    return own, {name.removeprefix(CONTROL): tensor for name, tensor in tensors.items() if name.startswith(CONTROL)}


def flat(tensors: Tensors) -> Tensor:
    """All numbers as one tensor (P,), float64, in the order of the parameters' names."""
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def by_name(numbers: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The parts of a flat tensor (P,) by parameter, which are in the order of their names."""
    names = sorted(shapes)
    parts = torch.split(numbers, [prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def check_numbers(tensors: Tensors) -> None:
    """Raise SurrogateError for a number that is not finite, or too large to learn from."""
    for name, tensor in tensors.items():
        if not (tensor.isfinite().all() and tensor.abs().max() < LARGEST_NUMBER):
            raise SurrogateError(f"{name} holds a number that is not finite, or beyond {LARGEST_NUMBER:g}")


def check_update(update: Parameters, shapes: Mapping[str, tuple[int, ...]], round: int, private: bool) -> None:
    """Raise SurrogateError unless an update has these shapes, finite numbers, the right round and a valid weight."""
    found = {name: tuple(tensor.shape) for name, tensor in update.tensors.items()}
    if found != dict(shapes):
        wrong = sorted(found.items() ^ dict(shapes).items())[:2]
        raise SurrogateError(
            f"tensors that are not this run's: {', '.join(f'{name[:40]} {shape}' for name, shape in wrong)}"
        )
    check_numbers(update.tensors)
    if update.round != round:
        raise SurrogateError(f"an update of round {update.round}, this is round {round}")
    if not (update.records == 0 if private else 1 <= update.records <= LARGEST_COUNT):
        raise SurrogateError(f"an update that represents {update.records} records")


def largest(tensors: Tensors, keep: float) -> dict[str, Tensor]:
    """Keep the share `keep` of the entries with the largest magnitude over all tensors; set the others to zero (DSFL)."""
    flat = torch.cat([tensor.abs().flatten() for tensor in tensors.values()])
    dropped = len(flat) - max(1, round(keep * len(flat)))
    if not dropped:
        return dict(tensors)
    threshold = flat.kthvalue(dropped).values
    return {name: torch.where(tensor.abs() > threshold, tensor, 0.0) for name, tensor in tensors.items()}


def average(heads: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of tensors by name, in double precision."""
    total = sum(weights)
    return {
        name: sum(
            (w / total * tensors[name].double() for w, tensors in zip(weights, heads, strict=True)),
            torch.zeros_like(heads[0][name], dtype=torch.float64),
        ).float()
        for name in heads[0]
    }
