"""The privacy card of a run: its guarantee, what the guarantee does not cover, and the
signal-to-noise ratios.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedsurrogate.common.methods.method import Plan
from fedsurrogate.common.models.classifiers import Classifier, target_of_model
from fedsurrogate.common.privacy.accounting import gaussian_epsilon
from fedsurrogate.common.privacy.gaussian_mechanism import Noisy
from fedsurrogate.common.privacy.mechanism import NOT_COVERED, Mechanism, relation_of
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.targets.answers import facts_of

Json = dict[str, Any]

DERIVED = "; and all results computed from these, such as the model, any number of times"
COVERS = {
    "secure-sums": "the sum over all sites: noisy sizes, sums and second moments of all classes "
    "of the run, the only numbers that the coordinator learns; for as long as at "
    "most the stated number of sites tell it their noise (central privacy through "
    "secure summation)",
    "summed-counts": "the sum over all sites of their counts: records of each class, or decisions "
    "and scores of a model on held-out records; for as long as at most the "
    "stated number of sites tell the coordinator their noise (central privacy "
    "through secure summation)",
    "summed-gradients": "in every round the sum over all sites: their noisy number of records and "
    "sum of clipped gradients at the common model, the only numbers that the "
    "coordinator learns; for as long as at most the stated number of sites "
    "tell it their noise (central privacy through secure summation), over all "
    "rounds together",
    "summed-steps": "in every round the sum over all sites: in the first one their noisy number of "
    "records, sum of features and numbers of features of each length, and in each later one the sums "
    "of their shortened gradients, and of how sure the common head should be of their records; the "
    "only numbers that the coordinator learns, for as long as at most the stated number of sites "
    "tell it their noise (central privacy through secure summation), over all rounds together",
    "steps": "every number that a site sends, over all rounds together: in the first one its noisy "
    "number of records, sum of features and numbers of features of each length, and in each later "
    "one the noisy sums of shortened gradients, and of how sure the common head should be of its records",
    "counts": "every count of a site: records of each class, or decisions and scores of a model "
    "on held-out records",
    "sums": "every number of a surrogate: noisy sizes, sums and second moments of all classes of "
    "the run, so that the noise also hides which classes a site has",
    "dp-em": "every number of a surrogate: noisy sizes and means of the Gaussians of every class, "
    "over all steps of EM; noisy sizes decide which classes it holds",
    "dp-sgd": "every number that a site sends (updates, synthetic records, or class sizes and "
    "sums), over all rounds together: sums over records get noise, and in every "
    "training step the sum of clipped gradients gets noise",
    "theorem-4.1": "mean and covariance of every class in a surrogate",
}
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
        simulated: whether the run was a simulation, which measures values that a deployment does
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
        return "summed-steps" if mechanism == "secure-sums" else "steps"
    if mechanism != "secure-sums":
        return mechanism
    if plan.counts:
        return "summed-counts"
    gradients = plan.kind == "rounds" and not plan.training.start
    return "summed-gradients" if gradients else "secure-sums"


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
    return {name: sigma for name, (sigma, _) in claim.noise.items()}


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
    elif mechanism != "secure-sums":
        # Without classes in the settings, the head has exactly the classes that some site has
        # released.
        learned = {name for surrogate in surrogates for name in surrogate.header.classes}
    return [name for name in classes if name not in learned]
