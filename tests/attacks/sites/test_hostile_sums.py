"""Noisy class sums of a hostile hospital: used tables are screened, and longer tables than clip and
noise allow fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsurrogate.common.errors import SurrogateError
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.class_sums import PRESENT
from fedsurrogate.common.surrogates.surrogates import AnySurrogate, SumsSurrogate
from fedsurrogate.common.wire.tensors import Expectation, check_surrogate
from fedsurrogate.strategies.fedpft.strategy import learn
from fedsurrogate.strategies.robustness.defence import defend_surrogates
from fedsurrogate.strategies.robustness.harm import of_surrogates
from tests.hostile_sites import digits_of, surrogate_of

CLASSES = tuple(map(str, range(10)))
SITES = 10
Lie = Callable[[SumsSurrogate], SumsSurrogate]


def settings(family: str, epsilon: float, **more: Any) -> Run:
    return parse_run({"epsilon": epsilon, "delta": 1e-5, "fedpft.covariance": family} | more)


def honest(run: Run) -> tuple[list[AnySurrogate], tuple[torch.Tensor, torch.Tensor]]:
    parts, test = digits_of(SITES, seed=0)
    return [
        surrogate_of(part, CLASSES, "f" * 16, str(site), run) for site, part in enumerate(parts)
    ], test


def accuracy(sent: list[AnySurrogate], test: tuple[torch.Tensor, torch.Tensor], run: Run) -> float:
    return learn(sent, run, "cpu", CLASSES).model.accuracy(test[0], CLASSES, test[1])[0] / len(
        test[1]
    )


def accepted(surrogate: AnySurrogate, run: Run) -> bool:
    """Whether the coordinator's check accepts the surrogate."""
    try:
        check_surrogate(surrogate, Expectation.of(run, CLASSES, "f" * 16))
    except SurrogateError:
        return False
    return True


def lied(surrogate: AnySurrogate, lie: Lie) -> AnySurrogate:
    assert isinstance(surrogate, SumsSurrogate)
    return lie(surrogate)


def long_means(sigmas: float, length: float) -> Lie:
    """Counts of this many standard deviations of their noise, and means of this norm."""

    def lie(sent: SumsSurrogate) -> SumsSurrogate:
        counts = torch.full_like(sent.sums.counts, sigmas * sent.sums.sigmas["counts"])
        direction = torch.randn(sent.sums.sums.shape, generator=torch.Generator().manual_seed(3))
        direction /= direction.norm(dim=1, keepdim=True)
        return replace(
            sent, sums=replace(sent.sums, counts=counts, sums=length * counts[:, None] * direction)
        )

    return lie


@pytest.mark.parametrize("epsilon", [1.0, 4.0])
@pytest.mark.parametrize("sigmas", [2.1, 2.9, 3.5])
def test_sums_longer_than_clip_and_noise_make_them_are_refused(
    epsilon: float, sigmas: float
) -> None:
    run = settings("spherical", epsilon)
    good, _ = honest(run)
    assert all(accepted(each, run) for each in good)
    assert not accepted(lied(good[0], long_means(sigmas, 109.0)), run)


def test_what_is_used_is_judged_and_nothing_else() -> None:
    run = settings("spherical", 4.0)
    good, _ = honest(run)
    judged = of_surrogates(good, CLASSES).counts > 0
    used = torch.stack(
        [
            each.sums.counts > PRESENT * each.sums.sigmas["counts"]
            for each in good
            if isinstance(each, SumsSurrogate)
        ]
    )
    assert judged.equal(used)


def longest_allowed(sent: SumsSurrogate) -> SumsSurrogate:
    """An attacker who knows the bound: counts just above the threshold, the longest accepted means,
    in one direction.
    """
    low, high = 1.0, 200.0
    run = settings("spherical", 4.0)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if accepted(long_means(2.1, middle)(sent), run) else (low, middle)
        )
    return long_means(2.1, low)(sent)


def test_who_stays_just_below_the_bound_costs_little() -> None:
    run = settings("spherical", 4.0)
    good, test = honest(run)
    bad = [lied(each, longest_allowed) for each in good[:2]]
    assert all(accepted(each, run) for each in bad)
    assert accuracy([*bad, *good[2:]], test, run) > accuracy(good[2:], test, run) - 0.07


@pytest.mark.parametrize("family", ["diag", "lowrank"])
def test_second_moments_beyond_clip_and_noise_are_refused(family: str) -> None:
    run = settings(family, 8.0, **({"fedpft.rank": 8} if family == "lowrank" else {}))
    good, _ = honest(run)
    assert all(accepted(each, run) for each in good)
    assert not accepted(
        lied(
            good[0],
            lambda sent: replace(sent, sums=replace(sent.sums, squares=50 * sent.sums.squares)),
        ),
        run,
    )


def claiming_next(times: float) -> Lie:
    """Each class name holds the next class, and records are multiplied by this factor."""

    def lie(sent: SumsSurrogate) -> SumsSurrogate:
        sums = sent.sums
        return replace(
            sent,
            sums=replace(
                sums, counts=times * sums.counts.roll(1), sums=times * sums.sums.roll(1, 0)
            ),
        )

    return lie


@pytest.mark.parametrize("defence", ["none", "harm"])
def test_no_site_weighs_more_than_the_cap_in_what_is_used(defence: str) -> None:
    run = settings("spherical", 4.0, defence=defence)
    good, _ = honest(run)
    sent = [lied(good[0], claiming_next(100.0)), *good[1:]]
    kept = defend_surrogates(sent, run.defence, run.settings.max_share, CLASSES).kept
    weights = [float(torch.tensor(each.counts).square().amax()) for each in kept]
    assert max(weights) <= run.settings.max_share * sorted(weights)[(len(weights) - 1) // 2] * 1.2
