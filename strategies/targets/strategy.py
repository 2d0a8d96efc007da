"""Runs of one round that learn another target than classes: the strategy that checks, limits and adds
what each site sends.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.method import Plan, load
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters, check_update
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.target import CODE, RECORDS, SQUARES, Target
from fedsurrogate.strategies.base.defended import Defended
from fedsurrogate.strategies.base.one_shot import Learned
from fedsurrogate.strategies.closed_form.strategy import FromStatistics
from fedsurrogate.strategies.pooling.columns import moved_parameters
from fedsurrogate.strategies.pooling.plausibility import false_numbers
from fedsurrogate.strategies.pooling.site_weights import moment_shares, shares_kept
from fedsurrogate.strategies.pooling.total import Total
from fedsurrogate.strategies.robustness.defence import by_harm, without
from fedsurrogate.strategies.robustness.harm import judged
from fedsurrogate.strategies.targets.checks import check_exact, check_noisy
from fedsurrogate.strategies.targets.learning import check_sums
from fedsurrogate.strategies.targets.outputs import outputs
from fedsurrogate.strategies.targets.received import around_zero, of_site
from fedsurrogate.strategies.targets.steps import added
from fedsurrogate.strategies.targets.sums import CodedSums

# What `Combination.learn` names: the model of a target from the sums
# over all records, and facts about it.
LearnCoded = Callable[[CodedSums, Header, Target], tuple[Head, dict[str, str | float]]]


class FromCodedSums(FromStatistics):
    """A run of one round whose sites send sums over the code of their records."""

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these sums. Raises SurrogateError."""
        private = self.config.mechanism is not None
        shapes = {name: tuple(tensor.shape) for name, tensor in sent.tensors.items()}
        check_update(sent, shapes, 1, private)
        if sent.header.classes != self._target.rows:
            raise SurrogateError("sums of other rows than the target's, or in another order")
        if not private:
            check_exact(sent.tensors, self._target, SurrogateError)
            check_sums(self._of_site(sent), self._target)
            return
        if sent.claim is None:
            raise SurrogateError("sums without a privacy claim")
        sigmas = {name: sigma for name, (sigma, _) in sent.claim.noise.items()}
        if sigmas.keys() != sent.tensors.keys():
            raise SurrogateError(f"noise for other sums than {', '.join(sent.tensors)[:200]}")
        check_noisy(sent.tensors, self._target, sigmas, SurrogateError)
        check_sums(self._of_site(sent), self._target, largest=1.0)

    def records(self, sent: Parameters) -> int:
        """Number of records, noisy under privacy."""
        if sent.records:
            return sent.records
        if RECORDS in sent.tensors:
            return max(0, round(float(sent.tensors[RECORDS].sum())))
        return max(0, round(self._target.counted(sent.tensors[CODE].double())))

    def moved(self, sent: Parameters, frame: bytes) -> Parameters:
        """Exact sums in another frame; as in the base class."""
        return moved_parameters(sent, self.config.plan.messages.schema(), frame)

    def shared_classes(self, sent: Parameters) -> tuple[str, ...]:
        """The rows of the code, the same at all sites."""
        return sent.header.classes

    def learn(self, sent: Sequence[Parameters], classes: Sequence[str]) -> Learned:
        """Add the sums of all sites, and learn from them.

        Args:
            sent: checked sums, one for each site.
            classes: not used; all sites have the rows of the target.

        Raises:
            RunError: where no model can be learned.
        """
        defended = self.defend(sent, self._target.rows)
        shares = [defended.capped.get(each.header.site, 1.0) for each in defended.kept]
        header = replace(sent[0].header, site="coordinator")
        if self.config.mechanism is None:
            # One after the other: ten thousand second moments in double precision are too many.
            parts = (
                self._of_site(each).scaled(share)
                for each, share in zip(defended.kept, shares, strict=True)
            )
            sums = reduce(operator.add, parts)
        else:
            sums = self._noisy(defended.kept, shares)
        model, facts = learned_by(self.config.plan)(sums, header, self._target)
        return Learned(_on_clipped(model, self.config.mechanism), defended, facts=facts)

    def defend(self, sent: Sequence[Parameters], classes: tuple[str, ...]) -> Defended[Parameters]:
        """Cap weights by records, and without noise by second moments: with noise, features have norm
        at most one. With "harm", lower the weight of sites that harm the others.

        Args:
            sent: checked sums, one for each site.
            classes: not used.
        """
        counts = [[float(self.records(each))] for each in sent]
        power = 1.0 if self.config.mechanism is None else 2.0
        most = self.config.settings.max_share
        shares = shares_kept(counts, most, power)
        if self.config.mechanism is None:
            moments = moment_shares([each.tensors for each in sent], most)
            shares = list(map(operator.mul, shares, moments))
        capped = {
            each.header.site: share for each, share in zip(sent, shares, strict=True) if share < 1
        }
        if self.config.defence != "harm":
            return Defended(list(sent), capped)
        evidence = outputs(
            lambda: (
                self._of_site(each).scaled(share) for each, share in zip(sent, shares, strict=True)
            ),
            self._target,
        )
        names = [each.header.site for each in sent]
        found = by_harm(names, judged(evidence), capped)
        return replace(found, kept=without(sent, found.suspects))

    def restricted(self, sent: Parameters, classes: Sequence[str]) -> Parameters | None:
        """All of it: the rows of a code belong together."""
        return sent

    @property
    def _target(self) -> Target:
        target = self.config.target
        assert target is not None
        return target

    def _of_site(self, sent: Parameters) -> CodedSums:
        """The sums of one site, with the noise that it claims."""
        if sent.claim is None:
            return of_site(sent.tensors, self._target)
        sigmas = {name: sigma for name, (sigma, _) in sent.claim.noise.items()}
        return around_zero(sent.tensors, sigmas, self._target, sent.claim.clip == 0)

    def _noisy(self, sent: Sequence[Parameters], shares: Sequence[float]) -> CodedSums:
        mechanism = self.config.mechanism
        assert mechanism is not None
        total = added([each.tensors for each in sent], shares)
        root = sum(share**2 for share in shares) ** 0.5
        sigmas = {name: sigma * root for name, (sigma, _) in mechanism.noise.items()}
        return around_zero(total, sigmas, self._target, mechanism.clip == 0)


def learned_by(plan: Plan) -> LearnCoded:
    """The function that a run's plan names."""
    learn: LearnCoded = load(plan.combination.learn)
    return learn


def learn_from_sum(total: Total, run: Run) -> Learned:
    """The model from the sum over all sites.

    Args:
        total: of a secure sum, around zero.
        run: whose plan names the function that learns.

    Returns:
        A linear head, with the public map that the sites applied to their features.

    Raises:
        RunError: for sums that no records have, or from which nothing can be learned.
    """
    target, mechanism = run.target, run.mechanism
    assert target is not None
    if mechanism is not None:
        check_noisy(total.tensors, target, total.sigmas, false_numbers)
    try:
        unit_norm = mechanism is not None and mechanism.clip == 0
        rounding = 0.0 if total.sigmas else total.usual_rounding.get(SQUARES, 0.0)
        sums = around_zero(total.tensors, total.sigmas, target, unit_norm, rounding)
    except ValueError as error:
        raise RunError(f"the secure sum has nothing to learn from: {error}") from None
    try:
        check_sums(sums, target, 1.0 if total.sigmas else math.inf)
    except SurrogateError as error:
        raise false_numbers(str(error)) from None
    model, facts = learned_by(run.plan)(sums, total.header, target)
    mapped = total.mapped(model, run.public_frame(total.dimension))
    return Learned(_on_clipped(mapped, mechanism), Defended([]), facts=facts)


def _on_clipped(model: Head, mechanism: Mechanism | None) -> Head:
    """The model of features that are clipped first, as sites clip them before they add noise."""
    return model if mechanism is None else replace(model, clip=mechanism.clip)
