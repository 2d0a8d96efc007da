"""Loss landscapes of synthetic records: gradients, the mismatch of two gradients, and gradient
descent inside a radius.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .parameters import Tensors
from .training_parts import Change

# Number of records whose gradients are computed at a time.
TOGETHER = 1024
# A row of a gradient below this share of the whole gradient's norm is rounding error of 32-bit
# arithmetic.
GRADIENT_ROUNDING = 1e-6


def _unchanged(values: Tensor) -> Tensor:
    return values


@dataclass(frozen=True)
class LandscapeRecords:
    """Input records of a network's body.

    Attributes:
        values: (n, ...).
        labels: (n,).
        weights: (n,), which sum to one.
    """

    values: Tensor
    labels: Tensor
    weights: Tensor

    @classmethod
    def evenly(cls, values: Tensor, labels: Tensor) -> LandscapeRecords:
        """Records with equal weights.

        Args:
            values: (n, ...).
            labels: (n,).
        """
        return cls(
            values,
            labels,
            torch.full((len(labels),), 1 / max(1, len(labels)), device=values.device),
        )

    @classmethod
    def pool(cls, sets: Sequence[LandscapeRecords], shares: Sequence[float]) -> LandscapeRecords:
        """Several sets as one.

        Args:
            sets: of records.
            shares: of the weight that each set has, which need not sum to one.
        """
        weights = torch.cat(
            [each.weights * (share / sum(shares)) for each, share in zip(sets, shares, strict=True)]
        )
        return cls(
            torch.cat([each.values for each in sets]),
            torch.cat([each.labels for each in sets]),
            weights,
        )

    def take(self, rows: Tensor) -> LandscapeRecords:
        """A subset of the records, with equal weights.

        Args:
            rows: indices (m,), or a mask (n,).
        """
        return LandscapeRecords.evenly(self.values[rows], self.labels[rows])


def loss(body: nn.Module, parameters: Tensors, records: LandscapeRecords) -> Tensor:
    """Weighted mean cross-entropy of records, in nats.

    Args:
        body: the network without its fixed first step.
        parameters: of the body, by name.
        records: inputs of the body.

    Returns:
        A number, from which gradients can be taken.
    """
    logits: Tensor = functional_call(body, dict(parameters), (records.values,))
    each = torch.nn.functional.cross_entropy(logits, records.labels, reduction="none")
    return (each * records.weights.to(each)).sum()


def total_loss(body: nn.Module, parameters: Tensors, records: LandscapeRecords) -> float:
    """The same as `loss` as a float, for any number of records.

    Args:
        body: as in `loss`.
        parameters: as in `loss`.
        records: as in `loss`.
    """
    with torch.no_grad():
        return sum(float(loss(body, parameters, part)) for part in _parts(records))


def gradient(
    body: nn.Module, parameters: Tensors, records: LandscapeRecords, change: Change = _unchanged
) -> dict[str, Tensor]:
    """Gradient of `loss` by parameter, a thousand records at a time.

    Args:
        body: as in `loss`.
        parameters: as in `loss`.
        records: as in `loss`.
        change: applied to the values of the records first.

    Returns:
        The gradient by name, in the shape of each parameter.
    """
    asked = {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}
    total = [torch.zeros_like(tensor) for tensor in asked.values()]
    for part in _parts(records):
        changed = replace(part, values=change(part.values))
        slopes = torch.autograd.grad(loss(body, asked, changed), list(asked.values()))
        for sum_, addend in zip(total, slopes, strict=True):
            sum_ += addend
    return dict(zip(asked, total, strict=True))


def _parts(records: LandscapeRecords) -> Iterator[LandscapeRecords]:
    columns = (records.values, records.labels, records.weights)
    for part in zip(*(torch.split(column, TOGETHER) for column in columns), strict=True):
        yield LandscapeRecords(*part)


def mismatch(
    synthetic: Sequence[Tensor], real: Sequence[Tensor], mse_weight: float, noise: float = 0.0
) -> Tensor:
    """Mismatch of two gradients: the sum over parameter tensors of the mean of 1 - cosine of their
    rows, plus mse_weight times the squared error of all entries.

    A row belongs to one output: (out, in) of a linear layer, (out, in * h * w) of a convolution; a
    vector, such as a bias, is one row. Differs from the paper: rows are averaged, as in its code.
    Equation 10 sums them, so a layer's weight would grow with its number of outputs. If every entry
    of the real gradient has noise, a row's weight is the share of its energy that is signal, 1 -
    entries noise^2 / |row|^2. Otherwise the images would learn the noise. This costs no privacy,
    because the noise level is public.

    A row whose gradient is rounding error does not count: the bias of a convolution before
    GroupNorm has the gradient zero, but its cosine, and above all the derivative of that, would be
    those of the rounding errors.

    Args:
        synthetic: the gradient of synthetic records, a tensor for each parameter.
        real: the gradient of real records, in the same order.
        mse_weight: of the squared error.
        noise: standard deviation of the noise in every entry of the real gradient.

    Returns:
        A number, from which gradients can be taken.

    Source:
        FedLAP-DP, equations 9 and 10.

    Example:
        >>> real = [torch.tensor([[1.0, 0.0], [0.0, 2.0]])]
        >>> round(float(mismatch(real, real, mse_weight=0.0)), 3)
        0.0
        >>> round(float(mismatch([-real[0]], real, mse_weight=0.0)), 3)
        2.0
    """
    # All rows of all tensors in one vector: a call for each of many small tensors takes longer than
    # the sums.
    a, b = (torch.cat([tensor.flatten() for tensor in each]) for each in (synthetic, real))
    entries, share = _rows_of(tuple(tensor.shape for tensor in real), a.dtype, a.device)

    def sums(values: Tensor) -> Tensor:
        # The lengths are right; to look at them, a GPU would have to be waited for.
        return torch.segment_reduce(values, "sum", lengths=entries, unsafe=True)

    own, their = sums(a * a), sums(b * b)
    # A small constant under the root, because the derivative of a norm at zero is undefined.
    unlike = 1 - sums(a * b) / ((own + 1e-16) * (their + 1e-16)).sqrt()
    for squares in (own.detach(), their):
        unlike = unlike * (squares > GRADIENT_ROUNDING**2 * squares.sum())
    if noise:
        unlike = unlike * (1 - entries * noise**2 / their.clamp_min(1e-30)).clamp_min(0)
    total = (share * unlike).sum()
    return total + mse_weight * (a - b).square().sum() if mse_weight else total


@lru_cache(16)
def _rows_of(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The entries of each row of tensors, and one over the number of rows of its tensor; they are
    copied to a GPU once, and not for every step.
    """
    heights = [shape[0] if len(shape) > 1 else 1 for shape in shapes]
    rows = [
        (shape.numel() // height, height) for shape, height in zip(shapes, heights, strict=True)
    ]
    entries = [each for each, height in rows for _ in range(height)]
    shares = [1 / height for height in heights for _ in range(height)]
    return (torch.tensor(entries, device=device), torch.tensor(shares, dtype=dtype, device=device))


def distance(parameters: Tensors, start: Tensors) -> float:
    """Euclidean distance of two models, over all parameters together.

    Args:
        parameters: by name.
        start: by the same names.

    Example:
        >>> distance({"weight": torch.tensor([3.0, 4.0])}, {"weight": torch.zeros(2)})
        5.0
    """
    return math.sqrt(
        sum(
            float((tensor - start[name]).double().square().sum())
            for name, tensor in parameters.items()
        )
    )


@dataclass(frozen=True)
class Descent:
    """Steps of gradient descent inside a ball.

    Attributes:
        rate: learning rate of the first step.
        steps: their number.
        radius: of the ball, in the Euclidean norm of all parameters together.
        plain: whether all steps have this rate, and the first that leaves the ball is the last.
            Otherwise a cosine anneals the rate, and a step that leaves the ball is projected back to its
            surface.
    """

    rate: float
    steps: int
    radius: float
    plain: bool = False


def walk(
    body: nn.Module,
    start: Tensors,
    records: LandscapeRecords,
    descent: Descent,
    changes: Iterator[Change],
) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """Gradient descent on the loss of records inside a ball.

    Plain descent is the paper's: it ends at the full learning rate, in the middle of an oscillation.
    Annealed, accuracy is higher and varies less between rounds (benchmarks).

    Args:
        body: as in `loss`.
        start: parameters by name, the centre of the ball.
        records: as in `loss`.
        descent: its steps.
        changes: of the records' values, one for each step.

    Returns:
        After every step the parameters, and whether it left the ball. It ends early if the gradient is
        not finite.

    Source:
        FedLAP-DP, equation 14 and algorithm 2.
    """
    rate, steps, radius = descent.rate, descent.steps, descent.radius
    current = {name: tensor.clone() for name, tensor in start.items()}
    for step in range(steps):
        length = rate if descent.plain else rate * (1 + math.cos(math.pi * step / steps)) / 2
        slope = gradient(body, current, records, next(changes))
        moved = {name: current[name] - length * slope[name] for name in current}
        far = distance(moved, start)
        if not math.isfinite(far):
            return
        outside = far > radius
        if outside and not descent.plain:
            moved = {
                name: start[name] + (tensor - start[name]) * (radius / far)
                for name, tensor in moved.items()
            }
        current = moved
        yield current, outside
        if outside and descent.plain:
            return
