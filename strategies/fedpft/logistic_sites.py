"""FedPFT's head by a logistic loss where the coordinator sees the noisy sums of each site."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from flwr.serverapp import Grid
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.logistic_rounds import GAPS, LOGISTIC
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.bounded_gradients import Given, within_bounds
from fedsurrogate.strategies.fedpft.logistic_rounds import COUNTED, absorb_sums, head_of
from fedsurrogate.strategies.pooling.plausibility import beyond
from fedsurrogate.strategies.pooling.public_projection import map_with_words
from fedsurrogate.strategies.pooling.rounds_of_sums import RoundsOfSums
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.targets.steps import added

# In the memory of a training: the noisy number of a site's records.
COUNT = "count."
# And of its gradients: what `Given` holds.
TOTAL, USED, ROUNDS = "total.", "used.", "rounds."
# Honest sites keep nearly all or, where they are far from the median one, a large part.
SHOWN = 0.5


class LogisticRoundsOfSites(RoundsOfSums):
    """Rounds of noisy sums of each site, from which a head of mapped features is learned."""

    def _begin(self, grid: Grid, deadline: float) -> Training:
        training = super()._begin(grid, deadline)
        self.outcome.learning = {"solver": LOGISTIC}
        if words := map_with_words(self.config, training.inputs)[1]:
            self.outcome.learning["projection"] = words
        return training

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the classes, and that some records can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other classes, or sums that no records have.
        """
        super().check(reply, training)
        records, sigma = self._records(reply, training)
        for name in (TOTALS, CODE, SUMS, GAPS):
            if name in reply.tensors:
                noise = {"counts": sigma, "sums": self._noise(name)}
                table = reply.tensors[name].flatten()[None]
                if what := beyond(Sums(torch.tensor([records]), table, None, noise)):
                    raise SurrogateError(f"it has {what}")

    def counts(self, reply: Parameters) -> list[float] | None:
        """The noisy number of a site's records; None after the first round."""
        counted = reply.tensors.get(RECORDS)
        return None if counted is None else [max(0.0, float(counted))]

    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Take the step of one noisy sum: that of all sites.

        Args:
            training: before the round; changed.
            replies: that the defence keeps, sorted by site.
            shares: of its weight that each site keeps.

        Returns:
            In a step the sites that were far beyond the bound, and the share of it that they keep.
        """
        tensors = added([each.tensors for each in replies], shares)
        together = math.sqrt(sum(share**2 for share in shares))
        sigmas = {name: self._noise(name) * together for name in tensors}
        facts: dict[str, object] = {}
        if SUMS in tensors:
            tensors[SUMS], bounded = self._bounded(training, replies, shares)
            facts = {"bounded": bounded} if bounded else {}
        claim = self.config.mechanism
        if RECORDS not in tensors:
            # Of the sites of this round: others may have been in the first one.
            records = [self._records(each, training)[0] for each in replies]
            noise = self._noise(RECORDS) * together
            number = sum(share * each for share, each in zip(shares, records, strict=True))
            counted = torch.tensor([max(number, noise, 1.0), noise])
            training.memory = {**training.memory, COUNTED: counted}
        absorb_sums(Total(training.header(), tensors, sigmas, claim), training)
        of_sites = {
            COUNT + each.header.site: each.tensors[RECORDS].double()
            for each in replies
            if RECORDS in each.tensors
        }
        training.memory = {**training.memory, **of_sites}
        return facts

    def classifier(self, training: Training) -> Classifier:
        """The head after any round; that of the first is zero."""
        return head_of(training)

    def _bounded(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> tuple[Tensor, dict[str, float]]:
        """The sum of gradients within their bounds, and the shares that bounded sites keep.

        The training's memory gets what each site has sent.
        """
        memory, given = training.memory, dict[str, Given]()
        weights: dict[str, float] = {}
        for reply, share in zip(replies, shares, strict=True):
            site, sums = reply.header.site, reply.tensors[SUMS].double()
            records = max(1.0, self._records(reply, training)[0])
            weights[site] = share * records
            given[site] = Given(
                memory.get(TOTAL + site, torch.zeros_like(sums)).double() + sums / records,
                memory.get(USED + site, torch.zeros_like(sums)).double(),
                int(memory.get(ROUNDS + site, torch.zeros(1))) + 1,
                self._noise(SUMS) / records,
            )
        parts, changed = within_bounds(given), dict[str, Tensor]()
        for site, each in given.items():
            changed[TOTAL + site], changed[USED + site] = each.total, each.used + parts[site][0]
            changed[ROUNDS + site] = torch.tensor([float(each.rounds)])
        training.memory = {**memory, **changed}
        total = torch.stack([weights[site] * part for site, (part, _) in parts.items()]).sum(0)
        shown = {site: kept for site, (_, kept) in parts.items() if kept < SHOWN}
        return total, {site: float(f"{kept:.3g}") for site, kept in shown.items()}

    def _records(self, reply: Parameters, training: Training) -> tuple[float, float]:
        """The noisy number of a site's records, and its noise. A site that was not in the first round
        counts as a usual one.
        """
        if RECORDS in reply.tensors:
            return float(reply.tensors[RECORDS]), self._noise(RECORDS)
        known = {
            name: float(each) for name, each in training.memory.items() if name.startswith(COUNT)
        }
        usual = statistics.median_low(known.values()) if known else 0.0
        return known.get(COUNT + reply.header.site, usual), self._noise(RECORDS)

    def _noise(self, name: str) -> float:
        mechanism = self.config.mechanism
        assert mechanism is not None
        return mechanism.noise[name][0]
