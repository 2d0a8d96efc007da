"""What follows from the settings of a run alone, as plain values by name. A table of a name becomes
`name.key`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from fedsurrogate.client_app.governance.gate import Gate
from fedsurrogate.client_app.governance.ledger import Ledger
from fedsurrogate.client_app.governance.policy import Policy
from fedsurrogate.client_app.governance.release import planned
from fedsurrogate.client_app.methods.job import SiteRequest
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.costs import costs
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.methods.counting import KINDS_OF_COUNTS
from fedsurrogate.common.methods.method import Field, Method, Plan, Sizes
from fedsurrogate.common.privacy.mechanism import STATED, Mechanism, relation_of
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.secure_aggregation.rules import (
    context_of,
    dimensions_of,
    local_epsilon,
    numbers_of,
    rules_of,
    shapes_of,
)
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import Scalar, flatten, known_keys
from fedsurrogate.common.terms import Term
from fedsurrogate.server_app.runs.plan import in_words, plan

Facts = dict[str, Any]
# A run of three sites with three classes, and features of dimension 8 of sixty records.
SITES, CLASSES, DIMENSION, RECORDS, OTHER_ROUNDS = 3, ("a", "b", "c"), 8, 60, 20
SMALLEST_CLASS = 5
# Beginnings of the names of facts that a solver finds: its last digits differ between processors.
SOLVED = ("claim", "events", "ledger", "plan.noise", "sum.local epsilon")


def methods() -> tuple[str, ...]:
    """Names of all methods."""
    return tuple(METHODS)


def kinds_of_counts() -> tuple[str, ...]:
    """Kinds of runs that count."""
    return tuple(KINDS_OF_COUNTS)


def setting_keys() -> tuple[str, ...]:
    """All keys of the settings."""
    return tuple(known_keys(Settings))


def facts(settings: Mapping[str, Scalar]) -> Facts:
    """Everything that follows from these settings. Raises ConfigError, whose text is pinned too."""
    run = parse_run(settings)
    method, plan = run.method, run.plan
    messages, combination, defences = plan.messages, plan.combination, plan.defences
    sizes = messages.sizes(len(CLASSES), DIMENSION, RECORDS)
    found: Facts = {
        "digest": run.digest,
        "method": f"{method.name}: {method.title}; {method.paper}; {plan.kind}",
        "resolved": _resolved(run, settings),
        "sends": _fields(messages.sends, sizes),
        "sends first": None if messages.first is None else _fields(messages.first, sizes),
        "parsed": _fields(messages.schema(), sizes),
        "receives": _fields(messages.receives, sizes),
        "result": _fields(messages.result, sizes),
        "adds up": _sums(combination.sums_in(2)),
        "adds up first": None if combination.first_sums is None else _sums(combination.sums_in(1)),
        "in words": [plan.variant, plan.head, combination.tested],
        "is": sorted(_properties(method, plan)),
        "sections": sorted(method.sections),
        "packages": list(plan.judging_packages),
        "allows": sorted(plan.allows),
        "defence": [run.defence, *defences.available, defences.reason],
        "mechanisms": [plan.mechanism_name],
        "relation": [
            relation_of(plan.mechanism_name, units)
            for units in (["record"], ["patient"], ["patient", "record"])
        ],
        "power": run.power,
        "work": asdict(plan.work(len(CLASSES), DIMENSION)),
        "plan": _plan(run),
        "classes": _classes(run),
    }
    found |= {"claim": _claim(run), "events": None, "ledger": _ledger(run), "sum": _sum(run)}
    if run.mechanism is not None:
        found["events"] = [list(asdict(event).values()) for event in run.mechanism.events]
    return dict(_flat(found))


def whole_digest(settings: Mapping[str, Scalar]) -> str:
    """The digest of which `digest` is the beginning."""
    return parse_run(settings).full_digest


def claims(settings: Mapping[str, Scalar]) -> list[Facts]:
    """The claim for records, for patients, and for records after a public mean; empty without
    privacy.
    """
    run = parse_run(settings)
    found = [
        run.mechanism_for("record"),
        run.mechanism_for("patient"),
        run.mechanism_for("record", "0f" * 8),
    ]
    return [_stated(claim) for claim in found if claim is not None]


def other_plans() -> list[Facts]:
    """The rows of a plan that depend on no setting: FedAvg of the same head, and raw features."""
    rows = costs(parse_run({}), DIMENSION, len(CLASSES), RECORDS, OTHER_ROUNDS)[1:]
    return [asdict(row) for row in rows]


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield prefix + name, list(value) if isinstance(value, tuple) else value


def _resolved(config: Run, settings: Mapping[str, Scalar]) -> Facts:
    """Settings that the others decide: those with another value than given, or than the default."""
    given = Settings().model_dump(by_alias=True, mode="json")
    before = flatten(given) | dict(settings)
    after = config.settings.flat()
    names = {"classes", "dataset", "fedpft.order", "fedlap.augment"}
    return {key: value for key, value in after.items() if value != before[key] and key not in names}


def _fields(fields: Iterable[Field], sizes: Sizes) -> list[str]:
    return [_field(field, sizes) for field in fields]


def _field(field: Field, sizes: Sizes) -> str:
    shape = ", ".join(
        f"{symbol}={sizes[symbol]}" if symbol in sizes else symbol for symbol in field.shape.split()
    )
    named = "" if field.prefix is None else f" named {field.prefix}..."
    between = (
        ""
        if (field.low, field.high) == (float("-inf"), float("inf"))
        else f" from {field.low} to {field.high}"
    )
    return f"{field.name} ({shape}) of {field.bits} bits{between}{named}"


def _sums(summed: Iterable[Term]) -> list[str]:
    return [f"{each.name} ({each.shape}) of degree {each.degree}" for each in summed]


def _properties(method: Method, plan: Plan) -> Iterable[str]:
    messages, combination = plan.messages, plan.combination
    names = {
        "only private": method.needs_budget,
        "stored": combination.stored,
        "a maker of surrogates": combination.makes_surrogates,
        "identified": messages.identifies,
        "of norm one": plan.training.unit_features,
        "adversarial": method.adversarial,
        "proximal": plan.training.proximal,
        "signed": messages.signs,
        "kept at sites": combination.keeps_result,
        "a sampler": combination.samples,
        "a count": plan.counts,
        "released once": plan.releases_once,
        "answered by files": plan.answers_files,
    }
    yield from (words for words, holds in names.items() if holds)
    yield f"a {method.fill(Settings(method=method.name)).fedavg.kind}"
    if combination.personal:
        yield "personal"
    if any(messages.member_bytes):
        yield f"summed at {messages.member_bytes[0]} and {messages.member_bytes[1]} bytes a member"


def _plan(config: Run) -> Facts:
    # The plan of a run that counts has no noise: it is of counts, and a plan's is of class means.
    rows = costs if config.plan.counts else plan
    own = rows(config, DIMENSION, len(CLASSES), RECORDS, OTHER_ROUNDS)[0]
    large = costs(config, 1280, 10, 5000, OTHER_ROUNDS)[0]
    words = in_words(config, own, DIMENSION, len(CLASSES), RECORDS)
    lines = {f"{number}": line for number, line in enumerate(words, 1)}
    return asdict(own) | {"words": lines, "large": [large.up, large.down]}


def _classes(config: Run) -> Facts:
    """Whether the release covers the names of classes, and the records that a class needs to be
    released.
    """
    policy = Policy(smallest_class=SMALLEST_CLASS, exact_counts=kinds_of_counts())
    # Without its ledger, which these questions do not reach.
    gate = Gate(policy, cast(Ledger, None))
    return {
        "all": config.plan.messages.all_classes,
        "smallest": gate.smallest_class(config.plan.mechanism_name),
        "exact": gate.exact_counts(config),
    }


def _claim(run: Run) -> Facts | None:
    if run.mechanism is None:
        return None
    return _stated(run.mechanism) | {"rounds": run.rounds if run.plan.kind == "rounds" else 1}


def _stated(mechanism: Mechanism) -> Facts:
    """What a message states of a mechanism."""
    return {"mechanism" if name == "name" else name: getattr(mechanism, name) for name in STATED}


def _ledger(config: Run) -> Facts:
    """The entries that a site plans for the first two rounds."""
    rounds = (1, 2) if config.plan.kind == "rounds" else (1,)
    return {f"{number}": _entry(config, number) for number in rounds}


def _entry(config: Run, number: int) -> Facts:
    request = SiteRequest(config, NodeConfig(), "north", flower_run="77", info={"round": number})
    entry = asdict(planned(request))
    found = {name: entry[name] for name in ("method", "round", "mechanism", "unit")}
    claim = config.mechanism
    noise = claim.noise if claim else {}
    # What the entry takes from elsewhere.
    assert (entry["run"], entry["flower_run"], entry["bytes"], entry["facts"]) == (
        config.full_digest,
        "77",
        0,
        {},
    )
    assert (entry["epsilon"], entry["delta"]) == (
        (claim.epsilon, claim.delta) if claim else (0.0, 0.0)
    )
    assert entry["sigmas"] == {name: sigma for name, (sigma, _) in noise.items()}
    assert entry["sensitivities"] == {name: sensitivity for name, (_, sensitivity) in noise.items()}
    assert bool(entry["events"]) == (claim is not None)
    if claim is not None:
        found |= {
            "events": [list(event.values()) for event in entry["events"]],
            "sample rate": entry["sample_rate"],
        }
    return found


def _sum(run: Run) -> Facts | None:
    if not run.settings.secure_aggregation:
        return None
    rules = rules_of(run.settings, SITES)
    rounds = (1, 2) if run.plan.combination.first_sums else (1,)
    return {
        "context": context_of(run, "sum 1").hex()[:16],
        "rules": list(asdict(rules).values()),
        "dimensions": dimensions_of(run.settings.features, run.settings.colluding, run.mechanism),
        "numbers": {
            f"{number}": [
                f"{name} {shapes_of(run.plan, len(CLASSES), DIMENSION, number)[name]} up to "
                f"{fixed.largest}"
                for name, fixed in numbers_of(run.plan, run.settings, SITES, number).items()
            ]
            for number in rounds
        },
        "steps": [each.step for each in numbers_of(run.plan, run.settings, SITES).values()],
        "local epsilon": local_epsilon(run.settings.epsilon, run.mechanism, rules),
    }
