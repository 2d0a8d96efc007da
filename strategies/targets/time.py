"""Risk of an event from the cells of a time axis: heads in one round and in two."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.targets.time import at_risk_in
from fedsurrogate.strategies.targets.strength import (
    CAUTION,
    Directions,
    Outcomes,
    cross_validated,
)
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.survival import Cells

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
