"""Surrogates: what a site releases in place of its data; of a FedLAP site synthetic records, and the radius
inside which their loss approximates the real loss.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from ..errors import LARGEST_COUNT, SurrogateError
from .class_sums import Sums
from .covariances import Gram, LowRank
from .mixtures import Mixtures

if TYPE_CHECKING:
    from ..privacy.mechanism import Mechanism
    from ..settings import FedLAPSettings


@dataclass(frozen=True)
class Header:
    """Origin of a message.

    Attributes:
        method: its name.
        run: digest of the run's settings.
        site: its name.
        fingerprint: of the backbone.
        classes: class names.
        frame: of the columns of the features, in bytes (common/surrogates/mixtures.py); empty where
            features are as they are.
    """

    method: str
    run: str
    site: str
    fingerprint: str
    classes: tuple[str, ...]
    frame: bytes = b""

    def restricted(self, keep: Sequence[str]) -> Header:
        """The same with only these classes, in their order here."""
        return replace(self, classes=tuple(name for name in self.classes if name in keep))


@dataclass(frozen=True)
class Surrogate:
    """FedPFT: the mixtures that a site releases in place of its features.

    Attributes:
        header: origin. Class c of the table is header.classes[c].
        mixtures: the table.
        claim: what the message states of its differential privacy; None without privacy.
    """

    header: Header
    mixtures: Mixtures
    claim: Mechanism | None = None

    @property
    def counts(self) -> list[int]:
        """Records of each class."""
        return [int(count) for count in self.mixtures.counts]

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.mixtures.means.shape[1]

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """Its tensors by the names in the method's schema."""
        own = self.mixtures
        return {"counts": own.counts, "weights": own.weights, "means": own.means} | vars(
            own.covariance
        )


@dataclass(frozen=True)
class SumsSurrogate:
    """FedPFT under differential privacy: noisy class sums.

    Attributes:
        header: origin. Row c of the sums is header.classes[c].
        sums: of the site's records, with noise.
        claim: what the message states of its differential privacy.
    """

    header: Header
    sums: Sums
    claim: Mechanism

    @property
    def counts(self) -> list[int]:
        """Noisy number of records of each class, at least zero."""
        return [max(0, round(float(count))) for count in self.sums.counts]

    @property
    def dimension(self) -> int:
        """Dimension of the features."""
        return self.sums.sums.shape[1]

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """Its tensors by the names in the method's schema."""
        tensors = {"counts": self.sums.counts, "sums": self.sums.sums, "squares": self.sums.squares}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}


AnySurrogate = Surrogate | SumsSurrogate


class HasHeader(Protocol):
    """Any message of a site."""

    @property
    def header(self) -> Header:
        """Its origin."""


class Reply(HasHeader, Protocol):
    """A parsed message of a site, which the coordinator checks against the method's schema."""

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """Its tensors by the names in the method's schema."""

    @property
    def claim(self) -> Mechanism | None:
        """What it states of its differential privacy; None without privacy."""


def class_order(sent: Iterable[HasHeader]) -> tuple[str, ...]:
    """All classes of all sites, sorted; numerically if all are numbers."""
    return in_class_order({name for each in sent for name in each.header.classes})


def in_class_order(names: Collection[str]) -> tuple[str, ...]:
    """Distinct class names, sorted; numerically if all are numbers.

    Example:
        >>> in_class_order({"10", "9"}), in_class_order({"lesion", "10", "9"})
        (('9', '10'), ('10', '9', 'lesion'))
    """
    numeric = all(name.isdecimal() for name in names)
    return tuple(sorted(names, key=lambda name: (int(name), name) if numeric else (0, name)))


def without_classes(surrogate: AnySurrogate, keep: Sequence[str]) -> AnySurrogate | None:
    """Keep only some classes of a surrogate.

    The second moment over all classes cannot be split, so noisy sums lose it. A model learned from
    them then has one variance for all dimensions.

    Args:
        surrogate: of one site.
        keep: names of the classes that stay.

    Returns:
        The surrogate of these classes, in their order in the header; None if it has none of them.
    """
    wanted = torch.tensor([name in keep for name in surrogate.header.classes])
    if not wanted.any():
        return None
    header = surrogate.header.restricted(keep)
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        squares = sums.squares if bool(wanted.all()) else None
        sigmas = {
            name: sigma
            for name, sigma in sums.sigmas.items()
            if name != "squares" or squares is not None
        }
        kept = Sums(sums.counts[wanted], sums.sums[wanted], squares, sigmas)
        return SumsSurrogate(header, kept, surrogate.claim)
    mixtures = surrogate.mixtures
    rows = wanted[mixtures.labels]
    covariance = mixtures.covariance
    if not isinstance(covariance, Gram | LowRank):
        covariance = type(covariance)(*(table[rows] for table in vars(covariance).values()))
    return Surrogate(
        header,
        Mixtures(
            mixtures.counts[wanted],
            (wanted.cumsum(0) - 1)[mixtures.labels[rows]],
            mixtures.weights[rows],
            mixtures.means[rows],
            covariance,
        ),
        surrogate.claim,
    )


# Largest valid value. Normalised values are about one; no converged descent makes larger ones.
LARGEST_VALUE = 1e4


@dataclass(frozen=True)
class Synthetic:
    """Synthetic records of one site in one round.

    Attributes:
        header: origin.
        round: of the run.
        values: (n, d), flat, in the form after the network's fixed first step.
        labels: (n,), indices into header.classes, in rising order.
        radius: distance from the model they were made for, in the Euclidean norm of its parameters.
        records: number of the site's records, its weight; 0 if privacy hides it.
        claim: what the message states of its differential privacy; None without privacy.
    """

    header: Header
    round: int
    values: Tensor
    labels: Tensor
    radius: float
    records: int = 0
    claim: Mechanism | None = None

    @property
    def tables(self) -> Mapping[str, Tensor]:
        """Its tensors by the names in the method's schema."""
        return {"images": self.values, "labels": self.labels}


def check_synthetic(
    synthetic: Synthetic,
    settings: FedLAPSettings,
    classes: tuple[str, ...],
    dimension: int,
    round: int,
    private: bool,
) -> None:
    """Check that synthetic records fit this run and round.

    Args:
        synthetic: of one site.
        settings: of FedLAP.
        classes: of the run.
        dimension: of the values.
        round: of the run.
        private: whether the run has a privacy budget.

    Raises:
        SurrogateError: naming field and value, if they do not.
    """
    if synthetic.round != round:
        raise SurrogateError(f"synthetic records of round {synthetic.round}, this is round {round}")
    if synthetic.values.shape[1] != dimension:
        raise SurrogateError(
            f"synthetic records of dimension {synthetic.values.shape[1]}; this run has {dimension}"
        )
    if not synthetic.values.isfinite().all() or synthetic.values.abs().max() > LARGEST_VALUE:
        raise SurrogateError(
            f"synthetic records with values that are not finite, or beyond {LARGEST_VALUE:g}"
        )
    radius = synthetic.radius
    if not (math.isfinite(radius) and 0 < radius <= settings.trust_radius * (1 + 1e-6)):
        raise SurrogateError(
            f"a radius of {radius:g}; it must be above 0 and at most fedlap.trust-radius = "
            f"{settings.trust_radius:g}"
        )
    counts = torch.bincount(synthetic.labels, minlength=len(synthetic.header.classes)).tolist()
    if private and synthetic.header.classes != classes:
        raise SurrogateError(
            "synthetic records of other classes than the run's, or in another order"
        )
    if wrong := [count for count in counts if count != settings.images_per_class]:
        raise SurrogateError(
            f"{wrong[0]} synthetic records of a class; this run has fedlap.images-per-class = "
            f"{settings.images_per_class}"
        )
    if private and radius < settings.trust_radius * (1 - 1e-6):
        raise SurrogateError(
            f"a radius of {radius:g}; under privacy it is fedlap.trust-radius = "
            f"{settings.trust_radius:g}"
        )
    if not (synthetic.records == 0 if private else 1 <= synthetic.records <= LARGEST_COUNT):
        raise SurrogateError(f"synthetic records that represent {synthetic.records} records")
