"""What follows from the settings of a run alone, as plain values by name. A table of a name becomes `name.key`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, cast

from client_app.governance.gate import Gate
from client_app.governance.ledger import Ledger
from client_app.governance.policy import Policy
from client_app.governance.release import SurrogateRequest, planned
from client_app.node_config import NodeConfig
from common.costs import costs
from common.methods import METHODS
from common.methods.counting import KINDS_OF_COUNTS
from common.methods.method import Field, Method, Sizes, Summed
from common.privacy.mechanism import make_claim, plan_of, private_rounds, relation_of
from common.run import Run, parse_run
from common.secure_sum.of_run import context_of, dimensions_of, local_epsilon, numbers_of, rules_of, shapes_of
from common.settings.flat import Scalar, flatten, known_keys
from server_app.runs.plan import in_words, plan

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
    return tuple(known_keys(Run))


def facts(settings: Mapping[str, Scalar]) -> Facts:
    """Everything that follows from these settings. Raises ConfigError, whose text is pinned too."""
    config = parse_run(settings)
    spec = config.spec
    sizes = spec.sizes(config, len(CLASSES), DIMENSION, RECORDS)
    found: Facts = {
        "digest": config.digest,
        "method": f"{spec.name}: {spec.title}; {spec.paper}; {spec.kind}",
        "resolved": _resolved(config, settings),
        "sends": _fields(spec.sends(config), sizes),
        "sends first": None if spec.first_round is None else _fields(spec.first_round(config), sizes),
        "parsed": _fields(spec.schema(config), sizes),
        "receives": _fields(spec.receives(config), sizes),
        "result": _fields(spec.result(config), sizes),
        "adds up": _sums(spec.sums(config, 2)),
        "adds up first": None if spec.first_summed is None else _sums(spec.sums(config, 1)),
        "in words": [spec.variant(config), spec.head(config), spec.tested],
        "is": sorted(_properties(spec)),
        "sections": sorted(spec.sections),
        "packages": [*spec.packages(config), *spec.judging_packages],
        "allows": sorted(spec.allows),
        "defence": [config.defence, spec.default_defence, *spec.defences(config), spec.undefended],
        "mechanisms": [config.plan.mechanism_name, *spec.mechanisms],
        "relation": [
            relation_of(config.plan.mechanism_name, units) for units in (["record"], ["patient"], ["patient", "record"])
        ],
        "power": config.power,
        "work": asdict(spec.work(config, len(CLASSES), DIMENSION)),
        "plan": _plan(config),
        "classes": _classes(config),
    }
    found |= {"claim": _claim(config), "events": None, "ledger": _ledger(config), "sum": _sum(config)}
    if config.epsilon:
        found["events"] = [list(asdict(event).values()) for event in plan_of(config)]
    return dict(_flat(found))


def whole_digest(settings: Mapping[str, Scalar]) -> str:
    """The digest of which `digest` is the beginning."""
    return parse_run(settings).full_digest


def claims(settings: Mapping[str, Scalar]) -> list[Facts]:
    """The claim for records, for patients, and for records after a public centre; empty without privacy."""
    config = parse_run(settings)
    found = [make_claim(config, "record"), make_claim(config, "patient"), make_claim(config, "record", "0f" * 8)]
    return [asdict(claim) for claim in found if claim is not None]


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
    given = Run().model_dump(by_alias=True, mode="json")
    before = flatten(given) | dict(settings)
    after = flatten(config.model_dump(by_alias=True, mode="json"))
    names = {"classes", "dataset", "fedpft.order", "fedavg.augment", "fedlap.augment"}
    return {key: value for key, value in after.items() if value != before[key] and key not in names}


def _fields(fields: Iterable[Field], sizes: Sizes) -> list[str]:
    return [_field(field, sizes) for field in fields]


def _field(field: Field, sizes: Sizes) -> str:
    shape = ", ".join(f"{symbol}={sizes[symbol]}" if symbol in sizes else symbol for symbol in field.shape.split())
    named = "" if field.prefix is None else f" named {field.prefix}..."
    between = "" if (field.low, field.high) == (float("-inf"), float("inf")) else f" from {field.low} to {field.high}"
    return f"{field.name} ({shape}) of {field.bits} bits{between}{named}"


def _sums(summed: Iterable[Summed]) -> list[str]:
    return [f"{each.name} ({each.shape}) of degree {each.degree}" for each in summed]


def _properties(spec: Method) -> Iterable[str]:
    names = {
        "needs_budget": "only private",
        "stored": "stored",
        "makes_surrogates": "a maker of surrogates",
        "introduces": "introduced",
        "unit_features": "of norm one",
        "adversarial": "adversarial",
        "proximal": "proximal",
        "signs": "signed",
        "keeps_result": "kept at sites",
        "samples": "a sampler",
        "counts": "a count",
        "releases_once": "released once",
        "answers_files": "answered by files",
    }
    yield from (words for name, words in names.items() if getattr(spec, name))
    yield f"a {spec.network}"
    if spec.personal:
        yield "personal"
    if any(spec.member_bytes):
        yield f"summed at {spec.member_bytes[0]} and {spec.member_bytes[1]} bytes a member"


def _plan(config: Run) -> Facts:
    # The plan of a run that counts has no noise: it is of counts, and a plan's is of class means.
    rows = costs if config.plan.counts else plan
    own = rows(config, DIMENSION, len(CLASSES), RECORDS, OTHER_ROUNDS)[0]
    large = costs(config, 1280, 10, 5000, OTHER_ROUNDS)[0]
    words = in_words(config, own, DIMENSION, len(CLASSES), RECORDS)
    lines = {f"{number}": line for number, line in enumerate(words, 1)}
    return asdict(own) | {"words": lines, "large": [large.up, large.down]}


def _classes(config: Run) -> Facts:
    """Whether the release covers the names of classes, and the records that a class needs to be released."""
    policy = Policy(smallest_class=SMALLEST_CLASS, exact_counts=kinds_of_counts())
    # Without its ledger, which these questions do not reach.
    gate = Gate(policy, cast(Ledger, None))
    return {
        "all": config.plan.messages.all_classes(config),
        "smallest": gate.smallest_class(config.plan.mechanism_name),
        "exact": gate.exact_counts(config),
    }


def _claim(config: Run) -> Facts | None:
    claim = make_claim(config, "record")
    if claim is None:
        return None
    rounds = private_rounds(config) if config.plan.kind == "rounds" else 1
    return asdict(claim) | {"rounds": rounds}


def _ledger(config: Run) -> Facts:
    """The entries that a site plans for the first two rounds."""
    rounds = (1, 2) if config.plan.kind == "rounds" else (1,)
    return {f"{number}": _entry(config, number) for number in rounds}


def _entry(config: Run, number: int) -> Facts:
    request = SurrogateRequest(config, NodeConfig(), "north", "77", info={"round": number})
    entry = asdict(planned(request))
    found = {name: entry[name] for name in ("method", "round", "mechanism", "unit")}
    claim = make_claim(config, "record")
    noise = claim.noise if claim else {}
    # What the entry takes from elsewhere.
    assert (entry["run"], entry["flower_run"], entry["bytes"], entry["facts"]) == (config.digest, "77", 0, {})
    assert (entry["epsilon"], entry["delta"]) == ((claim.epsilon, claim.delta) if claim else (0.0, 0.0))
    assert entry["sigmas"] == {name: sigma for name, (sigma, _) in noise.items()}
    assert entry["sensitivities"] == {name: sensitivity for name, (_, sensitivity) in noise.items()}
    assert bool(entry["events"]) == (claim is not None)
    if claim is not None:
        found |= {"events": [list(event.values()) for event in entry["events"]], "sample rate": entry["sample_rate"]}
    return found


def _sum(config: Run) -> Facts | None:
    if not config.secure_sum:
        return None
    rules, spec = rules_of(config, SITES), config.spec
    rounds = (1, 2) if spec.first_summed else (1,)
    return {
        "context": context_of(config, "sum 1").hex()[:16],
        "rules": list(asdict(rules).values()),
        "dimensions": dimensions_of(config),
        "numbers": {
            f"{number}": [
                f"{name} {shapes_of(config, CLASSES, DIMENSION, number)[name]} up to {fixed.largest}"
                for name, fixed in numbers_of(config, SITES, number).items()
            ]
            for number in rounds
        },
        "steps": [each.step for each in numbers_of(config, SITES).values()],
        "local epsilon": local_epsilon(config, rules),
    }
