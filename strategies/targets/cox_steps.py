"""A Cox model in rounds at the coordinator: a Newton step from the sums of each round, and hazard
ratios with their standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, Tensors
from fedsurrogate.common.models.risk_sums import RiskSums
from fedsurrogate.common.surrogates.class_sums import TABLE_TOLERANCE, fold, unfold
from fedsurrogate.common.targets.target import CODE, Course, names_of_parts
from fedsurrogate.common.targets.time_rounds import (
    BETA,
    EVENT_SUMS,
    FIRST,
    HAZARD,
    OFFSET,
    SECOND,
    WEIGHTS,
)
from fedsurrogate.common.wire.parts import in_parts, joined
from fedsurrogate.strategies.base.training import Training
from fedsurrogate.strategies.targets.checks import check_finite_tensors
from fedsurrogate.strategies.targets.learning import head_of, risks
from fedsurrogate.strategies.targets.rounds import CoxSearch, Newton
from fedsurrogate.strategies.targets.steps import Round, TimeSteps, added
from fedsurrogate.strategies.targets.survival import Cells
from fedsurrogate.strategies.targets.time import RiskHead

# In the memory of the training: numbers by cell of the last round; the mean of all records, from
# which features are measured; and the search.
CELLS, CENTRE = "cells", "centre"
POINT, ACCEPTED, STATE, ACCEPTED_HAZARD, MEANS, INFORMATION = (
    "point",
    "accepted",
    "search",
    "accepted-hazard",
    "accepted-means",
    "information",
)
# Features of which a model names hazard ratios: those of tables, not of images.
MOST_NAMED = 200
# A last step that is no longer than this, in standard errors, is taken although no round has
# looked at its end; and one that is no longer than the second ends the search.
TAKEN, CONVERGED = 1.0, 0.01


class CoxSteps(TimeSteps):
    """Newton's steps, each halved where the likelihood fell."""

    def start(self, dimension: int) -> Tensors:
        """Weights of zero, and a hazard of one at which all records weigh alike."""
        names = self.target.names
        if names and len(names) != dimension:
            raise RunError(
                f"feature-names has {len(names)} names; the sites have {dimension} features"
            )
        sizes = {BETA: dimension, OFFSET: 1, HAZARD: self.target.bins}
        made = {
            part: torch.zeros(size)
            for name, size in sizes.items()
            for part in names_of_parts(name, self._course.parts)
        }
        made[HAZARD][0] = 1
        return made

    def check(self, reply: Parameters) -> None:
        """Check the sums of one site. Raises SurrogateError."""
        _check(self._joined(reply))

    def counts(self, reply: Parameters) -> list[float] | None:
        """Numbers of records by cell."""
        return [max(0.0, each) for each in self._joined(reply)[CODE].tolist()]

    def pooled(self, replies: Sequence[Parameters], shares: Sequence[float]) -> Round:
        """The sums of all sites."""
        return Round(added([self._joined(each) for each in replies], shares))

    def absorb(self, training: Training, sums: Round) -> dict[str, object]:
        """Take a step, or halve the last one. Raises RunError."""
        _check(sums.tensors)
        memory = {name: tensor.double() for name, tensor in training.memory.items()}
        cells, counted = Cells.of(sums.tensors[CODE]), sums.tensors[WEIGHTS]
        if not float(cells.events.sum()) > 0:
            raise RunError("no event before the horizon: nothing can be learned; set a later one")
        first = CENTRE not in memory
        centre = sums.tensors[FIRST].sum(0) / counted.sum() if first else memory[CENTRE]
        hazard = joined(HAZARD, training.model, self._course.parts)
        at = _centred(sums.tensors, centre, hazard)
        event_sums = sums.tensors[EVENT_SUMS] - cells.events.sum() * centre
        search = _search(memory, cells, event_sums)
        if CELLS in memory and not torch.allclose(memory[CELLS], cells.counts, rtol=1e-5, atol=0.5):
            # Of other records than the last round's, as where a site is missing.
            search = replace(search, newton=replace(search.newton, likelihood=-math.inf))
        search = search.begun(at) if first else search.after(at)
        newton = search.newton
        sent = self._sent(newton.point, (newton.point @ centre)[None], search.hazard)
        point = joined(BETA, sent, self._course.parts)
        training.model = sent
        training.memory = {
            **training.memory,
            CELLS: cells.counts,
            CENTRE: centre,
            POINT: point,
            ACCEPTED: newton.accepted,
            STATE: torch.tensor(
                [newton.likelihood, newton.steps, newton.halvings], dtype=torch.float64
            ),
            ACCEPTED_HAZARD: search.accepted_hazard,
            MEANS: search.accepted_means,
            INFORMATION: fold(search.information),
        }
        return {
            "likelihood": newton.likelihood,
            "halved": newton.halvings,
            "step": _length(point - newton.accepted, search.information),
        }

    def head(self, training: Training) -> Head:
        """The model after any round, with hazard ratios of each feature."""
        memory = {name: tensor.double() for name, tensor in training.memory.items()}
        cells, centre = Cells.of(memory[CELLS]), memory[CENTRE]
        search = _search(memory, cells, torch.zeros_like(centre))
        step = _length(search.newton.point - search.newton.accepted, search.information)
        taken = step <= TAKEN
        beta = search.newton.point if taken else search.newton.accepted
        hazard = search.hazard if taken else search.accepted_hazard
        made = risks(RiskHead(beta, centre, cells.within_bins(hazard)), cells, self.target)
        errors = (
            torch.linalg.pinv(search.information, hermitian=True).diagonal().clamp_min(0).sqrt()
        )
        ratios = [
            [float(f"{each:.12g}") for each in pair]
            for pair in zip(beta.tolist(), errors.tolist(), strict=True)
        ]
        public = {
            **made.public,
            "log-hazards": ratios if len(ratios) <= MOST_NAMED else [],
            "converged": step <= CONVERGED,
        }
        head, _ = head_of(replace(made, public=public), training.header(), self.target)
        return head

    def _sent(self, beta: Tensor, offset: Tensor, hazard: Tensor) -> dict[str, Tensor]:
        """A point in the parts that sites receive."""
        whole = {BETA: beta, OFFSET: offset, HAZARD: hazard}
        return {
            part: tensor
            for name, each in whole.items()
            for part, tensor in in_parts(name, each, self._course.parts).items()
        }

    def _joined(self, reply: Parameters) -> dict[str, Tensor]:
        parts = self._course.parts
        return {each.name: joined(each.name, reply.tensors, parts) for each in self._course.each}

    @property
    def _course(self) -> Course:
        course = self.target.course(self.run.private)
        assert course is not None
        return course


def _search(memory: Mapping[str, Tensor], cells: Cells, event_sums: Tensor) -> CoxSearch:
    """The search as the memory has it, for the events of this round."""
    search = CoxSearch.start(cells.events, event_sums, torch.zeros_like(cells.events))
    if POINT not in memory:
        return search
    likelihood, steps, halvings = memory[STATE].tolist()
    newton = Newton(memory[POINT], memory[ACCEPTED], likelihood, int(steps), int(halvings))
    return replace(
        search,
        newton=newton,
        accepted_hazard=memory[ACCEPTED_HAZARD],
        accepted_means=memory[MEANS],
        information=unfold(memory[INFORMATION], len(event_sums)),
    )


def _centred(tensors: Mapping[str, Tensor], centre: Tensor, hazard: Tensor) -> RiskSums:
    """The sums of features from which a centre is subtracted."""
    weights, first = tensors[WEIGHTS], tensors[FIRST]
    cumulative = torch.cat([hazard.cumsum(0), hazard.sum()[None]])
    total, mean = cumulative @ weights, cumulative @ first
    second = unfold(tensors[SECOND], len(centre))
    cross = torch.outer(mean, centre)
    moved = second - cross - cross.T + total * torch.outer(centre, centre)
    return RiskSums(weights, first - torch.outer(weights, centre), moved)


def _length(step: Tensor, information: Tensor) -> float:
    """Length of a step in standard errors."""
    return math.sqrt(max(0.0, float(step @ information @ step)))


def _check(tensors: Mapping[str, Tensor]) -> None:
    """Raise SurrogateError for sums that no records have."""
    check_finite_tensors(tensors)
    for name in (CODE, WEIGHTS):
        largest = float(tensors[name].abs().max())
        if float(tensors[name].min()) < -TABLE_TOLERANCE * largest:
            raise SurrogateError(f"{name}: a sum below zero")
    if not float(tensors[WEIGHTS].sum()) > 0:
        raise SurrogateError("sums of no records")
    second = unfold(tensors[SECOND], tensors[FIRST].shape[1])
    scale = second.diagonal().clamp_min(0).sqrt().clamp_min(1e-12)
    least = float(torch.linalg.eigvalsh(second / scale[:, None] / scale)[0])
    if least < -TABLE_TOLERANCE * len(second):
        raise SurrogateError("second moments that no records have: a negative eigenvalue")
