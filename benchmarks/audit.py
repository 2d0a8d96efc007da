"""Audits: for every private mechanism a lower bound on epsilon, measured through the site's own
code, next to its claim.

A site has canaries, each in its data by a coin toss, and replies to real requests: gate, policy,
ledger, noise, payload. The attacker sees all requests and payloads, and knows all canaries and
settings. It says which canaries were in the data. Bounds hold with 95 % confidence (Steinke, Nasr &
Jagielski 2023, one run). Runs of different canaries count as one run on all of them. How many
answers to give is chosen on simulated scores before. A bound above its claim ends this script with
exit code 1, and so does a planted fault that no bound shows.

    python benchmarks/audit.py
    python benchmarks/audit.py --only fedavg --epsilons 4

The first bound is for noise that is Gaussian as a whole; samples are not, and have the second only,
which holds for any mechanism. A low bound does not show that a mechanism leaks little.
"""

import logging
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks._audit_attacks import (
    Attack,
    by_bins,
    by_decoder,
    by_difference,
    by_first_round,
    by_gradients,
    by_mixtures,
    by_steps,
    by_summed_gradients,
    by_sums,
    by_synthetic,
    by_total,
)
from benchmarks._audit_faults import planted
from benchmarks._audit_site import (
    OTHERS,
    Canaries,
    Maker,
    alone,
    bags,
    in_own_bins,
    long,
    long_patients,
    one_a_class,
    orthogonal,
    patients,
    seen_of,
)
from benchmarks._gaussian_bound import best_count, gaussian_bound
from benchmarks.harness.options import described
from benchmarks.harness.results import report
from fedsurrogate.client_app.audit.membership import Guesses, epsilon_bound, guess
from fedsurrogate.common.privacy.accounting import gaussian_noise_multiplier
from fedsurrogate.common.settings.base import Scalar

DELTA = 1e-5
SHARES = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3)
# At these epsilons faults are planted. Few canaries are in a sample, so at a larger one they would
# be too few.
MIDDLE, SMALL = 4.0, 1.0
# Answers about a sampled mechanism, as a share of the canaries; all of them are "it was there".
SAMPLED_SHARE = 0.02
# Signal that a fault lets through, as a multiple of the claimed one; it only chooses the number of
# answers.
FAULTY = 2.5


@dataclass(frozen=True)
class Mechanism:
    """One row: settings of the run, how canaries are made, the attack, canaries a run, runs, and a
    fault that it shows.

    strength: of the attack, about the share of the budget's signal that it sees; it only chooses
    the number of answers. sampled: whether the mechanism draws records. sites: in the run.
    """

    settings: dict[str, Scalar]
    canaries: Maker
    attack: Attack
    fault: str
    count: int = 1000
    runs: int = 1
    strength: float = 1.0
    sampled: bool = False
    sites: int = 1


def _sums(
    family: str, fault: str = "half of the noise", canaries: Maker = one_a_class
) -> Mechanism:
    # Canaries along axes of their own have as many dimensions.
    count, runs = (500, 8) if canaries is alone else (1000, 4)
    return Mechanism({"fedpft.covariance": family}, canaries, by_sums, fault, count, runs)


# One step of all records in each round: the coordinator chooses these settings, and sees most then.
STEPS: dict[str, Scalar] = {
    "fedavg.model": "mlp",
    "fedavg.width": 8,
    "fedavg.rounds": 2,
    "fedavg.local-epochs": 1,
}
WHOLE = STEPS | {"fedavg.sample-rate": 1.0, "fedavg.learning-rate": 0.1}
SAMPLED = STEPS | {"fedavg.sample-rate": 0.05, "fedavg.learning-rate": 0.01}
LAP: dict[str, Scalar] = {
    "fedlap.model": "linear",
    "fedlap.rounds": 1,
    "fedlap.images-per-class": 1,
}
VAE: dict[str, Scalar] = {
    "dpcvae.rounds": 2,
    "dpcvae.local-epochs": 1,
    "dpcvae.latent": 1,
    "dpcvae.synthetic": 10,
}
SGD: dict[str, Scalar] = {"dpcvae.optimiser": "sgd", "dpcvae.learning-rate": 10.0}
SPHERICAL: dict[str, Scalar] = {"fedpft.covariance": "spherical"}
MECHANISMS: dict[str, Mechanism] = {
    "class sums, spherical": _sums("spherical"),
    "class sums, diag": _sums("diag", "half of the noise", alone),
    "class sums, lowrank": _sums("lowrank", "features not clipped", alone),
    "class sums, gram": _sums("gram", "half of the noise", alone),
    "class sums, own mean left out": _sums(
        "spherical", "features not clipped", partial(one_a_class, dimension=64)
    ),
    "class sums, patients": _sums("spherical", "each record counts, not each patient", patients),
    "class sums, bags": Mechanism(
        SPHERICAL | {"features.bag": "mean"}, bags, by_sums, "each image counts, not each bag", 1000, 4
    ),
    "secure aggregation": Mechanism(
        # The attack reads the features' own dimensions.
        {"fedpft.covariance": "gram", "secure-aggregation": True, "colluding": 0.0, "dropouts": 0.0,
         "features.projection": ""},
        alone, by_total, "a quarter of the noise", 250, 8, sites=3,
    ),
    "dp-fedavg, distributed noise": Mechanism(
        {"method": "dp-fedavg", "fedavg.rounds": 1, "secure-aggregation": True, "colluding": 0.0, "dropouts": 0.0},
        alone, by_summed_gradients, "a quarter of the noise", 250, 8, 0.7, sites=3,
    ),
    "logistic rounds": Mechanism(
        {"head.solver": "logistic", "features.projection": "", "secure-aggregation": True, "colluding": 0.0,
         "dropouts": 0.0},
        alone, by_steps, "a quarter of the noise", 250, 4, 0.9, sites=3,
    ),
    "logistic rounds, noise at each site": Mechanism(
        {"head.solver": "logistic", "features.projection": ""},
        alone, by_steps, "a third of the noise", 500, 8, 0.9,
    ),
    "evaluation of labels, hostile head": Mechanism(
        {"task": "multilabel", "counting.kind": "evaluation"}, in_own_bins, by_bins, "a name may stand twice", 64, 32, 0.5,
    ),
    "DP-EM, K = 2": Mechanism(SPHERICAL | {"fedpft.components": 2}, long, by_mixtures, "features not clipped", 1000, 3, 0.4),
    "theorem 4.1": Mechanism(
        SPHERICAL | {"fedpft.privacy": "theorem-4.1"}, orthogonal, by_mixtures, "hardly any noise", 1000, 1, 0.3
    ),
    "dp-fedavg": Mechanism({"method": "dp-fedavg"} | WHOLE, long, by_gradients, "gradients not clipped", 1500, 2),
    "dp-fedprox": Mechanism({"method": "dp-fedprox"} | WHOLE, long, by_gradients, "half of the noise", 1500, 2),
    "dp-fedavg, sampled": Mechanism(
        {"method": "dp-fedavg"} | SAMPLED, long, by_gradients, "all records instead of a sample", 1500, 2, sampled=True
    ),
    "dp-fedprox, sampled": Mechanism(
        {"method": "dp-fedprox"} | SAMPLED, long, by_gradients, "one sample for all steps", 1500, 2, sampled=True
    ),
    "dp-fedavg, patients": Mechanism(
        {"method": "dp-fedavg"} | WHOLE, long_patients, by_gradients, "each gradient counts, not each patient", 1500, 2
    ),
    "dp-fedavg, patients, sampled": Mechanism(
        {"method": "dp-fedavg"} | SAMPLED, long_patients, by_gradients, "each gradient counts, not each patient", 1500, 2,
        sampled=True,
    ),
    "dpcvae, patients": Mechanism(
        {"method": "dpcvae"} | VAE | SGD, long_patients, by_decoder, "each gradient counts, not each patient", 1500, 2
    ),
    "fedlap": Mechanism({"method": "fedlap"} | LAP, orthogonal, by_synthetic, "clip forgotten", 1500, 2, 0.7),
    "dpcvae": Mechanism({"method": "dpcvae"} | VAE | SGD, long, by_decoder, "gradients not clipped", 1500, 2),
    "dpcgan": Mechanism({"method": "dpcgan"} | VAE, long, by_first_round, "embeddings not clipped", 1000, 2, 0.7),
}  # fmt: skip


# Faults that another attack shows. Long steps change the gradients from one round to the next.
FURTHER = {
    "dp-fedavg": replace(
        MECHANISMS["dp-fedavg"],
        settings=MECHANISMS["dp-fedavg"].settings | {"fedavg.learning-rate": 10.0},
        attack=by_difference,
        fault="the state of the noise is used again",
    )
}


def scores_of(
    mechanism: Mechanism, epsilon: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Scores of the canaries of one run, and whether each was in the data. Those that another site
    has as well are no canaries.
    """
    canaries: Canaries = mechanism.canaries(mechanism.count, generator)
    settings = mechanism.settings | {"epsilon": epsilon, "delta": DELTA, "seed": 1}
    # One step has nearly the whole budget; no setting says how many there are.
    with patch("fedsurrogate.common.methods.logistic_rounds.STEPS", ((math.inf, 1),)):
        seen = seen_of(canaries, settings, mechanism.sites)
        tossed = slice(OTHERS if mechanism.sites > 1 else 0, None)
        return mechanism.attack(canaries, seen)[tossed], canaries.included[tossed]


def audit(
    mechanism: Mechanism, epsilon: float, generator: torch.Generator, expected: float = 1.0
) -> Guesses:
    """The answers of the attacker about the canaries of all runs. expected: signal, as a multiple
    of what is claimed.
    """
    runs = [scores_of(mechanism, epsilon, generator) for _ in range(mechanism.runs)]
    scores, included = torch.cat([run[0] for run in runs]), torch.cat([run[1] for run in runs])
    if mechanism.sampled:
        # A record that no sample contains shows nothing: a low score does not mean that it was not
        # there.
        top = scores.argsort()[-round(SAMPLED_SHARE * len(scores)) :]
        return Guesses(len(scores), len(top), int(included[top].sum()))
    return guess(scores, included, answers_of(len(scores), epsilon, expected * mechanism.strength))


@cache
def answers_of(count: int, epsilon: float, strength: float) -> int:
    """How many answers to give for so many canaries: the best number for Gaussian scores of the
    expected quality.
    """
    generator = torch.Generator().manual_seed(1)
    included = torch.rand(count, generator=generator) < 0.5
    noise = gaussian_noise_multiplier(epsilon, DELTA) / strength
    return best_count(
        included + noise * torch.randn(count, generator=generator), included, DELTA, SHARES
    )


def bounds(guesses: Guesses, sampled: bool) -> tuple[float, float]:
    """Lower bounds of epsilon: for Gaussian noise (the general one for samples), and for any
    mechanism.
    """
    plain = epsilon_bound(guesses, DELTA)
    return plain if sampled else gaussian_bound(guesses, DELTA), plain


def main() -> None:
    parser = described(__doc__)
    parser.add_argument("--only", default="", help="mechanisms whose name contains this text")
    parser.add_argument("--epsilons", default="1,4,8")
    parser.add_argument("--no-faults", action="store_true", help="plant no faults")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    chosen = {name: each for name, each in MECHANISMS.items() if options.only in name}
    began, processor = time.perf_counter(), time.process_time()
    rows, broken = measure(chosen, [float(each) for each in options.epsilons.split(",")])
    faults, missed = ([], []) if options.no_faults else measure_faults(chosen)
    seconds = {
        "seconds": round(time.perf_counter() - began),
        "processor_seconds": round(time.process_time() - processor),
    }
    columns = (
        "mechanism",
        "claim",
        "lower bound",
        "of the claim",
        "for any mechanism",
        "right",
        "canaries",
        "seconds",
    )
    whole = not options.only and not options.no_faults
    name = "audit" if whole else "audit-part"
    keys = ("mechanism", "fault", "claim", "bound", "found")
    planted_in = [dict(zip(keys, row, strict=True)) for row in faults]
    title = f"One-run audits, delta = {DELTA:g}, 95 % confidence"
    report(name, title, columns, rows, **seconds, faults=planted_in)
    print("\n".join([*broken, *missed]))
    sys.exit(bool(broken or missed))


def measure(
    chosen: dict[str, Mechanism], epsilons: Sequence[float]
) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Rows of the table, and a sentence for each bound above its claim."""
    generator = torch.Generator().manual_seed(0)
    rows: list[tuple[Any, ...]] = []
    broken: list[str] = []
    for name, mechanism in chosen.items():
        for epsilon in epsilons:
            began = time.process_time()
            guesses = audit(mechanism, epsilon, generator)
            bound, plain = bounds(guesses, mechanism.sampled)
            seconds = round(time.process_time() - began, 1)
            answers = f"{guesses.right} of {guesses.guessed}"
            cells = (round(bound, 2), f"{bound / epsilon:.0%}", round(plain, 2), answers)
            rows.append((name, epsilon, *cells, guesses.canaries, seconds))
            print(*rows[-1], sep=" | ", flush=True)
            if max(bound, plain) > epsilon:
                broken.append(
                    f"{name}: the bound {max(bound, plain):.3f} exceeds the claim {epsilon:g}"
                )
    return rows, broken


def measure_faults(chosen: dict[str, Mechanism]) -> tuple[list[tuple[Any, ...]], list[str]]:
    """Bounds with a fault in each mechanism, and a sentence for each fault that no bound above the
    claim shows.
    """
    generator = torch.Generator().manual_seed(1)
    rows: list[tuple[Any, ...]] = []
    further = [(name, FURTHER[name]) for name in chosen if name in FURTHER]
    for name, mechanism in [*chosen.items(), *further]:
        claim = SMALL if mechanism.sampled else MIDDLE
        with planted(mechanism.fault):
            bound = max(bounds(audit(mechanism, claim, generator, FAULTY), mechanism.sampled))
        rows.append((name, mechanism.fault, claim, round(bound, 2), bound > claim))
        print(*rows[-1], sep=" | ", flush=True)
    return rows, [
        f"{name}: the audit does not find {fault}" for name, fault, _, _, shown in rows if not shown
    ]


if __name__ == "__main__":
    main()
