"""The content of metrics.json and projection.json. This module uses no files and no clock."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedsurrogate.common.methods.method import Plan
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.targets.measures import added, metrics_of
from fedsurrogate.strategies.base.outcome import Fate, Outcome, Site

from .card import UNKNOWN, MissingClasses, missing_classes, privacy_card, run_card
from .scores import may_be_chance
from .state import as_numbers, as_table

Json = dict[str, Any]
FATES: tuple[Fate, ...] = ("used", "rejected", "dropped")
FIDELITY = ("sliced", "sinkhorn")
# In a privacy card: the sites of a run that was continued.
EARLIER = "sites of earlier rounds"


@dataclass(frozen=True)
class End:
    """How a run ended.

    Attributes:
        status: "running" (not ended), "ok", "failed" or "interrupted".
        failure: why the status is not "ok".
        seconds: total of the run.
        command: seconds since the start of the command that made the run, if one did: with the
            start of all processes.
    """

    status: str = "running"
    failure: str = ""
    seconds: float = 0.0
    command: float | None = None


def make_metrics(
    config: Run, outcome: Outcome, end: End, counts: Mapping[str, Mapping[str, float]] | None = None
) -> Json:
    """The content of metrics.json.

    Args:
        config: the run.
        outcome: sites and results so far.
        end: how the run ended.
        counts: records by class that each site has reported, by its name.

    Returns:
        The content. Parts that a run does not have are left out. Accuracies are shares in [0, 1],
        sizes are in bytes, times in seconds.
    """
    sites, seconds = outcome.sites.values(), round(end.seconds, 3)
    simulated = any(site.simulated for site in sites)
    names = "" if simulated and outcome.names == "claimed" else outcome.names
    rounds = outcome.rounds
    if outcome.model is not None and not rounds:
        sent = sum(site.bytes_up for site in sites)
        rounds = [
            {
                "round": 1,
                "accuracy": outcome.accuracy.get("model"),
                "bytes_up": sent,
                "seconds": seconds,
            }
        ]
    privacy = _privacy(config.plan, config.settings, outcome, simulated)
    # Of a run that has not come to its end, the sites that have not replied may have these classes.
    missing, chance = UNKNOWN, False
    accuracy: Json = outcome.accuracy | {
        "per_site": {
            site.name: site.correct / site.tested
            for site in sites
            if site.tested and not site.measured
        }
    }
    if end.status == "ok" and config.target is None:
        missing = _missing_classes(config.settings.classes, outcome, counts or {}, privacy)
        known = list((counts or {}).values())
        classes = 0 if outcome.model is None else len(outcome.model.header.classes)
        chance = may_be_chance(outcome.quality, accuracy, known, classes)
    metrics: Json = {
        "schema": 1,
        "method": config.method.name,
        "status": end.status,
        "sites": {"invited": len(sites)} | {fate: outcome.count(fate) for fate in FATES},
        "card": run_card(sites, config.settings.site_count, outcome.absent, names, missing, chance),
        "accuracy": accuracy,
        "tested": {site.name: site.tested for site in sites if site.tested and not site.measured},
        "bytes": {
            "up": sum(site.bytes_up for site in sites),
            "down": sum(site.bytes_down for site in sites),
            "up_per_site": {site.name: site.bytes_up for site in sites},
            "compare": outcome.compare_bytes,
        },
        "versions": {site.name: site.version for site in sites if site.version},
        "privacy": privacy,
        "rounds": rounds,
        "seconds": {key: round(value, 3) for key, value in outcome.seconds.items()}
        | {"total": seconds},
    }
    if end.command is not None:
        metrics["seconds"]["command"] = round(end.command, 3)
    metrics |= _downstream(sites)
    metrics |= _measures(outcome)
    optional = {
        "learning": outcome.learning,
        "parameters": outcome.parameters,
        "failure": end.failure,
        "stopped": outcome.stopped,
        "hops": outcome.hops,
        "data": outcome.data,
        "quality": {} if outcome.quality is None else outcome.quality.facts(),
    }
    return metrics | {name: value for name, value in optional.items() if value}


def make_projection(outcome: Outcome) -> Json:
    """The content of projection.json: the points of the report's feature plot; empty without
    points.
    """
    if outcome.model is None or not outcome.points:
        return {}
    return {"classes": outcome.model.header.classes} | {
        kind: asdict(points) for kind, points in outcome.points.items()
    }


def _privacy(plan: Plan, own: Settings, outcome: Outcome, simulated: bool) -> Json | None:
    """The privacy card. For a run that stopped early it shows the epsilon spent, which is less than
    the budget. Where no site of this run took part in a round, it is that of the run it continues.
    """
    trained = {site.name: site.claim for site in outcome.sites.values() if site.claim is not None}
    if not trained and outcome.earlier is not None:
        trained = {EARLIER: outcome.earlier}
    card = privacy_card(plan, own, outcome.surrogates, outcome.model, simulated, trained)
    if card and outcome.stopped and outcome.rounds and (spent := outcome.rounds[-1].get("epsilon")):
        card["epsilon"] = spent
    return card


def _missing_classes(
    classes: Sequence[str],
    outcome: Outcome,
    counts: Mapping[str, Mapping[str, float]],
    privacy: Json | None,
) -> MissingClasses:
    """Classes of the model and of the settings without records at the sites that reported counts."""
    learned = () if outcome.model is None else outcome.model.header.classes
    per_site = as_table((privacy or {}).get("per_site"))
    reported = [
        (each, as_numbers(as_table(per_site.get(name)).get("noise")).get("counts"))
        for name, each in counts.items()
    ]
    wanted = dict.fromkeys([*learned, *classes])
    return missing_classes(wanted, reported, bool(privacy))


def _measures(outcome: Outcome) -> Json:
    """How well a model of another target than classes answers: at each site, and on all test
    records; ranks compare records of one site only, unless a simulation tests all together.
    """
    rows = {site.name: site.measured for site in outcome.sites.values() if site.measured}
    if not (rows or outcome.measured):
        return {}
    together = outcome.measured or added(rows.values())
    return {
        "measures": {
            "all": metrics_of(together),
            "per_site": {name: metrics_of(row) for name, row in rows.items()},
        }
    }


def _downstream(sites: Collection[Site]) -> Json:
    """Accuracies with a generator's embeddings at each site, and the distance of these embeddings
    to real ones.
    """
    rows = {site.name: site.downstream for site in sites if site.downstream}
    if not rows:
        return {}
    measured = [row for row in rows.values() if all(name in row for name in FIDELITY)]
    if not measured:
        return {"downstream": rows}
    return {
        "downstream": rows,
        "fidelity": {name: sum(row[name] for row in measured) / len(measured) for name in FIDELITY},
    }
