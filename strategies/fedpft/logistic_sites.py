"""FedPFT's head by a logistic loss where the coordinator sees the noisy sums of each site."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.methods.logistic_rounds import GAPS
from fedsurrogate.common.models.classifiers import Classifier
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.surrogates.class_sums import Sums
from fedsurrogate.common.targets.target import CODE, RECORDS, SUMS, TOTALS
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.fedpft.logistic_rounds import COUNTED, absorb_sums, head_of
from fedsurrogate.strategies.pooling.plausibility import beyond
from fedsurrogate.strategies.pooling.rounds_of_sums import RoundsOfSums
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.targets.steps import added

# In the memory of a training: the noisy number of a site's records.
COUNT = "count."


class LogisticRoundsOfSites(RoundsOfSums):
    """Rounds of noisy sums of each site, from which a head of mapped features is learned."""

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

        Raises:
            RunError: for sums that no records have.
        """
        tensors = added([each.tensors for each in replies], shares)
        together = math.sqrt(sum(share**2 for share in shares))
        sigmas = {name: self._noise(name) * together for name in tensors}
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
        return {}

    def classifier(self, training: Training) -> Classifier:
        """The head after any round; that of the first is zero."""
        return head_of(training)

    def _records(self, reply: Parameters, training: Training) -> tuple[float, float]:
        """The noisy number of a site's records, and its noise. A site that was not in the first round
        has at most as many as the largest of the others.
        """
        if RECORDS in reply.tensors:
            return float(reply.tensors[RECORDS]), self._noise(RECORDS)
        known = {name: float(each) for name, each in training.memory.items() if COUNT in name}
        largest = max(known.values(), default=0.0)
        return known.get(COUNT + reply.header.site, largest), self._noise(RECORDS)

    def _noise(self, name: str) -> float:
        mechanism = self.config.mechanism
        assert mechanism is not None
        return mechanism.noise[name][0]
