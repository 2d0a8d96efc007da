"""What the target of a record means, the same at every site and at the coordinator.

A target gives each record a public code t of q numbers. A site sends sums over its records x with
features z: of t, of t z', of z z', and for some targets of t t'. All heads follow from these. Training by
gradients needs the loss of a record, and the linear model that makes it small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ..terms import Term

if TYPE_CHECKING:
    from torch import Tensor

    from ..settings import Settings

# The sums of a site. Those of "records" and "totals" are of the code 1, which every record has.
RECORDS, TOTALS, CODE, SUMS, SQUARES, PRODUCTS = (
    "records",
    "totals",
    "code",
    "sums",
    "squares",
    "products",
)


# Sites that must be together in an exact sum, besides those that may collude.
LEAST_TOGETHER = 2


def sums_of_counts(
    bound: float,
    private: bool,
    shares: tuple[float, float, float] = (0.03, 0.55, 0.42),
    blocks: bool = False,
) -> tuple[Term, ...]:
    """The sums of a target whose code counts records.

    Args:
        bound: largest norm of a record's code.
        private: whether with noise; the public mean then stands for the mean of the features, which
            a message without noise needs to have the other sums around it.
        shares: fractions of the budget, for the code, its sums and the squares.
        blocks: whether records, totals and squares are apart for each block of sites.

    Example:
        >>> [each.name for each in sums_of_counts(1.0, private=True)]
        ['code', 'sums', 'squares']
    """
    coded = (
        Term(CODE, "C", bound=bound, share=shares[0]),
        Term(SUMS, "C d", 1, False, bound, share=shares[1]),
        Term(SQUARES, "B T" if blocks else "T", 2, False, share=shares[2]),
    )
    if private:
        return coded
    return (
        Term(RECORDS, "B" if blocks else "1"),
        Term(TOTALS, "B d" if blocks else "d", 1, False, count=RECORDS),
        *coded,
    )


@dataclass(frozen=True)
class Course:
    """What sites send where a target is learned in several rounds.

    Attributes:
        rounds: their number.
        each: the sums of a round; shares are fractions of the budget of all rounds but the first.
        first: those of the first round, if others; shares are fractions of its own budget.
        first_share: fraction of the whole budget that the first round has.
        receives: what sites receive in a round: a name, and a symbol for each axis as in
            `Term`.
        site_sums: "module:function" at the site, which makes the sums.
        steps: "module:class" at the coordinator: its half of the rounds, without messages.
    """

    rounds: int
    each: tuple[Term, ...]
    receives: tuple[tuple[str, str], ...]
    site_sums: str
    steps: str
    first: tuple[Term, ...] | None = None
    first_share: float = 0.0


class Target(ABC):
    """A target, resolved from the settings of a run.

    Attributes:
        name: of the kind.
        columns: of a table, or tensors of a file, that hold the values (n, k), in this order.
        gaps: whether a value may be missing, as NaN.
        counts: whether rows of the code are counts of records, which are ones and zeros.
        divides: whether each record is in one row exactly.
        blocks: number of blocks of sites whose second moments secure aggregation has apart; 0 for one
            moment of all.
        compared: of which kind its code is, where the coordinator measures what each site costs the
            others; empty where it does not.
    """

    name: str
    columns: tuple[str, ...]
    gaps = False
    counts = True
    divides = False
    blocks: int = 0
    compared = ""

    @property
    @abstractmethod
    def rows(self) -> tuple[str, ...]:
        """Names of the q rows of the code."""

    @property
    @abstractmethod
    def outputs(self) -> tuple[str, ...]:
        """Names of what a model answers."""

    @abstractmethod
    def statistics(self, private: bool) -> tuple[Term, ...]:
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

    def counted(self, code: Tensor) -> float:
        """The number of records that the sum of a code is of, or the best that it says of it.

        Args:
            code: sum over records, (q,), perhaps with noise.
        """
        return float(code.sum())

    def known(self, code: Tensor) -> tuple[bool, ...]:
        """For each output, whether a site has records of which it is known, where outputs have
        moments of their own; nothing where they share one.

        Args:
            code: sum over the records of the site, (q,).
        """
        return ()

    def known_in_blocks(self) -> tuple[tuple[bool, ...], ...]:
        """The same for the sites of each block, as far as settings say."""
        return ()

    def block(self, site: str) -> int:
        """The block of a site, counted from zero."""
        return 0

    def of_site(self, values: Tensor, site: str) -> Tensor:
        """The values that a site lets into exact sums.

        Args:
            values: of its records, (n, k).
            site: its name.

        Returns:
            (n, k), NaN for those that it keeps.

        Raises:
            ConfigError: for a site that the settings leave out.
        """
        return values

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

    @property
    def gap(self) -> str:
        """What keeps sites out of a run without noise and secure aggregation, as a sentence; empty for
        nothing that is worth a warning before the start.
        """
        return ""

    def course(self, private: bool) -> Course | None:
        """What sites send in rounds; None where they send all at once.

        Args:
            private: whether with noise.
        """
        return None

    @property
    def choices(self) -> dict[str, str]:
        """What follows from the settings, by name: what it became, and why, for people."""
        return {}

    def for_training(self) -> Target:
        """The target where sites train a model in rounds, in place of sending sums."""
        return self

    def fewest(self, sites: Collection[str] | None = None) -> tuple[str, int] | None:
        """What of the code, or which of it together, fewest sites know of their records, and their
        number, as far as settings say; None where all sites know all.

        Args:
            sites: names of those that count; None for all.
        """
        return None

    def warnings(self, values: Tensor) -> list[str]:
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
        chance: from the metrics, and the quantile z of a normal distribution, the score that chance alone
            does not exceed with its probability; infinite where no records tell. None for a score of
            which nobody has said it.
        columns: the field that names the columns, and a name for a column that has none; empty
            where columns have fixed names.
        trained: settings of sums alone, with the values that leave no trace of them where sites train
            a model in rounds.
        once: settings with which a site sends all at once, for messages as files.
    """

    name: str
    settings: tuple[str, ...]
    make: Callable[[Settings], Target]
    answers: Callable[[Facts, tuple[str, ...], Tensor], dict[str, Tensor]]
    measured: Callable[[Tensor, Tensor], dict[str, float]]
    metrics: Callable[[Mapping[str, float]], dict[str, float]]
    score: str
    chance: Callable[[Mapping[str, float], float], float] | None = None
    columns: tuple[str, str] = ("", "")
    once: Mapping[str, str] = field(default_factory=dict)
    trained: Mapping[str, str] = field(default_factory=dict)


class LearningRates(NamedTuple):
    """Learning rates of a linear model for fedavg.learning-rate = 0.

    Attributes:
        site: at a site, over the mean squared norm of its features.
        private: at a site under privacy, for features of norm one.
        distributed: of the coordinator's step with distributed noise.
    """

    site: float
    private: float
    distributed: float


@dataclass(frozen=True)
class Answering:
    """A linear model of a target.

    Attributes:
        outputs: names of o answers.
        weight: (o, d).
        bias: (o,).
        public: what a model says of it besides the target's own facts, as values of JSON.
        facts: for the run's result.
    """

    outputs: tuple[str, ...]
    weight: Tensor
    bias: Tensor
    public: Mapping[str, object] = field(default_factory=dict)
    facts: Mapping[str, str | float] = field(default_factory=dict)


@dataclass(frozen=True)
class Objective:
    """What sites minimise together: the mean loss of all records.

    A record adds the sum over what is known of it, and the divisor is the number of records. So the
    mean of sites' gradients by their records is the gradient of all records together, whatever each
    site knows; and under privacy the divisor, a number of records, is public.

    Attributes:
        outputs: o, of the model in training.
        losses: of each record (n,), from outputs (n, o) and code (n, q).
        rates: of a linear model.
        answering: the head, from the parameters by name.
        levels: where outputs differ by a level only, and so share one weight vector: their values
            at the start, o; empty for a weight vector each.
    """

    outputs: int
    losses: Callable[[Tensor, Tensor], Tensor]
    rates: LearningRates
    answering: Callable[[Mapping[str, Tensor]], Answering]
    levels: tuple[float, ...] = ()

    def numbers(self, dimension: int) -> int:
        """Number of parameters for features of a dimension."""
        shared = dimension + self.outputs
        return shared if self.levels else self.outputs * (dimension + 1)
