"""What a run amounts to, filled in as it goes: who took part, how well it works, what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.surrogates import AnySurrogate, Head
from strategies.learning import Learned

Fate = Literal["used", "rejected", "dropped"]
NO_REPLY = "no reply before the deadline"


@dataclass
class Site:
    """One site in a run. `name` is what the site calls itself, or its node id until it has answered."""

    name: str
    fate: Fate = "dropped"
    reason: str = NO_REPLY
    bytes_up: int = 0
    bytes_down: int = 0
    tested: int = 0
    correct: int = 0
    simulated: bool = False


@dataclass
class Points:
    """Points of a picture and their class indices."""

    x: list[float]
    y: list[float]
    label: list[int]


@dataclass
class Outcome:
    """Everything a run folder is written from. `sites` is keyed by Flower's node id."""

    sites: dict[int, Site] = field(default_factory=dict)
    surrogates: list[AnySurrogate] = field(default_factory=list)
    head: Head | None = None
    learned: Learned | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    compare_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    points: dict[str, Points] = field(default_factory=dict)

    def count(self, fate: Fate) -> int:
        """Sites that met this fate."""
        return sum(site.fate == fate for site in self.sites.values())
