"""SCAFFOLD at a site: what its gradients have in excess of the others', kept on its disk from round to round."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.parameters import Tensors

CONTROL = "control."


def split(tensors: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Parameters, and the control variates that travel beside them."""
    own = {name: tensor for name, tensor in tensors.items() if not name.startswith(CONTROL)}
    return own, {name.removeprefix(CONTROL): tensor for name, tensor in tensors.items() if name.startswith(CONTROL)}


def read_control(folder: Path, like: Tensors) -> dict[str, Tensor]:
    """This site's control variate, zero in its first round."""
    file = folder / "control.safetensors"
    return load_file(file) if file.is_file() else {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def next_control(own: Tensors, common: Tensors, moved: Tensors, steps: int, rate: float) -> dict[str, Tensor]:
    """c_i - c + (x - y_i) / (steps rate), where `moved` is y_i - x (Karimireddy et al. 2020, option II)."""
    return {name: own[name] - common[name] - moved[name] / (steps * rate) for name in moved}


def write_control(folder: Path, control: Tensors) -> None:
    """Keep it for the next round, in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".control"
    save_file(dict(control), temporary)
    temporary.replace(folder / "control.safetensors")
