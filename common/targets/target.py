"""What the target of a record means, the same at every site and at the coordinator.

A target gives each record a public code t of q numbers. A site sends sums over its records x with
features z: of t, of t z', of z z', and for some targets of t t'. All heads follow from these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from fedsurrogate.common.settings import Settings
    from fedsurrogate.common.targets.objective import Objective

# The sums of a site. Those of "records" and "totals" are of the code 1, which every record has.
RECORDS, TOTALS, CODE, SUMS, SQUARES, PRODUCTS = (
    "records",
    "totals",
    "code",
    "sums",
    "squares",
    "products",
)


@dataclass(frozen=True)
class TargetSum:
    """One of the sums of a site.

    Attributes:
        name: one of those above.
        shape: a symbol for each axis: C rows of the code, d dimensions, T = d (d + 1) / 2,
            P = C (C + 1) / 2.
        degree: a record adds at most the largest feature to this power to an entry.
        bound: largest norm of what a record adds, for features of norm at most one.
        share: part of the privacy budget.
        whole: whether entries are whole numbers without noise.
    """

    name: str
    shape: str
    degree: int
    bound: float
    share: float
    whole: bool = False


def sums_of_counts(bound: float, private: bool) -> tuple[TargetSum, ...]:
    """The sums of a target whose code counts records.

    Args:
        bound: largest norm of a record's code.
        private: whether with noise; the public centre then stands for the mean of the features, which
            a message without noise needs to have the other sums around it.

    Example:
        >>> [each.name for each in sums_of_counts(1.0, private=True)]
        ['code', 'sums', 'squares']
    """
    coded = (
        TargetSum(CODE, "C", 0, bound, 0.03, whole=True),
        TargetSum(SUMS, "C d", 1, bound, 0.55),
        TargetSum(SQUARES, "T", 2, 1.0, 0.42),
    )
    if private:
        return coded
    return (
        TargetSum(RECORDS, "1", 0, 1.0, 0.0, whole=True),
        TargetSum(TOTALS, "d", 1, 1.0, 0.0),
        *coded,
    )


class Target(ABC):
    """A target, resolved from the settings of a run.

    Attributes:
        name: of the kind.
        columns: of a table, or tensors of a file, that hold the values (n, k), in this order.
        gaps: whether a value may be missing, as NaN.
        counts: whether rows of the code are counts of records, which are ones and zeros.
        divides: whether each record is in one row exactly.
        gap: what keeps sites out of a run without noise and secure sum, as a sentence; empty for
            nothing that is worth a warning before the start.
    """

    name: str
    columns: tuple[str, ...]
    gaps = False
    counts = True
    divides = False
    gap = ""

    @property
    @abstractmethod
    def rows(self) -> tuple[str, ...]:
        """Names of the q rows of the code."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of what a model answers."""

    @abstractmethod
    def statistics(self, private: bool) -> tuple[TargetSum, ...]:
        """The sums that sites send.

        Args:
            private: whether with noise.
        """

    @abstractmethod
    def code(self, values: Tensor) -> Tensor:
        """The code of records.

        Args:
            values: (n, k), float64, without faults.

        Returns:
            (n, q), float64.
        """

    @abstractmethod
    def faults(self, values: Tensor) -> Mapping[str, Tensor]:
        """Values that no record can have, besides missing ones.

        Args:
            values: (n, k), float64; NaN where missing.

        Returns:
            By what is wrong and what is allowed: which records, (n,) bool.
        """

    def large_enough(self, code: Tensor, least: int, summed: bool) -> tuple[Tensor, str]:
        """What of the code of a site's records may be in exact sums.

        Args:
            code: (n, q).
            least: number of records that a row needs at this site.
            summed: whether the coordinator sees only the sum over all sites.

        Returns:
            The code, in which rows that must not leave are zero; and which these are, in words.

        Raises:
            DataError: if none of it may leave.
        """
        return code, ""

    @abstractmethod
    def groups(self, values: Tensor) -> Tensor:
        """Groups of like records, for splits and partitions.

        Args:
            values: (n, k), float64.

        Returns:
            (n,), int64.
        """

    def objective(self) -> Objective | None:
        """What training by gradients minimises; None for a target that is learned from sums only."""
        return None

    @property
    @abstractmethod
    def public(self) -> dict[str, object]:
        """What it is, as values of JSON: in the digest of the run and in its model."""

    @property
    def title(self) -> str:
        """What is learned, in words."""
        return ", ".join(self.outputs)

    def fewest(self) -> tuple[str, int] | None:
        """What of the code fewest sites know of their records, and their number, as far as settings
        say; None where all sites know all.
        """
        return None

    def remarks(self, values: Tensor) -> list[str]:
        """What a person should look at, for the data report: values (n, k), without faults."""
        return []


# What a model knows of its target: `Target.public`, and what its head adds.
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of target in the registry.

    Attributes:
        name: in the settings.
        settings: fields that are for this kind alone.
        make: the target of a run. Raises ConfigError for settings that do not agree.
        answers: of a model: from its facts, the names of its o outputs and scores (n, o), float64, to
            columns by name, (n,) each.
        measured: of one output: from scores (n,) and true values, (n,) or (n, k), float64, to sums
            over records that add up over sites.
        metrics: what people read, from these sums, of which "records" is above zero.
        score: the metric that says most.
        columns: the field that names the columns, and a name for a column that has none; empty
            where columns have fixed names.
    """

    name: str
    settings: tuple[str, ...]
    make: Callable[[Settings], Target]
    answers: Callable[[Facts, tuple[str, ...], Tensor], dict[str, Tensor]]
    measured: Callable[[Tensor, Tensor], dict[str, float]]
    metrics: Callable[[Mapping[str, float]], dict[str, float]]
    score: str
    columns: tuple[str, str] = ("", "")
