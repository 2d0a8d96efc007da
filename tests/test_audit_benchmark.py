"""The audit of all mechanisms: its faults can be planted, and its white-box attacker finds one at a real site."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import audit
from _audit_faults import planted

from common.methods import METHODS


@pytest.mark.parametrize("name", audit.MECHANISMS)
def test_every_mechanism_has_a_fault_that_can_be_planted(name: str) -> None:
    with planted(audit.MECHANISMS[name].fault):
        pass


def test_every_private_mechanism_is_audited() -> None:
    private = {each for name in METHODS for each in METHODS[name].mechanisms} - {"counts"}
    assert private == {"sums", "dp-em", "theorem-4.1", "dp-sgd"}
    trained = {str(each.settings.get("method", "fedpft")) for each in audit.MECHANISMS.values()}
    assert {"fedpft", "dp-fedavg", "dp-fedprox", "fedlap", "dpcvae", "dpcgan"} <= trained


def test_a_forgotten_clip_is_found_and_the_clip_holds() -> None:
    """Without the clip a canary's gradient is eleven times as long: all answers are right. With it, about half are."""
    mechanism = replace(audit.MECHANISMS["dp-fedavg"], count=300, runs=1)
    with planted(mechanism.fault):
        found = audit.audit(mechanism, 1.0, torch.Generator().manual_seed(1), audit.FAULTY)
    assert max(audit.bounds(found, sampled=False)) > 1.0
    found = audit.audit(mechanism, 1.0, torch.Generator().manual_seed(1))
    # A bound is above its claim in at most 5 % of all runs, so a test takes one that fails in one of 100,000.
    assert audit.gaussian_bound(found, audit.DELTA, 1 - 1e-5) <= 1.0
