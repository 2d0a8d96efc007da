"""What a defence against hostile sites returns: the replies that are kept, and the sites that it
suspects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Kind = Literal["far", "moved", "label", "unrelated", "opposed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Suspect:
    """A site that disagrees with the other sites.

    Attributes:
        site: its name.
        kind: of disagreement.
        score: 1 is the threshold.
        reason: as text.
    """

    site: str
    kind: Kind
    score: float
    reason: str


@dataclass(frozen=True)
class Defended(Generic[T]):
    """The result of a defence.

    Attributes:
        kept: replies with capped weights.
        capped: the share of weight that each capped site keeps, by site.
        suspects: that are excluded.
        bounded: the share that is kept of what each bounded site changes, by site.
    """

    kept: list[T]
    capped: dict[str, float] = field(default_factory=dict)
    suspects: list[Suspect] = field(default_factory=list)
    bounded: dict[str, float] = field(default_factory=dict)
