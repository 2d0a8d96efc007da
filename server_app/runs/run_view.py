"""Read a run folder: leniently with notes for the report, strictly for learning again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import RunError
from common.methods import METHODS
from common.methods.fedpft import SOLVERS_IN_WORDS
from server_app.runs.event_tail import PARTS, EventFile
from server_app.runs.json_values import Json, as_list, as_number, as_numbers, at, clean, natural_order
from server_app.runs.state import SiteState, state_of

OUTCOMES = {"invited": "no reply", "replied": "used"} | {each: each for each in ("rejected", "dropped", "late", "absent")}
# Heads at a site with a generator, by the records that they are trained on, and their keys in metrics.json.
DOWNSTREAM = {"own": "accuracy-local", "synthetic": "accuracy-synthetic", "mixed": "accuracy-mixed"}
TROUBLES = ("rejected", "dropped", "late", "absent", "no reply")


@dataclass(frozen=True)
class SiteView:
    """Data of one site in the run folder; None for missing values."""

    name: str
    status: str
    troubles: tuple[tuple[str, str], ...]
    bytes: float | None
    seconds: float | None
    accuracy: float | None
    counts: Mapping[str, float]

    @property
    def label(self) -> str:
        """Return the name for use in a sentence."""
        return f"site {self.name}" if self.name.isdecimal() else self.name

    @property
    def records(self) -> float | None:
        """Return the number of records that the site's surrogate represents."""
        return sum(self.counts.values()) if self.counts else None


@dataclass(frozen=True)
class Run:
    """The readable parts of a run folder. notes: the parts that could not be read."""

    metrics: Json
    manifest: Json
    projection: Json
    sites: tuple[SiteView, ...]
    failure: str | None
    notes: tuple[str, ...]

    def number(self, *keys: str) -> float | None:
        """Return the finite number at `keys` in the metrics, or None."""
        return as_number(at(self.metrics, *keys))

    def numbers(self, *keys: str) -> dict[str, float]:
        """Return the finite numbers of the table at `keys` in the metrics."""
        return as_numbers(at(self.metrics, *keys))

    def downstream(self, site: str) -> dict[str, float]:
        """Return the accuracies at a site by the records of its head: own, synthetic, mixed; empty without a generator."""
        row = as_numbers(at(self.metrics, "downstream", site))
        return {name: row[key] for name, key in DOWNSTREAM.items() if key in row}

    @property
    def tested(self) -> str:
        """Return what each site has evaluated on its own test records, in words."""
        name = str(self.metrics.get("method") or "")
        return METHODS[name].usual.combination.tested if name in METHODS else "the model of the run"

    @property
    def accuracy(self) -> float | None:
        """Return the model's accuracy on the test split or, without one, the mean of the accuracies at the sites."""
        local = list(self.numbers("accuracy", "per_site").values())
        model = self.number("accuracy", "model")
        return model if model is not None else sum(local) / len(local) if local else None

    @property
    def used(self) -> int:
        """Return how many sites were used for the result; for a failed run, how many had replied."""
        used = self.number("sites", "used") if self.failure is None else None
        return int(sum(site.status in ("used", "replied") for site in self.sites) if used is None else used)

    @property
    def invited(self) -> int:
        """Return how many sites were invited."""
        invited = self.number("sites", "invited")
        return int(len(self.sites) if invited is None else invited)

    @property
    def classes(self) -> list[str]:
        """Return the class names in the order of the labels; without a manifest, those in the sites' counts."""
        listed = [str(name) for name in as_list(self.manifest.get("classes"))]
        return listed or sorted({name for site in self.sites for name in site.counts}, key=natural_order)

    @property
    def head(self) -> str:
        """Return how the head was found, and the shrinkage of its covariance; empty if the method has no choice."""
        found = SOLVERS_IN_WORDS.get(str(at(self.metrics, "learning", "solver") or ""), "")
        shrinkage = self.number("learning", "shrinkage")
        return found if not found or shrinkage is None else f"{found}, shrinkage {shrinkage:.3g}"

    @property
    def sends_surrogates(self) -> bool:
        """Return whether the sites sent surrogates of their data, not models."""
        spec = METHODS.get(str(self.metrics.get("method") or "fedpft"))
        return spec is not None and spec.usual.combination.makes_surrogates

    @property
    def method(self) -> str:
        """Return the display name of the method."""
        name = str(self.metrics.get("method") or at(self.manifest, "config", "method") or "This run")
        return METHODS[name].title if name in METHODS else name


def read_run(run_dir: Path) -> Run:
    """Read all readable parts of a run folder. Raises RunError when it has neither metrics, manifest nor events."""
    if not any((run_dir / part).is_file() for part in PARTS):
        what = "holds none of " + ", ".join(PARTS) if run_dir.is_dir() else "does not exist"
        raise RunError(f"{str(run_dir)!r} is not a run folder: it {what}; give a folder that a run has written")
    notes: list[str] = []
    from server_app.lifecycle.ending import settled

    metrics, manifest = (_load(run_dir / part, notes) for part in PARTS[:2])
    metrics = clean(settled(run_dir, metrics))
    events = _events(run_dir / PARTS[2], notes)
    projection = _load(run_dir / "projection.json", notes) if (run_dir / "projection.json").exists() else {}
    failure = None
    if metrics.get("status") != "ok":
        reasons = [
            str(e["reason"])
            for e in events
            if e.get("event") in ("failed", "interrupted") and "site" not in e and e.get("reason")
        ]
        fallback = "the run ended before it wrote its result" if not metrics else "no reason was recorded"
        failure = str(metrics.get("failure") or (reasons[-1] if reasons else fallback))
    return Run(metrics, manifest, projection, _sites(metrics, events), failure, tuple(notes))


def _load(path: Path, notes: list[str]) -> Json:
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return {}
    try:
        value = clean(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} is not a JSON object")
        return {}
    return value


def _events(path: Path, notes: list[str]) -> list[Json]:
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return []
    file = EventFile(path)
    events = file.read(to_the_end=True)
    if file.broken:
        notes.append(f"{path.name} has {file.broken} unreadable line{'s' * (file.broken > 1)}, left out here")
    return events


def _sites(metrics: Json, events: Sequence[Json]) -> tuple[SiteView, ...]:
    accuracy, up = as_numbers(at(metrics, "accuracy", "per_site")), as_numbers(at(metrics, "bytes", "up_per_site"))
    states = {name: SiteState(name) for name in (*accuracy, *up)} | state_of(events).sites
    return tuple(_site(states[name], metrics, accuracy, up) for name in sorted(states, key=natural_order))


def _site(state: SiteState, metrics: Json, accuracy: Mapping[str, float], up: Mapping[str, float]) -> SiteView:
    outcomes = [(OUTCOMES[what], why or "no reason given") for what, why in state.outcomes]
    status = outcomes[-1][0] if outcomes else "used"
    troubles = [(what, why) for what, why in outcomes if what in TROUBLES[:-1]]
    if status == "no reply":
        troubles.append((status, "invited, but did not reply"))
    if status == "used" and metrics.get("status") != "ok":
        status = "replied"
    return SiteView(
        name=state.name,
        status=status,
        troubles=tuple(dict.fromkeys(troubles)),
        bytes=up.get(state.name, state.bytes),
        seconds=state.seconds,
        accuracy=accuracy.get(state.name),
        counts=state.counts,
    )


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read one of a run's JSON files. Raises RunError when it is missing or not a JSON object."""
    try:
        content = json.loads((folder / name).read_text())
    except (OSError, ValueError) as error:
        raise RunError(f"{folder} is not a run folder: {name} cannot be read ({type(error).__name__})") from None
    if not isinstance(content, dict):
        raise RunError(f"{folder / name} is not a JSON object")
    return content


def read_payloads(folder: Path) -> list[bytes]:
    """Stored surrogates of a run, ordered by site. Raises RunError when there is none."""
    files = sorted((folder / "surrogates").glob("*.pb"), key=lambda path: (len(path.name), path.name))
    if not files:
        raise RunError(f"{folder} has no surrogates")
    return [path.read_bytes() for path in files]
