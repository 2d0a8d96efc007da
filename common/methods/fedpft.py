"""FedPFT: sites send Gaussian mixtures of features, or noisy class sums. Star and chain.

Which covariance a run has where its settings say "auto" follows from one rule, from public numbers. It uses
no record, so that every side finds the same answer and the answer discloses nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..backbones.backbone_names import named_dimension
from ..errors import LARGEST_COUNT, LARGEST_NUMBER
from ..privacy.mechanism import (
    DISTRIBUTED_SUMS,
    EM,
    SUMS,
    THEOREM,
    MechanismRecipe,
    NoisySums,
    TheoremNoise,
)
from ..privacy.shares import EM_STEPS, budget_shares
from ..settings import FedPFTSettings, Settings
from ..settings.base import AnyCovariance, Covariance
from ..settings.heads import TargetSettings
from ..targets.target import Target
from ..terms import Term
from . import heads, logistic_rounds
from .method import BY_HARM, Combination, Defences, Field, Messages, Method, Plan, Sizes, Work
from .sums import MOMENTS, coded_rounds_plan, coded_sums_plan, refused, weighs_own_parts

# Most dimensions of a covariance that is sent whole, which takes 4 MB at 16 bits.
LARGEST_GRAM = 2048
# Rank and bits of "lowrank" where "auto" takes it, and where it was set.
AUTO_RANK, AUTO_BITS = 64, 8
SET_RANK, SET_BITS = 16, 16
# Dimensions that the rule for privacy assumes where the settings do not tell them.
USUAL_DIMENSION = 1024
# Families of which each class has its own, without any covariance between dimensions.
APART: tuple[Covariance, ...] = ("diag", "spherical")
# What a run with one of these says, before it starts and in its result.
TOO_LITTLE = (
    "it holds nothing of how features vary together, so on features of a backbone the head may be "
    "below an ensemble of heads; covariance auto, gram, or lowrank of rank 64 holds it"
)
# Least epsilon x records / root of (sites x dimensions) for which a noisy second moment is worth its
# share of the budget. Chosen on one draw of eight federations (CIFAR-10, PACS, digits, X-rays), of
# which it takes the better form in most; docs/methods/fedpft.md has where it does not.
LEAST_SIGNAL = 300.0


@dataclass(frozen=True)
class Form:
    """The covariance of a run.

    Attributes:
        family: of the covariance.
        rank: columns of the factor, if it is "lowrank".
        bits: of an entry of that factor in a message.
        reason: why "auto" takes this one, as the end of a sentence.
    """

    family: Covariance
    rank: int
    bits: int
    reason: str = ""


def form_of(settings: Settings, dimension: int) -> Form:
    """The covariance of a run for features of a dimension.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet, for which a covariance is whole.

    Returns:
        What was set; where the covariance is "auto", what the rule gives.
    """
    own = settings.fedpft
    if own.covariance != "auto":
        return Form(own.covariance, own.rank or SET_RANK, own.bits or SET_BITS)
    return automatic(settings, dimension)


def automatic(settings: Settings, dimension: int) -> Form:
    """The covariance that "auto" stands for.

    Without privacy it is whole ("gram") up to `largest_gram` dimensions, and of rank 64 above. With
    noise at each site it follows from how far a second moment stands out from its noise. Secure
    aggregation, another target, a chain, several components and theorem 4.1 each work with one form only.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet.

    Example:
        >>> automatic(Settings(), 1280).family, automatic(Settings(), 4096).family
        ('gram', 'lowrank')
        >>> automatic(Settings(epsilon=0.5, delta=1e-5), 1280).family
        'spherical'
    """
    own = settings.fedpft
    if own.rank or own.bits:
        why = "fedpft.rank or fedpft.bits is set, which only this form has"
        return Form("lowrank", own.rank or SET_RANK, own.bits or SET_BITS, why)
    if settings.secure_aggregation or settings.task != TargetSettings.model_fields["task"].default:
        return _whole("it adds up over sites")
    if settings.epsilon:
        return _private(settings)
    if own.topology == "chain":
        return Form("lowrank", SET_RANK, SET_BITS, "a chain cannot have a whole one")
    if own.components > 1:
        return _thin("several components cannot have a whole one")
    most = largest_gram(settings.max_payload_mib)
    if dimension <= most:
        return _whole(f"up to {most:,} dimensions a whole one fits, and is exact")
    return _thin(f"a whole one is sent up to {most:,} dimensions only")


def largest_gram(payload_mib: float) -> int:
    """Most dimensions of a covariance that "auto" sends whole.

    Args:
        payload_mib: the limit of a message, of which half is left to class means.

    Example:
        >>> largest_gram(256), largest_gram(1)
        (2048, 724)
    """
    return min(LARGEST_GRAM, math.isqrt(int(payload_mib * 2**19)))


def filled(settings: Settings) -> Settings:
    """Settings with the covariance, rank and bits of the run.

    "auto" stays where the dimension decides, which only the sites know: `form_of` then has it.
    """
    own = settings.fedpft
    if own.covariance == "auto" and _depends_on_dimension(settings):
        return settings
    form = form_of(settings, 0)
    changed = {"covariance": form.family, "rank": form.rank, "bits": form.bits}
    return settings.model_copy(update={"fedpft": own.model_copy(update=changed)})


def explained(settings: Settings, dimension: int) -> str:
    """The covariance of a run, and why "auto" takes it, in words.

    Args:
        settings: of the run.
        dimension: of the features; 0 where it is not known yet.

    Example:
        >>> explained(Settings(fedpft=FedPFTSettings(covariance="full")), 1280)
        'covariance full, as set; auto is gram: up to 2,048 dimensions a whole one fits, and is exact'
    """
    unset = {"covariance": "auto", "rank": 0, "bits": 0}
    free = settings.model_copy(update={"fedpft": settings.fedpft.model_copy(update=unset)})
    form, usual = form_of(settings, dimension), automatic(free, dimension)
    if lacks_directions(settings.fedpft, settings.epsilon):
        return (
            f"covariance {form.family}, as set: {TOO_LITTLE}; auto is {_named(usual)}: "
            f"{usual.reason}"
        )
    if replace(form, reason="") == replace(usual, reason=""):
        return f"covariance {_named(form)}, chosen because {usual.reason}"
    return f"covariance {_named(form)}, as set; auto is {_named(usual)}: {usual.reason}"


def lacks_directions(own: FedPFTSettings, epsilon: float) -> bool:
    """Whether a run without a budget has one component a class and no covariance between dimensions.

    Args:
        own: the settings of the method.
        epsilon: of the run; 0 without a budget.

    Example:
        >>> lacks_directions(FedPFTSettings(covariance="diag"), 0.0)
        True
    """
    return own.covariance in APART and own.components == 1 and not epsilon


def _named(form: Form) -> str:
    return f"lowrank r={form.rank}" if form.family == "lowrank" else form.family


def in_form(own: FedPFTSettings, form: Form) -> FedPFTSettings:
    """The settings of FedPFT with a form in place of "auto"."""
    return own.model_copy(update={"covariance": form.family, "rank": form.rank, "bits": form.bits})


def _depends_on_dimension(settings: Settings) -> bool:
    return automatic(settings, 1).family != automatic(settings, LARGEST_GRAM + 1).family


def _private(settings: Settings) -> Form:
    """The form for noise at each site."""
    own = settings.fedpft
    if own.privacy == THEOREM or own.components > 1:
        return Form(
            "spherical", SET_RANK, SET_BITS, "its mechanism needs a covariance of each class"
        )
    sites = settings.site_count or logistic_rounds.USUAL_SITES
    d = named_dimension(settings.data, settings.backbone, settings.image_size) or USUAL_DIMENSION
    records = settings.features.records
    signal = settings.epsilon * records / math.sqrt(sites * d)
    numbers = (
        f"epsilon x records / root of (sites x dimensions) is {signal:.3g} for {records:,} records, "
        f"{sites} sites and {d:,} dimensions"
    )
    if signal >= LEAST_SIGNAL:
        why = f"{numbers}: a second moment stands out from its noise from {LEAST_SIGNAL:g} on"
        return Form("lowrank", AUTO_RANK, SET_BITS, why)
    why = f"{numbers}: below {LEAST_SIGNAL:g} a second moment is lost in its noise"
    return Form("spherical", SET_RANK, SET_BITS, why)


def _whole(reason: str) -> Form:
    return Form("gram", SET_RANK, SET_BITS, reason)


def _thin(reason: str) -> Form:
    return Form("lowrank", AUTO_RANK, AUTO_BITS, reason)


# Mechanisms whose noisy sums have a solver of their own.
NOISY = (SUMS, DISTRIBUTED_SUMS)

# The solver that the statistics of the sites decide, and what it may be besides "lda".
BY_STATISTICS, BALANCED_RIDGE = "by statistics", "balanced-ridge"
SOLVERS_IN_WORDS = {
    "noisy sums": "in closed form from noisy sums",
    "lda": "linear discriminant analysis, in closed form",
    "ridge": "least squares, in closed form",
    "naive-bayes": "naive Bayes with one pooled diagonal, in closed form",
    "qda": "quadratic discriminant analysis, in closed form",
    "sampled": "trained on samples of the surrogates",
    BY_STATISTICS: "in closed form: linear discriminant analysis, or least squares where the class "
    "means of the sites differ",
    logistic_rounds.LOGISTIC: logistic_rounds.LOGISTIC_HEAD,
    BALANCED_RIDGE: "least squares with classes of equal weight, in closed form",
}


@dataclass(frozen=True)
class Choices:
    """What the settings of FedPFT decide.

    Attributes:
        mechanism: the name of the privacy mechanism, or "none".
        family: the covariance family of surrogates; "auto" where the sites' dimension decides.
        solver: how the coordinator finds the head: "noisy sums", "lda", "ridge", "naive-bayes",
            "qda", "sampled", "logistic", or BY_STATISTICS.
    """

    mechanism: str
    family: AnyCovariance
    solver: str


def choices(settings: Settings) -> Choices:
    """Mechanism, covariance family and solver of a run, with "auto" resolved.

    The mechanism is "theorem-4.1" if requested; otherwise "sums" for one component and "dp-em" for
    several. "auto" for the solver is BY_STATISTICS where all classes of a site share one covariance
    and have one component each; for secure aggregation, which shows no site, discriminant analysis.
    Mixtures of several components, and a covariance for each class, hold more than it uses; noisy
    mixtures are used as published.
    """
    own = settings.fedpft
    if not settings.epsilon:
        mechanism = "none"
    elif settings.secure_aggregation:
        mechanism = DISTRIBUTED_SUMS
    elif own.privacy == THEOREM:
        mechanism = THEOREM
    else:
        mechanism = EM if own.components > 1 else SUMS
    family: AnyCovariance = "spherical" if mechanism == EM else own.covariance
    solver: str
    if settings.head.solver == logistic_rounds.LOGISTIC:
        solver = logistic_rounds.LOGISTIC
    elif mechanism in NOISY:
        solver = "noisy sums"
    elif settings.head.solver != "auto":
        solver = settings.head.solver
    else:
        shared = own.covariance in ("auto", "lowrank", "gram") and own.components == 1
        closed = "lda" if settings.secure_aggregation else BY_STATISTICS
        solver = closed if shared and not settings.epsilon else "sampled"
    return Choices(mechanism, family, solver)


def plan(settings: Settings) -> Plan:
    """The plan of FedPFT: as a star, as a chain, or in rounds. Secure aggregation has no chain."""
    if settings.head.solver == logistic_rounds.LOGISTIC:
        return logistic_rounds.logistic_plan(settings)
    chosen, own = choices(settings), settings.fedpft
    chain = own.topology == "chain" and not settings.secure_aggregation
    sends = surrogate_fields(chosen, own.bits or AUTO_BITS)
    centre = (Field("centre", "d"),) if own.public else ()
    head = _head_fields(settings.head.solver, own.covariance, centre)
    return Plan(
        kind="chain" if chain else "one-shot",
        messages=Messages(
            sends=sends,
            parsed=sends if chosen.mechanism == SUMS else _parsed(chosen.family),
            receives=sends if chain else centre,
            result=() if chain and own.seal else head,
            symbols=partial(symbols, settings, chosen.mechanism),
            all_classes=chosen.mechanism in (SUMS, EM),
            identifies=chain,
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.fedpft.surrogate:"
            + ("extend_chain" if chain else "fedpft_surrogate"),
            strategy="fedsurrogate.strategies.fedpft.strategy:"
            + ("FedPFTChain" if chain else "FedPFT"),
            stored=True,
            samples=True,
            makes_surrogates=True,
            sums=_summed(own, chosen.solver),
            site_sums="fedsurrogate.client_app.methods.sums:class_moments",
            from_sums="fedsurrogate.strategies.fedpft.strategy:fedpft_head_from_sum",
        ),
        work=_work_of(settings, chosen.mechanism, chain),
        privacy=_privacy(settings, chosen),
        defences=_defences(chosen.mechanism, chain),
        refusal=(_chain_refusal if chain else _refusal)(settings, chosen),
        allows=frozenset({"order", "seal"}) if chain else frozenset(),
        variant=f"{chosen.family}, {chosen.mechanism}" if settings.epsilon else chosen.family,
        head=SOLVERS_IN_WORDS[chosen.solver],
        mean_over_columns=chosen.mechanism in (SUMS, DISTRIBUTED_SUMS)
        and weighs_own_parts(settings.features, own.public),
        ranges=not chain,
    )


def coded_plan(settings: Settings, target: Target) -> Plan:
    """The plan for another target than classes: one moment of all features, as with covariance
    gram, which "lowrank" means too here: it was the default.
    """
    own, why = settings.fedpft, ""
    if own.covariance not in ("gram", "lowrank") or own.components > 1:
        why = (
            f"task = {target.name!r} needs one moment of all features; set fedpft.covariance = "
            "'gram' and fedpft.components = 1"
        )
    elif own.topology == "chain":
        why = f"task = {target.name!r} works only with fedpft.topology = 'star'"
    elif own.privacy == THEOREM or settings.head.solver != "auto":
        why = (
            f"task = {target.name!r} has a solver and a mechanism of its own; set head.solver = "
            "'auto' and fedpft.privacy = 'auto'"
        )
    elif own.public and not settings.secure_aggregation:
        why = f"task = {target.name!r}: fedpft.public works only with secure-aggregation = true"
    # Records in their ranges have norm one at most, and how far they are from the middle says much.
    clip = own.clip or (1.0 if settings.features.ranges else 0.0)
    if (course := target.course(bool(settings.epsilon))) is not None:
        return refused(coded_rounds_plan(settings, target, course, clip), why)
    return refused(coded_sums_plan(settings, target, clip), why)


FEDPFT = Method(
    name="fedpft",
    title="FedPFT",
    paper="Beitollahi et al. 2024, algorithm 1",
    plan=plan,
    coded=coded_plan,
    reads=("fedpft",),
    learns=("head",),
    shown="fedpft",
    fill=lambda settings: logistic_rounds.with_dimensions(
        filled(logistic_rounds.with_solver(settings))
    ),
)


def kd_plan(settings: Settings) -> Plan:
    """The plan of knowledge distillation along a chain."""
    return Plan(
        kind="chain",
        messages=Messages(
            heads.HEAD, heads.HEAD, heads.HEAD, symbols=partial(heads.symbols, settings.site_count)
        ),
        combination=Combination(
            site="fedsurrogate.client_app.methods.local_training:distil_chain",
            strategy="fedsurrogate.strategies.heads:HeadChain",
        ),
        work=partial(heads.chain_work, settings.head, bool(settings.epsilon)),
        defences=Defences(
            reason=", a chain in which each site builds on the previous one", gap=heads.CHAIN_GAP
        ),
        allows=frozenset({"order"}),
    )


KD = Method(
    name="kd",
    title="Knowledge distillation",
    paper="Hinton et al. 2015; a head passed from site to site, as in FedPFT's comparison",
    plan=kd_plan,
    reads=("head", "baseline"),
    shown="fedpft",
)


def _privacy(settings: Settings, chosen: Choices) -> MechanismRecipe | None:
    epsilon, delta, clip = settings.epsilon, settings.delta, settings.fedpft.clip
    if chosen.mechanism == "none":
        return None
    if chosen.mechanism == THEOREM:
        return TheoremNoise(epsilon, delta, clip)
    family = "distributed" if chosen.mechanism == DISTRIBUTED_SUMS else chosen.family
    steps = EM_STEPS if chosen.mechanism == EM else 1
    return NoisySums(
        chosen.mechanism, epsilon, delta, partial(budget_shares, family), clip, steps=steps
    )


def surrogate_fields(chosen: Choices, bits: int) -> tuple[Field, ...]:
    """A surrogate: mixtures of K components, or noisy class sums.

    Args:
        chosen: mechanism and family.
        bits: of an entry of a low-rank factor.

    Returns:
        The fields of a message.

    Source: FedPFT, equations 9 to 11; lowrank is ours.
    """
    family = chosen.family
    if chosen.mechanism == SUMS:
        sums = (Field("counts", "C"), Field("sums", "C d"))
        return (
            sums
            if family == "spherical"
            else (*sums, Field("squares", "d" if family == "diag" else "t"))
        )
    # At 8 bits the loadings have a scale for each column.
    loadings = (
        Field("loadings", "d r", bits=bits),
        *((Field("scales", "r", 0),) if bits < 16 else ()),
    )
    spread = {
        "full": (Field("pivots", "K d", 0), Field("ratios", "K b")),
        "diag": (Field("variances", "K d", 0),),
        "spherical": (Field("variances", "K", 0),),
        "lowrank": (Field("variances", "d", 0), *loadings),
        "gram": (
            Field("variances", "d", 0),
            Field("corrections", "d", 0),
            Field("correlations", "b"),
        ),
        # A whole covariance or a thin one; `symbols` has zero for what is not sent.
        "auto": (
            Field("variances", "d", 0),
            Field("corrections", "g", 0),
            Field("correlations", "b"),
            *loadings,
        ),
    }
    return (Field("weights", "K", 0, 1), Field("means", "K d"), *spread[family])


def _parsed(family: AnyCovariance) -> tuple[Field, ...]:
    """A parsed mixture of M components, with its covariance as a matrix.

    A site has any number of components up to fedpft.components for each class, and any rank R up to
    fedpft.rank.
    """
    largest = LARGEST_NUMBER**2
    spread = {
        "full": (Field("cholesky", "M d d"),),
        "diag": (Field("variances", "M d", 0, largest),),
        "spherical": (Field("variances", "M", 0, largest),),
        "lowrank": (Field("variances", "d", 0, largest), Field("factor", "d R")),
        "gram": (Field("matrix", "d d"),),
        "auto": (
            Field("variances", "d", 0, largest, optional=True),
            Field("factor", "d R", optional=True),
            Field("matrix", "d d", optional=True),
        ),
    }
    counts = Field("counts", "C", 1, LARGEST_COUNT)
    return (counts, Field("weights", "M", 0, 1), Field("means", "M d"), *spread[family])


def _summed(own: FedPFTSettings, solver: str) -> tuple[Term, ...]:
    """The sums that determine a head in closed form with one covariance of all classes; empty for
    other settings.
    """
    closed = solver in ("lda", "ridge", "naive-bayes", "noisy sums", BY_STATISTICS)
    one = own.covariance == "gram" and own.components == 1 and own.topology == "star"
    return MOMENTS if one and closed and own.privacy != THEOREM else ()


def _head_fields(
    solver: str, covariance: AnyCovariance, centre: tuple[Field, ...]
) -> tuple[Field, ...]:
    """A head, and the centre that is subtracted from features before it."""
    if solver == "qda":
        whiteners = Field("whiteners", "C d d" if covariance == "full" else "C d")
        return (Field("means", "C d"), whiteners, Field("bias", "C", bits=64))
    return (Field("weight", "C d"), Field("bias", "C"), *centre)


def symbols(
    settings: Settings, mechanism: str, classes: int, dimension: int, records: int
) -> Sizes:
    """K: components of all classes; r: rank; t, b: entries of a triangle with and without its
    diagonal; g: of the diagonal. Zero where a covariance "auto" does not send them.
    """
    own, form = settings.fedpft, form_of(settings, dimension)
    most = records // max(1, classes) // own.samples_per_component
    each = own.components if mechanism == EM else max(1, min(own.components, most))
    rank = max(1, min(form.rank, records // own.samples_per_component, dimension))
    below, diagonal = dimension * (dimension - 1) // 2, dimension
    triangle = below + diagonal
    if own.covariance == "auto":
        whole = form.family == "gram"
        rank, below, diagonal = (0, below, diagonal) if whole else (rank, 0, 0)
    return {"K": each * classes, "r": rank, "t": triangle, "b": below, "g": diagonal}


def _work_of(settings: Settings, mechanism: str, chain: bool) -> Callable[[int, int], Work]:
    """The work of a site. A site of a chain also samples from the received surrogate and trains a
    head.
    """
    own, head, private = settings.fedpft, settings.head, mechanism != "none"
    components = own.components if not private or mechanism == EM else 1

    def work(classes: int, dimension: int) -> Work:
        form = form_of(settings, dimension)
        squares = form.family in ("full", "lowrank", "gram")
        whole = squares and (private or form.family in ("full", "gram"))
        each = dimension if whole else form.rank + 2
        # DP-EM holds means, exact sums in two parts, the noisy sums, and the results computed from
        # them.
        factor = 8 if mechanism == EM else each if squares else 2
        return Work(
            steps=head.min_steps if chain else 0,
            passes=head.epochs if chain else 1,
            synthetic=head.max_samples if chain else 0,
            numbers=classes * components * dimension * factor,
            components=own.components,
            rank=form.rank if form.family == "lowrank" else 0,
        )

    return work


def _defences(mechanism: str, chain: bool) -> Defences:
    """No "harm" for DP-EM and theorem 4.1: it needs the noise on each mean, which depends on the size of
    a component in DP-EM and of a class in theorem 4.1.
    """
    if chain:
        reason = " in a chain, where each site builds on the previous one"
        if mechanism in NOISY:
            # A chain message holds the sums of each site, and no site can change the others'.
            return replace(BY_HARM, reason=reason)
        return Defences(reason=reason, gap=heads.CHAIN_GAP)
    if mechanism in (EM, THEOREM):
        of = "component" if mechanism == EM else "class"
        reason = f" under {mechanism}, whose noise on a mean differs with the size of its {of}"
        return Defences(reason=reason)
    return BY_HARM


def _refusal(settings: Settings, chosen: Choices) -> str:
    """Why FedPFT does not support the settings; empty if it does."""
    own, solver = settings.fedpft, settings.head.solver
    if solver not in ("auto", "sampled") and settings.epsilon:
        return (
            f"head.solver = {solver!r} is for runs without privacy; noisy sums have a solver "
            "of their own"
        )
    if solver == "sampled" and chosen.mechanism in NOISY:
        return "head.solver = 'sampled': noisy sums have a solver of their own; remove head.solver"
    # No covariance makes it a sum over sites, so secure aggregation has a refusal of its own.
    if (
        solver == "qda"
        and own.covariance in ("auto", "lowrank", "gram")
        and not settings.secure_aggregation
    ):
        return (
            "head.solver = 'qda' needs a covariance of each class: set fedpft.covariance = "
            "'diag' or 'full'"
        )
    if solver == "qda" and own.topology == "chain":
        return "head.solver = 'qda' works with topology 'star'"
    if own.covariance == "gram" and own.components > 1:
        return (
            "fedpft.covariance = 'gram' has one component a class; set fedpft.components = 1, "
            "or covariance = 'lowrank'"
        )
    if 0 < own.bits < 16 and (settings.epsilon or own.covariance != "lowrank"):
        return (
            f"fedpft.bits = {own.bits} is for the loadings of covariance 'lowrank' without "
            "privacy; set 16"
        )
    if chosen.mechanism == THEOREM and (
        own.covariance in ("lowrank", "gram") or own.components > 1
    ):
        return (
            "fedpft.privacy = 'theorem-4.1' is defined for one component and covariance "
            "'full', 'diag' or 'spherical'"
        )
    return ""


def _chain_refusal(settings: Settings, chosen: Choices) -> str:
    """Why a chain does not support the settings; empty if it does."""
    if chosen.mechanism not in ("none", SUMS):
        return (
            "fedpft.topology = 'chain' with privacy supports noisy sums only, not "
            f"{chosen.mechanism!r}"
        )
    if settings.fedpft.covariance == "gram" and not settings.epsilon:
        return (
            "fedpft.covariance = 'gram' works only with fedpft.topology = 'star'; use "
            "'lowrank' in a chain"
        )
    if settings.fedpft.public:
        return "fedpft.public works only with fedpft.topology = 'star'"
    return _refusal(settings, chosen)
