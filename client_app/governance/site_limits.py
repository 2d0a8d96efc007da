"""The limits that a site sets to what a method computes."""

from __future__ import annotations

from dataclasses import dataclass

from fedsurrogate.common.limits import MOST_CLASSES


@dataclass(frozen=True)
class SiteLimits:
    """Limits that the site sets itself.

    Attributes:
        components: most components of a mixture; 0: the run's settings hold.
        rank: largest rank of a covariance; 0: the run's settings hold.
        smallest_class: records that a class needs to be released.
        most_classes: largest number of classes in a received model.
        smallest_cell: records that a class needs in exact counts.
        show_evaluation: whether this site's own share of an evaluation may be shown.
    """

    components: int = 0
    rank: int = 0
    smallest_class: int = 1
    most_classes: int = MOST_CLASSES
    smallest_cell: int = 1
    show_evaluation: bool = True


NO_LIMITS = SiteLimits()
