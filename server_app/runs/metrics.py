"""The content of metrics.json and projection.json, with the run card and the privacy card. This module
uses no clock, and no file of a run.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fedsurrogate.common.methods.method import Plan
from fedsurrogate.common.models.classifiers import Classifier, target_of_model
from fedsurrogate.common.privacy.accounting import gaussian_epsilon
from fedsurrogate.common.privacy.gaussian_mechanism import Noisy
from fedsurrogate.common.privacy.mechanism import NOT_COVERED, Mechanism, relation_of
from fedsurrogate.common.run import Run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.targets.metrics import added, facts_of, metrics_of
from fedsurrogate.strategies.base.outcome import ALIKE, Fate, Outcome, Site

from .scores import UNMEASURED, accuracy_of, answers_at_chance, may_be_chance
from .state import as_numbers, as_table, at

# Mean of max(0, z) for a standard normal z; and how far above it a count is more than noise.
MEAN_OF_HALF, DEVIATIONS = 0.4, 3.0


# Classes without records anywhere, and how that is known. "exact": the sites' counts show it. "noisy": their
# noisy counts together are no more than noise, so records may be there. "unknown": no count of a single site
# or class was reported, as in secure aggregation.
MissingClasses = tuple[tuple[str, ...], Literal["exact", "noisy", "unknown"]]


def missing_classes(
    wanted: Collection[str],
    counts: Sequence[tuple[Mapping[str, float], float | None]],
    private: bool,
) -> MissingClasses:
    """Find the classes of which no site has a record. It uses reported counts only.

    Args:
        wanted: names of the classes of the model, and of those that the settings list.
        counts: for each site that has reported counts: records by class, and the standard deviation
            of their noise; None if unknown.
        private: whether the run adds noise.

    Example:
        >>> missing_classes(["a", "b"], [({"a": 3.0}, None)], False)
        (('b',), 'exact')
        >>> missing_classes(["a", "b"], [({"a": 90.0, "b": 4.0}, 5.0)], True)
        (('b',), 'noisy')
        >>> missing_classes(["a", "b"], [], True)
        ((), 'unknown')
    """
    if private:
        noisy = [(records, noise) for records, noise in counts if records and noise]
        # Counts below zero are recorded as zero, so noise alone has a mean above it.
        bound = MEAN_OF_HALF * sum(noise for _, noise in noisy) + DEVIATIONS * math.sqrt(
            sum(noise**2 for _, noise in noisy)
        )
        known, totals = "noisy" if noisy else "unknown", [records for records, _ in noisy]
    else:
        totals, bound = [records for records, _ in counts if records], 0.0
        known = "exact" if totals else "unknown"
    names = tuple(
        name
        for name in wanted
        if totals and sum(max(0.0, each.get(name, 0.0)) for each in totals) <= bound
    )
    return names, known  # type: ignore[return-value]


# The card is red if at least this share of all records is missing.
MUCH = 0.1
UNKNOWN: MissingClasses = ((), "unknown")

# Harm of a site, a share of records, from which a line says it.
WORTH_A_LINE = 0.01


def run_card(
    sites: Collection[Site],
    expected: int,
    absent: Sequence[str] = (),
    names: str = "",
    missing: MissingClasses = UNKNOWN,
    at_chance: bool | None = False,
) -> dict[str, Any]:
    """The run card: site names under used, late, rejected and dropped, with reasons, and the share
    of missing data.

    Args:
        sites: of the run, as far as they have connected.
        expected: number of sites in the settings, 0 for any.
        absent: names of registered sites that have not connected.
        names: "registered" if the names belong to registered keys, else "claimed".
        missing: classes of which no site has a record.
        at_chance: whether the model may be no better than chance; None where nobody knows.

    Returns:
        The content of "card" in metrics.json. missing_share: of all records. A site that has not
        reported its number of records, or never connected, is counted like the largest site that
        has. capped: the share of its weight that a site keeps. suspects: why these sites are
        left out. effects: by site, what a fifth of the others lose by it, such as a share of their records,
        the share of its own that it gains by being there, and the share of its weight that is kept.
        without_records: classes of which no site has a record; records_by_class: whether that is known
        from "exact" or "noisy" counts, or "unknown". at_chance: as given. state:
        "green" when no record and no class is missing and the model is better than chance for all that
        is known, "red" when a tenth of the records or more is missing, else "amber".
    """
    reported = [site.records for site in sites if site.records]
    largest = max(reported, default=1)
    used = sum(site.records or largest for site in sites if site.fate == "used")
    never_came = max(0, expected - len(sites))
    lost = never_came * largest + sum(
        site.records or largest for site in sites if site.fate != "used"
    )
    share = lost / max(1, used + lost)
    return {
        "state": "red"
        if share >= MUCH
        else "amber"
        if lost or missing[0] or at_chance is not False
        else "green",
        "missing_share": round(share, 4),
        "invited": len(sites),
        "never_came": never_came,
        "absent": list(absent),
        "names": names,
        "used": sorted(site.name for site in sites if site.fate == "used"),
        "late": {site.name: site.reason for site in sites if site.late},
        "rejected": {site.name: site.reason for site in sites if site.fate == "rejected"},
        "dropped": {
            site.name: site.reason for site in sites if site.fate == "dropped" and not site.late
        },
        "records": {site.name: site.records for site in sites if site.records},
        "capped": {site.name: round(site.kept_share, 6) for site in sites if site.kept_share < 1},
        "suspects": {site.name: site.suspect for site in sites if site.suspect},
        "effects": {site.name: site.effect.rounded() for site in sites if site.effect is not None},
        "without_records": list(missing[0]),
        "records_by_class": missing[1],
        "at_chance": at_chance,
    }


def missing_line(card: Mapping[str, Any]) -> str:
    """The share of missing records, the sites they belong to, classes without records, and whether
    the model may be no better than chance, in one line.

    Args:
        card: the run card of `run_card`.

    Returns:
        The line.

    Example:
        >>> card = {"rejected": {"north": "no key"}, "dropped": {}, "late": {}}
        >>> missing_line(card | {"never_came": 1, "missing_share": 0.25})
        'about 25% of all records are missing: north, 1 that never connected'
        >>> card |= {"rejected": {}, "without_records": ["rare"], "records_by_class": "noisy"}
        >>> missing_line(card | {"never_came": 0, "missing_share": 0.0})
        'perhaps no site has a record of rare'
    """
    parts = []
    names = sorted({**card["rejected"], **card["dropped"], **card["late"]})
    if card["never_came"]:
        absent = f" (not connected: {', '.join(card['absent'])})" if card.get("absent") else ""
        names.append(f"{card['never_came']} that never connected{absent}")
    if names:
        parts.append(
            f"about {card['missing_share']:.0%} of all records are missing: {', '.join(names)}"
        )
    if without := card.get("without_records"):
        perhaps = "perhaps " if card["records_by_class"] == "noisy" else ""
        parts.append(f"{perhaps}no site has a record of {', '.join(without)}")
    if card.get("at_chance"):
        parts.append("the model may be no better than chance; the report says why")
    elif card.get("at_chance", False) is None:
        parts.append(UNMEASURED)
    return "; ".join(parts)


def effect_lines(card: Mapping[str, Any]) -> list[str]:
    """What the defence did to whom, and what each site changes, a line for each site that harms others
    by a point or more, or that keeps less than its weight.

    Args:
        card: the run card of `run_card`.

    Example:
        >>> card = {"effects": {"photo": {"harm": 0.019, "gain": 0.23, "kept": 1.0}}, "suspects": {}}
        >>> effect_lines(card)
        ['photo: kept; costs the others 1.9 points, gains 23.0 on its own records']
    """
    lines = []
    for name, effect in card.get("effects", {}).items():
        if effect["harm"] < WORTH_A_LINE and effect["kept"] == 1:
            continue
        if name in card["suspects"]:
            lines.append(
                f"{name}: left out, costs the others {100 * effect['harm']:.1f} points; "
                "`coordinator refit RUN --defence none` puts it back"
            )
            continue
        kept = "kept" if effect["kept"] == 1 else f"kept with {effect['kept']:.0%} of its weight"
        lines.append(
            f"{name}: {kept}; costs the others {100 * effect['harm']:.1f} points, gains "
            f"{100 * effect['gain']:.1f} on its own records"
        )
    return lines


Json = dict[str, Any]

DERIVED = "; and all results computed from these, such as the model, any number of times"
COVERS = tomllib.loads(Path(__file__).with_name("covers.toml").read_text(encoding="utf-8"))
SINGLE_RECORDS = (
    "a patient with several records at a site that protects records: k records together have k "
    "times the epsilon, and a larger delta; with patient-column a site protects patients instead"
)
IN_CLEAR = (
    "class sizes and which classes a site has: they are sent without noise",
    "a class with one record more or less: the guarantee is for the content of one record, and "
    "class sizes are public",
)
SIMULATED = (
    "accuracies, times and the plot of real features in this report: exact, because the "
    "run was a simulation"
)


def privacy_card(
    plan: Plan,
    own: Settings,
    surrogates: Sequence[AnySurrogate],
    model: Classifier | None,
    simulated: bool = False,
    trained: Mapping[str, Mechanism] | None = None,
) -> Json | None:
    """The privacy card of a run: the content of "privacy" in metrics.json.

    Signal-to-noise is estimated from the noisy values only, so it costs no budget.

    Args:
        plan: of the run.
        own: settings of the run.
        surrogates: those that were used.
        model: the learned model; None without one.
        simulated: whether the run was a simulation, which metrics values that a deployment does
            not.
        trained: claims of sites that trained in rounds, by name; their epsilon covers all rounds
            together.

    Returns:
        The card: epsilon, delta, neighbouring relation ("relation"), what the guarantee covers and
        does not cover, the claim of each site, and dropped classes or labels; None when no used
        surrogate has a privacy claim, and no site trained with one.
    """
    claims: dict[str, tuple[AnySurrogate | None, Mechanism]] = {
        s.header.site: (s, s.claim) for s in surrogates if s.claim is not None
    }
    claims |= {site: (None, claim) for site, claim in (trained or {}).items() if site not in claims}
    if not claims:
        return None
    units = {claim.unit for _, claim in claims.values()}
    open_ends = [*NOT_COVERED]
    if "record" in units:
        open_ends.insert(0, SINGLE_RECORDS)
    if plan.mechanism_name == "theorem-4.1":
        open_ends[:0] = IN_CLEAR
    if simulated:
        open_ends.append(SIMULATED)
    if own.noise_seed:
        open_ends.insert(0, f"anything: noise-seed = {own.noise_seed} makes the noise repeatable")
    return {
        "mechanism": plan.mechanism_name,
        # If the settings fix the noise, this is less than the epsilon that the run may spend.
        "epsilon": max(claim.epsilon for _, claim in claims.values()),
        "delta": own.delta,
        "relation": relation_of(plan.mechanism_name, units),
        "covers": COVERS[_covered(plan.mechanism_name, plan)] + DERIVED,
        "not_covered": open_ends,
        "per_site": {site: _site(surrogate, claim) for site, (surrogate, claim) in claims.items()},
        "dropped_classes": _dropped(surrogates, plan.mechanism_name, own.classes, model),
    }


def _covered(mechanism: str, plan: Plan) -> str:
    """The key of COVERS for a run of this method."""
    if plan.sent_by_solver:
        return "summed-steps" if mechanism == "secure-aggregation" else "steps"
    if mechanism != "secure-aggregation":
        return mechanism
    if plan.counts:
        return "summed-counts"
    gradients = plan.kind == "rounds" and not plan.training.start
    return "summed-gradients" if gradients else "secure-aggregation"


def mean_noise(claim: Mechanism, dimension: int, records: float) -> float:
    """Norm (root mean square) of the noise on the mean of features.

    Args:
        claim: the privacy mechanism.
        dimension: of the features, and so of their mean (dimension,).
        records: number of records in the mean, each of norm one.

    Returns:
        The norm.

    Example:
        >>> mechanism = Mechanism("sums", 1.0, 1e-5, "record", 2.0, 0.0, {"sums": (3.0, 1.0)})
        >>> mean_noise(mechanism, dimension=4, records=10)
        0.6
    """
    return _sigmas(claim)["sums"] * math.sqrt(dimension) / records


def _site(surrogate: AnySurrogate | None, claim: Mechanism) -> Json:
    card: Json = {
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "unit": claim.unit,
        "mechanism": claim.name,
        "noise_multiplier": claim.noise_multiplier,
        "noise": _sigmas(claim),
        "signal_to_noise": {
            noisy.name: noisy.signal_to_noise() for noisy in _released(surrogate, claim)
        }
        if surrogate
        else {},
    }
    if claim.name == "theorem-4.1":
        # The published noise is too large for a small epsilon, and too small for an epsilon above
        # 40.
        card["epsilon_tight"] = gaussian_epsilon(claim.noise_multiplier, claim.delta)
    return card


def _sigmas(claim: Mechanism) -> dict[str, float]:
    """Noise of each statistic as a sum over records, for every mechanism, so that mechanisms can be
    compared.
    """
    if claim.name == "theorem-4.1":
        # Means and covariances of n records have noise sigma / n: n times the joint sensitivity is
        # 2 sqrt(5).
        sigma = 2 * math.sqrt(5) * claim.noise_multiplier
        return {"sums": sigma, "squares": sigma}
    return claim.sigmas


def _released(surrogate: AnySurrogate, claim: Mechanism) -> list[Noisy]:
    """The noisy sums of a surrogate; for a surrogate of means, the sums computed from these.

    There, sizes are left out: they have no noise, or only sizes that stood out from the noise were
    released. Variances are left out too: noise that made them negative was cut off, so their noise
    cannot be estimated.
    """
    sigmas = _sigmas(claim)
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        values = {"counts": sums.counts, "sums": sums.sums} | (
            {} if sums.squares is None else {"squares": sums.squares}
        )
    else:
        table = surrogate.mixtures
        sizes = table.weights * table.counts[table.labels]
        values = {"sums": table.means * sizes[:, None]}
    return [Noisy(name, value, sigmas[name], 1.0) for name, value in sorted(values.items())]


def _dropped(
    surrogates: Sequence[AnySurrogate],
    mechanism: str,
    classes: Sequence[str],
    model: Classifier | None,
) -> list[str]:
    """Classes or labels of the run that the model has not learned: no site has them, or the noise
    hides them. The rows of a code, such as cells of time and event, are no answers of a model.
    """
    if model is None or mechanism in ("theorem-4.1", "dp-sgd", "counts"):
        return []
    if target := target_of_model(model):
        return list(facts_of(target).get("left-out", ()))
    learned = set(model.header.classes)
    if mechanism == "sums":
        classes = classes or (surrogates[0] if surrogates else model).header.classes
    elif mechanism != "secure-aggregation":
        # Without classes in the settings, the head has exactly the classes that some site has
        # released.
        learned = {name for surrogate in surrogates for name in surrogate.header.classes}
    return [name for name in classes if name not in learned]


FATES: tuple[Fate, ...] = ("used", "rejected", "dropped")
RANKS_WITHIN = "AUROC and concordance compare records of one site, not of different sites"
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
        rounds = [
            {
                "round": 1,
                "accuracy": outcome.accuracy.get("model"),
                "bytes_up": outcome.bytes_up,
                "seconds": seconds,
            }
        ]
    privacy = _privacy(config.plan, config.settings, outcome, simulated)
    # Of a run that has not come to its end, the sites that have not replied may have these classes.
    answers = _metric_values(outcome)
    missing, downstream = UNKNOWN, _downstream(sites)
    chance: bool | None = False
    accuracy: Json = outcome.accuracy | {
        "per_site": {
            site.name: site.correct / site.tested
            for site in sites
            if site.tested and not site.measured
        }
    }
    if end.status == "ok" and config.target is not None:
        together = at(answers, "metric_values", "all")
        chance = answers_at_chance(config.target.name, as_table(together)) != ""
    elif end.status == "ok":
        missing = _missing_classes(config.settings.classes, outcome, counts or {}, privacy)
        known = list((counts or {}).values())
        classes = 0 if outcome.model is None else len(outcome.model.header.classes)
        chance = may_be_chance(outcome.quality, accuracy, known, classes)
    measured = outcome.quality or answers or downstream or accuracy_of(accuracy) is not None
    if end.status == "ok" and privacy and not (measured or config.plan.counts):
        alike = outcome.learning.get(ALIKE)
        chance = None if alike is None else bool(alike)
    metrics: Json = {
        "schema": 1,
        "method": config.method.name,
        "status": end.status,
        "sites": {"invited": len(sites)} | {fate: outcome.count(fate) for fate in FATES},
        "card": run_card(sites, config.settings.site_count, outcome.absent, names, missing, chance),
        "accuracy": accuracy,
        "tested": {site.name: site.tested for site in sites if site.tested and not site.measured},
        "bytes": {
            "up": outcome.bytes_up,
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
    metrics |= downstream
    metrics |= answers
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
    return {"classes": outcome.model.header.classes, **outcome.points}


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


def _metric_values(outcome: Outcome) -> Json:
    """How well a model of another target than classes answers: at each site, and on all test
    records; "ranks" says in words where these compare records of one site only.
    """
    rows = {site.name: site.measured for site in outcome.sites.values() if site.measured}
    if not (rows or outcome.measured):
        return {}
    together = outcome.measured or added(rows.values())
    return {
        "metric_values": {
            "all": metrics_of(together),
            "per_site": {name: metrics_of(row) for name, row in rows.items()},
            "ranks": RANKS_WITHIN if len(rows) > 1 and not outcome.measured else "",
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
