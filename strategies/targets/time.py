"""Risk of an event from the cells of a time axis: heads in one round and in two.

Survival statistics from the cells of a time axis: Kaplan-Meier curves whose intervals hold the
noise, and the log-rank test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.targets.time import at_risk_in

from .number import CAUTION, Directions, Outcomes, cross_validated
from .sums import CodedSums

# Variances of the log hazard between records, among which the prior is chosen.
SPREADS = torch.linspace(-14, 6, 241, dtype=torch.float64).exp()
# Newton steps of the one slope that calibrates scores.
PASSES = 25
# Where scores are taken as normal: nodes of the integral, slopes that are looked at, and halvings of
# an interval that give all digits.
NODES, SLOPES, HALVINGS = 40, (0.2, 5.0), 60


@dataclass(frozen=True)
class RiskHead:
    """Log hazards (z - mean) w, relative to a record with the mean features.

    Attributes:
        weight: w, (d,), float64.
        mean: of the features, (d,).
        hazard: baseline hazard of each bin, (B,); zeros where it was not asked for.
        excess: sum over the events of the score of the record that has it, less the mean score of
            those at risk; without what noise and chance add to it.
    """

    weight: Tensor
    mean: Tensor
    hazard: Tensor
    excess: float = 0.0


def risk_head(sums: CodedSums, calibrated: bool = True) -> RiskHead:
    """The risk from the cells of one round: a normal prior on the weights, and the score of the Cox
    model at zero, which is the sum of martingale residuals times features.

    Args:
        sums: of the code that is one for a record's cell, in the order of `Cells`.
        calibrated: whether the scores' slope and the baseline hazard are estimated from the sums as
            well.

    Returns:
        The head.

    Raises:
        RunError: where no event was seen, or noise leaves none.
    """
    cells = cells_of(sums)
    _check_events(cells)
    residuals = cells.residuals
    score = residuals @ sums.sums
    noise = 0.0
    if sums.noise is not None:
        noise = float((residuals * sums.noise.sums).norm())
    weight, _ = _weights(score, noise, cells, sums)
    head = RiskHead(weight, sums.mean, torch.zeros(len(cells.events), dtype=torch.float64))
    return calibrated_head(head, sums) if calibrated else head


def cells_of(sums: CodedSums) -> Cells:
    """The cells of coded sums."""
    noise = 0.0 if sums.noise is None else float(sums.noise.code.max())
    return Cells.of(sums.code, noise)


def second_code(cells: Cells) -> tuple[Tensor, float]:
    """The code of the second of two rounds: the martingale residual of each cell, scaled so that its
    magnitude is at most one.

    Args:
        cells: of the first round.

    Returns:
        Values by cell, (2 B + 1,), and the bound by which they were divided.
    """
    residuals = cells.residuals
    bound = max(1.0, float(cells.hazard.sum()))
    return residuals / bound, bound


def risk_of_rounds(cells: Cells, sums: CodedSums, values: Tensor | None = None) -> RiskHead:
    """The risk from two rounds: cells in the first, and in the second the features weighted with the
    residuals of `second_code`.

    Args:
        cells: of the first round.
        sums: of the second round's code (1, residual), around zero. With noise, the sum of the code
            is taken from the cells.
        values: of the code by cell, (2 B + 1,), as sites received them; None for exact ones.

    Returns:
        The head, not calibrated.

    Raises:
        RunError: as in `risk_head`.
    """
    _check_events(cells)
    exact, bound = second_code(cells)
    values = exact if values is None else values
    counted = max(float(cells.counts.sum()), 1.0)
    if sums.noise is None:
        # Sites may be missing in the second round.
        mean = bound * float(sums.code[1]) / sums.records
    else:
        mean = bound * float(values @ cells.counts) / counted
    score = bound * sums.sums[1] - mean * sums.sums[0]
    noise = 0.0
    if sums.noise is not None:
        noise = float((sums.noise.sums * torch.tensor([mean, bound]).double()).norm())
    weight, excess = _weights(score, noise, cells, sums)
    zeros = torch.zeros(len(cells.events), dtype=torch.float64)
    return RiskHead(weight, sums.mean, zeros, excess)


def marginal_head(head: RiskHead, cells: Cells, covariance: Tensor) -> RiskHead:
    """The head with the slope and the baseline hazard that its cells suggest, without sums by cell.

    Scores are taken as normal, and the last time at which a record was seen as independent of its
    score. Then the survival of all records gives the baseline hazard for any slope, and the scores
    of those at risk in each bin. The slope is that at which records with events would have the
    excess of scores that they have.

    Args:
        head: whose scores are calibrated, with their excess.
        cells: of all records.
        covariance: of the features, (d, d).

    Returns:
        The head with its weights times the slope, and the baseline hazard.
    """
    from numpy.polynomial.hermite_e import hermegauss

    variance = max(float(head.weight @ covariance @ head.weight), 0.0)
    nodes, masses = (torch.from_numpy(each).double() for each in hermegauss(NODES))
    scores, masses = nodes * variance**0.5, masses / masses.sum()
    steps = cells.within_bins(cells.hazard)
    survival = (-steps.cumsum(0)).exp()

    def baseline(slope: float) -> Tensor:
        return _marginal_hazard(survival, scores * slope, masses)

    def excess(slope: float) -> float:
        """Summed over events: the mean score of events, less that of records at risk."""
        risk = (scores * slope).exp()
        left = masses * (-baseline(slope)[:, None] * risk).exp()
        at_risk = torch.cat([masses[None], left[:-1]])
        seen = (at_risk - left).clamp_min(1e-300)
        apart = seen @ scores / seen.sum(1) - at_risk @ scores / at_risk.sum(1)
        return float(cells.possible_events @ apart)

    low, high = SLOPES
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if excess(middle) < head.excess else (low, middle)
    slope = (low + high) / 2 if variance > 0 else 1.0
    hazard = baseline(slope)
    return RiskHead(
        slope * head.weight, head.mean, torch.diff(hazard, prepend=torch.zeros(1).double())
    )


def _marginal_hazard(survival: Tensor, scores: Tensor, masses: Tensor) -> Tensor:
    """The cumulative baseline hazard of each bin (B,) at which records with these scores, in these
    shares, survive as all together do.

    Args:
        survival: of all records, at the end of each bin, (B,).
        scores: log hazards, (k,).
        masses: shares of records, (k,).
    """
    low, high = torch.zeros_like(survival), torch.full_like(survival, 1e3)
    risk = scores.exp()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        above = (-middle[:, None] * risk).exp() @ masses > survival
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (low + high) / 2


def calibrated_head(head: RiskHead, sums: CodedSums) -> RiskHead:
    """The head with the slope and the baseline hazard that its cells suggest, without another round.

    Within a cell, scores are taken as normal around the mean that the sums give, all with the
    variance that is left: so the sum of exp(slope score) at risk follows, and the slope of the
    Cox model of this one number.

    Args:
        head: whose scores are calibrated.
        sums: of the cells.

    Returns:
        The head with its weights times the slope, and the baseline hazard.
    """
    cells = cells_of(sums)
    events, counts = cells.possible_events, cells.counts.clamp_min(0)
    scores = sums.sums @ head.weight - cells.counts * float(head.mean @ head.weight)
    bins = len(events)
    present = counts > max(1e-9, 2 * cells.noise)
    mean = torch.where(present, scores / counts.clamp_min(1e-9), 0.0)
    spread = float(head.weight @ sums.covariance @ head.weight)
    between = float(mean.square() @ counts) / max(float(counts.sum()), 1e-9)
    within = max(spread - between, 0.1 * spread)
    if spread <= 0:
        return RiskHead(head.weight, head.mean, cells.within_bins(cells.hazard))
    own = float(scores[:bins].sum())
    slope = 1.0
    for _ in range(PASSES):
        weights = counts * (slope * mean + slope**2 * within / 2).exp()
        tilted = mean + slope * within
        sums_of = [
            at_risk_in(each)
            for each in (weights, weights * tilted, weights * (tilted.square() + within))
        ]
        below = sums_of[0].clamp_min(1e-300)
        first, second = sums_of[1] / below, sums_of[2] / below
        gradient = own - float(events @ first)
        information = max(float(events @ (second - first.square())), 1e-12)
        slope = min(max(slope + gradient / information, slope / 2), 2 * slope)
    weights = counts * (slope * mean + slope**2 * within / 2).exp()
    hazard = cells.within_bins(events / at_risk_in(weights).clamp_min(1e-300))
    return RiskHead(slope * head.weight, head.mean, hazard)


def _directions(sums: CodedSums) -> Directions:
    if sums.noise is None:
        return Directions.of(sums.covariance, sums.rounding)
    return Directions.of_noisy(sums.covariance, sums.noise.squares / max(sums.records, 1.0), 0.0)


def _check_events(cells: Cells) -> None:
    """Raise RunError without an event, or with no more than noise makes."""
    events, bins = float(cells.events.sum()), len(cells.events)
    least = 2 * cells.noise * bins**0.5
    if not events > least:
        within = f", within the noise of {least / 2:.3g}" if cells.noise else ""
        raise RunError(
            f"{events:.4g} events before the horizon{within}: nothing can be learned; set a later "
            "horizon"
        )


def _weights(score: Tensor, noise: float, cells: Cells, sums: CodedSums) -> tuple[Tensor, float]:
    """Weights (d,) from the score (d,) of the Cox model at zero, whose entries have this noise; and
    their product with it, less what noise and chance add, for the events of all cells.

    Without noise they are the ridge of the martingale residuals on the features, in units of the
    log hazard. With it, those that are expected for a normal prior of which the variance has the
    largest likelihood. That needs few dimensions for the records: without noise, where all are
    used, it chose hardly any weight for a thousand pixels.
    """
    directions, events = _directions(sums), float(cells.possible_events.sum())
    if sums.noise is None:
        counted = max(float(cells.counts.sum()), 1.0)
        # Sites may be missing in a second round.
        present = sums.records / counted
        squares = float(cells.residuals.square() @ cells.counts) / counted
        variance, records, none = torch.tensor(
            [[squares], [sums.records], [0.0]], dtype=torch.float64
        )
        outcome = Outcomes(score[None] / sums.records, variance, records, none)
        fitted = cross_validated(directions, outcome, caution=CAUTION)
        weight = fitted.weight[0] * sums.records / (present * events)
        # Chance adds one for each degree of freedom.
        freedom = directions.values / (directions.values + fitted.strength[0])
        return weight, float(weight @ score - freedom.sum()) / present
    values = directions.values * events
    rotated = score @ directions.vectors
    scales = SPREADS[:, None] / directions.values.sum().clamp_min(1e-300)
    whole = values + values.square() * scales + noise**2
    usable = values > 1e-12 * float(values.max())
    terms = (whole.log() + rotated.square() / whole)[:, usable]
    scale = float(scales[int(terms.sum(1).argmin())])
    kept = scale * values / (values + scale * values.square() + noise**2)
    kept = torch.where(usable, kept, 0.0)
    excess = float(kept @ (rotated.square() - values - noise**2))
    return directions.vectors @ (kept * rotated), excess


# With noise, a bin has events in at most this share of the records at risk.
MOST_EVENTS = 0.95
# A curve ends where fewer records are at risk, or fewer than this many deviations of the noise.
FEWEST_AT_RISK, PRESENT = 10.0, 3.0


@dataclass(frozen=True)
class Cells:
    """Numbers of records by time bin and event, up to a horizon.

    A record that reaches the horizon without an event has outlived it.

    Attributes:
        events: with an event in each of B bins, (B,), float64.
        censored: last seen about the start of each bin, (B,): not at risk in it.
        outlived: number of records that reached the horizon.
        noise: standard deviation of the noise in each of these numbers.

    Example:
        >>> cells = Cells.of(torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]).double())
        >>> cells.at_risk.tolist(), cells.hazard.tolist()
        ([4.0, 2.0], [0.25, 0.5])
    """

    events: Tensor
    censored: Tensor
    outlived: float
    noise: float = 0.0

    @classmethod
    def of(cls, counts: Tensor, noise: float = 0.0) -> Cells:
        """From numbers in the order of the code: events by bin, last seen by bin, outlived.

        Args:
            counts: (2 B + 1,).
            noise: standard deviation of the noise in each.

        Raises:
            ValueError: for an even number of counts.
        """
        if len(counts) % 2 == 0:
            raise ValueError(f"{len(counts)} cells; two for each bin and one more are needed")
        bins = len(counts) // 2
        counts = counts.double()
        return cls(counts[:bins], counts[bins:-1], float(counts[-1]), noise)

    @property
    def counts(self) -> Tensor:
        """All numbers in the order of the code, (2 B + 1,)."""
        return torch.cat([self.events, self.censored, self.events.new_tensor([self.outlived])])

    @cached_property
    def at_risk(self) -> Tensor:
        """Records at risk in each bin, (B,); with noise, one or more."""
        found = at_risk_in(self.counts)
        return found.clamp_min(1.0) if self.noise else found

    @cached_property
    def possible_events(self) -> Tensor:
        """Events (B,); with noise, from none to most of the records at risk."""
        if not self.noise:
            return self.events
        return torch.minimum(self.events.clamp_min(0), MOST_EVENTS * self.at_risk)

    @property
    def hazard(self) -> Tensor:
        """Share of the records at risk that have an event in each bin, (B,)."""
        return self.possible_events / self.at_risk.clamp_min(1e-300)

    def within_bins(self, hazard: Tensor) -> Tensor:
        """The hazard of a model in continuous time, from one that takes the events of a bin as ties.

        Of the share q of records that have an event in a bin, the ties' hazard is q, and that which
        is constant over the bin -log(1 - q).

        Args:
            hazard: of each bin, (B,), with ties.

        Returns:
            (B,).
        """
        share = self.hazard.clamp(1e-12, MOST_EVENTS)
        return hazard * -torch.log1p(-share) / share

    @property
    def residuals(self) -> Tensor:
        """Martingale residuals of a record of each cell, (2 B + 1,): its events minus the expected
        ones.
        """
        hazard = self.hazard.cumsum(0)
        return torch.cat([1 - hazard, hazard.new_zeros(1), -hazard])


@dataclass(frozen=True)
class Curve:
    """A survival curve at the end of each bin.

    Attributes:
        survival: share that survives, (b,) of the first bins with enough records at risk.
        low: lower limits, (b,).
        high: upper limits, (b,).
        at_risk: records at risk in each bin, (b,).
    """

    survival: Tensor
    low: Tensor
    high: Tensor
    at_risk: Tensor


def kaplan_meier(cells: Cells, level: float = 0.95) -> Curve:
    """The Kaplan-Meier curve with intervals of log(-log S), whose variance is that of sampling
    (Greenwood) and of the noise.

    Args:
        cells: of the records.
        level: of the intervals.

    Returns:
        The curve, up to the bin where too few records are at risk. Limits are NaN where no event
        has been seen yet.
    """
    events, risk, bins = cells.possible_events, cells.at_risk, len(cells.events)
    kept = _kept(cells)
    survival = (1 - events / risk.clamp_min(1e-300)).cumprod(0)
    by_bin = events / (risk * (risk - events)).clamp_min(1e-300)
    greenwood = by_bin.cumsum(0)
    variance = greenwood
    if cells.noise:
        # Derivatives of log S_j in the cells of bin k: before j, an event raises all numbers at risk
        # up to its own bin, and a record that is last seen about its start those before.
        first = torch.minimum(torch.arange(bins)[:, None], torch.arange(bins))
        until = greenwood[first]
        within = (torch.arange(bins) <= torch.arange(bins)[:, None]).double()
        of_events = until - within / (risk - events)
        of_censored = until - within * by_bin
        squares = of_events.square().sum(1) + of_censored.square().sum(1) + greenwood.square()
        variance = greenwood + cells.noise**2 * squares
    low, high = _log_log(survival, variance, level)
    return Curve(survival[:kept], low[:kept], high[:kept], cells.at_risk[:kept])


def _kept(cells: Cells) -> int:
    """The number of bins until too few records are at risk."""
    bins = len(cells.events)
    least = torch.zeros(bins, dtype=torch.float64)
    if cells.noise:
        left = 2.0 * (bins - torch.arange(bins))
        least = (PRESENT * cells.noise * left.sqrt()).clamp_min(FEWEST_AT_RISK).double()
    few = (cells.at_risk < least) | (cells.at_risk <= 0)
    return int(few.double().argmax()) if bool(few.any()) else bins


def _log_log(survival: Tensor, variance: Tensor, level: float) -> tuple[Tensor, Tensor]:
    from scipy.stats import norm

    logarithm = survival.log()
    width = float(norm.ppf((1 + level) / 2)) * variance.sqrt() / logarithm.abs()
    factor = width.exp()
    low, high = (logarithm * factor).exp(), (logarithm / factor).exp()
    # Once nobody survives, the limits are zero, not a number divided by infinity.
    none_left = survival <= 0
    return low.masked_fill(none_left, 0.0), high.masked_fill(none_left, 0.0)


def log_rank(groups: Sequence[Cells]) -> dict[str, float]:
    """The log-rank test of equal hazards in groups, in its hypergeometric form.

    Args:
        groups: exact cells of two groups or more, with the same bins.

    Returns:
        The chi-square `statistic`, its degrees of `freedom`, and the p-value, `chance`.

    Raises:
        ValueError: for fewer groups, or for cells with noise, for which this test's distribution
            does not hold.

    Example:
        >>> early = Cells.of(torch.tensor([5.0, 1.0, 0.0, 0.0, 4.0]))
        >>> late = Cells.of(torch.tensor([1.0, 5.0, 0.0, 0.0, 4.0]))
        >>> round(log_rank([early, late])["chance"], 3)
        0.54
    """
    from scipy.stats import chi2

    if len(groups) < 2:
        raise ValueError("a log-rank test needs two groups or more")
    if any(each.noise for each in groups):
        raise ValueError("a log-rank test needs exact cells; these have noise")
    events = torch.stack([each.events for each in groups])
    risk = torch.stack([each.at_risk for each in groups])
    all_events, all_risk = events.sum(0), risk.sum(0)
    shares = risk / all_risk.clamp_min(1e-300)
    apart = (events - all_events * shares).sum(1)
    spread = all_events * (all_risk - all_events) / (all_risk - 1).clamp_min(1e-300)
    spread = torch.where(all_risk > 1, spread, 0.0)
    covariance = (shares * spread).sum(1).diag() - (shares * spread) @ shares.T
    # Differences sum to zero, so one group is left out.
    statistic = float(apart[:-1] @ torch.linalg.pinv(covariance[:-1, :-1]) @ apart[:-1])
    freedom = len(groups) - 1
    chance = float(chi2.sf(statistic, freedom))
    return {"statistic": statistic, "freedom": freedom, "chance": chance}
