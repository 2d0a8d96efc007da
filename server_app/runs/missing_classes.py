"""Classes of which no site of a run has a record, as far as the sites' counts show them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

# Mean of max(0, z) for a standard normal z; and how far above it a count is more than noise.
MEAN_OF_HALF, DEVIATIONS = 0.4, 3.0


@dataclass(frozen=True)
class MissingClasses:
    """Classes without records anywhere.

    Attributes:
        names: of these classes.
        known: "exact": the sites' counts show it. "noisy": their noisy counts together are no more
            than noise, so records may be there. "unknown": no count of a single site or class was
            reported, as in a secure sum.
        bound: below which a noisy total is no more than noise; 0 for exact counts.
    """

    names: tuple[str, ...] = ()
    known: Literal["exact", "noisy", "unknown"] = "unknown"
    bound: float = 0.0


def missing_classes(
    wanted: Collection[str],
    counts: Sequence[tuple[Mapping[str, float], float | None]],
    private: bool,
) -> MissingClasses:
    """Find the classes of which no site has a record. It uses reported counts only.

    Args:
        wanted: names of the classes of the model, and of those that the settings list.
        counts: for each site that has reported counts: records by class, and the standard deviation
            of their noise; None if unknown.
        private: whether the run adds noise.

    Example:
        >>> missing_classes(["a", "b"], [({"a": 3.0}, None)], False).names
        ('b',)
        >>> missing_classes(["a", "b"], [({"a": 90.0, "b": 4.0}, 5.0)], True).names
        ('b',)
        >>> missing_classes(["a", "b"], [], True).known
        'unknown'
    """
    if private:
        noisy = [(records, noise) for records, noise in counts if records and noise]
        # Counts below zero are recorded as zero, so noise alone has a mean above it.
        bound = MEAN_OF_HALF * sum(noise for _, noise in noisy) + DEVIATIONS * math.sqrt(
            sum(noise**2 for _, noise in noisy)
        )
        known, totals = "noisy" if noisy else "unknown", [records for records, _ in noisy]
    else:
        totals, bound = [records for records, _ in counts if records], 0.0
        known = "exact" if totals else "unknown"
    names = tuple(
        name
        for name in wanted
        if totals and sum(max(0.0, each.get(name, 0.0)) for each in totals) <= bound
    )
    return MissingClasses(names, known, bound)  # type: ignore[arg-type]
