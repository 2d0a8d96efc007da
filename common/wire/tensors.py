"""Tensors as scaled 16-bit numbers, whose scale avoids overflow and underflow and whose precision is the
11 bits of a half; covariances in them, with loadings at 8 bits and a scale for each column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fedsurrogate.common import surrogate_pb2 as pb
from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.surrogate_pb2 import Halves, Levels
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
)

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


BITS, MOST = 8, 127


def pack_levels(matrix: Tensor) -> Levels:
    """Encode a matrix: entries are multiples of their column's scale over 127.

    Args:
        matrix: (n, m).

    Example:
        >>> matrix = torch.tensor([[1.0, 10.0], [-0.5, 5.0]])
        >>> levels = pack_levels(matrix)
        >>> len(levels.data), bool((unpack_levels(levels, (2, 2)) - matrix).abs().max() < 0.05)
        (4, True)
    """
    scales = pack(matrix.double().abs().amax(0).clamp_min(1e-30), logarithm=True)
    exact = unpack(scales, "scales", (matrix.shape[1],)).double()
    levels = (matrix.double() / exact * MOST).round().clamp(-MOST, MOST).to(torch.int8)
    data = levels.numpy().tobytes()
    return Levels(shape=list(matrix.shape), bits=BITS, scales=scales, data=data)


def unpack_levels(levels: Levels, shape: tuple[int, ...]) -> Tensor:
    """Decode a matrix of `pack_levels`.

    Args:
        levels: the message.
        shape: that the matrix must have, (n, m).

    Returns:
        The matrix, float32.

    Raises:
        SurrogateError: for another shape, or numbers of other than 8 bits.
    """
    if levels.bits != BITS:
        raise SurrogateError(f"loadings of {levels.bits} bits; {BITS} are allowed next to 16")
    if tuple(levels.shape) != tuple(shape) or len(levels.data) != shape[0] * shape[1]:
        raise SurrogateError(
            f"loadings of shape {tuple(levels.shape)[:4]} in {len(levels.data)} bytes, expected "
            f"{shape}"
        )
    if not levels.scales.logarithm:
        raise SurrogateError("scales of loadings must travel as logarithms")
    scales = unpack(levels.scales, "scales of loadings", (shape[1],))
    numbers = np.frombuffer(levels.data, dtype=np.int8).astype(np.float32)
    shares: Tensor = torch.from_numpy(numbers).reshape(shape) / MOST
    return shares * scales


def pack_covariance(
    covariance: AnyCovariance, bits: int = 16
) -> tuple[list[pb.Halves], pb.Levels | None]:
    """A covariance as tables of 16-bit numbers.

    Variances are logarithms, and factors are relative to their dimension's own variance, so that no
    entry can underflow.

    Args:
        covariance: of M components in d dimensions.
        bits: of a loading of a low-rank factor. At 8, the variances make up for the rounding
            of the loadings, so that the total variance of every dimension stays.

    Returns:
        The tables, and the loadings at 8 bits; None for other loadings.
    """
    match covariance:
        case Spherical() | Diagonal():
            return [pack(covariance.variances, logarithm=True)], None
        case LowRank() if bits < 16:
            levels = pack_levels(covariance.factor)
            missing = covariance.factor.square().sum(1) - unpack_levels(
                levels, covariance.factor.shape
            ).square().sum(1)
            least = 1e-3 * covariance.variances
            return [pack((covariance.variances + missing).maximum(least), logarithm=True)], levels
        case LowRank():
            largest = covariance.factor.abs().amax(1)
            variances = covariance.variances.maximum((largest / LARGEST_HALF).square())
            return [
                pack(variances, logarithm=True),
                pack(covariance.factor / variances.sqrt()[:, None]),
            ], None
        case Gram():
            matrix = covariance.matrix.double()
            smallest = RELATIVE_LEAST * float(matrix.diagonal().mean().clamp_min(0)) + SMALLEST
            variances = matrix.diagonal().clamp_min(smallest)
            deviations = variances.sqrt()
            rows, columns = _below_diagonal(len(matrix))
            correlations = (matrix / deviations / deviations[:, None])[rows, columns]
            tables = [pack(variances, logarithm=True)]
            # A logarithm at 16 bits is off by up to a hundredth; the second table brings that to
            # half precision.
            tables.append(
                pack(variances / unpack(tables[0], "variances", tuple(variances.shape)).double())
            )
            return [*tables, pack(correlations)] if correlations.numel() else tables, None
        case Full():
            rows, columns = _below_diagonal(covariance.cholesky.shape[1])
            below = covariance.cholesky.tril(-1)
            pivots = covariance.cholesky.diagonal(dim1=1, dim2=2).maximum(
                below.abs().amax(2) / LARGEST_HALF
            )
            ratios = (below / pivots[:, :, None])[:, rows, columns]
            tables = [pack(pivots, logarithm=True)]
            return [*tables, pack(ratios)] if ratios.numel() else tables, None


# Variances of dimensions that never vary, as a share of the mean variance; and of all dimensions if
# none varies.
RELATIVE_LEAST, SMALLEST = 1e-9, 1e-30
TABLES = {"spherical": 1, "diag": 1, "lowrank": 2, "full": 2, "gram": 3}


def unpack_covariance(body: pb.Mixtures, total: int, dimension: int) -> AnyCovariance:
    """Parse tables of `pack_covariance`.

    Args:
        body: the message of the mixtures.
        total: number of components.
        dimension: of the features.

    Raises:
        SurrogateError: for tables that do not fit.
    """
    spread, family = list(body.spread), body.covariance
    if family not in TABLES:
        raise SurrogateError(f"unknown covariance {family[:20]!r}")
    wanted = TABLES[family] - (
        body.HasField("levels") or (dimension == 1 and family in ("full", "gram"))
    )
    if len(spread) != wanted or (body.HasField("levels") and family != "lowrank"):
        raise SurrogateError(f"covariance {family!r} with {len(spread)} tables, expected {wanted}")
    if not spread[0].logarithm:
        raise SurrogateError("variances must travel as logarithms")
    match family:
        case "spherical":
            return Spherical(unpack(spread[0], "variances", (total,)))
        case "diag":
            return Diagonal(unpack(spread[0], "variances", (total, dimension)))
        case "lowrank":
            variances = unpack(spread[0], "variances", (dimension,))
            if body.HasField("levels"):
                return LowRank(
                    unpack_levels(body.levels, (dimension, _rank(body.levels.shape))), variances
                )
            loadings = unpack(spread[1], "loadings", (dimension, _rank(spread[1].shape)))
            return LowRank(loadings * variances.sqrt()[:, None], variances)
        case "gram":
            return _unpack_gram(spread, dimension)
        case _:
            return _unpack_full(spread, total, dimension)


# Unpacked first, in both: only a payload with a whole matrix may cause the allocation of one.
def _unpack_gram(spread: list[pb.Halves], dimension: int) -> Gram:
    variances, exact = (unpack(table, "variances", (dimension,)) for table in spread[:2])
    if not (exact - 1).abs().max() < 0.1:
        raise SurrogateError(
            f"a correction of a variance by {float(exact.max()):.4g}; about 1 is expected"
        )
    variances = variances * exact
    if dimension == 1:
        return Gram(variances[:, None])
    correlations = unpack(spread[2], "correlations", (dimension * (dimension - 1) // 2,))
    rows, columns = _below_diagonal(dimension)
    matrix, deviations = torch.diag(variances), variances.sqrt()
    matrix[rows, columns] = correlations * (deviations[rows] * deviations[columns])
    matrix[columns, rows] = matrix[rows, columns]
    return Gram(matrix)


def _unpack_full(spread: list[pb.Halves], total: int, dimension: int) -> Full:
    pivots = unpack(spread[0], "pivots", (total, dimension))
    if dimension == 1:
        return Full(pivots[:, :, None])
    ratios = unpack(spread[1], "ratios", (total, dimension * (dimension - 1) // 2))
    rows, columns = _below_diagonal(dimension)
    cholesky = torch.diag_embed(pivots)
    cholesky[:, rows, columns] = ratios * pivots[:, rows]
    return Full(cholesky)


def _rank(shape: Iterable[int]) -> int:
    sizes = tuple(shape)
    if len(sizes) != 2 or sizes[1] < 1:
        raise SurrogateError(f"loadings of shape {sizes[:4]}; (d, rank) is expected")
    return int(sizes[1])


def _below_diagonal(dimension: int) -> tuple[Tensor, Tensor]:
    rows, columns = torch.tril_indices(dimension, dimension, offset=-1)
    return rows, columns
