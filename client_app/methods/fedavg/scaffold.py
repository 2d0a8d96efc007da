"""SCAFFOLD at a site: its control variate, kept on its disk from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from fedsurrogate.common.errors import DataError
from fedsurrogate.common.files import replace_file
from fedsurrogate.common.models.parameters import Tensors


def read_control(folder: Path, confirmed: int, like: Tensors) -> dict[str, Tensor]:
    """This site's control variate after the last round that the coordinator used; zero before the
    first.

    Args:
        folder: of its files.
        confirmed: that round; zero before the first.
        like: parameters of the model; the control variate has their names and shapes.

    Raises:
        DataError: when its file is missing: without it, c would no longer be the mean of the sites'
            c_i.
    """
    if not confirmed:
        return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    file = folder / f"control-{confirmed}.safetensors"
    if not file.is_file():
        raise DataError(
            f"the control variate of round {confirmed} is not in {str(folder)!r}; it is needed to "
            "go on"
        )
    control: dict[str, Tensor] = load_file(file)
    return control


def next_control(
    own: Tensors, common: Tensors, moved: Tensors, steps: int, rates: Mapping[str, float]
) -> dict[str, Tensor]:
    """The new control variate c_i - c + (x - y_i) / (steps rate).

    Args:
        own: c_i, by parameter.
        common: c, by parameter.
        moved: y_i - x, by parameter.
        steps: of training in the round.
        rates: learning rates, by parameter.

    Source: Karimireddy et al. 2020, option II.

    Example:
        >>> one = {"weight": torch.ones(1)}
        >>> next_control(one, one, {"weight": torch.tensor([-1.0])}, steps=2, rates={"weight": 0.25})
        {'weight': tensor([2.])}
    """
    return {name: own[name] - common[name] - moved[name] / (steps * rates[name]) for name in moved}


def write_control(folder: Path, number: int, control: Tensors) -> None:
    """Write the control variate of a round atomically.

    Earlier ones stay: the next request names the round that counts.

    Args:
        folder: of its files.
        number: of the round.
        control: by parameter.
    """
    replace_file(folder / f"control-{number}.safetensors", save(dict(control)), durable=False)
