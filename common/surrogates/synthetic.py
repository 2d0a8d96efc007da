"""The release of a FedLAP site: synthetic records, and the radius inside which their loss
approximates the real loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.limits import LARGEST_COUNT
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.settings import FedLAPSettings
from fedsurrogate.common.surrogates.surrogates import Header

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
    every = settings.labels == "all" or private
    if every and synthetic.header.classes != classes:
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
