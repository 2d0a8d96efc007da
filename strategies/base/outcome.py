"""The outcome of a run: its sites, model, accuracy and costs, filled in during the run; what a defence
against hostile sites returns; and what a claim has to state, also in runs of earlier versions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from flwr.app import ConfigRecord, RecordDict

from fedsurrogate.common.errors import SITE_NAME, SurrogateError
from fedsurrogate.common.files import READABLE, replace_file
from fedsurrogate.common.models.class_metrics import QUALITY, ModelQuality, unpacked_quality
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.privacy.accounting import Unit
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.privacy.shares import as_stored
from fedsurrogate.common.run import Run
from fedsurrogate.common.security.registrations import (
    MOST_RECEIPTS,
    VARIABLE,
    Receipt,
    join_receipts,
    parse_receipt,
    read_table,
)
from fedsurrogate.common.signed_models.signed_model import Sampler
from fedsurrogate.common.surrogates.surrogates import AnySurrogate
from fedsurrogate.common.targets.metrics import LONGEST_METRICS, METRIC_VALUES, is_metric
from fedsurrogate.common.wire.records import INFO, Info

from .collection import Recorder

DOWNSTREAM = "downstream."
# Among the facts about a head of noisy sums: whether its class means differ by no more than noise and
# sampling explain, the only sign of what it is worth where nobody measures it.
ALIKE = "class means alike"
# A site's scores of a generator and their upper bounds: shares, and distances between embeddings of
# norm one.
DOWNSTREAM_LIMITS = {
    f"{kind}-{head}": 1.0
    for kind in ("accuracy", "balanced")
    for head in ("local", "synthetic", "mixed")
}
DOWNSTREAM_LIMITS |= {"share": 1.0, "sliced": 4.0, "sinkhorn": 4.0}


class RefusedError(SurrogateError):
    """A site has refused what was asked.

    Args:
        text: the reason.
        info: what the site reports, not checked.
    """

    def __init__(self, text: str, info: Info) -> None:
        super().__init__(text)
        self.info = info


def whole_number(info: Info, key: str) -> int:
    """A reported count; 0 if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the number in it.

    Example:
        >>> whole_number({"tested": 12}, "tested"), whole_number({"tested": -1}, "tested")
        (12, 0)
    """
    value = info.get(key)
    return value if isinstance(value, int) and 0 <= value < 2**40 else 0


def share_in(info: Info, key: str) -> float | None:
    """A reported accuracy; None if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the number in it.

    Example:
        >>> share_in({"accuracy": 0.9}, "accuracy"), share_in({"accuracy": 1.5}, "accuracy")
        (0.9, None)
    """
    value = info.get(key)
    return value if isinstance(value, float) and 0 <= value <= 1 else None


def numbers_in(info: Info, key: str) -> list[Any]:
    """A reported list of finite numbers; empty if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the list in it.
    """
    value = info.get(key)
    numbers = isinstance(value, list) and all(
        isinstance(v, int | float) and math.isfinite(v) for v in value
    )
    return cast(list[Any], value) if numbers else []


def downstream_in(info: Info) -> dict[str, float]:
    """The valid reported scores of a generator at a site."""
    scores = {name: info.get(DOWNSTREAM + name) for name in DOWNSTREAM_LIMITS}
    return {
        name: v
        for name, v in scores.items()
        if isinstance(v, float) and 0 <= v <= DOWNSTREAM_LIMITS[name]
    }


def metric_values_in(info: Info) -> dict[str, float]:
    """The valid reported sums that measure a model of another target than classes; empty if there
    are none.
    """
    try:
        found = json.loads(str(info.get(METRIC_VALUES, "{}"))[:LONGEST_METRICS])
    except (ValueError, RecursionError):
        return {}
    if not isinstance(found, dict) or not all(
        isinstance(value, int | float) and math.isfinite(value) for value in found.values()
    ):
        return {}
    return {str(name): float(value) for name, value in found.items() if is_metric(name)}


def seconds_in(info: Info, key: str) -> float | None:
    """A reported duration in seconds; None if invalid or missing.

    Args:
        info: what a site reports, not checked.
        key: of the duration in it, without "-seconds".
    """
    value = info.get(f"{key}-seconds")
    return value if isinstance(value, float) and 0 <= value < math.inf else None


def quality_in(info: Info) -> ModelQuality | None:
    """What a simulated site reports of the model on all test records; None if it is invalid or missing.

    Args:
        info: what a site reports, not checked.
    """
    try:
        return unpacked_quality(str(info[QUALITY])) if QUALITY in info else None
    except SurrogateError:
        return None


FOLDER = "receipts"
MOST_SITES = 10_000


class Receipts:
    """The receipts of the sites' ledgers.

    Args:
        output: folder of the run folders, next to which the receipts are stored.
        resumed: folder of a run that is continued, for the receipts next to it; empty for none.
        recorder: of receipts that are not stored.
    """

    def __init__(self, output: str, resumed: str, recorder: Recorder) -> None:
        self._folder = _absolute(output) / FOLDER
        self._recorder = recorder
        self._known: dict[str, dict[str, Receipt]] = {}
        self._nodes: dict[str, int] = {}
        self._names: dict[int, dict[str, None]] = {}
        folders = [self._folder]
        if resumed:
            folders.append(_absolute(resumed).parent / FOLDER)
        for folder in dict.fromkeys(folders):
            for name, node, receipts in _stored(folder):
                self._place(name, self._nodes.get(name, node))
                for receipt in receipts:
                    self._put(name, receipt)

    def __bool__(self) -> bool:
        return bool(self._known)

    def has_node(self, node: int) -> bool:
        """Whether `node` is the last known node of a site with receipts."""
        return bool(self._names.get(node))

    def of(self, name: str, node: int | None = None) -> str:
        """The receipts of a site, as one text.

        Args:
            name: of the site.
            node: its last known node also identifies the site; None if it is not known.
        """
        names = dict.fromkeys([*(self._names.get(node, ()) if node is not None else ()), name])
        receipts = [receipt for each in names for receipt in self._known.get(each, {}).values()]
        return join_receipts(receipts[-MOST_RECEIPTS:])

    def show(self, record: RecordDict, name: str, node: int) -> None:
        """Add the receiving site's receipts to a message.

        Args:
            record: content of the message, which is changed.
            name: of the site.
            node: that receives the message.
        """
        if text := self.of(name, node):
            record.config_records[INFO]["receipts"] = text

    def take(self, name: str, node: int, text: object) -> None:
        """Store a site's receipt, if it sent one.

        Args:
            name: of the site.
            node: that it has now.
            text: the receipt as it was sent; None if the site sent none.

        Raises:
            SurrogateError: for an invalid receipt.
        """
        if text is None or not SITE_NAME.fullmatch(name):
            return
        receipt = parse_receipt(text)
        if name not in self._known and len(self._known) >= MOST_SITES:
            self._recorder.event(
                "receipt-not-kept", site=name, reason=f"the limit of {MOST_SITES} sites is reached"
            )
            return
        # First read receipts that another run may have written meanwhile.
        for other, _, receipts in _stored(self._folder, f"{name}.json"):
            for stored in receipts if other == name else ():
                self._put(name, stored)
        self._put(name, receipt)
        self._place(name, node)
        try:
            self._write(name)
        except OSError as error:
            # The run continues with the receipts in memory; the site's own check log is not affected.
            self._recorder.event("receipt-not-kept", site=name, reason=type(error).__name__)

    def _place(self, name: str, node: int) -> None:
        """Set the last known node of a site."""
        self._names.get(self._nodes.get(name, node), {}).pop(name, None)
        self._nodes[name] = node
        self._names.setdefault(node, {})[name] = None

    def _put(self, name: str, receipt: Receipt) -> None:
        """Keep the longest receipt of each ledger, and only the most recent ledgers."""
        kept = self._known.setdefault(name, {})
        before = kept.pop(receipt.ledger, receipt)
        kept[receipt.ledger] = max(before, receipt, key=lambda each: each.length)
        while len(kept) > MOST_RECEIPTS:
            del kept[next(iter(kept))]

    def _write(self, name: str) -> None:
        """Write a site's file atomically."""
        content = {
            "node": self._nodes[name],
            "receipts": list(map(str, self._known[name].values())),
        }
        replace_file(self._folder / f"{name}.json", json.dumps(content) + "\n", mode=READABLE)


def stored_receipts(output: str) -> dict[str, str]:
    """The receipts stored in an output folder, by site, each site's as one text."""
    stored = _stored(_absolute(output) / FOLDER)
    return {name: join_receipts(receipts) for name, _, receipts in stored}


def _absolute(folder: str) -> Path:
    return Path(folder).expanduser().absolute()


def _stored(folder: Path, pattern: str = "*.json") -> Iterator[tuple[str, int, list[Receipt]]]:
    """Names, nodes and receipts of the sites in a folder. Unreadable files are skipped."""
    for file in sorted(folder.glob(pattern)):
        try:
            content = json.loads(file.read_text())
            if type(content["node"]) is not int:
                raise ValueError("the node is no number")
            yield (
                file.stem,
                content["node"],
                [parse_receipt(text) for text in content["receipts"][:MOST_RECEIPTS]],
            )
        except (OSError, ValueError, TypeError, LookupError, RecursionError, SurrogateError):
            continue


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


@dataclass(frozen=True)
class Learned:
    """What a run of one round has learned.

    Attributes:
        model: a classifier.
        defended: the result of the defence against hostile sites.
        source: of synthetic features (n, d) and their labels (n,), given a seed and about how many;
            None if there is none.
        facts: about the learning, for the events.
    """

    model: Classifier
    defended: Defended[Any]
    source: Sampler | None = None
    facts: Mapping[str, str | float] = field(default_factory=dict)


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

    def use(self) -> None:
        """Its reply is used."""
        self.fate, self.reason = "used", ""


# Of a picture of features: coordinates x and y, and the label of each point.
Points = dict[str, list[float]]


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
        quality: metrics of a model of classes on these records; None outside of simulations.
        earlier: the privacy claim of the rounds of a run that this one continues; None without.
    """

    sites: dict[int, Site] = field(default_factory=dict)
    surrogates: list[AnySurrogate] = field(default_factory=list)
    model: Classifier | None = None
    learned: Sampler | None = None
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
    def used(self) -> list[int]:
        """The nodes of the used sites."""
        return [node for node, site in self.sites.items() if site.fate == "used"]

    @property
    def bytes_up(self) -> int:
        """Bytes that all sites have sent."""
        return sum(site.bytes_up for site in self.sites.values())

    def reasons(self, besides: Container[int] = ()) -> list[str]:
        """Why sites are not used, other than the nodes `besides`: at the start of a run these can be,
        although they have sent nothing yet.
        """
        return [
            site.reason
            for node, site in self.sites.items()
            if node not in besides and site.fate != "used"
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
        centre: digest of the public mean, or empty.
    """
    earlier = claim is not None and run.stored_as not in ("", run.full_digest[:16])
    stated = claim.centre if earlier and claim is not None else None
    return as_stored(stated, run.plan.subtracted(dimension, centre))


NOT_REGISTERED = (
    "its key is not in the table of registered sites, which `coordinator sites register` writes"
)
ABSENT = "registered, and not connected"


@dataclass(frozen=True)
class Registered:
    """The table of registered sites in a file. It is read again each time: a key may be replaced
    during a run.

    Attributes:
        file: in the format of `write_table`.
    """

    file: Path

    @classmethod
    def here(cls, environment: Mapping[str, str]) -> Registered | None:
        """The table that the environment variable names; None if it is not set."""
        return cls(Path(environment[VARIABLE])) if environment.get(VARIABLE) else None

    def names(self) -> dict[int, str]:
        """Site names by node id. Raises RunError."""
        return {each.node: name for name, each in read_table(self.file).items()}


def admit(
    outcome: Outcome,
    recorder: Recorder,
    nodes: Sequence[int],
    names: Mapping[int, str] | None,
    number: int | None = None,
) -> list[int]:
    """Add the connected nodes to the outcome. Records absent sites and refused nodes.

    Args:
        outcome: of the run, whose sites are changed.
        recorder: of the events.
        nodes: that are connected.
        names: names of registered sites by node id. None without a table: then every node may take
            part, and has no name before its first reply.
        number: the round, for the events.

    Returns:
        The nodes that may take part, which are the registered ones.
    """
    sites = outcome.sites
    if names is None:
        for node in nodes:
            sites.setdefault(node, Site(name=nameless(node), node=node))
        return list(nodes)
    # As it was before: keys may be replaced and exchanged between two looks at the table.
    earlier = {site.name: (node, site) for node, site in sites.items()}
    for node in nodes:
        if node in names:
            _enter(sites, node, names[node], earlier.get(names[node]))
    for node in nodes:
        if node not in names and (node not in sites or sites[node].registered):
            site = sites.setdefault(node, Site(name=nameless(node), node=node))
            site.fate, site.reason, site.barred, site.registered = (
                "rejected",
                NOT_REGISTERED,
                True,
                False,
            )
            recorder.event("rejected", site=site.name, reason=NOT_REGISTERED, round=number)
    there = {site.name for site in sites.values()}
    absent, known = sorted(set(names.values()) - there), set(outcome.absent)
    for name in absent:
        if name not in known:
            recorder.event("absent", site=name, reason=ABSENT, round=number)
    outcome.absent = absent
    return [node for node in nodes if node in names]


def _enter(sites: dict[int, Site], node: int, name: str, earlier: tuple[int, Site] | None) -> None:
    """Assign a registered node to its site. The site had another node, in `earlier`, if its key was
    replaced. It takes part again if its key was taken out of the table and registered again.
    """
    if node in sites and sites[node].name == name and sites[node].registered:
        return
    site = Site(name=name, registered=True, node=node)
    if earlier is not None:
        place, before = earlier
        site.bytes_up, site.bytes_down = before.bytes_up, before.bytes_down
        if sites.get(place) is before:
            del sites[place]
    sites[node] = site


def check_name(site: Site, info: Info) -> None:
    """Check that a registered site reports the name that its key is registered under.

    A failure report without a name is accepted: a site that cannot read its settings does not know
    its name.

    Args:
        site: with that name.
        info: what it reports.

    Raises:
        SurrogateError: for another name.
    """
    claimed = info.get("site")
    if claimed is None and info.get("status") != "ok":
        return
    if claimed != site.name:
        raise SurrogateError(
            f"the site reports the name {str(claimed)[:64]!r}, but its key is registered as {site.name!r}; set "
            f'site="{site.name}" in its node-config, or register its key under its own name'
        )
    site.heard = True


def addressed(record: RecordDict, name: str) -> RecordDict:
    """A request with the name of its receiver, so that a site with another name refuses it before
    it is charged.

    Args:
        record: content of the request.
        name: of the site that it is for.
    """
    return RecordDict({**record, INFO: ConfigRecord({**record.config_records[INFO], "site": name})})
