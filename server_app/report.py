"""Run folder -> report.html: one file, no network, pictures first. What is missing or broken is said, never fatal."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.config import RunConfig
from common.errors import RunError
from server_app import plots
from server_app.plots import human_bytes, human_seconds, percent

Json = dict[str, Any]
OUTCOMES = {"invited": "no reply", "replied": "used", "rejected": "rejected", "dropped": "dropped", "late": "late"}
TROUBLES = ("rejected", "dropped", "late", "no reply")
METHODS = {"fedpft": "FedPFT", "fedlap": "FedLAP", "dpcvae": "DP-CVAE", "fedavg": "FedAvg"}
PICTURES = {
    "outcomes": "accuracy against traffic",
    "time": "where the time went",
    "accuracy": "accuracy at each site",
    "counts": "classes at each site",
}
PHASES = {"extract": "extracting features", "fit": "fitting surrogates", "learn": "learning from surrogates"}
NAMED_IN_BANNER = 24
BASELINES = {"oracle": "pooled real features", "ensemble": "ensemble of heads", "average": "average of heads"}


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
        return _number(_at(self.metrics, *keys))

    def numbers(self, *keys: str) -> dict[str, float]:
        """Return the finite numbers of the table at `keys` in the metrics."""
        return _numbers(_at(self.metrics, *keys))

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
        listed = [str(name) for name in _list(self.manifest.get("classes"))]
        return listed or sorted({name for site in self.sites for name in site.counts}, key=_natural)

    @property
    def method(self) -> str:
        """Return the method as people write it."""
        name = str(self.metrics.get("method") or _at(self.manifest, "config", "method") or "This run")
        return METHODS.get(name, name)


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into `run_dir` and return its path. The same folder always gives the same bytes.

    Raises RunError when `run_dir` is no run folder.
    """
    from jinja2 import Environment, StrictUndefined

    from server_app.report_page import PAGE

    run = read_run(run_dir)
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=human_bytes, seconds=human_seconds, percent=percent)
    html = environment.from_string(PAGE).render(_page(run, run_dir.resolve().name))
    path = run_dir / "report.html"
    path.write_text(html, encoding="utf-8", newline="\n")
    return path


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
    accuracy, up = _numbers(_at(metrics, "accuracy", "per_site")), _numbers(_at(metrics, "bytes", "up_per_site"))
    told: dict[str, list[Json]] = {name: [] for name in (*accuracy, *up)}
    for event in events:
        if "site" in event:
            told.setdefault(str(event["site"]), []).append(event)
    return tuple(_site(name, told[name], metrics, accuracy, up) for name in sorted(told, key=_natural))


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
    sent, took = ([n for e in replies if (n := _number(e.get(key))) is not None] for key in ("bytes", "seconds"))
    return Site(
        name=name,
        status=status,
        troubles=tuple(dict.fromkeys(troubles)),
        bytes=up.get(name, sum(sent) if sent else None),
        seconds=sum(took) if took else None,
        accuracy=accuracy.get(name),
        counts=_numbers(replies[-1].get("counts")) if replies else {},
    )


def _page(run: Run, folder: str) -> Json:
    from markupsafe import Markup

    pictures = _pictures(run)
    changed, unchanged = _settings(_table(run.manifest.get("config")))
    private = _table(_at(run.metrics, "privacy", "per_site"))
    measured = sorted((s for s in run.sites if s.accuracy is not None), key=lambda site: site.accuracy or 0.0)
    return {
        "run": run,
        "folder": folder,
        "pictures": {key: [Markup(svg) for svg in svgs] for key, svgs in pictures.items()},
        "undrawn": [what for key, what in PICTURES.items() if key not in pictures],
        "lowest": measured[:3] if len(measured) > plots.NAMED_SITES else [],
        "troubles": _troubles(run),
        "sites": sorted(run.sites, key=lambda site: not site.troubles),
        "changed": changed,
        "unchanged": unchanged,
        "versions": sorted(_table(run.manifest.get("versions")).items()),
        "unprotected": _who([s.name for s in run.sites if s.status in ("used", "replied") and s.name not in private]),
        "private_sites": {name: _numbers(private[name]) for name in sorted(private, key=_natural)},
    }


def _troubles(run: Run) -> list[tuple[str, str, str]]:
    """Return (who, what, why), sites with the same trouble together."""
    groups: dict[tuple[str, str], list[str]] = {}
    for site in run.sites:
        for trouble in site.troubles:
            groups.setdefault(trouble, []).append(site.name)
    ordered = sorted(groups.items(), key=lambda group: (TROUBLES.index(group[0][0]), group[0][1]))
    lines = [(_who(names), what, why) for (what, why), names in ordered]
    for what in ("rejected", "dropped"):
        named = {name for (kind, _), names in ordered if kind == what for name in names}
        nameless = (run.number("sites", what) or 0) - len(named)
        if nameless > 0:
            lines.append((f"{nameless:.0f} more", what, "events.jsonl does not say which or why"))
    return lines


def _who(names: Sequence[str]) -> str:
    """Return names as one phrase; beyond a number nobody reads, the rest is left to the table."""
    shown = ", ".join(names[:NAMED_IN_BANNER])
    more = f" and {len(names) - NAMED_IN_BANNER} more (see Sites)" if len(names) > NAMED_IN_BANNER else ""
    numbers = ("site " if len(names) == 1 else "sites ") if names and all(name.isdecimal() for name in names) else ""
    return numbers + shown + more


def _pictures(run: Run) -> dict[str, tuple[str, ...]]:
    """Draw what the run has numbers for."""
    pictures: dict[str, tuple[str, ...]] = {}
    per_site = list(run.numbers("accuracy", "per_site").values())
    model = run.number("accuracy", "model")
    outcomes = [
        plots.Outcome(name, accuracy, run.number("bytes", "compare", key))
        for key, name in BASELINES.items()
        if (accuracy := run.number("accuracy", key)) is not None
    ]
    if run.accuracy is not None:
        outcomes.insert(0, plots.Outcome("this run", run.accuracy, run.number("bytes", "up"), ours=True))
    if outcomes:
        ends = (min(per_site), max(per_site)) if per_site and model is None else None
        pictures["outcomes"] = (plots.accuracy_against_bytes(outcomes, ends),)
    rows = list(run.sites)
    if len(rows) > plots.NAMED_SITES:
        rows.sort(key=lambda site: -1.0 if site.accuracy is None else site.accuracy, reverse=True)
    names = [site.label for site in rows]
    if per_site:
        line = ("global model" if model is not None else "mean of sites", run.accuracy) if run.accuracy else None
        notes = ["not measured" if site.status == "used" else site.status for site in rows]
        pictures["accuracy"] = (plots.site_accuracy(names, [site.accuracy for site in rows], notes, line),)
    classes = run.classes
    if classes and any(site.counts for site in rows):
        counts = np.array([[site.counts.get(c, 0.0 if site.counts else np.nan) for c in classes] for site in rows])
        pictures["counts"] = (plots.class_counts(names, classes, counts),)
    real, synthetic = (_points(run.projection.get(key)) for key in ("real", "synthetic"))
    if real and synthetic:
        named = [str(c) for c in _list(run.projection.get("classes"))]
        pictures["features"] = plots.features(real, synthetic, named or classes)
    seconds = {PHASES.get(name, name): value for name, value in run.numbers("seconds").items() if value > 0}
    total = seconds.pop("total", 0.0)
    if seconds:
        rest = total - sum(seconds.values())
        pictures["time"] = (plots.time_spent(seconds | ({plots.REST: rest} if rest > 0.01 * total else {})),)
    return pictures


def _points(value: Any) -> plots.Points | None:
    table = _table(value)
    columns = [_list(table.get(key)) for key in ("x", "y", "label")]
    rows = [
        (x, y, int(label))
        for x, y, label in zip(*([_number(value) for value in column] for column in columns), strict=False)
        if x is not None and y is not None and label is not None and label >= 0
    ]
    if not rows:
        return None
    x, y, label = (np.array(column) for column in zip(*rows, strict=True))
    return plots.Points(x.astype(np.float64), y.astype(np.float64), label.astype(np.int64))


def _settings(config: Json) -> tuple[list[tuple[str, str, str]], list[tuple[str, str]]]:
    """Return the settings that differ from their default (key, value, default), and the others (key, value)."""
    defaults = _flat(RunConfig().model_dump(by_alias=True))
    flat = dict(sorted(_flat(config).items()))
    changed = [(k, str(v), str(defaults.get(k, "unknown to this version"))) for k, v in flat.items() if v != defaults.get(k)]
    return changed, [(k, str(v)) for k, v in flat.items() if v == defaults.get(k)]


def _flat(settings: Json, prefix: str = "") -> Json:
    """Flatten sections to dotted keys and lists of names to "a,b", as they stand in the run-config."""
    flat: Json = {}
    for key, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
    return flat


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _table(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> float | None:
    """Return a finite number as it is, anything else as None."""
    fits = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if fits else None


def _numbers(value: Any) -> dict[str, float]:
    return {str(key): number for key, item in _table(value).items() if (number := _number(item)) is not None}


def _natural(name: str) -> list[tuple[int, int | str]]:
    """Sort key under which "site 10" follows "site 9"."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"(\d+)", name) if part]
