"""The sums of sites as harm is measured in them: one linear code an output, by kind of target."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fedsurrogate.common.targets.labels import Labels
from fedsurrogate.common.targets.target import Target
from fedsurrogate.strategies.robustness.target_harm import (
    AREA,
    CONCORDANCE,
    Coded,
    Outputs,
    outputs_of,
)
from fedsurrogate.strategies.targets.learning import annotated_of
from fedsurrogate.strategies.targets.sums import CodedSums
from fedsurrogate.strategies.targets.survival import Cells

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


def _labels(parts: Parts, target: Target) -> Outputs:
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
    "number": _numbers,
    "labels": _labels,
    "time": _times,
}
