"""Survival statistics from the cells of a time axis: Kaplan-Meier curves whose intervals hold the
noise, and the log-rank test.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedsurrogate.common.targets.time import at_risk_in

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


@dataclass(frozen=True)
class LogRank:
    """The log-rank test of equal hazards in groups.

    Attributes:
        statistic: chi-square.
        freedom: number of groups minus one.
        chance: p-value.
    """

    statistic: float
    freedom: int
    chance: float


def log_rank(groups: Sequence[Cells]) -> LogRank:
    """The log-rank test, in its hypergeometric form.

    Args:
        groups: exact cells of two groups or more, with the same bins.

    Raises:
        ValueError: for fewer groups, or for cells with noise, for which this test's distribution
            does not hold.

    Example:
        >>> early = Cells.of(torch.tensor([5.0, 1.0, 0.0, 0.0, 4.0]))
        >>> late = Cells.of(torch.tensor([1.0, 5.0, 0.0, 0.0, 4.0]))
        >>> round(log_rank([early, late]).chance, 3)
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
    return LogRank(statistic, freedom, float(chi2.sf(statistic, freedom)))
