"""What a statistic is made of: sums over records, of each of which all else follows that a run needs to
know of it; and tables of counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from .privacy.mechanism import DISTRIBUTED_SUMS, SUMS, NoisyRounds

if TYPE_CHECKING:
    from .settings import Settings

# Metadata of what a run's document leaves out, since the noise that follows from it is there.
NOT_SIGNED = {"signed": False}


def signed_fields(value: Any) -> list[str]:
    """Names of the fields of a dataclass that are in a run's document."""
    return [each.name for each in fields(value) if each.metadata != NOT_SIGNED]


@dataclass(frozen=True)
class Term:
    """One tensor of a statistic: a sum over records.

    Attributes:
        name: of the tensor.
        shape: a symbol for each axis, such as "C d".
        degree: a record adds at most the largest feature to this power to an entry; 0 for counts.
        whole: whether entries of degree 0 are whole numbers without noise.
        bound: largest norm of what a record adds, for features of norm at most one.
        largest: largest feature of a record, where it is smaller than secure-aggregation-range.
        share: part of the privacy budget of the statistic.
        count: the term with the number of records that it is summed over, by which a shift of the
            columns moves it; empty where features are measured from their mean.
    """

    name: str
    shape: str
    degree: int = 0
    whole: bool = True
    bound: float = 1.0
    largest: float = math.inf
    share: float = field(default=0.0, metadata=NOT_SIGNED)
    count: str = field(default="", metadata=NOT_SIGNED)


@dataclass(frozen=True)
class Counted:
    """One table of counts.

    Attributes:
        name: of the table.
        shape: of the table.
        bound: Euclidean norm of what one record adds; the weights of a patient's records sum to
            one, so a patient adds no more.
        share: part of the privacy budget.
        most: largest magnitude of what a record adds to an entry; one where records are counted.
    """

    name: str
    shape: tuple[int, ...]
    bound: float
    share: float = 1.0
    most: float = 1.0


def noise_in_rounds(
    each: Sequence[Term],
    settings: Settings,
    clip: float,
    rounds: int,
    first: Sequence[Term] = (),
    first_share: float = 0.0,
) -> NoisyRounds:
    """The noise on terms in rounds.

    Args:
        each: of a round, with parts of the budget of all rounds but the first.
        settings: of the run.
        clip: of features.
        rounds: their number.
        first: of the first round, with parts of its budget; empty if they are the same.
        first_share: of the whole budget.
    """
    whole = sum(term.share for term in each)
    return NoisyRounds(
        DISTRIBUTED_SUMS if settings.secure_aggregation else SUMS,
        settings.epsilon,
        settings.delta,
        clip,
        rounds,
        step_shares={term.name: term.share / whole for term in each},
        first_share=first_share,
        first_shares={term.name: term.share for term in first},
    )
