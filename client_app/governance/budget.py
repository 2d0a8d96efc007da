"""The privacy budget of one folder of data: decides whether one more release keeps two privacy
guarantees.

**All runs together** are (epsilon-total, delta-total)-differentially private, even if the
coordinator chooses each run after seeing earlier results: `common/privacy/accounting.py` has
the theorem.

**Each run alone** is (epsilon-per-run, delta)-differentially private. The first charged release of
a run fixes its plan, and every later one must follow it. The full digest of a run fixes noise,
sample rate and steps of every round (`common/privacy/mechanism.py` derives them from the settings
in the digest). All rounds cost the same, except a first round that opens a run, as that of a
generative method, which can only come first. So the releases of a run are a prefix of one sequence,
fixed before the first result. Composition by privacy loss distributions is exact for it; stopping
early is post-processing. A resumed run has its own id, so its guarantee for one run begins anew;
the total counts both runs.

Earlier versions wrote the first 16 digits of the digest, and 2^32 hashes find two settings that
share them. Such a name fixes no plan: a coordinator could choose between both settings after the
first result. Entries with such names are one plan only where all releases are equal, because then
the first one alone fixes the sequence. All others are counted by Renyi divergences, which hold for
any choice and cost more.

A proposal that people have signed pays for one run, of any method.

Entries of a ledger: what a release records, the hash chain of the lines, and what a list of
entries adds up to.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from fedsurrogate.common.errors import BudgetError, PolicyError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.privacy.accounting import GaussianEvent, PrivacyFilter, Unit, composed
from fedsurrogate.common.privacy.mechanism import EXACT_COUNTS

Entry = dict[str, Any]
# What a ledger counts: one of these for all its private releases.
Charged = Unit | Literal["bag"]


@dataclass(frozen=True)
class Release:
    """A release's entry in the ledger.

    Attributes:
        run: full digest of the run's settings; in entries of earlier versions its first 16 digits.
        flower_run: id of the run.
        method: its name.
        round: number of the round, from one.
        mechanism: name of the privacy mechanism; "none" without privacy.
        events: cost, empty without privacy.
        unit: what is protected: a record, which is an image where runs take images, a bag of images,
            or a patient.
        epsilon: of the claim; 0 without privacy.
        delta: of the claim; 0 without privacy.
        sigmas: noise of each statistic.
        sensitivities: of each statistic.
        facts: stay here.
        bytes: size of the payload.
        sha256: of the payload.
        sealed: for other sites only.
        sample_rate: the lowest of all rounds of the run, or one if no round samples; it shows the
            plan of a run from its first release.
        disclosure: address of the sheet that a person has read before, in the state folder; empty
            for none.
        rounds: private releases that the settings of the run plan; 0 without privacy, and in
            entries of earlier versions.
        opens: whether the first round of the run has another cost than the others; entries of
            earlier versions have none of it, and there the method says so.
        selection: the settings that select which records are in it, in words; empty with privacy.
            Entries of earlier versions have none of it.
    """

    run: str
    flower_run: str
    method: str
    round: int
    mechanism: str
    events: tuple[GaussianEvent, ...]
    unit: Charged
    epsilon: float
    delta: float
    sigmas: dict[str, float]
    sensitivities: dict[str, float]
    facts: dict[str, float]
    bytes: int
    sha256: str
    sealed: bool = False
    sample_rate: float = 1.0
    disclosure: str = ""
    rounds: int = 0
    opens: bool = False
    proposal: str = ""
    allowed_by: str = ""
    selection: Mapping[str, str] = field(default_factory=dict)


def chained(previous: Entry | None, fields: Entry) -> Entry:
    """The entry that follows another one.

    Args:
        previous: the entry before; None for the first.
        fields: of the new entry.

    Returns:
        The fields with time, sequence number and both hashes.
    """
    entry = fields | {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "sequence": previous["sequence"] + 1 if previous else 0,
        "previous": previous["hash"] if previous else "",
    }
    return entry | {"hash": digest(entry)}


def canonical(entry: Entry) -> bytes:
    """The bytes of an entry in its line; equal entries give equal bytes."""
    return json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()


def digest(entry: Entry) -> str:
    """SHA-256 of an entry, as hexadecimal digits; covers all fields except the hash itself."""
    return hashlib.sha256(
        canonical({key: value for key, value in entry.items() if key != "hash"})
    ).hexdigest()


@lru_cache(maxsize=2048)
def read_entry(line: bytes) -> Entry | None:
    """The entry in a line, if it is whole. A site reads its ledger several times a round, so that latest
    lines are kept.

    Args:
        line: of a ledger, without its end.

    Returns:
        The entry, which nobody changes; None for a line that is damaged or was edited.
    """
    try:
        entry: Entry = json.loads(line)
        whole = entry["hash"] == digest(entry) and line == canonical(entry)
        return entry if whole and {"previous", "sequence"} <= entry.keys() else None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def events_of(entries: Sequence[Entry], flower_run: str = "") -> list[GaussianEvent]:
    """The noise of all releases, or of those of one run.

    Args:
        entries: of the ledger, without its header.
        flower_run: id of the run; empty for all.
    """
    chosen = (entry for entry in entries if not flower_run or entry["flower_run"] == flower_run)
    return [GaussianEvent(**event) for entry in chosen for event in entry["events"]]


def non_private_releases(entries: Sequence[Entry]) -> int:
    """Number of releases without differential privacy, apart from counts that the policy has
    excluded from the total.
    """
    return sum(
        entry["kind"] == "release" and not entry["events"] and entry["mechanism"] != EXACT_COUNTS
        for entry in entries
    )


# Noise calibrated to a budget may give an epsilon that is larger in the last digit.
EPSILON_TOLERANCE = 1 + 1e-9
# Digits of a run's digest, and of the beginning that entries of earlier versions have.
FULL, SHORT = 64, 16


@dataclass(frozen=True)
class Budget:
    """Limits on epsilon.

    Attributes:
        epsilon_total: of all releases.
        delta: for exact accounting; a part of delta_total.
        epsilon_per_run: of one run, at the run's own delta.
        after_open: whether private releases may follow releases without privacy, for which no
            epsilon holds.
        delta_total: of all releases; 0 means 2 delta.
        exact_may_differ: whether releases without privacy may select other records than earlier ones.
        bags: whether runs of earlier versions may have pooled bags, which the site names. Their entries
            say "record" of both, so all of these count as the image of a bag would: twice the
            sensitivity.

    Example:
        >>> Budget(4.0, 1e-5, 1.0).filter.epsilon
        4.0
        >>> spent([], Budget(4.0, 1e-5, 1.0))
        0.0
    """

    epsilon_total: float
    delta: float
    epsilon_per_run: float
    after_open: bool = False
    delta_total: float = 0.0
    exact_may_differ: bool = False
    bags: bool = False

    @property
    def filter(self) -> PrivacyFilter:
        """The privacy filter for the total. Raises ConfigError for a delta_total not above delta."""
        return PrivacyFilter(self.epsilon_total, self.delta, self.delta_total or 2 * self.delta)


def spent(entries: Sequence[Entry], budget: Budget) -> float:
    """The part of epsilon_total that is spent; at epsilon_total nothing is left.

    Args:
        entries: of the ledger, without its header.
        budget: the limits.

    Returns:
        Epsilon, as `PrivacyFilter.spent` counts it.
    """
    return budget.filter.spent(_counted(entries, budget), _exact(entries))


def closed(entries: Sequence[Entry], budget: Budget) -> str:
    """Why no release with noise is allowed any more, of any run; empty if there may be one.

    Args:
        entries: of the ledger, without its header.
        budget: the limits.
    """
    count = non_private_releases(entries)
    if not count or budget.after_open:
        return ""
    return (
        f"{count} releases left without privacy before, so no total can be guaranteed any more; "
        "neither the policy nor a larger epsilon-total takes them back"
    )


def runs_left(entries: Sequence[Entry], plan: Sequence[GaussianEvent], budget: Budget) -> int:
    """Number of further runs that the total allows.

    Args:
        entries: of the ledger, without its header.
        plan: each of these runs has exactly these releases.
        budget: the limits.
    """
    if not plan or closed(entries, budget):
        return 0
    rule, earlier = budget.filter, _counted(entries, budget)
    shares = [(rule.renyi_share(earlier), rule.renyi_share(plan))]
    private = [entry for entry in entries if entry["events"]]
    if not any(event.sample_rate < 1 for event in [*earlier, *plan]) and (
        not private or _is_gaussian(private[0])
    ):
        shares.append((rule.gaussian_share(earlier), rule.gaussian_share(plan)))
    most = max(
        math.floor((EPSILON_TOLERANCE - used) / each) if each < math.inf else 0
        for used, each in shares
    )
    if most < 1 and not earlier:
        return int(composed(tuple(plan), rule.delta) <= rule.epsilon * EPSILON_TOLERANCE)
    return max(0, most)


def check_budget(entries: list[Entry], release: Release, budget: Budget) -> float:
    """Epsilon spent with a release included.

    It depends on settings and earlier releases, never on the data.

    Args:
        entries: of the ledger, without its header.
        release: the next one.
        budget: the limits.

    Returns:
        Epsilon, see `spent`; of the earlier releases alone if this one has no privacy.

    Raises:
        BudgetError: when the total or the run's budget would be exceeded, or the release is not in
            the plan of its run. Also when an earlier release had no privacy, or protected
            another unit.
        PolicyError: when another run has used its proposal, or a release without privacy selects
            other records than an earlier one.
    """
    _check_used_once(entries, release)
    if not release.events:
        if not budget.exact_may_differ:
            _check_selection(entries, release)
        return spent(entries, budget)
    if why := closed(entries, budget):
        raise BudgetError(why)
    _check_unit(entries, release)
    this: Entry = {"kind": "release", **asdict(release)}
    _check_plan(entries, this)
    total = spent([*entries, this], budget)
    if total > budget.epsilon_total * EPSILON_TOLERANCE:
        raise BudgetError(
            f"epsilon-total = {budget.epsilon_total:g} at delta {budget.delta:g}: "
            f"{spent(entries, budget):.4g} is spent, with this release it would be {total:.4g}"
        )
    run = (*events_of(entries, release.flower_run), *release.events)
    # The Renyi bound is fast; the exact number accepts every run that this bound accepts.
    loosely = (
        PrivacyFilter(budget.epsilon_per_run, release.delta / 2, release.delta).renyi_share(run)
        <= 1
    )
    if loosely:
        return total
    if not _one_plan([*_of_run(entries, release.flower_run), this]):
        raise BudgetError(
            f"epsilon-per-run = {budget.epsilon_per_run:g}: run {release.flower_run} began in an "
            "earlier version, whose ledger does not fix the plan of a run, and by Renyi "
            "divergences its releases would spend more; start another run"
        )
    if (in_run := composed(run, release.delta)) > budget.epsilon_per_run * EPSILON_TOLERANCE:
        raise BudgetError(
            f"epsilon-per-run = {budget.epsilon_per_run:g}: this run's releases would spend "
            f"{in_run:.4g}"
        )
    return total


def _check_used_once(entries: Sequence[Entry], release: Release) -> None:
    """Raise PolicyError for a round that a proposal has paid for in another run: people allowed one.

    A run that is resumed goes on with later rounds of the same proposal. What a site reports before
    the first round may be reported again.
    """
    if not (used := release.proposal):
        return
    for entry in entries:
        if used in entry.get("proposals", ()):
            raise PolicyError(
                f"proposal {used[:8]} was used before this ledger was reopened; another run needs a "
                "proposal of its own"
            )
        elsewhere = entry["flower_run"] != release.flower_run
        same_round = entry.get("round") == release.round != 0
        if entry.get("proposal") == used and same_round and elsewhere:
            raise PolicyError(
                f"proposal {used[:8]} allows one run, and run {entry['flower_run']} has had "
                f"round {release.round} of it; another run needs a proposal of its own"
            )


def _check_unit(entries: Sequence[Entry], release: Release) -> None:
    """Raise BudgetError for another unit than that of earlier releases: what one of them costs the
    other is not in the ledger. An image changes its bag, and a record its patient, by a removal and
    an addition; five images of a bag cost it five times what one costs.
    """
    units = [entry["unit"] for entry in entries if entry["kind"] == "release" and entry["events"]]
    if others := [unit for unit in units if unit != release.unit]:
        raise BudgetError(
            f"{len(others)} releases protected single {others[0]}s before, so no total can be guaranteed "
            f"to {release.unit}s, for a ledger counts one unit; set `unit` in the node-config as before, or "
            "let a person decide what is spent, with `site ledger reopen`"
        )


def _check_selection(entries: Sequence[Entry], release: Release) -> None:
    """Raise PolicyError for a release without privacy that selects other records than the first one
    since a person decided about this ledger: the difference of both may be one record.
    """
    decided = max((at for at, e in enumerate(entries) if e["kind"] == "decision"), default=-1)
    first: dict[str, str] = {}
    for entry in entries[decided + 1 :]:
        first = {**entry.get("selection", {}), **first}
    for key, now in release.selection.items():
        if first.get(key, now) != now:
            raise PolicyError(
                f"exact-runs-may-differ = false: an earlier run without noise had {key} = "
                f"{first[key]}, this one has {now}, and the difference of both may be a single record; "
                "run with the same, or with epsilon; `site ledger forget` accepts the difference once, "
                "exact-runs-may-differ = true in this site's policy always"
            )


def _check_plan(entries: Sequence[Entry], this: Entry) -> None:
    """Raise BudgetError unless a release follows the plan that the first charged release of its run
    fixed.
    """
    before = _of_run(entries, this["flower_run"])
    steps = [entry for entry in before if not _is_first_round(entry)]
    # Other rounds may cost more than a first one, so they never take its place.
    planned = 1 if _is_first_round(this) else this["rounds"] - _has_first_round(this)
    if not all(_may_be_one(this["run"], entry["run"]) for entry in before):
        raise BudgetError(
            f"run {this['flower_run']} began with the settings {before[0]['run'][:SHORT]}, this "
            f"release has {this['run'][:SHORT]}: the noise of a run is fixed when it begins; start another run"
        )
    if before and _is_first_round(this):
        raise BudgetError(
            f"run {this['flower_run']} has begun, and its first round can be released only once"
        )
    if len(steps) >= planned:
        raise BudgetError(
            f"the claim of run {this['flower_run']} is for the {planned} private releases of one "
            f"kind that its settings plan, and {len(steps)} have left; start another run"
        )
    if steps and list(this["events"]) != list(steps[0]["events"]):
        raise BudgetError(
            f"round {this['round']} of run {this['flower_run']} has other noise than the rounds "
            "before it"
        )


def _exact(entries: Sequence[Entry]) -> bool:
    """Whether rule 1 of the filter applies. The first release decides its form: the plan of its run
    is known by then.
    """
    private = [entry for entry in entries if entry["events"]]
    if not private:
        return True
    first, *later = private
    if _is_gaussian(first):
        return all(event["sample_rate"] == 1 for entry in private for event in entry["events"])
    return _one_plan(private) and not any(map(_is_first_round, later))


def _of_run(entries: Sequence[Entry], flower_run: str) -> list[Entry]:
    """The private releases of a run."""
    return [
        entry
        for entry in entries
        if entry["kind"] == "release" and entry["events"] and entry["flower_run"] == flower_run
    ]


def _one_plan(entries: Sequence[Entry]) -> bool:
    """Whether private entries follow a plan that the first of them fixed before its result: all
    have its full digest, or may have, and all its cost.
    """
    first = entries[0]
    runs = [entry.get("run", "") for entry in entries]
    if len(runs[0]) == FULL and all(run == runs[0] for run in runs):
        return True
    return all(_may_be_one(run, runs[0]) for run in runs) and all(
        _events(entry) == _events(first) for entry in entries
    )


def _events(entry: Entry) -> list[GaussianEvent]:
    return [GaussianEvent(**event) for event in entry["events"]]


def _counted(entries: Sequence[Entry], budget: Budget) -> list[GaussianEvent]:
    """The noise of all releases as the total counts it, see `Budget.bags`."""
    found = []
    for entry in entries:
        unsure = budget.bags and entry.get("unit") == "record" and "selection" not in entry
        found += [
            replace(event, noise_multiplier=event.noise_multiplier / (1 + unsure))
            for event in _events(entry)
        ]
    return found


def _may_be_one(run: str, other: str) -> bool:
    """Whether two names may be of the same settings; where one is short, as far as it goes."""
    return run[:SHORT] == other[:SHORT] if SHORT in (len(run), len(other)) else run == other


def _is_gaussian(first: Entry) -> bool:
    """Whether this entry, the first of all, decides for the Gaussian form of rule 1: a decision, or
    a release of a run of which no round samples records. Older entries lack `sample_rate`.
    """
    if first["kind"] == "decision":
        return True
    return float(first.get("sample_rate", 0.0 if _is_first_round(first) else 1.0)) == 1 and all(
        event["sample_rate"] == 1 for event in first["events"]
    )


def _is_first_round(entry: Entry) -> bool:
    """Whether a release is the first round of a run whose first round has another cost."""
    return _has_first_round(entry) and entry["round"] == 1


def _has_first_round(entry: Entry) -> bool:
    """Whether the first round of its run has another cost than the others."""
    method = entry["method"]
    of_method = method in METHODS and METHODS[method].usual.messages.first is not None
    return of_method or bool(entry.get("opens", False))
