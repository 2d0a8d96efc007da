"""What a defence against hostile sites returns: the replies that are kept, and the sites that it suspects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Kind = Literal["far", "moved", "label", "unrelated", "opposed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Suspect:
    """A site that disagrees with the other sites: kind, score (1 is the threshold), and the reason as text."""

    site: str
    kind: Kind
    score: float
    reason: str


@dataclass(frozen=True)
class Defended(Generic[T]):
    """The result of a defence: kept replies with capped weights, the share of weight that each capped site keeps, and the
    excluded suspects.
    """

    kept: list[T]
    capped: dict[str, float] = field(default_factory=dict)
    suspects: list[Suspect] = field(default_factory=list)
