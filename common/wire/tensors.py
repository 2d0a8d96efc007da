"""Tensors as scaled 16-bit numbers, whose scale avoids overflow and underflow and whose precision is the
11 bits of a half; covariances in them, with loadings at 8 bits and a scale for each column.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from .. import surrogate_pb2 as pb
from ..backbones.backbone_names import columns_in, shown
from ..backbones.power_transform import power_in
from ..errors import (
    LARGEST_COUNT,
    LARGEST_NUMBER,
    LONGEST_FINGERPRINT,
    LONGEST_NAME,
    MOST_CLASSES,
    SITE_NAME,
    RunError,
    SurrogateError,
)
from ..methods.fedpft import AUTO_RANK, choices, largest_gram
from ..methods.method import Messages, check_schema
from ..run import Run
from ..surrogate_pb2 import Halves, Levels
from ..surrogates.class_sums import beyond
from ..surrogates.covariances import AnyCovariance, Diagonal, Full, Gram, LowRank, Spherical
from ..surrogates.surrogates import AnySurrogate, Header, Reply, SumsSurrogate, Surrogate

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
            scaled = (matrix / deviations).div_(deviations[:, None]).cpu().numpy()
            # By a mask, in a fifth of the time of indices.
            correlations = torch.from_numpy(scaled[np.tri(len(scaled), k=-1, dtype=bool)])
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


# Largest relative error of a number at 16 bits, with some room. Sum of variances a dimension that
# counts as none.
HALF, NO_VARIANCE = 2.0**-10, 1e-25
# Of the software of a site.
VERSION = re.compile(r"[0-9][0-9A-Za-z.+-]{0,19}")


@dataclass(frozen=True)
class Expectation:
    """Required properties of this run's surrogates. Empty or zero means "not known beforehand".

    A family "auto" is "gram" up to `largest_gram` dimensions. "lowrank" is allowed for any: a site
    may send less.
    """

    method: str
    run: str
    family: str
    components: int
    rank: int
    classes: tuple[str, ...] = ()
    fingerprint: str = ""
    dimension: int = 0
    power: float | None = None
    largest_gram: int = 0

    @classmethod
    def of(
        cls, run: Run, classes: tuple[str, ...], fingerprint: str, dimension: int = 0
    ) -> Expectation:
        """The expectation from a run's settings.

        Args:
            run: that a message must belong to.
            classes: of the run; empty if any are allowed.
            fingerprint: of the backbone; empty if any is allowed.
            dimension: of the features; 0 if any is allowed.
        """
        own = run.settings.fedpft
        return cls(
            run.settings.method,
            run.digest,
            choices(run.settings).family,
            own.components,
            own.rank or AUTO_RANK,
            classes,
            fingerprint,
            dimension,
            run.power,
            largest_gram(run.settings.max_payload_mib),
        )

    def allows(self, family: str, dimension: int) -> bool:
        """Whether a surrogate may have this covariance."""
        if self.family != "auto":
            return family == self.family
        return family == "lowrank" or (family == "gram" and dimension <= self.largest_gram)


OTHER_RUN = (
    ": it is of another run or of other settings, such as classes or columns in another order, or "
    "another unit"
)


def is_name(value: object) -> TypeGuard[str]:
    """Whether a value is a valid name of a class or a backbone: a short text of printable
    characters.
    """
    # This also excludes lone UTF-16 surrogates, which cannot be encoded.
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()


def is_fingerprint(value: object) -> TypeGuard[str]:
    """Whether a value is a valid fingerprint of features: a name, longer only for names of columns."""
    return is_name(value) or (
        isinstance(value, str)
        and len(value) <= LONGEST_FINGERPRINT
        and value.isprintable()
        and bool(columns_in(value))
    )


def check_header(header: Header, expected: Expectation) -> None:
    """Check that a header belongs to this run.

    Args:
        header: of a message.
        expected: of the run.

    Raises:
        SurrogateError: if it does not.
    """
    for name, value, wanted in (
        ("method", header.method, expected.method),
        ("run", header.run, expected.run),
        ("backbone fingerprint", header.fingerprint, expected.fingerprint or header.fingerprint),
    ):
        if value != wanted:
            own, other = (
                shown(each) if columns_in(each) else each[:80] for each in (value, wanted)
            )
            why = OTHER_RUN if name == "run" else ""
            raise SurrogateError(f"{name} {own!r} is not this run's {other!r}{why}")
    if expected.power is not None and (power := power_in(header.fingerprint)) != expected.power:
        raise SurrogateError(
            f"features to the power {power:g}; this run's power is {expected.power:g}"
        )
    if not SITE_NAME.fullmatch(header.site):
        raise SurrogateError(
            f"site name {header.site[:64]!r}; letters, digits, '.', '_' and '-' are allowed, 64 at "
            "most"
        )
    if not header.classes:
        raise SurrogateError("an empty class list")
    named = all(map(is_name, header.classes)) and is_fingerprint(header.fingerprint)
    if len(header.classes) > MOST_CLASSES or not named:
        raise SurrogateError(
            f"{len(header.classes)} classes, or a name of a class or backbone that does not print; "
            f"allowed are at most {MOST_CLASSES} classes, and names of at most {LONGEST_NAME} "
            "characters"
        )
    if expected.classes and (unknown := set(header.classes) - set(expected.classes)):
        raise SurrogateError(
            f"unknown class {sorted(unknown)[0][:80]!r}; this run has {', '.join(expected.classes)}"
        )


def check_reply(
    reply: Reply, messages: Messages, expected: Expectation, first: bool = False
) -> None:
    """Check that a parsed message belongs to this run and matches the schema of its method.

    Strategies check every reply with it before their own checks.

    Args:
        reply: the parsed message.
        messages: of the method.
        expected: of the run.
        first: whether it is a message of the first round.

    Raises:
        SurrogateError: if it does not.
    """
    check_header(reply.header, expected)
    check_schema(messages, reply.tables, len(reply.header.classes), expected.dimension, first)


def check_class_number(classes: Sequence[str]) -> None:
    """Check the number of classes of all sites together, which can exceed the limit even if no
    single site does.

    Args:
        classes: of all sites.

    Raises:
        RunError: for too many classes.
    """
    if len(classes) > MOST_CLASSES:
        raise RunError(
            f"the sites name {len(classes)} classes together, above the limit of {MOST_CLASSES}; "
            "set classes"
        )


def check_surrogate(surrogate: AnySurrogate, expected: Expectation) -> None:
    """Check that all numbers of a surrogate are usable for learning.

    `mechanism.check_stated` checks the privacy claim.

    Args:
        surrogate: of a site.
        expected: of the run.

    Raises:
        SurrogateError: naming field and value, if one is not.
    """
    check_header(surrogate.header, expected)
    dimension = surrogate.dimension
    if expected.dimension and dimension != expected.dimension:
        raise SurrogateError(
            f"features of dimension {dimension}, the other sites have {expected.dimension}"
        )
    if isinstance(surrogate, SumsSurrogate):
        _check_sums(surrogate, expected)
    else:
        _check_mixtures(surrogate, expected)


def _check_sums(surrogate: SumsSurrogate, expected: Expectation) -> None:
    sums, dimension = surrogate.sums, surrogate.dimension
    if expected.classes and surrogate.header.classes != expected.classes:
        raise SurrogateError("noisy sums of other classes than the run's, or in another order")
    wanted = {"spherical": 0, "diag": dimension}.get(
        expected.family, dimension * (dimension + 1) // 2
    )
    count = 0 if sums.squares is None else len(sums.squares)
    if count != wanted:
        raise SurrogateError(
            f"second moments of {count} numbers; covariance {expected.family!r} needs {wanted}"
        )
    for name, table in {"counts": sums.counts, "sums": sums.sums, "squares": sums.squares}.items():
        if table is not None and not table.isfinite().all():
            raise SurrogateError(f"{name} hold a number that is not finite")
    if sums.counts.abs().max() > LARGEST_COUNT:
        raise SurrogateError(
            f"a class of {float(sums.counts.abs().max()):g} records; {LARGEST_COUNT} at most"
        )
    if what := beyond(sums):
        raise SurrogateError(what)


def _check_mixtures(surrogate: Surrogate, expected: Expectation) -> None:
    mixtures = surrogate.mixtures
    if not expected.allows(mixtures.family, surrogate.dimension):
        raise SurrogateError(f"covariance {mixtures.family!r}, expected {expected.family!r}")
    if int(mixtures.components.max()) > expected.components:
        raise SurrogateError(
            f"{int(mixtures.components.max())} components in a class; at most "
            f"{expected.components} are allowed"
        )
    covariance = mixtures.covariance
    if isinstance(covariance, Gram):
        _check_gram(covariance.matrix, mixtures.counts)
    if isinstance(covariance, LowRank) and covariance.factor.shape[1] > expected.rank:
        raise SurrogateError(
            f"rank {covariance.factor.shape[1]}; at most {expected.rank} is allowed"
        )
    tables = {"weights": mixtures.weights, "means": mixtures.means} | vars(covariance)
    for name, table in tables.items():
        if not table.isfinite().all():
            raise SurrogateError(f"{name} hold a number that is not finite")
    mean, variance = mixtures.moments()
    if not (mean.abs().max() < LARGEST_NUMBER and variance.max() < LARGEST_NUMBER**2):
        raise SurrogateError(
            "means or variances are too large; means and deviations must be below "
            f"{LARGEST_NUMBER:g}"
        )
    totals = torch.zeros(len(mixtures.counts)).index_add_(0, mixtures.labels, mixtures.weights)
    if mixtures.weights.min() < 0 or (totals - 1).abs().max() > 0.01:
        raise SurrogateError(
            f"mixture weights of a class sum to {float(totals[(totals - 1).abs().argmax()]):.4g}, "
            "not to one"
        )


def _check_gram(matrix: Tensor, counts: Tensor) -> None:
    """Raise SurrogateError for a covariance within classes that no records with these counts have.

    At 16 bits an entry is rounded by at most HALF of itself, so eigenvalues move by at most HALF
    times the Frobenius norm of the correlations. N records of C classes have at most N - C
    directions, so tr(S)^2 is at most (N - C) |S|^2.
    """
    if not matrix.isfinite().all():
        raise SurrogateError("the covariance holds a number that is not finite")
    deviations = matrix.diagonal().clamp_min(1e-37).sqrt()
    correlations = (matrix / deviations / deviations[:, None]).double()
    if correlations.abs().max() > 1 + HALF:
        raise SurrogateError(
            f"a correlation of {float(correlations.abs().max()):.4g} in the covariance; at most 1 "
            "is possible"
        )
    correlations.diagonal().add_(HALF * float(correlations.norm()))
    if torch.linalg.cholesky_ex(correlations)[1]:
        raise SurrogateError(
            "a covariance that no records have: the matrix has a negative eigenvalue"
        )
    trace, freedom = float(matrix.double().trace()), int(counts.sum()) - len(counts)
    if (
        trace**2
        > 1.02 * max(freedom, 0) * float(matrix.double().square().sum())
        + (NO_VARIANCE * len(matrix)) ** 2
    ):
        raise SurrogateError(
            f"a covariance with more directions than {int(counts.sum())} records of {len(counts)} "
            "classes can have; the counts or the covariance are wrong"
        )
