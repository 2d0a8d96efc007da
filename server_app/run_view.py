"""A run folder read back for the report: whatever is there, with a note for what is not."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import RunError

Json = dict[str, Any]
OUTCOMES = {"invited": "no reply", "replied": "used", "rejected": "rejected", "dropped": "dropped", "late": "late"}
TROUBLES = ("rejected", "dropped", "late", "no reply")
METHODS = {
    "fedpft": "FedPFT",
    "kd": "Knowledge distillation",
    "local": "Training alone",
    "ensemble": "The ensemble of heads",
    "average": "The average of heads",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fedyogi": "FedYogi",
    "fedsgd": "FedSGD",
    "scaffold": "SCAFFOLD",
    "dsfl": "DSFL",
    "fedbe": "FedBE",
    "fedkt": "FedKT",
    "fedlambda": "FedLambda",
    "knn-per": "kNN-Per",
    "dp-fedavg": "DP-FedAvg",
    "dp-fedprox": "DP-FedProx",
    "fedlap": "FedLAP",
    "dpcvae": "DP-CVAE",
    "dpcgan": "DP-CGAN",
}


@dataclass(frozen=True)
class Site:
    """What the run folder tells about one site; None where it tells nothing."""

    name: str
    status: str
    troubles: tuple[tuple[str, str], ...]
    bytes: float | None
    seconds: float | None
    accuracy: float | None
    counts: Mapping[str, float]

    @property
    def label(self) -> str:
        """Return the name as it can stand in a sentence."""
        return f"site {self.name}" if self.name.isdecimal() else self.name

    @property
    def records(self) -> float | None:
        """Return how many records the site's surrogate stands for."""
        return sum(self.counts.values()) if self.counts else None


@dataclass(frozen=True)
class Run:
    """A run folder in memory, as far as it could be read; `notes` says what could not."""

    metrics: Json
    manifest: Json
    projection: Json
    sites: tuple[Site, ...]
    failure: str | None
    notes: tuple[str, ...]

    def number(self, *keys: str) -> float | None:
        """Return the finite number at `keys` in the metrics, or None."""
        return as_number(at(self.metrics, *keys))

    def numbers(self, *keys: str) -> dict[str, float]:
        """Return the finite numbers of the table at `keys` in the metrics."""
        return as_numbers(at(self.metrics, *keys))

    @property
    def accuracy(self) -> float | None:
        """Return the model's accuracy on the test split or, where there is none, the mean over the sites' own."""
        local = list(self.numbers("accuracy", "per_site").values())
        model = self.number("accuracy", "model")
        return model if model is not None else sum(local) / len(local) if local else None

    @property
    def used(self) -> int:
        """Return how many sites the result rests on; for a run that failed, how many had replied."""
        used = self.number("sites", "used") if self.failure is None else None
        return int(sum(site.status in ("used", "replied") for site in self.sites) if used is None else used)

    @property
    def invited(self) -> int:
        """Return how many sites were asked."""
        invited = self.number("sites", "invited")
        return int(len(self.sites) if invited is None else invited)

    @property
    def classes(self) -> list[str]:
        """Return the class names in the order of the labels; without a manifest, those the sites counted."""
        listed = [str(name) for name in as_list(self.manifest.get("classes"))]
        return listed or sorted({name for site in self.sites for name in site.counts}, key=natural_order)

    @property
    def sends_surrogates(self) -> bool:
        """Return whether what the sites sent stands for their data, rather than being a model."""
        return str(self.metrics.get("method") or "fedpft") in ("fedpft", "fedlap", "dpcvae", "dpcgan")

    @property
    def method(self) -> str:
        """Return the method as people write it."""
        name = str(self.metrics.get("method") or at(self.manifest, "config", "method") or "This run")
        return METHODS.get(name, name)


def read_run(run_dir: Path) -> Run:
    """Read what there is of a run folder. Raises RunError when it holds neither metrics, manifest nor events."""
    parts = ("metrics.json", "manifest.json", "events.jsonl")
    if not any((run_dir / part).is_file() for part in parts):
        what = "holds none of " + ", ".join(parts) if run_dir.is_dir() else "does not exist"
        raise RunError(f"{str(run_dir)!r} is no run folder: it {what}; give a folder that a run has written")
    notes: list[str] = []
    metrics, manifest = (_load(run_dir / part, notes) for part in parts[:2])
    events = _events(run_dir / parts[2], notes)
    projection = _load(run_dir / "projection.json", notes) if (run_dir / "projection.json").exists() else {}
    failure = None
    if metrics.get("status") != "ok":
        said = [str(e["reason"]) for e in events if e.get("event") == "failed" and "site" not in e and e.get("reason")]
        fallback = "it ended before its result was written" if not metrics else "no reason was recorded"
        failure = str(metrics.get("failure") or (said[-1] if said else fallback))
    return Run(metrics, manifest, projection, _sites(metrics, events), failure, tuple(notes))


def _load(path: Path, notes: list[str]) -> Json:
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return {}
    try:
        value = _clean(json.loads(path.read_text(encoding="utf-8", errors="replace")))
    except (ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return {}
    if not isinstance(value, dict):
        notes.append(f"{path.name} holds no object")
        return {}
    return value


def _events(path: Path, notes: list[str]) -> list[Json]:
    if not path.is_file():
        notes.append(f"{path.name} is missing")
        return []
    events, broken = [], 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            event = _clean(json.loads(line)) if line.strip() else None
        except (ValueError, RecursionError):
            event = "broken"
        if isinstance(event, dict):
            events.append(event)
        elif event is not None:
            broken += 1
    if broken:
        notes.append(f"{path.name} has {broken} unreadable line{'s' * (broken > 1)}, left out here")
    return events


def _clean(value: Any) -> Any:
    """Replace what cannot be shown (control characters, text direction marks, lone surrogates) in all strings."""
    if isinstance(value, str):
        return "".join(c if c.isprintable() else " " if c.isspace() else "\ufffd" for c in value)
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return {_clean(key): _clean(item) for key, item in value.items()} if isinstance(value, dict) else value


def _sites(metrics: Json, events: Sequence[Json]) -> tuple[Site, ...]:
    accuracy, up = as_numbers(at(metrics, "accuracy", "per_site")), as_numbers(at(metrics, "bytes", "up_per_site"))
    told: dict[str, list[Json]] = {name: [] for name in (*accuracy, *up)}
    # Who answers late has been given up, perhaps before it said its name.
    names = {str(event["before"]): str(event.get("site")) for event in events if "before" in event}
    for event in events:
        if "site" in event:
            name = str(event["site"])
            told.setdefault(names.get(name, name), []).append(event)
    return tuple(_site(name, told[name], metrics, accuracy, up) for name in sorted(told, key=natural_order))


def _site(name: str, told: Sequence[Json], metrics: Json, accuracy: Mapping[str, float], up: Mapping[str, float]) -> Site:
    known = [(OUTCOMES.get(str(event.get("event"))), event) for event in told]
    outcomes = [(what, str(event.get("reason") or "no reason given")) for what, event in known if what]
    status = outcomes[-1][0] if outcomes else "used"
    troubles = [(what, why) for what, why in outcomes if what in TROUBLES[:-1]]
    if status == "no reply":
        troubles.append((status, "invited, but nothing came back"))
    if status == "used" and metrics.get("status") != "ok":
        status = "replied"
    replies = [e for e in told if e.get("event") == "replied"]
    sent, took = ([n for e in replies if (n := as_number(e.get(key))) is not None] for key in ("bytes", "seconds"))
    return Site(
        name=name,
        status=status,
        troubles=tuple(dict.fromkeys(troubles)),
        bytes=up.get(name, sum(sent) if sent else None),
        seconds=sum(took) if took else None,
        accuracy=accuracy.get(name),
        counts=as_numbers(next((reply["counts"] for reply in reversed(replies) if "counts" in reply), None)),
    )


def flat_keys(settings: Json, prefix: str = "") -> Json:
    """Flatten sections to dotted keys and lists of names to "a,b", as they stand in the run-config."""
    flat: Json = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= flat_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flat


def at(value: Any, *keys: str) -> Any:
    """Return what lies at `keys` in nested tables, or None."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def as_table(value: Any) -> Json:
    """Return a table as it is, anything else as an empty one."""
    return value if isinstance(value, dict) else {}


def as_list(value: Any) -> list[Any]:
    """Return a list as it is, anything else as an empty one."""
    return value if isinstance(value, list) else []


def as_number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def as_numbers(value: Any) -> dict[str, float]:
    """Return the entries of a table that are finite numbers."""
    return {str(key): number for key, item in as_table(value).items() if (number := as_number(item)) is not None}


def natural_order(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which "site 10" follows "site 9"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
