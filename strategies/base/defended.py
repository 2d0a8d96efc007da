"""What a defence against hostile sites returns: the replies that are kept, and the sites that it
suspects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

Kind = Literal["harm", "far", "opposed"]
T = TypeVar("T")


@dataclass(frozen=True)
class Suspect:
    """A site that is left out.

    Attributes:
        site: its name.
        kind: "harm" to the others; "far" from them, or "opposed" to them.
        score: 1 is the threshold.
        reason: as text.
    """

    site: str
    kind: Kind
    score: float
    reason: str


@dataclass(frozen=True)
class Effect:
    """What a site changes, as far as the statistics of all sites show it.

    Attributes:
        harm: what one in five of the others, and at least two, lose by it: a share of their records, or
            of concordance or AUROC.
        gain: what it gains on its own records by being there.
        kept: the share of its weight that is kept because of its harm.
    """

    harm: float
    gain: float
    kept: float

    def rounded(self) -> dict[str, float]:
        """As events and the run card have it."""
        return {"harm": round(self.harm, 4), "gain": round(self.gain, 4), "kept": self.kept}


@dataclass(frozen=True)
class Defended(Generic[T]):
    """The result of a defence.

    Attributes:
        kept: replies with capped weights.
        capped: the share of weight that each capped site keeps, by site.
        suspects: that are excluded.
        bounded: the share that is kept of what each bounded site changes, by site.
        effects: of each site, by its name, where it is measured.
        alike: whether the sites' class means agree without the few that differ most.
    """

    kept: list[T]
    capped: dict[str, float] = field(default_factory=dict)
    suspects: list[Suspect] = field(default_factory=list)
    bounded: dict[str, float] = field(default_factory=dict)
    effects: dict[str, Effect] = field(default_factory=dict)
    alike: bool = False
