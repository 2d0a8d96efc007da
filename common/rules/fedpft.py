"""Rules of FedPFT: privacy mechanism, schema of a surrogate, work at a site."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from common.limits import LARGEST_COUNT, LARGEST_NUMBER
from common.rules.secure_sum import MECHANISM, MOMENTS
from common.rules.spec import Field, Sizes, Summed, Work

if TYPE_CHECKING:
    from common.config.run_config import RunConfig

# By section of the settings: the keys that decide what a site sends, in the run's digest.
FEDPFT_KEYS = ("covariance", "components", "rank", "samples_per_component", "privacy", "clip", "topology")


# Mechanisms whose noisy sums have a solver of their own.
NOISY = ("sums", MECHANISM)


def mechanism(config: RunConfig) -> str:
    """The privacy mechanism: "theorem-4.1" if requested; otherwise "sums" for one component, "dp-em" for several."""
    if config.fedpft.privacy == "theorem-4.1":
        return "theorem-4.1"
    return "dp-em" if config.fedpft.components > 1 else "sums"


def all_classes(config: RunConfig) -> bool:
    """Whether surrogates have every class of the run: noisy sums do, so that they do not show which classes a site has."""
    return config.mechanism in ("sums", "dp-em")


def family(config: RunConfig) -> str:
    """The covariance family of surrogates."""
    return "spherical" if config.mechanism == "dp-em" else config.fedpft.covariance


def solver(config: RunConfig) -> str:
    """How the coordinator finds the head, with "auto" resolved: "noisy sums", "lda", "ridge" or "sampled".

    "auto" is discriminant analysis where all classes of a site share one covariance and have one component each. Mixtures of
    several components, and a covariance for each class, hold more than it uses; noisy mixtures are used as published.
    """
    if config.mechanism in NOISY:
        return "noisy sums"
    if config.head.solver != "auto":
        return config.head.solver
    shared = config.fedpft.covariance in ("lowrank", "gram") and config.fedpft.components == 1
    return "lda" if shared and not config.epsilon else "sampled"


SOLVERS_IN_WORDS = {
    "noisy sums": "in closed form from noisy sums",
    "lda": "linear discriminant analysis, in closed form",
    "ridge": "least squares, in closed form",
    "naive-bayes": "naive Bayes with one pooled diagonal, in closed form",
    "qda": "quadratic discriminant analysis, in closed form",
    "sampled": "trained on samples of the surrogates",
}


def head(config: RunConfig) -> str:
    """How the coordinator finds the head, in words."""
    return SOLVERS_IN_WORDS[solver(config)]


def variant(config: RunConfig) -> str:
    """Covariance family and mechanism, for tables."""
    return f"{family(config)}, {config.mechanism}" if config.epsilon else family(config)


def sends(config: RunConfig) -> tuple[Field, ...]:
    """A surrogate: mixtures of K components (FedPFT, equations 9 to 11; lowrank is ours), or noisy class sums."""
    if config.mechanism == "sums":
        sums = (Field("counts", "C"), Field("sums", "C d"))
        return sums if family(config) == "spherical" else (*sums, Field("squares", "d" if family(config) == "diag" else "t"))
    spread = {
        "full": (Field("pivots", "K d", 0), Field("ratios", "K b")),
        "diag": (Field("variances", "K d", 0),),
        "spherical": (Field("variances", "K", 0),),
        "lowrank": (Field("variances", "d", 0), *loadings(config)),
        "gram": (Field("variances", "d", 0), Field("corrections", "d", 0), Field("correlations", "b")),
    }
    return (Field("weights", "K", 0, 1), Field("means", "K d"), *spread[family(config)])


def parsed(config: RunConfig) -> tuple[Field, ...]:
    """A parsed surrogate: a mixture of M components with its covariance as a matrix, or noisy class sums as they are sent.

    A site has any number of components up to fedpft.components for each class, and any rank R up to fedpft.rank.
    """
    if config.mechanism == "sums":
        return sends(config)
    largest = LARGEST_NUMBER**2
    spread = {
        "full": (Field("cholesky", "M d d"),),
        "diag": (Field("variances", "M d", 0, largest),),
        "spherical": (Field("variances", "M", 0, largest),),
        "lowrank": (Field("variances", "d", 0, largest), Field("factor", "d R")),
        "gram": (Field("matrix", "d d"),),
    }
    counts = Field("counts", "C", 1, LARGEST_COUNT)
    return (counts, Field("weights", "M", 0, 1), Field("means", "M d"), *spread[family(config)])


def summed(config: RunConfig) -> tuple[Summed, ...]:
    """The sums that determine a head in closed form with one covariance of all classes; empty for other settings."""
    settings, closed = config.fedpft, solver(config) in ("lda", "ridge", "naive-bayes", "noisy sums")
    one = settings.covariance == "gram" and settings.components == 1 and settings.topology == "star"
    return MOMENTS if one and closed and settings.privacy != "theorem-4.1" else ()


def loadings(config: RunConfig) -> tuple[Field, ...]:
    """The loadings of a low-rank covariance; at 8 or 4 bits, with a scale for each column."""
    bits = config.fedpft.bits
    return (Field("loadings", "d r", bits=bits), *((Field("scales", "r", 0),) if bits < 16 else ()))


def receives(config: RunConfig) -> tuple[Field, ...]:
    """The public centre, if the run has one."""
    return (Field("centre", "d"),) if config.fedpft.public else ()


def result(config: RunConfig) -> tuple[Field, ...]:
    """A head, and the centre that is subtracted from features before it."""
    if config.head.solver == "qda":
        whiteners = Field("whiteners", "C d d" if config.fedpft.covariance == "full" else "C d")
        return (Field("means", "C d"), whiteners, Field("bias", "C", bits=64))
    return (Field("weight", "C d"), Field("bias", "C"), *receives(config))


def symbols(config: RunConfig, classes: int, dimension: int, records: int) -> Sizes:
    """K: components of all classes; r: rank; t, b: entries of a triangle with and without its diagonal."""
    settings = config.fedpft
    most = records // max(1, classes) // settings.samples_per_component
    each = settings.components if config.mechanism == "dp-em" else max(1, min(settings.components, most))
    rank = max(1, min(settings.rank, records // settings.samples_per_component, dimension))
    below = dimension * (dimension - 1) // 2
    return {"K": each * classes, "r": rank, "t": below + dimension, "b": below}


def work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a site. `passes` are those of the head that `compare` trains."""
    settings = config.fedpft
    squares = settings.covariance in ("full", "lowrank", "gram")
    components = settings.components if not config.epsilon or config.mechanism == "dp-em" else 1
    each = dimension if squares and (config.epsilon or settings.covariance in ("full", "gram")) else settings.rank + 2
    # DP-EM holds means, exact sums in two parts, the noisy sums, and the results computed from them.
    return Work(
        passes=config.head.epochs,
        numbers=classes * components * dimension * (8 if config.mechanism == "dp-em" else each if squares else 2),
        components=settings.components,
        rank=settings.rank if settings.covariance == "lowrank" else 0,
    )


def chain_work(config: RunConfig, classes: int, dimension: int) -> Work:
    """The work of a chain site, which also samples from the received surrogate and trains a head."""
    return replace(work(config, classes, dimension), steps=config.head.min_steps, synthetic=config.head.max_samples)


def refusal(config: RunConfig) -> str:
    """Why FedPFT does not support the settings; empty if it does."""
    if config.head.solver not in ("auto", "sampled") and config.epsilon:
        return f"head.solver = {config.head.solver!r} is for runs without privacy; noisy sums have a solver of their own"
    if config.head.solver == "sampled" and config.mechanism in NOISY:
        return "head.solver = 'sampled': noisy sums have a solver of their own; remove head.solver"
    if config.head.solver == "qda" and (config.fedpft.covariance in ("lowrank", "gram")):
        return "head.solver = 'qda' needs a covariance of each class: set fedpft.covariance = 'diag' or 'full'"
    if config.head.solver == "qda" and (config.defence in ("median", "trimmed") or config.fedpft.topology == "chain"):
        return "head.solver = 'qda' works with defence 'none' or 'screen', and topology 'star'"
    if config.fedpft.covariance == "gram" and config.fedpft.components > 1:
        return "fedpft.covariance = 'gram' has one component a class; set fedpft.components = 1, or covariance = 'lowrank'"
    if config.fedpft.bits < 16 and (config.epsilon or config.fedpft.covariance != "lowrank"):
        return f"fedpft.bits = {config.fedpft.bits} is for the loadings of covariance 'lowrank' without privacy; set 16"
    if config.mechanism == "theorem-4.1" and (
        config.fedpft.covariance in ("lowrank", "gram") or config.fedpft.components > 1
    ):
        return "fedpft.privacy = 'theorem-4.1' is defined for one component and covariance 'full', 'diag' or 'spherical'"
    return ""


def chain_refusal(config: RunConfig) -> str:
    """Why a chain does not support the settings; empty if it does."""
    if config.mechanism not in ("none", "sums"):
        return f"fedpft.topology = 'chain' with privacy supports noisy sums only, not {config.mechanism!r}"
    if config.fedpft.covariance == "gram" and not config.epsilon:
        return "fedpft.covariance = 'gram' works only with fedpft.topology = 'star'; use 'lowrank' in a chain"
    if config.fedpft.public:
        return "fedpft.public works only with fedpft.topology = 'star'"
    return refusal(config)


def defences(config: RunConfig) -> tuple[str, ...]:
    """Available defences. No "screen" for DP-EM and theorem 4.1: they do not state their noise, which the screen needs."""
    private = config.mechanism in ("dp-em", "theorem-4.1")
    return ("none", "median", "trimmed") if private else ("none", "median", "trimmed", "screen")
