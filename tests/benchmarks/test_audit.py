"""The audit of all mechanisms: its faults can be planted, and its white-box attacker finds one at a
real site.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch

from benchmarks import audit
from benchmarks._audit_attacks import (
    by_steps,
    by_summed_gradients,
    by_sums,
    by_total,
    of_sums,
)
from benchmarks._audit_faults import planted
from fedsurrogate.common.methods import METHODS
from fedsurrogate.common.settings import FedPFTSettings, Settings
from fedsurrogate.common.surrogates.class_sums import fold

FAULTS = {each.fault for each in (*audit.MECHANISMS.values(), *audit.FURTHER.values())}


@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_every_fault_can_be_planted(fault: str) -> None:
    with planted(fault):
        pass


def test_every_private_mechanism_is_audited() -> None:
    private = set()
    for method, privacy, components in product(METHODS.values(), ("auto", "theorem-4.1"), (1, 2)):
        own = FedPFTSettings(covariance="spherical", privacy=privacy, components=components)  # type: ignore[arg-type]
        settings = Settings(method=method.name, epsilon=1.0, delta=1e-5, fedpft=own)
        private.add(method.plan(method.fill(settings)).mechanism_name)
    private -= {"none", "counts"}
    assert private == {"sums", "dp-em", "theorem-4.1", "dp-sgd"}
    trained = {str(each.settings.get("method", "fedpft")) for each in audit.MECHANISMS.values()}
    assert {"fedpft", "dp-fedavg", "dp-fedprox", "fedlap", "dpcvae", "dpcgan"} <= trained


def test_a_forgotten_clip_is_found_and_the_clip_holds() -> None:
    """Without the clip a canary's gradient is eleven times as long: all answers are right. With it,
    about half are.
    """
    mechanism = replace(audit.MECHANISMS["dp-fedavg"], count=300, runs=1)
    with planted(mechanism.fault):
        found = audit.audit(mechanism, 1.0, torch.Generator().manual_seed(1), audit.FAULTY)
    assert max(audit.bounds(found, sampled=False)) > 1.0
    found = audit.audit(mechanism, 1.0, torch.Generator().manual_seed(1))
    # A bound is above its claim in at most 5 % of all runs, so a test takes one that fails in one
    # of 100,000.
    assert audit.gaussian_bound(found, audit.DELTA, 1 - 1e-5) <= 1.0


def test_noise_that_is_used_again_is_found_and_fresh_noise_shows_nothing() -> None:
    """The difference of two rounds has no noise then. With fresh noise, the same attack answers as
    a guess does.
    """
    mechanism = replace(audit.FURTHER["dp-fedavg"], count=300, runs=1)
    with planted(mechanism.fault):
        found = audit.audit(mechanism, 4.0, torch.Generator().manual_seed(1), audit.FAULTY)
    assert max(audit.bounds(found, sampled=False)) > 4.0
    found = audit.audit(mechanism, 4.0, torch.Generator().manual_seed(1))
    assert audit.gaussian_bound(found, audit.DELTA, 1 - 1e-5) <= 4.0


# Attacks that see all that a record adds; the others miss some records without noise too.
WHOLE = [
    name
    for name, each in audit.MECHANISMS.items()
    if each.attack in (by_sums, by_total, by_summed_gradients, by_steps)
]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("seed", [1, 2])
def test_with_hardly_any_noise_every_canary_is_found(name: str, seed: int) -> None:
    """A record that another site has as well is in a sum in any case, so it is no canary: it was
    taken for the surest one, and hid a planted fault.
    """
    mechanism = replace(audit.MECHANISMS[name], count=40)
    generator = torch.Generator().manual_seed(seed)
    scores, included = audit.scores_of(mechanism, 90.0, generator)
    assert len(scores) >= 38
    assert scores[included].min() > scores[~included].max()


@pytest.mark.parametrize(
    "name",
    [
        "logistic rounds",
        "secure aggregation",
        pytest.param("dp-fedavg, distributed noise", marks=pytest.mark.slow),
    ],
)
def test_a_quarter_of_the_noise_in_a_secure_aggregation_is_found_and_all_of_it_holds(
    name: str,
) -> None:
    mechanism = replace(audit.MECHANISMS[name], runs=3)
    with planted(mechanism.fault):
        found = audit.audit(mechanism, 4.0, torch.Generator().manual_seed(1), audit.FAULTY)
    assert max(audit.bounds(found, sampled=False)) > 4.0
    found = audit.audit(mechanism, 4.0, torch.Generator().manual_seed(1))
    assert audit.gaussian_bound(found, audit.DELTA, 1 - 1e-5) <= 4.0


@pytest.mark.parametrize("family", ["diag", "gram"])
def test_second_moments_are_attacked_too(family: str) -> None:
    """Counts and sums without information; the second moments show which canaries were in the data."""
    canaries = audit.alone(30, torch.Generator().manual_seed(1))
    present = canaries.included.float()
    squares = present if family == "diag" else fold(present.diag())
    released = {"counts": torch.full((30,), 0.5), "sums": torch.zeros(30, 30), "squares": squares}
    scores = of_sums(canaries, released, dict.fromkeys(released, 1.0))
    assert scores[canaries.included].min() > scores[~canaries.included].max()
