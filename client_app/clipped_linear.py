"""Per-record clipping for networks of linear layers, without ever holding a record's gradient."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from client_app.private_gradients import clip_factors, sums_like


def clipped_sums(modules: nn.ModuleList, losses: Callable[[], Tensor], clip: float) -> tuple[dict[str, Tensor], int]:
    """The sum (float64) of records' gradients, each of norm at most `clip` over all parameters; and how many were longer.

    losses: computes every record's loss (n,) with `modules`, whose trained parameters are those of linear layers, each used
    once. A record's gradient of a layer is the outer product of what comes in, a, and the gradient of what goes out, g: its
    squared norm is |a|^2 |g|^2, and the clipped sum one product of matrices ("ghost clipping", Goodfellow 2015, Li et
    al. 2022). Raises ValueError for parameters that are not covered.
    """
    seen: list[tuple[str, nn.Linear, Tensor, Tensor]] = []

    def remember(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            assert isinstance(module, nn.Linear)
            seen.append((name, module, inputs[0].detach(), output))

        return hook

    trained = {name for name, parameter in modules.named_parameters() if parameter.requires_grad}
    with ExitStack() as hooks:
        for name, module in modules.named_modules():
            if isinstance(module, nn.Linear):
                hooks.callback(module.register_forward_hook(remember(name)).remove)
        each = losses()
    covered = [f"{name}.{part}" for name, module, _, _ in seen for part, _ in module.named_parameters()]
    if sorted(covered) != sorted(trained):
        raise ValueError(f"parameters outside linear layers, or used twice: {sorted(trained ^ set(covered))[:3]}")
    backward = torch.autograd.grad(each.sum(), [output for *_, output in seen])
    # In double precision: the bound must hold to the last digit.
    lengths = [torch.linalg.vector_norm(inputs, dim=1, dtype=torch.float64) for _, _, inputs, _ in seen]
    squares = torch.zeros(len(each), dtype=torch.float64, device=each.device)
    for (_, module, *_), came, after in zip(seen, lengths, backward, strict=True):
        went = torch.linalg.vector_norm(after, dim=1, dtype=torch.float64).square()
        squares += went * (came.square() + (module.bias is not None))
    norms = squares.sqrt()
    factors = clip_factors(norms, clip)[:, None]
    sums: dict[str, Tensor] = {}
    for (name, module, inputs, _), came, after in zip(seen, lengths, backward, strict=True):
        scaled = (after * factors).nan_to_num_(0.0, 0.0, 0.0)
        # What comes in as a direction, whose entries are at most one; its length goes to the other factor.
        came = came.clamp_min(1e-100)[:, None]
        (weight,) = sums_like([module.weight], clip)
        weight.add_products((scaled * came).nan_to_num_(0.0, 0.0, 0.0), (inputs / came).nan_to_num_(0.0, 0.0, 0.0))
        sums[f"{name}.weight"] = weight.value
        if module.bias is not None:
            (bias,) = sums_like([module.bias], clip)
            bias.add(scaled)
            sums[f"{name}.bias"] = bias.value
    return sums, int((norms > clip).sum())
