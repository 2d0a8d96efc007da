"""Tensors as scaled 16-bit numbers: the scale avoids overflow and underflow; the precision is the
11 bits of a half.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Halves

LARGEST_HALF = 65504.0


def pack(values: Tensor, *, logarithm: bool = False) -> Halves:
    """Encode values as 16-bit numbers.

    A common scale is divided out first, so values times 1e-4 or 1e4 give the same halves.

    Args:
        values: of any shape.
        logarithm: encode logarithms. Values must then be positive, and may span any orders of
            magnitude.

    Example:
        >>> unpack(pack(torch.tensor([1e-9, 2e-9])), "values", (2,)).tolist()
        [9.999999717180685e-10, 1.999999943436137e-09]
    """
    values = values.detach().to("cpu", torch.float64)
    if logarithm:
        scale = float(np.float32(values.log().mean().exp())) or float(np.finfo(np.float32).tiny)
        values = (values / scale).log()
    else:
        scale = float(np.float32(values.abs().max())) or 1.0 if values.numel() else 1.0
        values = values / scale
    data = values.numpy().astype("<f2").tobytes()
    return Halves(shape=list(values.shape), scale=scale, logarithm=logarithm, data=data)


def unpack(halves: Halves, name: str, shape: tuple[int, ...]) -> Tensor:
    """Decode 16-bit numbers.

    Args:
        halves: the message.
        name: of the tensor, for the error.
        shape: that the tensor must have.

    Returns:
        The tensor, float32.

    Raises:
        SurrogateError: with the name, if shape, size or scale is wrong.
    """
    if tuple(halves.shape) != shape:
        raise SurrogateError(f"{name} of shape {tuple(halves.shape)[:4]}, expected {shape}")
    # No valid tensor has several dimensions and one of size zero; torch fails on such a shape if
    # the others are huge.
    if len(halves.data) != 2 * math.prod(shape) or (len(shape) > 1 and 0 in shape):
        raise SurrogateError(f"{name} of {len(halves.data)} bytes do not fill the shape {shape}")
    if not 0 < halves.scale < np.inf:
        raise SurrogateError(f"{name} with scale {halves.scale}; a positive number is needed")
    values = torch.from_numpy(np.frombuffer(halves.data, dtype="<f2").astype(np.float32)).reshape(
        shape
    )
    return (values.exp() if halves.logarithm else values) * halves.scale
