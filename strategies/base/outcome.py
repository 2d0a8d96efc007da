"""The outcome of a run: its sites, model, accuracy and costs, filled in during the run; what a defence
against hostile sites returns; and what a claim has to state, also in runs of earlier versions.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.head_training import Batch
from fedsurrogate.common.models.model_quality import ModelQuality
from fedsurrogate.common.privacy.accounting import Unit
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.own_mean import as_stored
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import AnySurrogate

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


Fate = Literal["used", "rejected", "dropped"]
NO_REPLY = "no reply before the deadline"


@dataclass
class Site:
    """One site in a run.

    Attributes:
        name: the registered name of its key. Without a table of registered sites it is the name
            that the site reports, or its node id before the first reply.
        fate: whether its reply was used.
        reason: why not; empty if it was.
        bytes_up: that the site has sent.
        bytes_down: that were sent to the site.
        tested: number of its test records on which the model was evaluated.
        correct: how many of these the model got right.
        simulated: it reports that it is part of a simulation.
        records: number of records its reply represents, noisy under privacy; 0 if not reported.
        late: it replied after the deadline.
        barred: it is excluded and not asked again.
        kept_share: share of its weight that is kept, below 1 if capped.
        suspect: why the defence left it out.
        effect: what it changes for the others and for itself, where that is measured.
        claim: the privacy claim of its rounds.
        downstream: quality scores of a generator at this site.
        measured: sums over its test records that measure a model of another target than classes.
        registered: its name is that of its key.
        heard: it has replied under its name.
        version: of its software.
        node: its Flower node id, or 0.
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
    effect: Effect | None = None
    claim: Mechanism | None = None
    downstream: dict[str, float] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=dict)
    registered: bool = False
    heard: bool = False
    version: str = ""
    node: int = 0


class PointSource(Protocol):
    """A source of synthetic features that a model was learned from, for figures."""

    def sample(self, seed: int, limit: int) -> Batch:
        """Synthetic features.

        Args:
            seed: of all random streams.
            limit: about so many features.

        Returns:
            Features (n, d), and their labels (n,).
        """


@dataclass
class Points:
    """Points of a figure.

    Attributes:
        x: coordinates.
        y: coordinates.
        label: class indices.
    """

    x: list[float]
    y: list[float]
    label: list[int]


@dataclass
class Outcome:
    """All results that a run folder is written from.

    Attributes:
        sites: by Flower's node id.
        surrogates: that a head was learned from.
        model: None before it is learned.
        learned: source of synthetic features, for figures; None if there is none.
        accuracy: by what was evaluated, such as "model" or "last_site".
        compare_bytes: bytes of the baselines that a simulation compares with.
        seconds: by part of the run.
        rounds: training rounds, each with number, accuracy on all test data, bytes up so far and
            seconds.
        hops: chain steps in order, each with its site and the accuracy of its head.
        points: of figures.
        stopped: why the run ended before its last round; the model so far is kept.
        learning: facts about the learning, such as the solver of a head.
        parameters: number of generator parameters that a site sends in a round.
        data: the data reports of a simulation.
        names: "registered" if names come from keys, "claimed" if sites report them.
        absent: registered sites that have not connected.
        measured: as of a site, on all test records of a simulation.
        quality: measures of a model of classes on these records; None outside of simulations.
        earlier: the privacy claim of the rounds of a run that this one continues; None without.
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
    learning: dict[str, str | float] = field(default_factory=dict)
    parameters: int = 0
    data: list[dict[str, Any]] = field(default_factory=list)
    names: Literal["registered", "claimed", ""] = ""
    absent: list[str] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    quality: ModelQuality | None = None
    earlier: Mechanism | None = None

    @property
    def reasons(self) -> list[str]:
        """Why sites are not used."""
        return [site.reason for site in self.sites.values() if site.fate != "used"]

    def reasons_besides(self, nodes: Container[int]) -> list[str]:
        """Why sites are not used, at the start of a run: `nodes` can be, although they have sent
        nothing yet.
        """
        return [
            site.reason
            for node, site in self.sites.items()
            if node not in nodes and site.fate != "used"
        ]

    @property
    def units(self) -> frozenset[Unit]:
        """What the privacy claims of the used sites protect; empty without claims."""
        claims = [sent.claim for sent in self.surrogates] + [
            site.claim for site in self.sites.values() if site.fate == "used"
        ]
        return frozenset(claim.unit for claim in claims if claim is not None)

    def count(self, fate: Fate) -> int:
        """Number of sites with this fate."""
        return sum(site.fate == fate for site in self.sites.values())


def nameless(node: int) -> str:
    """Placeholder name of a site whose name is unknown. No site can choose it."""
    return f"node {node}"


def due_centre(run: Run, claim: Mechanism | None, dimension: int, centre: str = "") -> str:
    """What a claim has to state; in a stored run of an earlier version, what that version stated.

    Args:
        run: which may be stored.
        claim: of a message.
        dimension: of the features.
        centre: digest of the public centre, or empty.
    """
    earlier = claim is not None and run.stored_as not in ("", run.full_digest[:16])
    stated = claim.centre if earlier and claim is not None else ""
    return as_stored(stated, run.plan.subtracted(dimension, centre))
