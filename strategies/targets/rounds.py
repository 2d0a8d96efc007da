"""Survival models in rounds: Newton steps from round sums, each halved where the likelihood fell."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsurrogate.common.models.risk_sums import RiskSums
from fedsurrogate.strategies.closed_form.solving import solved

# A likelihood that falls by less than this share of itself has only been rounded.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Newton:
    """The state of a search for the largest likelihood.

    Attributes:
        point: where sites compute their next sums, (k,), float64.
        accepted: the best point so far, (k,).
        likelihood: log likelihood there, without what a penalty takes; -inf before the first step.
        steps: number of steps that raised it.
        halvings: number of rounds that were spent on halving a step.
    """

    point: Tensor
    accepted: Tensor
    likelihood: float = -math.inf
    steps: int = 0
    halvings: int = 0

    @classmethod
    def at(cls, start: Tensor) -> Newton:
        """A search that starts from a point (k,)."""
        return cls(start, start)

    def after(self, likelihood: float, gradient: Tensor, information: Tensor) -> Newton:
        """The state after the sums at `point` have arrived.

        Args:
            likelihood: at the point.
            gradient: there, (k,).
            information: minus the second derivatives there, (k, k).
        """
        fell = likelihood < self.likelihood - ROUNDING * abs(self.likelihood)
        sound = math.isfinite(likelihood) and bool(information.isfinite().all())
        if fell or not (sound and bool(gradient.isfinite().all())):
            half = (self.point + self.accepted) / 2
            return replace(self, point=half, halvings=self.halvings + 1)
        step, _ = solved(information.clone(), gradient[None])
        return replace(
            self,
            point=self.point + step[0],
            accepted=self.point,
            likelihood=likelihood,
            steps=self.steps + 1,
        )


@dataclass(frozen=True)
class CoxSearch:
    """A Cox model in rounds, with ties as in Breslow 1974.

    Attributes:
        events: events in each bin, (B,), float64.
        event_sums: sum of z over the records with an event, (d,).
        penalty: of |beta|^2 / 2.
        newton: the search for beta.
        accepted_hazard: baseline hazard of each bin at the best point so far, (B,).
        accepted_means: means of the features at risk in each bin there, (B, d).
        information: minus the second derivatives there, (d, d).
    """

    events: Tensor
    event_sums: Tensor
    penalty: float
    newton: Newton
    accepted_hazard: Tensor
    accepted_means: Tensor
    information: Tensor

    @classmethod
    def start(
        cls, events: Tensor, event_sums: Tensor, hazard: Tensor, penalty: float = 0.0
    ) -> CoxSearch:
        """A search from beta = 0.

        Args:
            events: events in each bin, (B,).
            event_sums: sum of z over the records with an event, (d,).
            hazard: events by records at risk in each bin, (B,).
            penalty: of |beta|^2 / 2.
        """
        start, means = torch.zeros_like(event_sums), torch.zeros(len(events), len(event_sums))
        none = torch.zeros(len(event_sums), len(event_sums), dtype=torch.float64)
        return cls(events, event_sums, penalty, Newton.at(start), hazard, means.double(), none)

    @property
    def hazard(self) -> Tensor:
        """The baseline hazard that is expected at the next point, (B,), to which sites weight their
        second moment.
        """
        step = self.newton.point - self.newton.accepted
        return self.accepted_hazard * (-self.accepted_means @ step).exp()

    def begun(self, sums: RiskSums) -> CoxSearch:
        """The search after a first round at beta = 0, when no hazard is known yet.

        The information is the covariance of all records for each event, which leads no less far than
        that of the records at risk.

        Args:
            sums: of all sites at zero, with a hazard of one for every record, and features around
                their mean.
        """
        covariance = sums.second / sums.weights.sum()
        return self._moved(sums, self.events.sum() * covariance)

    def after(self, sums: RiskSums) -> CoxSearch:
        """The search after a round.

        The information has the covariance of the records at risk in every bin, weighted with the
        expected hazard in place of the exact one, which needs this round's sums: so it stays
        positive, and is exact where the search ends.

        Args:
            sums: of all sites at `newton.point`, with `hazard`.
        """
        weights, means = self._means(sums)
        expected = self.hazard * weights
        information = sums.second - (means * expected[:, None]).T @ means
        # What is known exactly: the expected events at these sums are as many as the events.
        scale = float(self.events.sum() / expected.sum().clamp_min(1e-300))
        return self._moved(sums, scale * (information + information.T) / 2)

    def _means(self, sums: RiskSums) -> tuple[Tensor, Tensor]:
        """Weights at risk in each bin (B,), and the mean features there (B, d)."""
        weights, first = _at_risk(sums.weights), _at_risk(sums.first)
        seen = self.events > 0
        means = torch.zeros_like(first)
        means[seen] = first[seen] / weights[seen][:, None]
        return weights, means

    def _moved(self, sums: RiskSums, information: Tensor) -> CoxSearch:
        weights, means = self._means(sums)
        seen = self.events > 0
        beta = self.newton.point
        likelihood = float(beta @ self.event_sums - self.events[seen] @ weights[seen].log())
        likelihood -= self.penalty * float(beta @ beta) / 2
        gradient = self.event_sums - self.events @ means - self.penalty * beta
        information.diagonal().add_(self.penalty)
        newton = self.newton.after(likelihood, gradient, information)
        if newton.halvings > self.newton.halvings:
            return replace(self, newton=newton)
        hazard = torch.where(seen, self.events / weights.clamp_min(1e-300), 0.0)
        return replace(
            self,
            newton=newton,
            accepted_hazard=hazard,
            accepted_means=means,
            information=information,
        )


def _at_risk(by_bin: Tensor) -> Tensor:
    """Sums over the records at risk in each bin (B, ...), from those of records that leave in it."""
    return by_bin.flip(0).cumsum(0).flip(0)[:-1]
