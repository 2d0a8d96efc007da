"""Named tensors for training in rounds: the model sent to sites, or an update of a site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import LARGEST_COUNT, LARGEST_NUMBER, SurrogateError

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism
    from ..surrogates.surrogates import Header

Tensors = Mapping[str, Tensor]
# Prefix of SCAFFOLD's control variates, which are sent together with the parameters, under the same
# names.
CONTROL = "control."


@dataclass(frozen=True)
class Parameters:
    """Tensors by name: the model sent to sites, or an update of a site.

    Attributes:
        header: origin.
        round: of the run.
        tensors: by name.
        records: the weight of an update in an average; 0 if privacy hides it.
        claim: what the message states of its differential privacy; None without privacy.
    """

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
    """Split tensors into parameters and control variates.

    Args:
        tensors: of both, those of control variates with the prefix `CONTROL`.

    Returns:
        Parameters and control variates, both by the parameters' names.

    Example:
        >>> split_control({"bias": torch.zeros(1), "control.bias": torch.ones(1)})
        ({'bias': tensor([0.])}, {'bias': tensor([1.])})
    """
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONTROL)}
    return own, {
        name.removeprefix(CONTROL): tensor
        for name, tensor in tensors.items()
        if name.startswith(CONTROL)
    }


def flat(tensors: Tensors) -> Tensor:
    """All numbers as one tensor.

    Args:
        tensors: by name.

    Returns:
        The numbers (P,), float64, in the order of the parameters' names.

    Example:
        >>> tensors = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])}
        >>> numbers = flat(tensors)
        >>> numbers.tolist()
        [3.0, 1.0, 2.0]
        >>> by_name(numbers, {"weight": (1, 2), "bias": (1,)})["weight"].tolist()
        [[1.0, 2.0]]
    """
    return torch.cat([tensors[name].double().flatten() for name in sorted(tensors)])


def length_of(tensors: Tensors) -> float:
    """The Euclidean norm of all numbers together.

    Args:
        tensors: by name.

    Example:
        >>> length_of({"weight": torch.tensor([[3.0]]), "bias": torch.tensor([4.0])})
        5.0
    """
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))


def by_name(numbers: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The parts of a flat tensor by parameter: the inverse of `flat`.

    Args:
        numbers: (P,), in the order of the parameters' names.
        shapes: by parameter.

    Returns:
        Tensors by name.
    """
    names = sorted(shapes)
    parts = torch.split(numbers, [prod(shapes[name]) for name in names])
    return {name: part.reshape(shapes[name]) for name, part in zip(names, parts, strict=True)}


def check_numbers(tensors: Tensors) -> None:
    """Check that all numbers are finite, and not too large to learn from.

    Args:
        tensors: by name.

    Raises:
        SurrogateError: for another number.
    """
    for name, tensor in tensors.items():
        if not (tensor.isfinite().all() and tensor.abs().max() < LARGEST_NUMBER):
            raise SurrogateError(
                f"{name} holds a number that is not finite, or beyond {LARGEST_NUMBER:g}"
            )


def check_update(
    update: Parameters, shapes: Mapping[str, tuple[int, ...]], round: int, private: bool
) -> None:
    """Check the shapes, numbers, round and weight of an update.

    Args:
        update: of one site.
        shapes: of the run's tensors, by name.
        round: of the run.
        private: whether the run has a privacy budget, which hides the weight.

    Raises:
        SurrogateError: for other shapes, a number that is not finite, another round, or a weight
            that is not valid.
    """
    sent = {name: tuple(tensor.shape) for name, tensor in update.tensors.items()}
    if sent != dict(shapes):
        wrong = sorted(sent.items() ^ dict(shapes).items())[:2]
        raise SurrogateError(
            "tensors that are not this run's: "
            f"{', '.join(f'{name[:40]} {shape}' for name, shape in wrong)}"
        )
    check_numbers(update.tensors)
    if update.round != round:
        raise SurrogateError(f"an update of round {update.round}, this is round {round}")
    if not (update.records == 0 if private else 1 <= update.records <= LARGEST_COUNT):
        raise SurrogateError(f"an update that represents {update.records} records")


def largest(tensors: Tensors, keep: float) -> dict[str, Tensor]:
    """Keep the entries with the largest magnitude over all tensors; set the others to zero.

    Args:
        tensors: by name.
        keep: share of the entries that stay; at least one entry does.

    Returns:
        Tensors of the same names and shapes.

    Source:
        DSFL.

    Example:
        >>> update = {"weight": torch.tensor([1.0, -3.0]), "bias": torch.tensor([2.0, 0.0])}
        >>> largest(update, keep=0.5)
        {'weight': tensor([ 0., -3.]), 'bias': tensor([2., 0.])}
    """
    flat = torch.cat([tensor.abs().flatten() for tensor in tensors.values()])
    dropped = len(flat) - max(1, round(keep * len(flat)))
    if not dropped:
        return dict(tensors)
    threshold = flat.kthvalue(dropped).values
    return {
        name: torch.where(tensor.abs() > threshold, tensor, 0.0) for name, tensor in tensors.items()
    }


def average(heads: Sequence[Tensors], weights: Sequence[float]) -> dict[str, Tensor]:
    """Weighted mean of tensors by name, computed in double precision.

    Args:
        heads: tensors of the same names and shapes.
        weights: of each, which need not sum to one.

    Returns:
        The mean by name, float32.

    Example:
        >>> average([{"bias": torch.tensor([0.0])}, {"bias": torch.tensor([4.0])}], [3, 1])
        {'bias': tensor([1.])}
    """
    total = sum(weights)
    return {
        name: sum(
            (w / total * tensors[name].double() for w, tensors in zip(weights, heads, strict=True)),
            torch.zeros_like(heads[0][name], dtype=torch.float64),
        ).float()
        for name in heads[0]
    }
