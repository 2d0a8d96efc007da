"""Plan of a run before it starts: its costs for each site, and the noise that its privacy adds."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

from fedsurrogate.common.costs import Cost, costs
from fedsurrogate.common.escapes import human_bytes
from fedsurrogate.common.methods.fedpft import BY_STATISTICS, Choices, choices, explained
from fedsurrogate.common.methods.logistic_rounds import LOGISTIC, steps_of, with_dimensions
from fedsurrogate.common.methods.method import Messages, count
from fedsurrogate.common.privacy.mechanism import DISTRIBUTED_SUMS, SUMS
from fedsurrogate.common.run import Run
from fedsurrogate.common.secure_aggregation.rules import projected_dimensions
from fedsurrogate.common.settings import FeaturesSettings, Settings

from .metrics import mean_noise

STEP = (
    "the sum of clipped gradients of all records of all sites at the common model, and their "
    "number, with distributed noise"
)


def plan(config: Run, dimension: int, classes: int, records: int, fedavg_rounds: int) -> list[Cost]:
    """Costs per site of a run, and of what it is compared with.

    Args:
        config: the run.
        dimension: of the features.
        classes: their number.
        records: of one site.
        fedavg_rounds: rounds of FedAvg.

    Returns:
        Costs of this run with its noise, of FedAvg with the same linear head, and of raw features;
        see `costs`.
    """
    own, *others = costs(config, dimension, classes, records, fedavg_rounds)
    return [replace(own, noise=noise_on_mean(config, dimension, classes, records)), *others]


def in_words(config: Run, own: Cost, dimension: int, classes: int, records: int) -> list[str]:
    """What a site releases, how the head is computed, and the noise: lines below the table of
    costs.

    Args:
        config: the run.
        own: the run's row of the table.
        dimension: of the features.
        classes: their number.
        records: of one site.

    Returns:
        The lines.
    """
    classes = classes if config.target is None else len(config.target.rows)
    lines = _released(config.plan.messages, classes, dimension, records)
    covers = "fedpft" in config.method.sections
    if config.target is None and covers and not config.plan.sent_by_solver:
        lines.append(explained(config.settings, dimension))
    if mapped := projected_dimensions(config, dimension):
        # A logistic head's dimensions are in its settings, also where it has chosen them.
        unset = config.settings.features.model_copy(update={"dimensions": 0})
        usual = with_dimensions(config.settings.model_copy(update={"features": unset}))
        free = config.settings.features.dimensions in (0, usual.features.dimensions)
        # With public images a logistic head has a fixed number.
        fixed = config.plan.sent_by_solver and bool(config.settings.fedpft.public)
        chosen = config.private and free and not fixed
        lines.append(_projection(config.settings.features, chosen, dimension, mapped))
    if head := config.plan.head:
        # Of other methods' heads the section of FedPFT says nothing.
        of_classes = config.target is None and config.method.shown == "fedpft"
        shrinkage = _shrinkage(config.settings) if of_classes else ""
        star = of_classes and config.plan.kind != "chain"
        # Columns with ranges, whose means say nothing, have one sum only.
        two = star and not config.settings.features.ranges
        other = _another_way(choices(config.settings), config.settings.epsilon) if two else ""
        lines.append(f"head {head}{shrinkage}{other}")
    if own.noise is not None:
        size = max(1, records // classes)
        lines.append(
            f"noise {own.noise:.2g} on the mean of a class of {size} records at one site, whose "
            "features have norm 1; S such sites together have "
            f"{noise_share(config.plan.mechanism_name, config.settings.colluding)} of it"
        )
    elif config.target is not None and config.mechanism is not None:
        deviations = (f"{key} {sigma:.3g}" for key, (sigma, _) in config.mechanism.noise.items())
        lines.append(f"noise in each number, standard deviation: {', '.join(deviations)}")
    elif own.epsilon is not None:
        what = "counts" if config.plan.counts else "rounds"
        lines.append(f"epsilon and delta are those of all {what} together, for one record")
    else:
        lines.append("privacy none")
    return [*lines, *who_sees_what(config)]


AGGREGATION = " Secure aggregation: the coordinator sees the sum over all sites alone."
CLAIM = "epsilon {:g}, delta {:g}; neighbours differ in a record, or a patient where the data name patients"


def impact_fields(
    config: Run, own: Cost, dimension: int, classes: int, records: int
) -> list[tuple[str, str, str]]:
    """Fields of a data protection impact assessment and of the AI Act's technical documentation, as
    far as a plan knows them.

    Args:
        config: the run.
        own: the run's row of the table.
        dimension: of the features.
        classes: their number.
        records: of one site.

    Returns:
        Field, article and text of each. What only people know says so.
    """
    settings = config.settings
    texts = tomllib.loads(Path(__file__).with_name("impact.toml").read_text(encoding="utf-8"))
    classes = classes if config.target is None else len(config.target.rows)
    named = f"names of classes: {', '.join(settings.classes)}"
    privacy = texts["private" if config.private else "open"]
    values = {
        "method": config.method.title,
        "rounds": own.rounds,
        "sent": " ".join(_released(config.plan.messages, classes, dimension, records))
        or "see the settings",
        "names": named if settings.classes else "class names",
        "size": human_bytes(own.up),
        "aggregation": AGGREGATION * settings.secure_aggregation,
        "withdrawal": texts["withdrawal"]["stored" if config.plan.combination.stored else "again"],
        "backbone": settings.backbone,
        "defence": settings.defence,
        "mechanism": config.plan.mechanism_name,
        "claim": CLAIM.format(own.epsilon, own.delta) if config.private else "",
    }
    values |= {name: privacy[name].format_map(values) for name in ("risk", "noise")}
    return [
        (each["field"], each["article"], each["text"].format_map(values))
        for each in texts["fields"]
    ]


def _released(messages: Messages, classes: int, dimension: int, records: int) -> list[str]:
    """How many numbers a site releases, and in the first of several rounds where these differ."""
    sizes = messages.sizes(classes, dimension, records)

    def numbers(first: bool) -> str:
        fields = messages.leaving(classes, dimension, records, first)
        return ", ".join(
            f"{field.name} {count([field], sizes):,}{f' at {field.bits} bits' * (field.bits < 16)}"
            for field in fields
        )

    if not (each := numbers(first=False)):
        return []
    if messages.first is None:
        return [f"released, in numbers: {each}"]
    return [f"released, in numbers: {numbers(first=True)} in the first round, then {each} in each"]


def _another_way(chosen: Choices, epsilon: float) -> str:
    """What else a run of noisy sums could do; empty for other runs."""
    if chosen.mechanism not in (SUMS, DISTRIBUTED_SUMS):
        return ""
    rounds, screens = steps_of(epsilon) + 1, chosen.mechanism == SUMS
    if chosen.solver == LOGISTIC and screens:
        return "; mostly more accurate than head.solver = 'auto', which takes one round and measures harm"
    if chosen.solver == LOGISTIC:
        return (
            "; mostly more accurate than from one sum, which fedpft.covariance = 'gram' takes in one "
            "round"
        )
    return (
        f"; head.solver = {LOGISTIC!r} takes {rounds} rounds of sums, and was mostly more accurate"
        + ", but measures no harm" * screens
    )


def _projection(own: FeaturesSettings, chosen: bool, dimension: int, mapped: int) -> str:
    """What projects the features to how many dimensions, and why where a rule has chosen them."""
    source = (
        "the given file"
        if own.given_projection
        else "the backbone's own head where the coordinator has its weights, else random directions"
    )
    why = f", chosen because of {own.records:,} records and the noise"
    return f"projection to {mapped:,} of {dimension:,} dimensions{why * chosen}, by {source}"


def _shrinkage(settings: Settings) -> str:
    """How the covariance is shrunk, for heads that need it: as the setting says, or from the
    statistics themselves.
    """
    chosen = choices(settings)
    if chosen.solver in ("noisy sums", "sampled", LOGISTIC):
        return ""
    if settings.head.shrinkage != "auto":
        return f"; shrinkage {settings.head.shrinkage:g}, as set"
    restricted = chosen.family in ("diag", "spherical") or chosen.solver == "naive-bayes"
    if restricted and chosen.solver != "ridge":
        # RESTRICTED in fedsurrogate.strategies.closed_form.solvers, whose import takes seconds
        return "; shrinkage 0.01"
    how = {
        BY_STATISTICS: "for the highest expected accuracy, or by generalised cross-validation",
        "ridge": "by generalised cross-validation",
        "qda": "by oracle approximation, for each class",
    }
    return (
        "; shrinkage chosen from the released numbers alone, "
        f"{how.get(chosen.solver, 'for the highest expected accuracy')}"
    )


def noise_on_mean(config: Run, dimension: int, classes: int, records: int) -> float | None:
    """Norm of the noise on a class mean, or on the mean of a component of a class.

    Args:
        config: the run.
        dimension: of the features, which have norm one.
        classes: their number.
        records: of one site. A class has records / classes of them.

    Returns:
        The norm; None without privacy, and for training in rounds.
    """
    if config.plan.kind == "rounds" or config.plan.counts or config.target is not None:
        return None
    claim = config.mechanism
    components = config.settings.fedpft.components if config.plan.mechanism_name == "dp-em" else 1
    return (
        None
        if claim is None
        else mean_noise(claim, dimension, max(1.0, records / classes / components))
    )


def noise_share(mechanism: str, colluding: float) -> str:
    """The noise on the mean over S equal sites, as a share of that on one site's.

    Args:
        mechanism: of the run's privacy. One distributed noise, as in secure aggregation, does not grow with S.
        colluding: share of the sites that may collude with the coordinator, in [0, 1].

    Returns:
        The share as a formula of S.

    Example:
        >>> noise_share("sums", 0.0), noise_share("secure-aggregation", 0.0), noise_share("secure-aggregation", 0.75)
        ('1/sqrt(S)', '1/S', '2.00/S')
    """
    if mechanism != DISTRIBUTED_SUMS:
        return "1/sqrt(S)"
    # Sites add more noise than needed, because some may collude. That for lost sites is taken out
    # when none is lost.
    most = 1 - colluding
    return f"{most**-0.5:.2f}/S" if 0 < most < 1 else "1/S"


def who_sees_what(config: Run) -> list[str]:
    """Sentences about secure aggregation: who sees what, and under which trust; none for other runs."""
    if not config.settings.secure_aggregation:
        return []
    sees = "secure aggregation: the coordinator sees the sum over all sites, and no site's part"
    few = f"at most {config.settings.colluding:.0%} of the sites"
    trust = f"{sees}, if {few} collude with it and sites know each other's keys (peers)"
    if config.plan.mechanism_name == DISTRIBUTED_SUMS:
        rounds = (
            [f"each of {config.rounds} rounds is one step: {STEP}"]
            if config.plan.kind == "rounds" and not config.plan.training.start
            else []
        )
        return [
            trust,
            *rounds,
            "epsilon holds under the same trust; a site's own noise alone gives a larger one "
            "(local-epsilon)",
        ]
    if config.settings.epsilon:
        return [trust, "epsilon holds without any trust: each site adds the whole noise itself"]
    return [
        trust,
        "the sum has no noise: what only one site has, such as a class, is in it as that site has "
        "it",
    ]
