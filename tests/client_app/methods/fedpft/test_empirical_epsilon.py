"""Empirical lower bound on epsilon: the real release code, run 6,000 times on a worst-case pair
of data sets, as often with a planted fault, which so many find.

The bound comes from counting (Clopper-Pearson, both rates at 97.5 %, so 95 % together). An attack
that says "the record is there" at rate a with the record and b without it proves epsilon >= ln((a -
delta) / b). Gaussian noise spends its budget where a is a few times delta. At (1, 1e-5) too few
runs end there: an attack proves 0.4 on average, and no fault is visible. At (3, 0.01) it proves
about 1.8 of the 3, at least 1.5 in 95 of 100 draws of the noise; with half the noise it proves 3.8,
at least 3.4 in 95 of 100.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from benchmarks.harness.site_data import clipped
from fedsurrogate.client_app.methods.fedpft import surrogate as fedpft_private
from fedsurrogate.client_app.methods.fedpft.surrogate import noisy_sums
from fedsurrogate.common.privacy.gaussian_mechanism import BoundedSum, Noisy
from fedsurrogate.common.privacy.mechanism import Mechanism
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.class_sums import statistics

EPSILON, DELTA = 3.0, 0.01
RUNS = 6_000
# Long features along the axes: the differing record has a count, a sum and a square of exactly norm
# one.
FEATURES, LABELS = torch.tensor([[0.0, 5.0], [-7.0, 0.0]]), torch.tensor([1, 0])


def promised(family: str) -> Mechanism:
    claim = parse_run({"epsilon": EPSILON, "delta": DELTA, "fedpft.covariance": family}).mechanism
    assert claim is not None
    return claim


def outputs(family: str, runs: int) -> tuple[Tensor, Tensor]:
    """Outputs of `runs` releases, half with one record more: counts, sums (and squares), flat,
    divided by sigma.
    """
    claim, found = promised(family), []
    for records in (1, 2):
        data = clipped(FEATURES[:records], LABELS[:records])
        rows = []
        for _ in range(runs // 2):
            sums, _ = noisy_sums(data, 2, family, claim)
            tables = [
                sums.counts.flatten(),
                sums.sums.flatten(),
                *([] if sums.squares is None else [sums.squares]),
            ]
            rows.append(torch.cat(tables))
        sigmas = [
            torch.full((len(part),), sigma)
            for part, sigma in zip(tables, noise(claim), strict=True)
        ]
        found.append(torch.stack(rows) / torch.cat(sigmas))
    return found[0], found[1]


def noise(claim: Mechanism) -> list[float]:
    return [claim.noise[name][0] for name in ("counts", "sums", "squares") if name in claim.noise]


def directions(family: str) -> list[Tensor]:
    """Directions in which the releases differ: the log-likelihood ratio of all statistics, and of
    each alone.
    """
    claim, found = promised(family), []
    less, more = (clipped(FEATURES[:records], LABELS[:records]) for records in (1, 2))
    without, with_record = (
        statistics(each.features, each.labels, each.weights, 2, family) for each in (less, more)
    )
    tables = zip(without, with_record, noise(claim), strict=True)
    shifts = [
        (there.value - absent.value).flatten().float() / sigma for absent, there, sigma in tables
    ]
    for alone in range(-1, len(shifts)):
        found.append(
            torch.cat([shift * (alone in (-1, place)) for place, shift in enumerate(shifts)])
        )
    return found


def lower_bound(without: Tensor, with_record: Tensor, attacks: list[Tensor]) -> float:
    """Epsilon that an attacker proves. Direction and threshold are chosen on one half of the runs."""
    half = len(without) // 2
    best = (-math.inf, attacks[0], 0.0)
    for direction in attacks:
        there, absent = with_record[:half] @ direction, without[:half] @ direction
        # Beyond this there are too few runs for the choice.
        for share in (2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2):
            threshold = float(absent.sort(descending=True).values[int(share * half)])
            score = _bound(int((there > threshold).sum()), int((absent > threshold).sum()), half)
            best = max(best, (score, direction, threshold), key=lambda each: each[0])
    _, direction, threshold = best
    there, absent = with_record[half:] @ direction, without[half:] @ direction
    return _bound(int((there > threshold).sum()), int((absent > threshold).sum()), len(there))


def _bound(hits: int, alarms: int, runs: int) -> float:
    least = float(beta.ppf(0.025, hits, runs - hits + 1)) if hits else 0.0
    most = float(beta.ppf(0.975, alarms + 1, runs - alarms)) if alarms < runs else 1.0
    return math.log((least - DELTA) / most) if least > DELTA else 0.0


@pytest.mark.parametrize("family", ["spherical", "lowrank"])
def test_no_attack_proves_more_than_the_claim_and_one_proves_over_a_third(family: str) -> None:
    proven = lower_bound(*outputs(family, RUNS), directions(family))
    assert EPSILON / 3 < proven <= EPSILON


Real = Callable[..., list[Noisy]]


def scaled(claim: Mechanism, factor: float, *names: str) -> Mechanism:
    """The mechanism with its noise times `factor`, of the named statistics."""
    noise = {
        name: (sigma * factor if name in names else sigma, bound)
        for name, (sigma, bound) in claim.noise.items()
    }
    return replace(claim, noise=noise)


def halved_noise(real: Real, parts: list[BoundedSum], claim: Mechanism) -> list[Noisy]:
    return real(parts, scaled(claim, 0.5, *claim.noise))


def halved_noise_of_sums(real: Real, parts: list[BoundedSum], claim: Mechanism) -> list[Noisy]:
    return real(parts, scaled(claim, 0.5, "sums"))


def exact_counts(real: Real, parts: list[BoundedSum], claim: Mechanism) -> list[Noisy]:
    exact = {part.name: part.value for part in parts}
    return [
        replace(each, value=exact["counts"]) if each.name == "counts" else each
        for each in real(parts, claim)
    ]


@pytest.mark.parametrize(
    ("fault", "runs"),
    # Counts without noise are told apart by any number of runs.
    [(halved_noise, RUNS), (halved_noise_of_sums, RUNS), (exact_counts, 1000)],
)
def test_the_same_attack_finds_a_planted_fault(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[..., Any], runs: int
) -> None:
    real = fedpft_private.with_noise
    monkeypatch.setattr(fedpft_private, "with_noise", lambda *arguments: fault(real, *arguments))
    assert lower_bound(*outputs("spherical", runs), directions("spherical")) > EPSILON
