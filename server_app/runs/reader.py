"""Read a run folder, whole or while it grows. Reading changes nothing, and a killed run is read as
interrupted, with the result that its events give.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.fedpft import SOLVERS_IN_WORDS
from fedsurrogate.common.renamed import of_today
from fedsurrogate.common.run import stored_run

from .scores import accuracy_of
from .state import (
    EVENTS,
    MANIFEST,
    METRICS,
    PARTS,
    EventFile,
    Json,
    RunState,
    SiteState,
    as_list,
    as_number,
    as_numbers,
    as_table,
    at,
    clean,
    natural_order,
    read_object,
    state_of,
)
from .writer_lock import last_sign, writer_is_gone

VANISHED = (
    "the process that wrote this run has ended without recording why: killed, out of "
    "memory, or a power cut"
)
UNFINISHED = "no reply before the run ended"


def why_killed(folder: Path) -> str:
    """Why a run has ended that has recorded no end.

    The writer's existence is looked up between two looks at the metrics: it may have recorded the
    end since the first.

    Args:
        folder: a run folder.

    Returns:
        The reason, with the time of the last sign of life if there is one; empty for other runs.

    Raises:
        OSError: metrics.json may not be read.
    """
    if not (_is_unfinished(folder) and writer_is_gone(folder) and _is_unfinished(folder)):
        return ""
    sign = last_sign(folder)
    return VANISHED + (f"; last sign of life {sign:%Y-%m-%d %H:%M:%S} UTC" if sign else "")


def _is_unfinished(folder: Path) -> bool:
    return bool(read_object(folder / METRICS)[0].get("status", "running") == "running")


def interrupted_metrics(folder: Path, metrics: Json, why: str) -> Json:
    """What metrics.json holds after an interruption.

    Args:
        folder: the run folder.
        metrics: content of metrics.json so far; empty if there is none.
        why: the reason of the interruption.

    Returns:
        For a run that has written a result, its metrics with another status; else what the events
        record of sites, rounds and bytes.

    Raises:
        RunError: the events may not be read.
    """
    if metrics.get("status", "running") == "running":
        metrics = metrics | _from_events(folder, why)
    return metrics | {"status": "interrupted", "failure": why}


def _from_events(folder: Path, why: str) -> Json:
    """What the events say of a run whose app was ended before it could write its metrics; empty for
    a run whose manifest cannot be read.
    """
    events = EventFile(folder / EVENTS).read(to_the_end=True)
    state = state_of(events)
    seconds = (
        0.0
        if state.first is None or state.last is None
        else (state.last - state.first).total_seconds()
    )
    try:
        config = stored_run(as_table(read_object(folder / MANIFEST)[0]["config"]))
    except (OSError, ValueError, TypeError, LookupError, FedSurrogateError):
        return {}
    from .metrics import End, make_metrics

    known = make_metrics(config, _outcome(folder, state, events), End("interrupted", why, seconds))
    known["accuracy"]["per_site"] = {
        site.name: site.accuracy for site in state.sites.values() if site.accuracy is not None
    }
    if known["privacy"] is None and state.epsilon and config.settings.epsilon:
        known["privacy"] = _spent(config.plan.mechanism_name, state.epsilon, config.settings.delta)
    return known


def _rounds(events: Sequence[Json]) -> list[Json]:
    """The rounds that were done, as metrics.json lists them."""
    return [
        {key: value for key, value in event.items() if key not in ("time", "event")}
        for event in events
        if event.get("event") == "round"
    ]


def _outcome(folder: Path, state: RunState, events: Sequence[Json]) -> Any:
    from fedsurrogate.strategies.base.outcome import Outcome

    here = [site for site in state.sites.values() if site.doing != "absent"]
    sites = [_killed_site(each) for each in here]
    # Sites choose their names unless keys are registered: before its first reply such a site has
    # none.
    sites += [
        _killed_site(SiteState(f"unnamed {number}"))
        for number in range(1, state.invited - len(here) + 1)
    ]
    registered = any(
        event.get("names") == "registered" for event in events if event.get("event") == "invited"
    )
    hops: list[dict[str, str | float]] = [
        {"site": str(event["site"]), "accuracy": as_number(event.get("accuracy")) or 0.0}
        for event in events
        if event.get("event") == "replied"
        and "hop" in event
        and as_number(event.get("accuracy")) is not None
    ]
    return Outcome(
        dict(enumerate(sites)),
        surrogates=_surrogates(folder),
        rounds=_rounds(events),
        hops=hops,
        stopped=state.stopped,
        names="registered" if registered else "claimed" if state.invited else "",
        absent=sorted(site.name for site in state.sites.values() if site.doing == "absent"),
    )


def _killed_site(state: SiteState) -> Any:
    from fedsurrogate.strategies.base.outcome import Site

    site = Site(state.name, bytes_up=int(state.bytes or 0), records=int(sum(state.counts.values())))
    site.reason, site.late = state.reason or UNFINISHED, state.doing == "late"
    if state.fate == "used":
        site.fate, site.reason = "used", ""
    elif state.fate == "rejected":
        site.fate = "rejected"
    return site


def _surrogates(folder: Path) -> list[Any]:
    """The stored surrogates that can be read; those of sites that were rejected are not stored."""
    from fedsurrogate.common.wire.records import unpack_surrogate

    surrogates = []
    for file in sorted((folder / "surrogates").glob("*.pb")):
        with suppress(OSError, FedSurrogateError):
            surrogates.append(unpack_surrogate(file.read_bytes()))
    return surrogates


def _spent(mechanism: str, epsilon: float, delta: float) -> Json:
    """The privacy card of a run in rounds: what its rounds have spent. Its sites' claims are in
    their replies only.
    """
    return {
        "mechanism": mechanism,
        "epsilon": epsilon,
        "delta": delta,
        "per_site": {},
        "not_covered": [],
    }


OUTCOMES = {"invited": "no reply", "replied": "used"} | {
    each: each for each in ("rejected", "dropped", "late", "absent")
}
# Heads at a site with a generator, by the records that they are trained on, and their keys in
# metrics.json.
DOWNSTREAM = {"own": "accuracy-local", "synthetic": "accuracy-synthetic", "mixed": "accuracy-mixed"}
TROUBLES = ("rejected", "dropped", "late", "absent", "no reply")
PROJECTION = "projection.json"
# How often a run that goes on is looked at.
POLL_SECONDS = 0.3


@dataclass(frozen=True)
class RunFolder:
    """The readable parts of a run folder, with texts that are safe to show.

    Attributes:
        metrics: content of metrics.json; of a killed run what its events record.
        manifest: content of manifest.json.
        projection: content of projection.json, the points of the picture of features.
        sites: by name, each with its part in the run.
        failure: why the run did not succeed; None for a run that did.
        notes: the parts that could not be read, and why.
    """

    metrics: Json
    manifest: Json
    projection: Json
    sites: tuple[SiteState, ...]
    failure: str | None
    notes: tuple[str, ...]

    def number(self, *keys: str) -> float | None:
        """Return the finite number at `keys` in the metrics, or None."""
        return as_number(at(self.metrics, *keys))

    def numbers(self, *keys: str) -> dict[str, float]:
        """Return the finite numbers of the table at `keys` in the metrics."""
        return as_numbers(at(self.metrics, *keys))

    def downstream(self, site: str) -> dict[str, float]:
        """Return the accuracies at a site by the records of its head.

        Args:
            site: its name.

        Returns:
            Accuracies in [0, 1] under own, synthetic and mixed; empty without a generator.
        """
        row = as_numbers(at(self.metrics, "downstream", site))
        return {name: row[key] for name, key in DOWNSTREAM.items() if key in row}

    @property
    def sources(self) -> list[str]:
        """Return the records of heads, as in `downstream`, of which a site has an accuracy."""
        measured = {source for site in self.sites for source in self.downstream(site.name)}
        return [source for source in DOWNSTREAM if source in measured]

    @property
    def config(self) -> Json:
        """Return the settings of the run."""
        return as_table(self.manifest.get("config"))

    @property
    def metric_values(self) -> list[tuple[str, str, Json]]:
        """Return how well a model of another target than classes answers: "all" or a site, an answer,
        and its metrics by name.
        """
        places = {"all": at(self.metrics, "metric_values", "all")}
        places |= as_table(at(self.metrics, "metric_values", "per_site"))
        return [
            (place, output, as_table(own))
            for place, outputs in places.items()
            for output, own in as_table(outputs).items()
        ]

    @property
    def tested(self) -> str:
        """Return what each site has evaluated on its own test records, in words."""
        name = str(self.metrics.get("method") or "")
        return METHODS[name].usual.combination.tested if name in METHODS else "the model of the run"

    @property
    def accuracy(self) -> float | None:
        """Return the model's accuracy on the test split or, without one, the mean of the accuracies
        at the sites.
        """
        return accuracy_of(as_table(self.metrics.get("accuracy")))

    @property
    def used(self) -> int:
        """Return how many sites were used for the result; for a failed run, how many had replied."""
        used = self.number("sites", "used") if self.failure is None else None
        return int(
            sum(site.status in ("used", "replied") for site in self.sites) if used is None else used
        )

    @property
    def invited(self) -> int:
        """Return how many sites were invited."""
        invited = self.number("sites", "invited")
        return int(len(self.sites) if invited is None else invited)

    @property
    def classes(self) -> list[str]:
        """Return the class names in the order of the labels; without a manifest, those in the
        sites' counts.
        """
        listed = [str(name) for name in as_list(self.manifest.get("classes"))]
        return listed or sorted(
            {name for site in self.sites for name in site.counts}, key=natural_order
        )

    @property
    def head(self) -> str:
        """Return how the head was computed, the shrinkage of its covariance, and what the sites'
        statistics decided, or lack; empty if the method has no choice.
        """
        solver = SOLVERS_IN_WORDS.get(str(at(self.metrics, "learning", "solver") or ""), "")
        shrinkage = self.number("learning", "shrinkage")
        reason = str(at(self.metrics, "learning", "reason") or "")
        if not solver:
            return ""
        shrunk = "" if shrinkage is None else f", shrinkage {shrinkage:.3g}"
        return f"{solver}{shrunk}{f'; {reason}' if reason else ''}"

    @property
    def sends_surrogates(self) -> bool:
        """Return whether the sites sent surrogates of their data, not models."""
        spec = METHODS.get(str(self.metrics.get("method") or "fedpft"))
        return spec is not None and spec.usual.combination.makes_surrogates

    @property
    def method(self) -> str:
        """Return the display name of the method."""
        name = str(
            self.metrics.get("method") or at(self.manifest, "config", "method") or "This run"
        )
        return METHODS[name].title if name in METHODS else name


class LiveRun:
    """A run folder that may still grow.

    Args:
        folder: a run folder.

    Attributes:
        folder: the run folder.
        state: the state at the last `refresh`.
        metrics: content of metrics.json at the last `refresh`; of a killed run what its events
            record.
        manifest: content of manifest.json, once it could be read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = RunState()
        self.metrics: Json = {}
        self.manifest: Json = {}
        self._events = EventFile(folder / EVENTS)

    def refresh(self) -> list[Json]:
        """Read new files and lines, and update the state.

        Returns:
            The new events.

        Raises:
            RunError: the folder is gone, or a file may not be read.
        """
        try:
            # Read metrics before events: after metrics report the end there are no more events, so
            # none is missed.
            self.metrics = clean(current_metrics(self.folder)[0])
            self.manifest = self.manifest or clean(read_object(self.folder / MANIFEST)[0])
        except OSError as error:
            raise RunError(f"{error.filename} cannot be read: {error.strerror}") from None
        events = self._events.read()
        if not self.folder.is_dir():
            raise RunError(f"the run folder {self.folder} is gone")
        for event in events:
            self.state.take(event)
        self.state.conclude(self.metrics)
        return events

    @property
    def budget(self) -> float | None:
        """Return the epsilon in the run's settings, None without one."""
        epsilon = as_table(self.manifest.get("config")).get("epsilon")
        return float(epsilon) if isinstance(epsilon, int | float) and epsilon else None


def run_folders(output: Path) -> list[Path]:
    """The run folders in an output folder, newest first: their names begin with their creation
    time.
    """
    return sorted(
        (manifest.parent for manifest in output.glob(f"*/{MANIFEST}")),
        key=lambda folder: folder.name,
    )[::-1]


def find_run(path: Path, known: Collection[Path] = ()) -> Path | None:
    """The run folder `path`, or the newest in the output folder `path`.

    Args:
        path: a run folder or an output folder; it need not exist yet.
        known: run folders that are passed over in an output folder.

    Returns:
        The run folder; None when there is none yet.

    Raises:
        RunError: `path` is not a folder.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{str(path)!r} is a file; give a run folder, or the folder of all runs")
    if any((path / part).is_file() for part in PARTS):
        return path
    return next((folder for folder in run_folders(path) if folder not in known), None)


def current_metrics(folder: Path) -> tuple[Json, str]:
    """The metrics of a run, true also if it was killed; see `killed`.

    Args:
        folder: a run folder.

    Returns:
        The metrics, and why metrics.json could not be read, empty if it could.

    Raises:
        OSError: metrics.json may not be read.
        RunError: the run was killed, and its events may not be read.
    """
    # Asked before: a run may end meanwhile, and then its metrics record that.
    why = why_killed(folder)
    metrics, problem = read_object(folder / METRICS)
    if why and metrics.get("status", "running") == "running":
        metrics = interrupted_metrics(folder, metrics, why)
    return metrics, problem


def read_run(folder: Path) -> RunFolder:
    """Read all readable parts of a run folder.

    Args:
        folder: a run folder.

    Returns:
        Its content, with a note for each part that could not be read.

    Raises:
        RunError: it has neither metrics, manifest nor events.
    """
    if not any((folder / part).is_file() for part in PARTS):
        what = "holds none of " + ", ".join(PARTS) if folder.is_dir() else "does not exist"
        raise RunError(
            f"{str(folder)!r} is not a run folder: it {what}; give a folder that a run has written"
        )
    stored, problem = current_metrics(folder)
    metrics, notes = clean(stored), [problem]
    manifest, problem = read_object(folder / MANIFEST)
    manifest |= {"config": of_today(as_table(manifest["config"]))} if "config" in manifest else {}
    notes.append(problem)
    events, problem = _events(folder / EVENTS)
    notes.append(problem)
    projection, problem = read_object(folder / PROJECTION)
    if (folder / PROJECTION).exists():
        notes.append(problem)
    sites, failure = _sites(metrics, events), _failure(metrics, events)
    return RunFolder(
        metrics, clean(manifest), clean(projection), sites, failure, tuple(filter(None, notes))
    )


def _events(path: Path) -> tuple[list[Json], str]:
    """The events, and what could not be read of them."""
    if not path.is_file():
        return [], f"{path.name} is missing"
    file = EventFile(path)
    events = file.read(to_the_end=True)
    lines = f"{file.broken} unreadable line{'s' * (file.broken > 1)}"
    return events, f"{path.name} has {lines}, left out here" if file.broken else ""


def _failure(metrics: Json, events: Sequence[Json]) -> str | None:
    if metrics.get("status") == "ok":
        return None
    reasons = [
        str(e["reason"])
        for e in events
        if e.get("event") in ("failed", "interrupted") and "site" not in e and e.get("reason")
    ]
    fallback = (
        "the run ended before it wrote its result" if not metrics else "no reason was recorded"
    )
    return str(metrics.get("failure") or (reasons[-1] if reasons else fallback))


def _sites(metrics: Json, events: Sequence[Json]) -> tuple[SiteState, ...]:
    accuracy, up = (
        as_numbers(at(metrics, "accuracy", "per_site")),
        as_numbers(at(metrics, "bytes", "up_per_site")),
    )
    states = {name: SiteState(name) for name in (*accuracy, *up)} | state_of(events).sites
    return tuple(
        _site(states[name], metrics, accuracy, up) for name in sorted(states, key=natural_order)
    )


def _site(
    state: SiteState, metrics: Json, accuracy: Mapping[str, float], up: Mapping[str, float]
) -> SiteState:
    outcomes = [(OUTCOMES[what], why or "no reason given") for what, why in state.outcomes]
    status = outcomes[-1][0] if outcomes else "used"
    troubles = [(what, why) for what, why in outcomes if what in TROUBLES[:-1]]
    if status == "no reply":
        troubles.append((status, "invited, but did not reply"))
    if status == "used" and metrics.get("status") != "ok":
        status = "replied"
    state.status, state.troubles = status, tuple(dict.fromkeys(troubles))
    state.bytes, state.accuracy = up.get(state.name, state.bytes), accuracy.get(state.name)
    state.tested = as_numbers(metrics.get("tested")).get(state.name)
    state.counted = as_numbers(at(metrics, "card", "records")).get(state.name)
    return state


def read_payloads(folder: Path) -> list[bytes]:
    """Stored surrogates of a run.

    Args:
        folder: a run folder.

    Returns:
        The payloads, ordered by site.

    Raises:
        RunError: there is none.
    """
    files = sorted((folder / "surrogates").glob("*.pb"), key=lambda path: natural_order(path.stem))
    if not files:
        raise RunError(f"{folder} has no surrogates")
    return [path.read_bytes() for path in files]
