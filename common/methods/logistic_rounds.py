"""FedPFT's head by a logistic loss: rounds of noisy sums, with distributed noise in secure aggregation or with that
of each site. One plan.
"""

from __future__ import annotations

import math
from functools import partial

from ..privacy.mechanism import NoisyRounds
from ..settings import FeaturesSettings, FedPFTSettings, Settings
from ..settings.heads import AUTO, FEWEST_MAPPED, MOST_DIMENSIONS, TargetSettings
from ..targets.target import CODE, RECORDS, SUMS, TOTALS
from ..terms import Term, noise_in_rounds
from . import method
from .sums import weighs_own_parts

# Its value of head.solver, and in words.
LOGISTIC, LOGISTIC_HEAD = "logistic", "by a logistic loss, in rounds of noisy gradients"
# What sites receive: the head of the features; the map of these; and what divides a feature that is
# longer, in the first round. It is zero where no public images show how long features are: then each
# is divided by its norm.
WEIGHT, BIAS, PROJECTION, CENTRE, BOUND = "weight", "bias", "projection", "centre", "bound"
# Of the first round: the number of records, and the sum of their features, whose mean becomes the
# centre of the others. What all records share would take most of their norm.
# Their parts of its budget were, as all numbers here, measured on folds of the training features of
# CIFAR-10.
FIRST = (Term(RECORDS, "1", share=0.1), Term(TOTALS, "k", share=0.9))
# Without public images also how many records have features of each length, by half octaves: what the
# mean of features of norm one is multiplied with. Those in the middle have norm one.
FIRST_ALONE = (FIRST[0], Term(TOTALS, "k", share=0.8), Term(CODE, "l", share=0.1))
BINS, BINS_OF_TWICE = 64, 2
# Of every other round: residuals times features, which are the gradient; and how sure the head should
# be, see `gaps` of the site. A feature has one entry more, a constant, for the bias.
GAPS = "gaps"
GRADIENT = (Term(SUMS, "C j", share=0.97), Term(GAPS, "s", share=0.03))
# The factors of all scores at which gaps are measured.
FACTORS = (0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
# The first round's part of the budget.
CENTRING = 0.04
# Largest norm of a record's residual, which is at most the root of two. The constant entry beside
# features of norm one.
CLIP, CONSTANT = 0.75, 0.25
# Norm of such a feature with its constant.
LENGTH = math.sqrt(1 + CONSTANT**2)
# Sites of a run whose settings do not tell their number.
USUAL_SITES = 10
# Steps, by epsilon: smaller noise allows more.
STEPS = ((1.5, 10), (3.0, 15), (6.0, 25), (float("inf"), 40))
# Dimensions after the projection, if none are set: with public images, by which it is whitened; and
# without, times the root of the records over the noise of the whole budget.
DIMENSIONS, DIMENSIONS_ALONE = 512, 6.0
GAP = (
    "gradients of a site are bounded by those of the others over all rounds, and nothing names a "
    "hostile site: with much noise and few sites one can spoil the model; fedpft's one round measures harm"
)
# Settings of FedPFT that say what one sum holds, or who adds it up.
OF_ONE_SUM = ("covariance", "components", "rank", "bits", "privacy", "topology", "seal")


def logistic_plan(settings: Settings) -> method.Plan:
    """The plan of a head that minimises the logistic loss, from sums of clipped gradients.

    Args:
        settings: of the run.
    """
    own, rounds = settings.fedpft, 1 + steps_of(settings.epsilon)
    first_round = FIRST if own.public else FIRST_ALONE
    public_map = (method.Field(PROJECTION, "p d"), method.Field(CENTRE, "d"))
    head = (method.Field(WEIGHT, "C k"), method.Field(BIAS, "C"), *public_map)
    return method.Plan(
        kind="rounds",
        messages=method.Messages(
            sends=method.fields_of(GRADIENT),
            first=method.fields_of(first_round),
            receives=(*head, method.Field(BOUND, "1")),
            result=head,
            symbols=partial(_symbols, settings.features),
            all_classes=True,
        ),
        combination=method.Combination(
            site=method.MESSAGE,
            strategy="fedsurrogate.strategies.fedpft.logistic_rounds:LogisticRoundsOfSites",
            sums=GRADIENT,
            first_sums=first_round,
            site_sums="fedsurrogate.client_app.methods.fedpft.logistic_rounds:bounded_round",
            from_sums="fedsurrogate.strategies.fedpft.logistic_rounds:absorb_total",
            sum_strategy="fedsurrogate.strategies.fedpft.logistic_rounds:LogisticRounds",
        ),
        work=lambda classes, dimension: method.Work(
            passes=1, rounds=rounds, numbers=dimension * (dimension + 2 * classes)
        ),
        privacy=_noise_of(settings),
        defences=method.Defences(
            reason=", whose gradients are bounded and not screened; max-share limits a site",
            gap=GAP,
        ),
        training=method.ModelTraining(
            frames=False,
            rounds=rounds,
            start="fedsurrogate.strategies.fedpft.logistic_rounds:LogisticStart",
        ),
        refusal=_refusal(settings),
        variant=LOGISTIC,
        sent_by_solver=True,
        head=LOGISTIC_HEAD,
        mean_over_columns=weighs_own_parts(settings.features, own.public),
    )


def _noise_of(settings: Settings) -> NoisyRounds:
    """The noise of the rounds."""
    first_round = FIRST if settings.fedpft.public else FIRST_ALONE
    rounds = 1 + steps_of(settings.epsilon)
    return noise_in_rounds(GRADIENT, settings, settings.fedpft.clip, rounds, first_round, CENTRING)


def steps_of(epsilon: float) -> int:
    """Number of steps under a budget.

    Args:
        epsilon: of the run.

    Example:
        >>> steps_of(1.0), steps_of(8.0)
        (10, 40)
    """
    return next(steps for most, steps in STEPS if epsilon <= most)


def with_solver(settings: Settings) -> Settings:
    """Settings with a logistic head where "auto" means that: in secure aggregation of classes with a
    budget, of which nothing else is set that only one sum has.

    Of four federations it was more accurate than one sum on records like those of the sites at
    nearly all budgets (`benchmarks/secure_defaults.py --rounds`).

    Args:
        settings: of the run.

    Example:
        >>> own = {"secure_aggregation": True, "epsilon": 1.0, "delta": 1e-5}
        >>> with_solver(Settings.model_validate(own)).head.solver
        'logistic'
        >>> with_solver(Settings.model_validate(own | {"fedpft": {"covariance": "gram"}})).head.solver
        'auto'
    """
    own, usual = settings.fedpft, FedPFTSettings()
    if any(getattr(own, key) != getattr(usual, key) for key in OF_ONE_SUM):
        return settings
    noisy = bool(settings.secure_aggregation and settings.epsilon and settings.delta)
    of_classes = settings.task == TargetSettings.model_fields["task"].default
    free = settings.head.solver == AUTO and not settings.features.ranges
    if not (noisy and of_classes and free) and settings.head.solver != LOGISTIC:
        return settings
    head = settings.head.model_copy(update={"solver": LOGISTIC})
    # No covariance is sent, and that of a sum stands for none.
    none = own.model_copy(update={"covariance": "gram"})
    return settings.model_copy(update={"head": head, "fedpft": none})


def with_dimensions(settings: Settings) -> Settings:
    """Settings with the dimensions of a logistic head after the projection, if none are set.

    Without public images no direction of the projection is known to matter more than others, and
    the noise decides how many are worth theirs. In secure aggregation they are nearly those of one sum.

    Args:
        settings: of the run.

    Example:
        >>> own = {"head": {"solver": "logistic"}, "epsilon": 1.0, "delta": 1e-5}
        >>> with_dimensions(Settings.model_validate(own)).features.dimensions
        175
        >>> with_dimensions(Settings.model_validate(own | {"secure_aggregation": True})).features.dimensions
        281
    """
    own = settings.features
    if settings.head.solver != LOGISTIC or own.dimensions or not own.projection:
        return settings
    dimensions = DIMENSIONS
    if not settings.fedpft.public and settings.epsilon and 0 < settings.delta < 1:
        each = _noise_of(settings).mechanism().noise_multiplier
        whole = each * math.sqrt((1 - CENTRING) / steps_of(settings.epsilon))
        # Of all sites together, if none is lost.
        shared = 1 / max(1 - settings.colluding, 0.1)
        sums = shared if settings.secure_aggregation else settings.site_count or USUAL_SITES
        worth = round(DIMENSIONS_ALONE * math.sqrt(own.records / (whole * math.sqrt(sums))))
        dimensions = min(max(1, worth), MOST_DIMENSIONS)
    given = own.model_copy(update={"dimensions": dimensions})
    return settings.model_copy(update={"features": given})


def _symbols(
    features: FeaturesSettings, classes: int, dimension: int, records: int
) -> method.Sizes:
    """k dimensions after the projection, p rows of it, none where nothing projects, j with the
    constant, l lengths and s factors of scores.
    """
    automatic = features.projection == AUTO and dimension >= FEWEST_MAPPED
    projected = bool(features.given_projection) or automatic
    k = min(features.dimensions, dimension) if projected else dimension
    return {"k": k, "p": k if projected else 0, "j": k + 1, "l": BINS, "s": len(FACTORS), "1": 1}


def _refusal(settings: Settings) -> str:
    own = settings.fedpft
    if not settings.epsilon:
        return (
            "head.solver = 'logistic' is for runs with privacy; set epsilon and delta, or use method "
            "= 'fedavg'"
        )
    if own.covariance not in ("auto", "gram") or own.components > 1 or own.topology == "chain":
        return (
            "head.solver = 'logistic' sends gradients, and no covariance; remove "
            f"{', '.join(f'fedpft.{name}' for name in OF_ONE_SUM if name != 'seal')}"
        )
    # Secure aggregation says so itself, also where nothing names the solver.
    if not settings.classes and not settings.secure_aggregation:
        return "head.solver = 'logistic' needs classes: the rows of the head are known before any round"
    return ""
