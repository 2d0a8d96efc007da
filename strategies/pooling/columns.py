"""Messages of sites whose features are in frames of their own, brought into one common frame."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.methods.method import Field
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.surrogates.class_sums import fold, unfold
from fedsurrogate.common.surrogates.columns import Frame
from fedsurrogate.common.surrogates.covariances import (
    AnyCovariance,
    Diagonal,
    Full,
    Gram,
    LowRank,
    Spherical,
    StoredGram,
)
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate


@dataclass(frozen=True)
class Change:
    """From one frame to another: a column z becomes factor z + shift.

    Attributes:
        factor: (d,), float64, above zero.
        shift: (d,), float64.
    """

    factor: Tensor
    shift: Tensor

    @classmethod
    def between(cls, own: bytes, wanted: bytes) -> Change:
        """The change from one frame to another, of which one may be empty: features as they are."""
        first, last = (Frame.of(each) if each else None for each in (own, wanted))
        one = torch.ones_like((first or last).offset)  # type: ignore[union-attr]
        scale, offset = (one, 0 * one) if first is None else (first.divisor, first.offset)
        unit, centre = (one, 0 * one) if last is None else (last.divisor, last.offset)
        return cls(scale / unit, (offset - centre) / unit)


def moved_surrogate(surrogate: AnySurrogate, wanted: bytes) -> AnySurrogate:
    """A surrogate in another frame.

    One variance for all columns stays one: their mean. Noisy sums have no frame.

    Args:
        surrogate: of a site.
        wanted: the frame.
    """
    if isinstance(surrogate, SumsSurrogate) or surrogate.header.frame == wanted:
        return surrogate
    change = Change.between(surrogate.header.frame, wanted)
    table = surrogate.mixtures
    means = (table.means.double() * change.factor + change.shift).float()
    mixtures = replace(table, means=means, covariance=_moved(table.covariance, change.factor))
    return replace(surrogate, header=replace(surrogate.header, frame=wanted), mixtures=mixtures)


def _moved(covariance: AnyCovariance, factor: Tensor) -> AnyCovariance:
    """The covariance after column j is multiplied by factor[j]."""
    match covariance:
        case Spherical():
            return Spherical((covariance.variances.double() * factor.square().mean()).float())
        case Diagonal():
            return Diagonal((covariance.variances.double() * factor.square()).float())
        case LowRank():
            loadings = (covariance.factor.double() * factor[:, None]).float()
            return LowRank(loadings, (covariance.variances.double() * factor.square()).float())
        case Full():
            return Full((covariance.cholesky.double() * factor[:, None]).float())
        case StoredGram():
            variances = (covariance.variances_per_dimension().double() * factor.square()).float()
            return StoredGram(lambda: _scaled(covariance.matrix, factor), variances)
        case Gram():
            return Gram(_scaled(covariance.matrix, factor))


def _scaled(matrix: Tensor, factor: Tensor) -> Tensor:
    return (matrix.double() * factor * factor[:, None]).float()


def moved_parameters(sent: Parameters, fields: Iterable[Field], wanted: bytes) -> Parameters:
    """Tensors of a site in another frame, float64, by what their fields say of them.

    Args:
        sent: in the frame of its header.
        fields: of its tensors.
        wanted: the frame.
    """
    if sent.header.frame == wanted:
        return sent
    change = Change.between(sent.header.frame, wanted)
    moved = {each.name: _moved_tensor(each, sent.tensors, change) for each in fields}
    return replace(sent, header=replace(sent.header, frame=wanted), tensors=moved)


def _moved_tensor(field: Field, own: Tensors, change: Change) -> Tensor:
    value, last = own[field.name].double(), field.shape.split()[-1]
    of = own[field.count].double() if field.count else None
    if field.degree is None:
        return value * change.factor + change.shift if last == "d" else value
    if not field.degree:
        return value if of is None else value - of @ (change.shift / change.factor)
    if last == "T":
        whole = unfold(value, len(change.factor))
        return fold(whole * change.factor * change.factor[:, None])
    value = value * change.factor**field.degree
    return value if of is None else value + torch.outer(of, change.shift).reshape(value.shape)
