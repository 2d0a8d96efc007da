"""Privacy claims of surrogates. A claim follows from the run's settings alone, so site and coordinator can compute it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache

from common.config.run_config import RunConfig
from common.config.sections import DPCVAEConfig
from common.errors import ConfigError, SurrogateError
from common.privacy.accounting import (
    GaussianEvent,
    Unit,
    calibrate,
    epsilon_spent,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)
from common.privacy.gaussian_mechanism import JOINT_STEP, budget_shares
from common.rules.counting import tables_of

# Releases of DP-EM: one for the class means, then the steps of EM. More steps split the same budget into smaller parts.
EM_STEPS = 4


@dataclass(frozen=True)
class Claim:
    """The differential privacy of one surrogate: (epsilon, delta) for adding or removing one `unit`.

    noise_multiplier: of the whole release as one Gaussian mechanism. clip: features x were divided by max(|x|, clip).
    noise: standard deviation and sensitivity of each released statistic. centre: digest of the public centre that was
    subtracted before the clip, or empty.
    """

    mechanism: str
    epsilon: float
    delta: float
    unit: Unit
    noise_multiplier: float
    clip: float
    noise: Mapping[str, tuple[float, float]]
    centre: str = ""


# Facts that no claim covers, for reports and documents.
NOT_COVERED = (
    "that a site takes part, and how long it takes to reply",
    "records of one person at several sites: each site's claim is for its own data only",
    "other releases of the same site, or releases from a copy of its data with a separate ledger",
    "whether the foundation model itself was trained on a person's images",
    "the last digits of a feature, which other images in its batch can change by rounding",
)


def make_claim(config: RunConfig, unit: Unit, centre: str = "") -> Claim | None:
    """The claim of a surrogate made under these settings; None without a budget.

    "theorem-4.1" is FedPFT's published mechanism: noise (4 / (n epsilon)) sqrt(5 ln(4 / delta)) on mean and covariance of a
    class of n records, whose joint sensitivity is 2 sqrt(5) / n (mean 2 / n, covariance 4 / n). It protects one record and
    assumes public class sizes; it does not hide them, nor which classes a site has. "dp-sgd": epsilon is for all steps of
    all rounds together, noise_multiplier for each step. So it is for "secure-sums" in rounds, where a round is one step.
    """
    mechanism, epsilon, delta = config.mechanism, config.epsilon, config.delta
    if mechanism == "none":
        return None
    if mechanism == "theorem-4.1":
        multiplier = 2 / epsilon * math.sqrt(math.log(4 / delta))
        if (true := gaussian_epsilon(multiplier, delta)) > epsilon:
            raise ConfigError(
                f"epsilon = {epsilon:g}: the noise of theorem-4.1 keeps only epsilon {true:.4g} at delta {delta:g}; set a "
                "smaller epsilon, or use fedpft.privacy = 'sums'"
            )
        return Claim(mechanism, epsilon, delta, unit, multiplier, config.fedpft.clip, {}, centre)
    if config.spec.kind == "rounds":
        settings, multiplier = config.trained, _noise_of_a_step(config)
        if settings.noise_multiplier:
            epsilon = spent_after(config, private_rounds(config))
        if mechanism != "dp-sgd":
            step = {name: (multiplier / math.sqrt(share), 1.0) for name, share in JOINT_STEP.items()}
            return Claim(mechanism, epsilon, delta, unit, multiplier, settings.clip, step)
        sgd = {"gradients": (multiplier * settings.clip, settings.clip)}
        if (first := first_round_noise(config)) is not None:
            sgd |= {name: (first / math.sqrt(share), 1.0) for name, share in first_round_shares(config).items()}
        return Claim(mechanism, epsilon, delta, unit, multiplier, settings.clip, sgd, centre)
    multiplier = gaussian_noise_multiplier(epsilon, delta)
    if config.spec.counts:
        tables = tables_of(config, len(config.classes))
        counted = {each.name: (multiplier * each.bound / math.sqrt(each.share), each.bound) for each in tables}
        return Claim(mechanism, epsilon, delta, unit, multiplier, 0.0, counted)
    steps = EM_STEPS if mechanism == "dp-em" else 1
    family = {"dp-em": "spherical", "secure-sums": "joint"}.get(mechanism, config.fedpft.covariance)
    each = multiplier * math.sqrt(steps)
    noise = {name: (each / math.sqrt(share), 1.0) for name, share in budget_shares(family, each).items()}
    return Claim(mechanism, epsilon, delta, unit, multiplier, config.fedpft.clip, noise, centre)


def relation_of(mechanism: str, units: Collection[str]) -> str:
    """The neighbouring relation of a run whose sites protect these units; empty without a unit."""
    if mechanism == "theorem-4.1":
        # Its sensitivities assume an exchange: one record more or less would change the class sizes, which have no noise.
        return "exchange one record for another of the same class"
    if len(units) == 1:
        return f"add or remove one {next(iter(units))}"
    return "add or remove one record, or one patient at the sites that protect patients" if units else ""


def private_rounds(config: RunConfig) -> int:
    """Number of rounds that a private run's epsilon allows: all rounds if the noise is derived from epsilon, otherwise as
    many as fit with the given noise_multiplier. Raises ConfigError when none fits.
    """
    settings = config.trained
    if not (config.epsilon and settings.noise_multiplier):
        return settings.rounds
    least_rounds = 1 if first_round_noise(config) is None else 2
    if (least := spent_after(config, least_rounds)) > config.epsilon:
        raise ConfigError(
            f"noise-multiplier = {settings.noise_multiplier:g}: one round spends epsilon {least:.4g}, but the run has "
            f"{config.epsilon:g}; set more noise, fewer steps per round, or noise-multiplier = 0 to derive the noise"
        )
    low, high = least_rounds, settings.rounds + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent_after(config, middle) <= config.epsilon else (low, middle)
    return low


def plan_of(config: RunConfig) -> tuple[GaussianEvent, ...]:
    """All releases of a site in a private run, in the order fixed by the settings; empty without privacy."""
    claim = make_claim(config, "record")
    if claim is None:
        return ()
    if config.spec.kind != "rounds":
        return (GaussianEvent(claim.noise_multiplier),)
    rounds, rest = private_rounds(config), released_in(config, 2)
    if first_round_noise(config) is None:
        return (replace(rest, count=rest.count * rounds),)
    return (released_in(config, 1), replace(rest, count=rest.count * (rounds - 1)))


def released_in(config: RunConfig, round: int) -> GaussianEvent:
    """The release of a site in a round of private training, counted from one."""
    if round == 1 and (first := first_round_noise(config)) is not None:
        return GaussianEvent(first)
    return GaussianEvent(_noise_of_a_step(config), *steps_of_a_round(config))


def steps_of_a_round(config: RunConfig) -> tuple[float, int]:
    """Sample rate and number of the private steps in a round. With joint noise it is one step over all records."""
    settings = config.trained
    return (settings.sample_rate, settings.private_steps) if config.mechanism == "dp-sgd" else (1.0, 1)


def first_round_noise(config: RunConfig) -> float | None:
    """Noise multiplier of a generative run's first round (class sizes and sums); None for other methods or no noise."""
    settings = config.trained
    if not (config.epsilon and isinstance(settings, DPCVAEConfig)):
        return None
    return gaussian_noise_multiplier(config.epsilon, config.delta) / math.sqrt(settings.share(config.epsilon))


def first_round_shares(config: RunConfig) -> dict[str, float]:
    """Shares of the first round's budget by statistic."""
    return budget_shares("spherical", 1.0) if config.dpcvae.opening == "sums" else {"counts": 1.0}


def _noise_of_a_step(config: RunConfig) -> float:
    settings, first = config.trained, first_round_noise(config)
    if settings.noise_multiplier:
        return settings.noise_multiplier
    rounds, (rate, steps) = settings.rounds - (first is not None), steps_of_a_round(config)
    return _calibrated(config.epsilon, config.delta, rate, rounds * steps, first)


def spent_after(config: RunConfig, rounds: int) -> float:
    """Epsilon of `rounds` rounds of a private run, at its delta."""
    first = first_round_noise(config)
    rate, steps = steps_of_a_round(config)
    return _composed(_noise_of_a_step(config), config.delta, rate, (rounds - (first is not None)) * steps, first)


@cache
def _composed(noise_multiplier: float, delta: float, sample_rate: float, steps: int, first: float | None) -> float:
    before = [GaussianEvent(first)] if first is not None else []
    return epsilon_spent([*before, *([GaussianEvent(noise_multiplier, sample_rate, steps)] if steps else [])], delta)


@cache
def _calibrated(epsilon: float, delta: float, sample_rate: float, steps: int, first: float | None) -> float:
    return calibrate(epsilon, delta, sample_rate, steps, [GaussianEvent(first)] if first is not None else [])


def check_claim(claim: Claim | None, config: RunConfig, centre: str = "") -> None:
    """Raise SurrogateError unless a claim equals the one of these settings, up to rounding."""
    unit: Unit = "patient" if claim is not None and claim.unit == "patient" else "record"
    expected = make_claim(config, unit, centre)
    if claim is None or expected is None:
        if claim is not expected:
            found = "no privacy" if claim is None else f"mechanism {claim.mechanism[:40]!r}"
            raise SurrogateError(f"a surrogate with {found}, this run asks for mechanism {config.mechanism!r}")
        return
    for field in fields(Claim):
        found, wanted = getattr(claim, field.name), getattr(expected, field.name)
        if not _equal(found, wanted):
            raise SurrogateError(f"a privacy claim with {field.name} = {str(found)[:80]}; this run's settings give {wanted}")


def _equal(found: object, wanted: object) -> bool:
    if isinstance(found, float | int) and isinstance(wanted, float | int):
        return math.isclose(found, wanted, rel_tol=1e-6)
    if isinstance(found, tuple) and isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(_equal, found, wanted))
    if isinstance(found, Mapping) and isinstance(wanted, Mapping):
        return found.keys() == wanted.keys() and all(_equal(found[key], wanted[key]) for key in wanted)
    return found == wanted
