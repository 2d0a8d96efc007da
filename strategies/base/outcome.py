"""What a run amounts to, filled in as it goes: who took part, how well it works, what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from common.models.classifiers import Classifier
from common.models.head_training import Batch
from common.privacy.claims import Claim
from common.surrogates.surrogates import AnySurrogate

Fate = Literal["used", "rejected", "dropped"]
NO_REPLY = "no reply before the deadline"


@dataclass
class Site:
    """One site in a run. `name` is what its key is registered under; without a table of registered sites it is what the site
    calls itself, or its node id until it has answered.

    records: that what it sent stands for, noisy under privacy; 0 where it has not told. late: it did answer, but too late.
    barred: it can take no part, and is not asked again. kept_share: of its weight, below 1 where it was capped.
    suspect: why the other sites do not explain what it sent. claim: of what it sent in rounds under privacy. downstream:
    how well a generator serves there. registered: its name is that of its key. heard: it has answered in its name.
    """

    name: str
    fate: Fate = "dropped"
    reason: str = NO_REPLY
    bytes_up: int = 0
    bytes_down: int = 0
    tested: int = 0
    correct: int = 0
    simulated: bool = False
    records: int = 0
    late: bool = False
    barred: bool = False
    kept_share: float = 1.0
    suspect: str = ""
    claim: Claim | None = None
    downstream: dict[str, float] = field(default_factory=dict)
    registered: bool = False
    heard: bool = False


class PointSource(Protocol):
    """What a model was learned from, for pictures."""

    def sample(self, seed: int, limit: int) -> Batch:
        """About `limit` synthetic features (n, d) and their labels."""


@dataclass
class Points:
    """Points of a picture and their class indices."""

    x: list[float]
    y: list[float]
    label: list[int]


@dataclass
class Outcome:
    """Everything a run folder is written from. `sites` is keyed by Flower's node id.

    rounds: of training, each with its number, accuracy on all test data, bytes up so far and seconds. hops: of a chain, in
    order, each with its site and what the head there was worth. stopped: why a run ended before its last round, with what it
    had learned by then. parameters: of a generator, that a site sends in a round. names: whether sites' names are those of
    their "registered" keys or only "claimed". absent: names of registered sites that have not connected.
    """

    sites: dict[int, Site] = field(default_factory=dict)
    surrogates: list[AnySurrogate] = field(default_factory=list)
    model: Classifier | None = None
    learned: PointSource | None = None
    accuracy: dict[str, float] = field(default_factory=dict)
    compare_bytes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    hops: list[dict[str, str | float]] = field(default_factory=list)
    points: dict[str, Points] = field(default_factory=dict)
    stopped: str = ""
    parameters: int = 0
    names: Literal["registered", "claimed", ""] = ""
    absent: list[str] = field(default_factory=list)

    def count(self, fate: Fate) -> int:
        """Sites that met this fate."""
        return sum(site.fate == fate for site in self.sites.values())


def nameless(node: int) -> str:
    """What a site is called whose name is not known; no site can choose that."""
    return f"node {node}"
