"""Runs of one round that learn another target than classes: what each site sends is checked, limited and
added, and a model is learned from the sums, by one function a kind of target.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce

import torch
from torch import Tensor

from fedsurrogate.common.errors import RunError, SurrogateError
from fedsurrogate.common.methods.method import measures_harm
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.models.parameters import Parameters
from fedsurrogate.common.run import Run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.number import Number
from fedsurrogate.common.targets.target import CODE, RECORDS, SQUARES, Answering, Target
from fedsurrogate.common.targets.time import Time

from ..base.outcome import Defended, Learned
from ..base.training import target_head
from ..heads import MOST_DIMENSIONS, Heads, noise_of, on_clipped
from ..pooling.class_means import moved_parameters
from ..pooling.site_weights import (
    Total,
    added,
    below_one,
    false_numbers,
    moment_shares,
    shares_kept,
)
from ..robustness.defence import by_harm, without
from ..robustness.harm import AREA, CONCORDANCE, Coded, Outputs, judged, outputs_of
from .number import Annotated, label_heads, number_head
from .sums import (
    CodedSums,
    around_zero,
    check_exact,
    check_noisy,
    check_sums,
    of_site,
)
from .time import Cells, RiskHead, cells_of, kaplan_meier, risk_head

# A column whose deviation is this share of the largest one is constant but for rounding.
CONSTANT = 1e-6
Fit = Callable[[CodedSums, Target], Answering]


def learned(sums: CodedSums, header: Header, target: Target) -> tuple[Head, dict[str, str | float]]:
    """The model whose strength is found from the sums.

    Args:
        sums: of all records.
        header: of the coordinator.
        target: of the run.

    Returns:
        The head, and facts for the run's result.

    Raises:
        RunError: where nothing can be learned.
    """
    fit = FITS[target.name]
    if not header.frame or sums.noise is not None:
        return head_of(fit(sums, target), header, target)
    factor = column_factors(sums)
    made = fit(sums.rescaled(factor), target)
    return head_of(replace(made, weight=made.weight * factor), header, target)


def column_factors(sums: CodedSums) -> Tensor:
    """What makes the columns of a table alike, for exact sums in a frame: public ranges say how far
    values can lie, not how far they do, and a ridge takes weight from narrow columns.

    Args:
        sums: without noise.

    Returns:
        One over the deviation of each column, (d,); one for a constant one.
    """
    deviation = sums.covariance.diagonal().clamp_min(0).sqrt()
    varies = deviation > CONSTANT * deviation.max()
    return torch.where(varies, 1 / deviation.clamp_min(1e-300), 1.0)


def head_of(made: Answering, header: Header, target: Target) -> tuple[Head, dict[str, str | float]]:
    """The model of a target, and facts for the run's result.

    Args:
        made: what it answers.
        header: of the coordinator.
        target: of the run.

    Raises:
        RunError: for numbers that are not finite.
    """
    if not (made.weight.isfinite().all() and made.bias.isfinite().all()):
        raise RunError("the sums of this run give no finite model; leave out sites with --without")
    return target_head(made, header, target), {**target.choices, **made.facts}


def _number(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Number)
    low, high = zip(*target.ranges, strict=True)
    head = number_head(sums, low, high)
    facts = {
        f"explained-{name}": share
        for name, share in zip(target.columns, head.explained.tolist(), strict=True)
    }
    return Answering(
        target.outputs, head.weight, head.bias, {"deviation": head.deviation.tolist()}, facts
    )


def _labels(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Labels)
    annotated = annotated_of(sums, target)
    moments = sums.moments() if sums.groups else None
    heads = label_heads(sums, annotated, target.columns, moments, calibrated=True)
    public = {"prevalence": heads.prevalence.tolist(), "left-out": dict(heads.left_out)}
    facts = {"labels": float(len(heads.labels)), "labels-left-out": float(len(heads.left_out))}
    return Answering(heads.labels, heads.weight, heads.bias, public, facts)


def annotated_of(sums: CodedSums, target: Labels) -> Annotated:
    """Sums over the records that are annotated for each label, from either code."""
    if target.capped:
        return Annotated.capped(sums, target.members, target.set_entry)
    return Annotated.exact(sums, len(target.columns))


def _time(sums: CodedSums, target: Target) -> Answering:
    assert isinstance(target, Time)
    head = risk_head(sums)
    made = risks(head, cells_of(sums), target)
    # Of the risk between records, for thirds that are known in public.
    spread = max(0.0, float(head.weight @ sums.covariance @ head.weight)) ** 0.5
    return replace(made, public={**made.public, "spread": spread})


def risks(head: RiskHead, cells: Cells, target: Time) -> Answering:
    """A model of risks, which also has the survival of all records.

    Args:
        head: calibrated.
        cells: of all records.
        target: of the run.
    """
    curve = kaplan_meier(cells)
    public = {
        "hazard": head.hazard.tolist(),
        "survival": [
            [round(each, 6) for each in part.tolist()]
            for part in (curve.survival, curve.low, curve.high)
        ],
    }
    facts = {"events": float(cells.events.sum())}
    bias = -(head.mean @ head.weight)[None]
    return Answering(target.outputs, head.weight[None], bias, public, facts)


# By kind of target: its head.
FITS: dict[str, Fit] = {"regression": _number, "multilabel": _labels, "survival": _time}


Parts = Callable[[], Iterable[CodedSums]]


def outputs(parts: Parts, target: Target) -> Outputs:
    """What sites sent, as harm is measured in it.

    Args:
        parts: gives the sums of each site, one at a time; called several times.
        target: of the run, of which harm is measured.
    """
    return OUTPUTS[target.compared](parts, target)


def _numbers(parts: Parts, target: Target) -> Outputs:
    def coded(sums: CodedSums) -> Coded:
        assert sums.products is not None
        squares = sums.products.diagonal().clamp_min(0)
        noise = torch.zeros_like(squares) if sums.noise is None else sums.noise.sums[1:]
        return _of_all(sums, sums.code[1:], squares, sums.sums[1:], noise)

    return outputs_of(lambda: map(coded, parts()), CONCORDANCE)


def _label_outputs(parts: Parts, target: Target) -> Outputs:
    assert isinstance(target, Labels)

    def coded(sums: CodedSums) -> Coded:
        own = annotated_of(sums, target)
        positive = own.positive.clamp_min(0)
        return Coded(
            sums.moment,
            own.annotated.clamp_min(0),
            positive,
            positive,
            own.positive_sums,
            own.annotated_sums,
            own.positive_noise[1],
        )

    return outputs_of(lambda: map(coded, parts()), AREA)


def _times(parts: Parts, target: Target) -> Outputs:
    """The output is the martingale residual, by the hazard of all records."""
    codes, noises = zip(*((sums.code, _noise_of(sums)[0]) for sums in parts()), strict=True)
    noise = float(torch.stack(noises).square().sum().sqrt())
    residuals = Cells.of(torch.stack(codes).sum(0), noise).residuals

    def coded(sums: CodedSums) -> Coded:
        totals, squares = residuals @ sums.code, residuals.square() @ sums.code
        moved = _noise_of(sums)[1] * residuals.norm()
        return _of_all(
            sums, totals[None], squares[None], (residuals @ sums.sums)[None], moved[None]
        )

    return outputs_of(lambda: map(coded, parts()), CONCORDANCE)


def _noise_of(sums: CodedSums) -> tuple[Tensor, Tensor]:
    """Largest noise in an entry of the code and of the sums; zeros without noise."""
    none = torch.zeros((), dtype=torch.float64)
    if sums.noise is None:
        return none, none
    return sums.noise.code.max(), sums.noise.sums.max()


def _of_all(
    sums: CodedSums, totals: Tensor, squares: Tensor, table: Tensor, noise: Tensor
) -> Coded:
    """Outputs that are known of all records."""
    known = sums.moment.counts.expand(len(totals))
    return Coded(
        sums.moment, known, totals, squares, table, known[:, None] * sums.moment.means, noise
    )


# By the kind of a target's code.
OUTPUTS: dict[str, Callable[[Parts, Target], Outputs]] = {
    "regression": _numbers,
    "multilabel": _label_outputs,
    "survival": _times,
}


class FromCodedSums(Heads):
    """A run of one round whose sites send sums over the code of their records."""

    most_with_zeros = MOST_DIMENSIONS**2

    def check(self, sent: Parameters) -> None:
        """Check that some records can have these sums. Raises SurrogateError."""
        super().check(sent)
        if sent.header.classes != self._target.rows:
            raise SurrogateError("sums of other rows than the target's, or in another order")
        if not self.config.private:
            check_exact(sent.tensors, self._target, SurrogateError)
            check_sums(self._of_site(sent), self._target)
            return
        check_noisy(sent.tensors, self._target, noise_of(sent), SurrogateError)
        check_sums(self._of_site(sent), self._target)

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
        model, facts = learned(sums, header, self._target)
        return Learned(on_clipped(model, sent[0].claim), defended, facts=facts)

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
        capped = below_one(sent, shares)
        if not measures_harm(self.config.defence, len(sent)):
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
        return around_zero(sent.tensors, sent.claim.sigmas, self._target, sent.claim.clip == 0)

    def _noisy(self, sent: Sequence[Parameters], shares: Sequence[float]) -> CodedSums:
        mechanism = self.config.mechanism
        assert mechanism is not None
        total = added([each.tensors for each in sent], shares)
        root = sum(share**2 for share in shares) ** 0.5
        sigmas = {name: sigma * root for name, sigma in mechanism.sigmas.items()}
        return around_zero(total, sigmas, self._target, mechanism.clip == 0)


def learn_from_sum(total: Total, run: Run) -> Learned:
    """The model from the sum over all sites.

    Args:
        total: of secure aggregation, around zero.
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
        raise RunError(f"the secure aggregation has nothing to learn from: {error}") from None
    try:
        check_sums(sums, target)
    except SurrogateError as error:
        raise false_numbers(str(error)) from None
    model, facts = learned(sums, total.header, target)
    mapped = total.mapped(model, run.public_frame(total.dimension))
    return Learned(on_clipped(mapped, total.claim), Defended([]), facts=facts)
