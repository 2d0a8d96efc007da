"""The real release code, run 100,000 times on a worst-case pair of data sets: what an attacker can prove about epsilon.

A lower bound on epsilon from counting (Clopper-Pearson, both rates at 97.5 %, so 95 % together): an attack that says "the
record is there" with rate a where it is and b where it is not shows epsilon >= ln((a - delta) / b). At epsilon 4 such a
bound can reach 2.4 with so many runs, because Gaussian noise loses its budget far out in the tails, where few runs end.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from client_app import fedpft_private
from client_app.fedpft_private import Clipped, noisy_sums
from common.claims import make_claim
from common.config import parse_run_config
from common.privacy import Noisy, Statistic

EPSILON, DELTA = 4.0, 1e-5
RUNS, FAULTY_RUNS = 100_000, 20_000


def outputs(family: str, runs: int) -> tuple[Tensor, Tensor]:
    """What left in `runs` releases, half of data with one record more: counts and sums (and squares), flat, over sigma."""
    run = parse_run_config({"epsilon": EPSILON, "delta": DELTA, "fedpft.covariance": family})
    claim = make_claim(run, "record")
    assert claim is not None
    features, labels = torch.tensor([[0.0, 5.0], [-7.0, 0.0]]), torch.tensor([1, 0])
    found = []
    for records in (1, 2):
        data = Clipped.of(features[:records], labels[:records])
        rows = []
        for _ in range(runs // 2):
            sums, _ = noisy_sums(data, 2, family, claim)
            tables = {"counts": sums.counts, "sums": sums.sums, "squares": sums.squares}
            rows.append(torch.cat([t.flatten() / claim.noise[name][0] for name, t in tables.items() if t is not None]))
        found.append(torch.stack(rows))
    return found[0], found[1]


def lower_bound(without: Tensor, with_record: Tensor) -> float:
    """Epsilon that an attacker proves. The attack (a direction and a threshold) is chosen on a third of the runs."""
    third = len(without) // 3
    shift = with_record[:third].mean(0) - without[:third].mean(0)
    spread = without[:third].var(0).clamp_min(1e-12)
    directions = [shift, shift / spread, *torch.eye(len(shift)) * shift.sign()]
    best = (-math.inf, directions[0], 0.0)
    for direction in directions:
        there, absent = with_record[:third] @ direction, without[:third] @ direction
        for share in (0.0, 1e-3, 2e-3, 5e-3, 0.01, 0.03, 0.1):
            threshold = float(absent.sort(descending=True).values[int(share * third)])
            score = _bound(int((there > threshold).sum()), int((absent > threshold).sum()), third)
            best = max(best, (score, direction, threshold), key=lambda each: each[0])
    _, direction, threshold = best
    there, absent = with_record[third:] @ direction, without[third:] @ direction
    return _bound(int((there > threshold).sum()), int((absent > threshold).sum()), len(there))


def _bound(hits: int, alarms: int, runs: int) -> float:
    least = float(beta.ppf(0.025, hits, runs - hits + 1)) if hits else 0.0
    most = float(beta.ppf(0.975, alarms + 1, runs - alarms)) if alarms < runs else 1.0
    return math.log((least - DELTA) / most) if least > DELTA else 0.0


@pytest.mark.parametrize("family", ["spherical", "lowrank"])
def test_no_attack_proves_more_than_the_claim_and_one_proves_over_half(family: str) -> None:
    proven = lower_bound(*outputs(family, RUNS))
    assert EPSILON / 2 < proven <= EPSILON


Real = Callable[..., list[Noisy]]


def halved_noise(real: Real, statistics: list[Statistic], noise_multiplier: float) -> list[Noisy]:
    return real(statistics, noise_multiplier / 2)


def halved_sensitivity(real: Real, statistics: list[Statistic], noise_multiplier: float) -> list[Noisy]:
    return real([replace(each, bound=each.bound / 2) for each in statistics], noise_multiplier)


def exact_counts(real: Real, statistics: list[Statistic], noise_multiplier: float) -> list[Noisy]:
    counts, *others = real(statistics, noise_multiplier)
    return [replace(counts, value=statistics[0].value), *others]


@pytest.mark.parametrize("fault", [halved_noise, halved_sensitivity, exact_counts])
def test_the_same_attack_finds_a_planted_fault(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any]) -> None:
    real = fedpft_private.release
    monkeypatch.setattr(fedpft_private, "release", lambda *arguments: fault(real, *arguments))
    assert lower_bound(*outputs("spherical", FAULTY_RUNS * (1 if fault is exact_counts else 3))) > EPSILON
