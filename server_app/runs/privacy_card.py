"""What a run may say about its privacy: the promise, what it leaves open, and how much of the signal the noise has left."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from common.config.run_config import RunConfig
from common.models.classifiers import Classifier
from common.privacy.accounting import Unit, gaussian_epsilon
from common.privacy.claims import NOT_COVERED, Claim
from common.privacy.gaussian_mechanism import Noisy
from common.surrogates.surrogates import AnySurrogate, SumsSurrogate

Json = dict[str, Any]

DERIVED = "; and whatever is computed from these, such as the model, however often"
COVERS = {
    "sums": "every number of a surrogate: noisy sizes, sums and second moments of the classes, all classes of the run "
    "included, so that the noise also hides which of them a site has",
    "dp-em": "every number of a surrogate: noisy sizes and means of the Gaussians of every class, over all steps of EM; "
    "which classes are in it follows from noisy sizes",
    "dp-sgd": "every number a site sends, updates, synthetic records, or class sizes and sums, over all rounds together: "
    "noise is added to sums over records, in every step of training to that of the sampled records' clipped gradients",
    "theorem-4.1": "mean and covariance of every class in a surrogate",
}
SINGLE_RECORDS = (
    "a patient with several records at a site that protects records: k records together have k times the epsilon, and a "
    "larger delta; fedpft with patient-column protects patients instead"
)
IN_CLEAR = (
    "class sizes and which classes a site has: they are sent in clear",
    "a class with one record more or less: the promise holds for one record's content, class sizes being public",
)
SIMULATED = "accuracies, times and the picture of real features here: exact, because the run was a simulation"


def privacy_card(
    config: RunConfig,
    surrogates: Sequence[AnySurrogate],
    model: Classifier | None,
    simulated: bool = False,
    trained: Mapping[str, Claim] | None = None,
) -> Json | None:
    """What metrics.json says under "privacy"; None when no surrogate that was used claims anything.

    `simulated` runs measure what a deployment does not. Signal-to-noise is estimated from the noisy values alone, so it
    costs no budget. trained: claims of sites that trained in rounds; their epsilon is that of all rounds together.
    """
    claims: dict[str, tuple[AnySurrogate | None, Claim]] = {
        s.header.site: (s, s.claim) for s in surrogates if s.claim is not None
    }
    claims |= {site: (None, claim) for site, claim in (trained or {}).items()}
    if not claims:
        return None
    units = {claim.unit for _, claim in claims.values()}
    open_ends = [*NOT_COVERED]
    if "record" in units:
        open_ends.insert(0, SINGLE_RECORDS)
    if config.mechanism == "theorem-4.1":
        open_ends[:0] = IN_CLEAR
    if simulated:
        open_ends.append(SIMULATED)
    return {
        "mechanism": config.mechanism,
        # With a given noise it is less than the most the run may spend.
        "epsilon": max(claim.epsilon for _, claim in claims.values()),
        "delta": config.delta,
        "relation": _relation(config.mechanism, units),
        "covers": COVERS[config.mechanism] + DERIVED,
        "not_covered": open_ends,
        "per_site": {site: _site(surrogate, claim) for site, (surrogate, claim) in claims.items()},
        "dropped_classes": _dropped(surrogates, config, model),
    }


def mean_noise(claim: Claim, dimension: int, records: float) -> float:
    """Length (root mean square) of the noise on the mean (dimension,) of so many records' features, each of norm one."""
    return _sigmas(claim)["sums"] * math.sqrt(dimension) / records


def _relation(mechanism: str, units: set[Unit]) -> str:
    if mechanism == "theorem-4.1":
        # Its sensitivities are those of an exchange: with one record more or less the sizes in clear would differ.
        return "exchange one record for another of the same class"
    if len(units) == 1:
        return f"add or remove one {units.pop()}"
    return "add or remove one record, or one patient at the sites that protect patients"


def _site(surrogate: AnySurrogate | None, claim: Claim) -> Json:
    card: Json = {
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "unit": claim.unit,
        "mechanism": claim.mechanism,
        "noise_multiplier": claim.noise_multiplier,
        "noise": _sigmas(claim),
        "signal_to_noise": {noisy.name: noisy.signal_to_noise() for noisy in _released(surrogate, claim)}
        if surrogate
        else {},
    }
    if claim.mechanism == "theorem-4.1":
        # The published noise is more than a small epsilon needs, and less than one above 40 does.
        card["epsilon_tight"] = gaussian_epsilon(claim.noise_multiplier, claim.delta)
    return card


def _sigmas(claim: Claim) -> dict[str, float]:
    """Noise of each statistic, in sums over records whatever the mechanism, so that mechanisms can be compared."""
    if claim.mechanism == "theorem-4.1":
        # On means and covariances of n records it is this over n: n times the joint sensitivity is 2 sqrt(5).
        sigma = 2 * math.sqrt(5) * claim.noise_multiplier
        return {"sums": sigma, "squares": sigma}
    return {name: sigma for name, (sigma, _) in claim.noise.items()}


def _released(surrogate: AnySurrogate, claim: Claim) -> list[Noisy]:
    """The noisy sums of a surrogate, put together again where it holds means.

    Sizes are left out there: clear ones have no noise, and only those that stood out from it have been released. So are
    variances: noise that would make them negative has been cut off, and no longer shows.
    """
    sigmas = _sigmas(claim)
    if isinstance(surrogate, SumsSurrogate):
        sums = surrogate.sums
        values = {"counts": sums.counts, "sums": sums.sums} | ({} if sums.squares is None else {"squares": sums.squares})
    else:
        table = surrogate.mixtures
        sizes = table.weights * table.counts[table.labels]
        values = {"sums": table.means * sizes[:, None]}
    return [Noisy(name, value, sigmas[name], 1.0) for name, value in sorted(values.items())]


def _dropped(surrogates: Sequence[AnySurrogate], config: RunConfig, model: Classifier | None) -> list[str]:
    """Classes of the run the model has not learned: no site has them, or their noise hides that one does."""
    if model is None or config.mechanism == "theorem-4.1":
        return []
    if config.mechanism == "dp-sgd":
        return []
    if config.mechanism == "sums":
        named, learned = config.classes or surrogates[0].header.classes, set(model.header.classes)
    else:
        # Without names of its own the head has exactly the classes that some site has released.
        named, learned = config.classes, {name for surrogate in surrogates for name in surrogate.header.classes}
    return [name for name in named if name not in learned]
