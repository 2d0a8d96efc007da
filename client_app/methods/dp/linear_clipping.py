"""Per-record clipping for networks of linear layers, without storing per-record gradients ("ghost
clipping").
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from fedsurrogate.client_app.methods.dp.record_chunks import aligned, per_record
from fedsurrogate.client_app.methods.dp.record_gradients import sums_like, weights_of
from fedsurrogate.common.privacy.exact_sums import CACHED, IntegerSum, clip_factors

# A chunk of records is so many times as large as for other networks.
LARGER = 4
# The bits of a double that are its exponent, and the shortest input whose digits count.
EXPONENT, SHORTEST = 0x7FF0000000000000, 2.0**-100


def clipped_sums(
    modules: nn.ModuleList,
    losses: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    clip: float,
    weights: Tensor | None = None,
) -> tuple[dict[str, IntegerSum], int]:
    """The sum of records' gradients, each clipped over all parameters, and weighted.

    A record's gradient of a layer is the outer product of the layer's input a and the gradient g of
    its output. So its squared norm is |a|^2 |g|^2, and the clipped sum is one matrix product
    ("ghost clipping").

    Args:
        modules: all trained parameters of these belong to linear layers, each used once.
        losses: computes the loss (n,) of every record from `inputs`, with `modules`.
        inputs: tensors (n, ...) of the records.
        clip: largest norm of one record's gradient.
        weights: of the records, (n,), see `units.Units`; None for one.

    Returns:
        The sum, by parameter; and the number of clipped gradients.

    Raises:
        ValueError: for other parameters.

    Source: Goodfellow 2015; Li et al. 2022.
    """
    parameters = {
        name: parameter for name, parameter in modules.named_parameters() if parameter.requires_grad
    }
    sums = dict(zip(parameters, sums_like(parameters.values(), clip), strict=True))
    layers: list[tuple[str, nn.Linear]] = []

    def outer_products(*some: Tensor) -> list[Tensor]:
        each, seen = _watched(modules, lambda: losses(*some))
        layers[:] = [(name, module) for name, module, _, _ in seen]
        covered = [
            f"{name}.{part}" for name, module in layers for part, _ in module.named_parameters()
        ]
        if sorted(covered) != sorted(parameters):
            raise ValueError(
                "parameters outside linear layers, or used twice: "
                f"{sorted(set(parameters) ^ set(covered))[:3]}"
            )
        backward = torch.autograd.grad(each.sum(), [output for *_, output in seen])
        # In double precision: the bound must hold to the last digit.
        lengths = [_lengths(came) for _, _, came, _ in seen]
        squares = torch.zeros(len(each), dtype=torch.float64, device=each.device)
        for (_, module, *_), length, after in zip(seen, lengths, backward, strict=True):
            squares += _lengths(after).square() * (length.square() + (module.bias is not None))
        return [squares.sqrt(), *lengths, *(came for _, _, came, _ in seen), *backward]

    cut = start = 0
    for norms, *parts in per_record(
        outer_products, inputs, modules, list(parameters.values()), larger=LARGER
    ):
        factors, count = clip_factors(norms, clip), len(layers)
        if (own := weights_of(weights, start, norms)) is not None:
            factors = factors * own
        lengths = torch.where(factors > 0, norms * factors, 0.0)
        factors = factors[:, None]
        cut, start = cut + int((norms > clip).sum()), start + len(norms)
        # Where the norm is finite, all entries are; other records add nothing.
        odd = ~norms.isfinite()
        any_odd = bool(odd.any())
        for (name, module), length, came, after in zip(
            layers, parts[:count], parts[count : 2 * count], parts[2 * count :], strict=True
        ):
            if any_odd:
                came, after = (part.masked_fill(odd[:, None], 0) for part in (came, after))
                length = length.masked_fill(odd, 0)
            scaled = after * factors
            sums[f"{name}.weight"].add_products(
                scaled, _in_single(came), _power_above(length), own, lengths
            )
            if module.bias is not None:
                sums[f"{name}.bias"].add(scaled, own, lengths)
    return {name: sum_.total for name, sum_ in sums.items()}, cut


def _lengths(rows: Tensor) -> Tensor:
    """Norms (n,), float64, of the rows of a chunk (n, d)."""
    rows = aligned(rows)
    # Long rows some at a time, so that they stay in the processor's cache.
    size = CACHED if rows.shape[1] > CACHED else len(rows)
    parts = torch.split(rows, size)
    return torch.cat([torch.linalg.vector_norm(some, dim=1, dtype=torch.float64) for some in parts])


def _in_single(values: Tensor) -> Tensor:
    """Values in at least single precision, in which a power of two multiplies without rounding."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _power_above(lengths: Tensor) -> Tensor:
    """A power of two above each length (n,), as a column (n, 1), float64."""
    bits = lengths.clamp_min(SHORTEST).view(torch.int64) & EXPONENT
    return bits.view(torch.float64)[:, None] * 2


def _watched(
    modules: nn.Module, work: Callable[[], Tensor]
) -> tuple[Tensor, list[tuple[str, nn.Linear, Tensor, Tensor]]]:
    """The result of `work`, and the inputs and outputs of every linear layer during it."""
    seen: list[tuple[str, nn.Linear, Tensor, Tensor]] = []

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            seen.append((name, module, inputs[0].detach(), output))

        return hook

    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(remember(name)).remove)
        return work(), seen
