"""Survival in two rounds at the coordinator: numbers of records by cell, then features weighted with
the martingale residuals that follow from them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.models.classifiers import Classifier, Head
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.class_sums import FALSE_ALARM, TABLE_TOLERANCE, fold, unfold
from fedsurrogate.common.targets.target import CODE, RECORDS, SQUARES, SUMS, TOTALS, Target
from fedsurrogate.common.targets.time import VALUES, Time, scored
from fedsurrogate.common.wire.tensors import pack, unpack

from ..base.training import Training
from ..pooling.class_means import RoundsOfSums, check_charged
from ..pooling.site_weights import Total, added, false_numbers
from ..secure_aggregation.strategy import SecureRounds
from .strategy import column_factors, head_of, risks
from .sums import (
    CodedSums,
    Noise,
    check_exact,
    message_rounding,
    moment_of,
    sum_rounding,
)
from .time import Cells, RiskHead, marginal_head, risk_of_rounds, second_code

# In the memory of the training: numbers by cell with the standard deviation of their noise; and the
# model, once it is learned.
CELLS, NOISE, WEIGHT, MEAN, BASELINE = "cells", "cells-noise", "weight", "mean", "baseline"


class ResidualSteps:
    """The coordinator's half of two rounds: cells, then residuals.

    Its state is the training's: `model` is what sites receive in the next round, `memory` the rest.

    Attributes:
        run: whose target it is.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    @property
    def target(self) -> Time:
        """Of the run."""
        target = self.run.target
        assert isinstance(target, Time)
        return target

    def start(self, dimension: int) -> Tensors:
        """What sites receive in the first round: zeros, which they do not read.

        Args:
            dimension: of the features.
        """
        return {VALUES: torch.zeros(len(self.target.rows))}

    def check(self, reply: Parameters) -> None:
        """Check that some records can have the sums of one site's reply. Raises SurrogateError."""
        sigmas = self._sigmas
        if reply.tensors.keys() == {CODE}:
            _check_counts(reply.tensors[CODE], sigmas.get(CODE, 0.0))
        elif not sigmas:
            _check_exact(reply.tensors, self._scored)

    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by cell, for the cap of its weight; in the second round, of all;
        none with noise.
        """
        for name in (RECORDS, CODE):
            if name in reply.tensors:
                return [max(0.0, each) for each in reply.tensors[name].tolist()]
        return None

    def pooled(
        self, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> tuple[Tensors, dict[str, float], float]:
        """The sums of all sites, around zero.

        Args:
            replies: checked.
            shares: of its weight that each site keeps.

        Returns:
            As the last three arguments of `absorb`.
        """
        tensors = [dict(each.tensors) for each in replies]
        rounding = 0.0
        if RECORDS in tensors[0]:
            rounding = math.hypot(
                *(share * _rounding(each) for each, share in zip(tensors, shares, strict=True))
            )
            tensors = [_around_zero(each) for each in tensors]
        root = math.sqrt(sum(share**2 for share in shares))
        sigmas = {name: sigma * root for name, sigma in self._sigmas.items()}
        return added(tensors, shares), sigmas, rounding

    def absorb(
        self, training: Training, tensors: Tensors, sigmas: Mapping[str, float], rounding: float
    ) -> dict[str, object]:
        """Finish a round: make the residuals of the cells, or the model. Returns facts for its event.

        Args:
            training: before the round; changed.
            tensors: sums over all sites by name, around zero, float64.
            sigmas: standard deviation of the noise in an entry; empty without noise.
            rounding: largest eigenvalue, about, of what rounding has changed in the second moment.

        Raises:
            RunError: for sums that no records have, or from which nothing can be learned.
        """
        if tensors.keys() == {CODE}:
            noise = sigmas.get(CODE, 0.0)
            _check_counts(tensors[CODE], noise)
            cells = Cells.of(tensors[CODE], noise)
            values, _ = second_code(cells)
            # As sites receive them.
            training.model = {VALUES: unpack(pack(values), VALUES, tuple(values.shape))}
            training.memory = {
                **training.memory,
                CELLS: tensors[CODE],
                NOISE: torch.tensor([noise], dtype=torch.float64),
            }
            return {"events": float(cells.events.sum())}
        cells = _cells_in(training.memory)
        coded = self._coded(cells, tensors, sigmas, training.model[VALUES].double())
        coded = replace(coded, rounding=rounding / coded.records)
        framed = bool(training.frame) and coded.noise is None
        factor = column_factors(coded) if framed else torch.ones_like(coded.mean)
        if framed:
            coded = coded.rescaled(factor)
            if not self.run.settings.secure_aggregation:
                # Messages round each entry in proportion, whatever its scale.
                coded = replace(coded, rounding=message_rounding(coded.covariance))
        head = risk_of_rounds(cells, coded, training.model[VALUES].double())
        head = marginal_head(head, cells, coded.covariance)
        head = replace(head, weight=head.weight * factor, mean=head.mean / factor)
        learned = {WEIGHT: head.weight, MEAN: head.mean, BASELINE: head.hazard}
        training.memory = {**training.memory, **learned}
        return {}

    def head(self, training: Training) -> Head:
        """The model; after the first round, one in which all records have the same risk."""
        memory = {name: tensor.double() for name, tensor in training.memory.items()}
        cells = _cells_in(memory)
        zeros = torch.zeros(training.inputs, dtype=torch.float64)
        same = RiskHead(zeros, zeros, cells.within_bins(cells.hazard))
        found = (
            RiskHead(memory[WEIGHT], memory[MEAN], memory[BASELINE]) if WEIGHT in memory else same
        )
        head, _ = head_of(risks(found, cells, self.target), training.header(), self.target)
        mechanism = self.run.mechanism
        kept = self.run.plan.mean_over_columns_weight(training.inputs)
        if mechanism is None:
            return head
        return replace(head, clip=mechanism.clip, mean_over_columns=kept)

    def _coded(
        self, cells: Cells, tensors: Tensors, sigmas: Mapping[str, float], values: Tensor
    ) -> CodedSums:
        """The sums of the second round, of the code (1, residual)."""
        rows = torch.cat([tensors[TOTALS][None], tensors[SUMS]])
        if sigmas:
            records = max(float(cells.counts.sum()), 1.0)
            second = float(values @ cells.counts)
            noise = Noise(
                torch.zeros(2, dtype=torch.float64),
                torch.tensor([sigmas[TOTALS], sigmas[SUMS]], dtype=torch.float64),
                sigmas[SQUARES],
            )
        else:
            records, second, noise = float(tensors[RECORDS]), float(tensors[CODE]), None
        code = torch.tensor([records, second], dtype=torch.float64)
        if not records > 0:
            raise SurrogateError("sums of no records")
        moment = moment_of(records, rows[0], tensors[SQUARES])
        return CodedSums(code, rows, moment, noise=noise)

    @property
    def _scored(self) -> Target:
        return scored(self.target, torch.zeros(len(self.target.rows)))

    @property
    def _sigmas(self) -> dict[str, float]:
        return {} if self.run.mechanism is None else self.run.mechanism.sigmas


def _cells_in(memory: Mapping[str, Tensor]) -> Cells:
    return Cells.of(memory[CELLS].double(), float(memory[NOISE]))


def _around_zero(tensors: Tensors) -> dict[str, Tensor]:
    """Exact sums of a site around zero, from those around its mean."""
    whole = {name: tensor.double() for name, tensor in tensors.items()}
    records, totals = whole[RECORDS], whole[TOTALS]
    mean = totals / records
    sums = whole[SUMS] + torch.outer(whole[CODE], mean)
    squares = whole[SQUARES] + fold(records * torch.outer(mean, mean))
    return {**whole, SUMS: sums, SQUARES: squares}


def _rounding(tensors: Tensors) -> float:
    return message_rounding(unfold(tensors[SQUARES].double(), tensors[SUMS].shape[1]))


def _check_exact(tensors: Tensors, target: Target) -> None:
    """Raise SurrogateError for exact sums of one site that no records have."""
    records, code = float(tensors[RECORDS]), float(tensors[CODE])
    if abs(code) > records * (1 + TABLE_TOLERANCE):
        raise SurrogateError(f"residuals with the sum {code:g} of {records:g} records")
    # A residual is at most one, so the sum of their squares is at most the number of records.
    check_exact({**tensors, CODE: tensors[RECORDS]}, target, SurrogateError)


def _check_counts(counts: Tensor, sigma: float) -> None:
    """Raise SurrogateError for numbers of records that are below zero, beyond honest noise."""
    tail = sigma * math.sqrt(2 * math.log(8 * len(counts) / FALSE_ALARM))
    if float(counts.min()) < -tail * (1 + TABLE_TOLERANCE):
        raise SurrogateError(f"a cell of {float(counts.min()):g} records")


class TargetRounds(RoundsOfSums):
    """Rounds in which the coordinator sees the sums of each site."""

    power = 2.0

    def check(self, reply: Parameters, training: Training) -> None:
        """Check the rows of the code, and that some records can have these sums.

        Args:
            reply: of a site.
            training: before the round.

        Raises:
            SurrogateError: for other rows, or sums that no records have.
        """
        super().check(reply, training)
        ResidualSteps(self.config).check(reply)

    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of a site's records by kind; None where a reply has none."""
        return ResidualSteps(self.config).counts(reply)

    def add(
        self, training: Training, replies: Sequence[Parameters], shares: Sequence[float]
    ) -> dict[str, object]:
        """Let the target's steps absorb the sums of all sites."""
        steps = ResidualSteps(self.config)
        return steps.absorb(training, *steps.pooled(replies, shares))

    def classifier(self, training: Training) -> Classifier:
        """The model of the target after any round."""
        return ResidualSteps(self.config).head(training)


class SummedTargetRounds(SecureRounds):
    """Rounds of secure aggregation, none of which can be left out."""

    def _check_resumed(self, training: Training) -> None:
        check_charged(training)

    def classifier(self, training: Training) -> Classifier:
        """The model of the target after any round."""
        return ResidualSteps(self.config).head(training)


def absorb_total(total: Total, training: Training, summed: Sequence[str]) -> None:
    """Finish a round with secure aggregation.

    Args:
        total: of the round.
        training: before the round; changed.
        summed: names of the sites in the sum.

    Raises:
        RunError: for sums that no records have, or from which nothing can be learned.
    """
    tensors = {name: each.double() for name, each in total.tensors.items()}
    rounding = 0.0
    if not total.sigmas:
        rounding = sum_rounding(total.usual_rounding.get(SQUARES, 0.0), training.inputs)
    try:
        ResidualSteps(training.config).absorb(training, tensors, total.sigmas, rounding)
    except SurrogateError as error:
        raise false_numbers(str(error)) from None
    training.finish_round(summed)
