"""Units of privacy in sums of gradients: a record, or a patient with all of that patient's records.

A patient is drawn with all of its records, and each of them weighs one over their number. A
record's gradient is no longer than the clip C, so the sum over a patient is not either: |sum_i w_i
g_i| <= sum_i w_i |g_i| <= C. This holds to the last digit, because weights and contributions are
rounded toward zero. So a step costs the same for patients as for records: all that changes is what
is added or removed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedsurrogate.common.privacy.gaussian_mechanism import unit_weights
from fedsurrogate.common.privacy.secret_numbers import system_uniforms


class UnitSample(NamedTuple):
    """Records that take part in a step.

    Attributes:
        rows: their indices, (m,).
        weights: of each, (m,), float64; None where each is a unit of its own.
    """

    rows: Tensor
    weights: Tensor | None = None


@dataclass(frozen=True)
class Units:
    """The unit that each record belongs to.

    Attributes:
        count: number of units.
        owners: index of each record's patient, (n,); None where each record is a unit of its own.
        weights: of each record, (n,), float64; those of a patient sum to at most one. None where
            each record is a unit of its own.
    """

    count: int
    owners: Tensor | None = None
    weights: Tensor | None = None

    @classmethod
    def of(cls, patients: Sequence[str] | None, count: int) -> Units:
        """The units of records.

        Args:
            patients: of each record, (n,); None where a record is the unit.
            count: n, number of records, used without patients.

        Example:
            >>> Units.of(["ann", "bob", "ann"], 3).weights.tolist(), Units.of(None, 3).count
            ([0.5, 1.0, 0.5], 3)
        """
        if patients is None:
            return cls(count)
        places: dict[str, int] = {}
        owners = [places.setdefault(name, len(places)) for name in patients]
        weights = unit_weights(patients, count)
        return cls(len(places), torch.tensor(owners, dtype=torch.int64), weights)

    def sample(self, rate: float) -> UnitSample:
        """A Poisson sample of units, each with all of its records.

        Args:
            rate: probability with which each unit is taken, independently.
        """
        taken = poisson_sample(self.count, rate)
        if self.owners is None or self.weights is None:
            return UnitSample(taken)
        chosen = torch.zeros(self.count, dtype=torch.bool)
        chosen[taken] = True
        rows = chosen[self.owners].nonzero().squeeze(1)
        return UnitSample(rows, self.weights[rows])


def poisson_sample(count: int, rate: float) -> Tensor:
    """Poisson sample of units, by numbers as secret as noise.

    They have 53 bits: with 24 bits every smaller rate would become 6e-8.

    Args:
        count: number of units.
        rate: probability with which each is taken, independently.

    Returns:
        Indices of the sample's units.
    """
    return (system_uniforms(count) < rate).nonzero().squeeze(1)
