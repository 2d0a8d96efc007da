"""The privacy mechanism of a run: one value that claim, plan, budget check, noise and ledger entry
all read.

A method names its noise by a recipe (`NoisySums`, `NoisyRounds`, `TheoremNoise`): settings and
shares, which cost nothing to write down. `mechanism()` of a recipe computes the noise. Both sides
compute it from the run's settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from ..errors import ConfigError, SurrogateError
from .accounting import (
    GaussianEvent,
    Unit,
    calibrate,
    epsilon_spent,
    gaussian_epsilon,
    gaussian_noise_multiplier,
)

# Names of mechanisms, as they stand in messages, ledgers and policies.
SUMS, EM, THEOREM, SGD, NOISY_COUNTS, DISTRIBUTED_SUMS = (
    "sums",
    "dp-em",
    "theorem-4.1",
    "dp-sgd",
    "counts",
    "secure-aggregation",
)
# In an entry of the ledger: exact counts, which the policy allows and which no guarantee covers.
EXACT_COUNTS = "exact-counts"
# Those whose noise hides which classes a site has.
HIDE_CLASSES = frozenset({SUMS, EM, SGD, NOISY_COUNTS, DISTRIBUTED_SUMS})
# Those whose message has a size that depends on the noisy result: components above the noise,
# entries that are not zero.
VARY_IN_SIZE = frozenset({EM, SGD})

# Facts that no mechanism covers, for reports and documents.
NOT_COVERED = (
    "that a site takes part, and how long it takes to reply",
    "records of one person at several sites: each site's claim is for its own data only",
    "other releases of the same site, or releases from a copy of its data with a separate ledger",
    "whether the foundation model itself was trained on a person's images",
    "the last digits of a feature, which other images in its batch can change by rounding",
)


@dataclass(frozen=True)
class Releases:
    """What a site's releases cost, round by round.

    Attributes:
        first: the release of round one.
        each: the release of every other round.
        rounds: their number.

    Example:
        >>> releases = Releases(GaussianEvent(8.0), GaussianEvent(4.0, count=2), rounds=10)
        >>> [(event.noise_multiplier, event.count) for event in releases.until(3)]
        [(8.0, 1), (4.0, 4)]
    """

    first: GaussianEvent
    each: GaussianEvent
    rounds: int = 1

    def until(self, rounds: int) -> tuple[GaussianEvent, ...]:
        """The releases of the first rounds, in their order."""
        if self.first == self.each:
            return (replace(self.each, count=self.each.count * rounds),)
        if rounds < 2:
            return (self.first,)
        return (self.first, replace(self.each, count=self.each.count * (rounds - 1)))


@dataclass(frozen=True)
class Mechanism:
    """The differential privacy of a site's releases in a run: (epsilon, delta) for adding or
    removing one `unit`.

    What a message states of it has no `releases`: a receiver computes them from the settings.

    Attributes:
        name: of the mechanism.
        epsilon: of all releases of the run together.
        delta: of all releases of the run together.
        unit: what is added or removed: a record, or a patient with all records of that patient.
        noise_multiplier: of the whole release as one Gaussian mechanism; in rounds, of one step.
        clip: features x were divided by max(|x|, clip), or gradients shortened to it.
        noise: standard deviation and sensitivity of each released statistic.
        centre: what was subtracted before the clip: the digest of a public mean, or what
            `shares.stated` says of the mean over columns; or empty.
        releases: what they cost.

    Example:
        >>> mechanism = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9}).mechanism()
        >>> f"{mechanism.noise_multiplier:.3f}", f"{mechanism.epsilon_after(1):.3f}"
        ('3.731', '1.000')
    """

    name: str
    epsilon: float
    delta: float
    unit: Unit
    noise_multiplier: float
    clip: float
    noise: Mapping[str, tuple[float, float]]
    centre: str = ""
    releases: Releases | None = None

    def of(self, unit: Unit, centre: str = "") -> Mechanism:
        """The mechanism for this unit, and with this digest of a public mean.

        Args:
            unit: what is added or removed.
            centre: what was subtracted before the clip, see the attribute.
        """
        return replace(self, unit=unit, centre=centre)

    @property
    def sigmas(self) -> dict[str, float]:
        """Standard deviation of the noise of each released statistic."""
        return {name: sigma for name, (sigma, _) in self.noise.items()}

    @property
    def rounds(self) -> int:
        """Number of rounds that the budget pays for."""
        return self._releases.rounds

    @property
    def events(self) -> tuple[GaussianEvent, ...]:
        """All releases of a site in the run, in their order."""
        return self._releases.until(self.rounds)

    def event(self, round: int) -> GaussianEvent:
        """The release of a site in a round, counted from one."""
        return self._releases.first if round == 1 else self._releases.each

    def epsilon_after(self, rounds: int) -> float:
        """Epsilon, at this delta, of the releases of the first rounds."""
        return _spent(self._releases.until(rounds), self.delta)

    def epsilon_of_part(self, parts: int) -> float:
        """Epsilon, at this delta, of all releases if of so many equal parts of their noise only one
        counts.
        """
        # Gaussian mechanisms compose as one whose squared inverse multiplier is the sum of theirs.
        precision = sum(event.count / event.noise_multiplier**2 for event in self.events)
        return gaussian_epsilon(1 / math.sqrt(precision * parts), self.delta)

    @property
    def _releases(self) -> Releases:
        if self.releases is None:
            raise TypeError(
                "a mechanism that was read from a message says nothing of the cost of releases"
            )
        return self.releases


# What a message states of a mechanism.
STATED = ("name", "epsilon", "delta", "unit", "noise_multiplier", "clip", "noise", "centre")
# The same in error messages.
SHOWN = {"name": "mechanism"}


def check_stated(stated: Mechanism | None, expected: Mechanism | None) -> None:
    """Check that a message states the mechanism of the run, up to rounding and for any unit.

    Args:
        stated: what the message states; None if it states no privacy.
        expected: what follows from the run's settings; None for a run without privacy.

    Raises:
        SurrogateError: if it states anything else.
    """
    if stated is None or expected is None:
        if stated is not expected:
            name = "no privacy" if stated is None else f"mechanism {stated.name[:40]!r}"
            asked = "none" if expected is None else expected.name
            raise SurrogateError(f"a surrogate with {name}, this run asks for mechanism {asked!r}")
        return
    own = expected.of("patient" if stated.unit == "patient" else "record", expected.centre)
    for name in STATED:
        given, due = getattr(stated, name), getattr(own, name)
        if not _equal(given, due):
            raise SurrogateError(
                f"a privacy claim with {SHOWN.get(name, name)} = {str(given)[:80]}; this run's "
                f"settings give {due}"
            )


def relation_of(mechanism: str, units: Collection[str]) -> str:
    """The neighbouring relation of a run whose sites protect these units.

    Args:
        mechanism: its name.
        units: that the sites protect: records, patients or both.

    Returns:
        The relation in words; empty without a unit.

    Example:
        >>> relation_of(SUMS, {"patient"})
        'add or remove one patient'
    """
    if mechanism == THEOREM:
        # Its sensitivities assume an exchange: one record more or less would change the class
        # sizes, which have no noise.
        return "exchange one record for another of the same class"
    if len(units) == 1:
        return f"add or remove one {next(iter(units))}"
    return (
        "add or remove one record, or one patient at the sites that protect patients"
        if units
        else ""
    )


Shares = Mapping[str, float] | Callable[[float], Mapping[str, float]]


@dataclass(frozen=True)
class NoisySums:
    """Gaussian noise on sums over records, which are released together.

    Attributes:
        name: of the mechanism.
        epsilon: of the release.
        delta: of the release.
        shares: part of the budget 1 / noise_multiplier^2 of each statistic; or a function of the
            noise multiplier.
        clip: see `Mechanism`.
        bounds: Euclidean norm of what one record adds to each statistic; one where none is given.
        steps: equal releases into which the budget is split.

    Example:
        Counts get a tenth of the budget, so their noise is larger than that of the sums, at the
        same sensitivity of one:

        >>> recipe = NoisySums("sums", 1.0, 1e-5, {"counts": 0.1, "sums": 0.9})
        >>> {name: round(sigma, 1) for name, (sigma, bound) in recipe.mechanism().noise.items()}
        {'counts': 11.8, 'sums': 3.9}
    """

    name: str
    epsilon: float
    delta: float
    shares: Shares
    clip: float = 0.0
    bounds: Mapping[str, float] = field(default_factory=dict)
    steps: int = 1

    def mechanism(self) -> Mechanism:
        """The mechanism for records."""
        multiplier = gaussian_noise_multiplier(self.epsilon, self.delta)
        each = multiplier * math.sqrt(self.steps)
        shares = self.shares(each) if callable(self.shares) else self.shares
        bounds = {name: self.bounds.get(name, 1.0) for name in shares}
        noise = {
            name: (sigma * bounds[name], bounds[name])
            for name, (sigma, _) in _noise_of(shares, each).items()
        }
        return _released_once(self, multiplier, noise)


@dataclass(frozen=True)
class TheoremNoise:
    """FedPFT's published mechanism: noise (4 / (n epsilon)) sqrt(5 ln(4 / delta)) on mean and
    covariance of a class.

    The joint sensitivity of a class of n records is 2 sqrt(5) / n (mean 2 / n, covariance 4 / n).
    It protects one record and assumes public class sizes; it does not hide them, nor which classes
    a site has.

    Attributes:
        epsilon: of the release.
        delta: of the release.
        clip: see `Mechanism`.
        name: of the mechanism.

    Source:
        Beitollahi et al. 2024, theorem 4.1.
    """

    epsilon: float
    delta: float
    clip: float
    name: str = THEOREM

    def mechanism(self) -> Mechanism:
        """The mechanism.

        Raises:
            ConfigError: where its noise is too small for epsilon.
        """
        epsilon, delta = self.epsilon, self.delta
        multiplier = 2 / epsilon * math.sqrt(math.log(4 / delta))
        if (true := gaussian_epsilon(multiplier, delta)) > epsilon:
            raise ConfigError(
                f"epsilon = {epsilon:g}: the noise of theorem-4.1 keeps only epsilon {true:.4g} at "
                f"delta {delta:g}; set a smaller epsilon, or use fedpft.privacy = 'sums'"
            )
        return _released_once(self, multiplier, {})


@dataclass(frozen=True)
class NoisyRounds:
    """Gaussian noise on sums of gradients, in steps of several rounds, perhaps after a first round
    of noisy sums.

    Epsilon is for all steps of all rounds together, the noise multiplier for each step.

    Attributes:
        name: of the mechanism.
        epsilon: of all rounds.
        delta: of all rounds.
        clip: largest norm of one record's gradient.
        rounds: planned, the first one included.
        steps: in a round.
        sample_rate: probability that a record takes part in a step.
        noise_multiplier: as given; 0 derives it, so that all rounds spend epsilon.
        step_shares: part of the budget of each statistic of a step, of sensitivity one; empty for
            gradients alone, whose sensitivity is the clip.
        first_share: the first round's part of the whole budget; 0 if it is like the others.
        first_shares: part of the first round's budget of each of its statistics.
    """

    name: str
    epsilon: float
    delta: float
    clip: float
    rounds: int
    steps: int = 1
    sample_rate: float = 1.0
    noise_multiplier: float = 0.0
    step_shares: Mapping[str, float] = field(default_factory=dict)
    first_share: float = 0.0
    first_shares: Mapping[str, float] = field(default_factory=dict)

    def mechanism(self) -> Mechanism:
        """The mechanism.

        Raises:
            ConfigError: for a given noise with which not even one round is within epsilon.
        """
        first_round = self._first_round
        multiplier = self.noise_multiplier or _calibrated(
            self.epsilon,
            self.delta,
            self.sample_rate,
            (self.rounds - (first_round is not None)) * self.steps,
            first_round,
        )
        each = GaussianEvent(multiplier, self.sample_rate, self.steps)
        releases = Releases(first_round or each, each, self.rounds)
        epsilon = self.epsilon
        if self.noise_multiplier:
            releases = replace(releases, rounds=self._affordable(releases))
            epsilon = _spent(releases.until(releases.rounds), self.delta)
        if self.step_shares:
            noise = _noise_of(self.step_shares, multiplier)
        else:
            noise = {"gradients": (multiplier * self.clip, self.clip)}
        if first_round is not None:
            noise |= _noise_of(self.first_shares, first_round.noise_multiplier)
        return Mechanism(
            self.name, epsilon, self.delta, "record", multiplier, self.clip, noise, "", releases
        )

    @property
    def _first_round(self) -> GaussianEvent | None:
        if not self.first_share:
            return None
        return GaussianEvent(
            gaussian_noise_multiplier(self.epsilon, self.delta) / math.sqrt(self.first_share)
        )

    def _affordable(self, releases: Releases) -> int:
        """Number of rounds with the given noise that epsilon allows."""
        low, high = 1 + bool(self.first_share), self.rounds + 1
        if (least := _spent(releases.until(low), self.delta)) > self.epsilon:
            raise ConfigError(
                f"noise-multiplier = {self.noise_multiplier:g}: one round spends epsilon "
                f"{least:.4g}, but the run has {self.epsilon:g}; set more noise, fewer steps per "
                "round, or noise-multiplier = 0 to derive the noise"
            )
        while high - low > 1:
            middle = (low + high) // 2
            if _spent(releases.until(middle), self.delta) <= self.epsilon:
                low = middle
            else:
                high = middle
        return low


# A recipe of a mechanism. What it raises is a ConfigError, for a budget that its noise cannot keep.
MechanismRecipe = NoisySums | TheoremNoise | NoisyRounds


def _released_once(
    recipe: NoisySums | TheoremNoise, multiplier: float, noise: Mapping[str, tuple[float, float]]
) -> Mechanism:
    event, budget = GaussianEvent(multiplier), (recipe.epsilon, recipe.delta)
    releases = Releases(event, event)
    return Mechanism(
        recipe.name, *budget, "record", multiplier, recipe.clip, noise, releases=releases
    )


def _noise_of(shares: Mapping[str, float], multiplier: float) -> dict[str, tuple[float, float]]:
    """Standard deviation and sensitivity of statistics of sensitivity one, released together.

    Args:
        shares: part of the budget 1 / multiplier^2 of each.
        multiplier: of the whole release.

    Raises:
        ValueError: for shares that spend more than the budget.
    """
    if any(share <= 0 for share in shares.values()) or math.fsum(shares.values()) > 1 + 1e-9:
        raise ValueError(f"shares of a privacy budget = {dict(shares)}: must be above 0, sum 1")
    return {name: (multiplier / math.sqrt(share), 1.0) for name, share in shares.items()}


@cache
def _spent(events: tuple[GaussianEvent, ...], delta: float) -> float:
    return epsilon_spent(events, delta)


@cache
def _calibrated(
    epsilon: float, delta: float, sample_rate: float, steps: int, first_round: GaussianEvent | None
) -> float:
    return calibrate(
        epsilon, delta, sample_rate, steps, [first_round] if first_round is not None else []
    )


def _equal(given: object, due: object) -> bool:
    if isinstance(given, float | int) and isinstance(due, float | int):
        return math.isclose(given, due, rel_tol=1e-6)
    if isinstance(given, tuple) and isinstance(due, tuple):
        return len(given) == len(due) and all(map(_equal, given, due))
    if isinstance(given, Mapping) and isinstance(due, Mapping):
        return given.keys() == due.keys() and all(_equal(given[key], due[key]) for key in due)
    return given == due
