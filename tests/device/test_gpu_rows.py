"""Every row of `make gpu`, and the tests that need a GPU, run on a pretended one: nothing there meets
a device's rules for the first time on a machine that costs money.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from benchmarks import _gpu_parity, _gpu_speed
from benchmarks._gpu_rows import TINY, Row, Sizes
from tests.client_app.features import test_transfers
from tests.common.surrogates import test_mixtures
from tests.device.machine import Machine
from tests.strategies.fedpft import test_sampling

FAMILIES = ("full", "diag", "spherical", "lowrank")


@pytest.mark.parametrize("rows", [_gpu_parity.rows, _gpu_speed.rows], ids=["parity", "speed"])
def test_every_row_runs_and_finds_on_a_device_what_the_processor_finds(
    rows: Callable[[str, Sizes], Iterator[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with Machine():
        found = list(rows("cuda", TINY))
    assert len(found) > 5
    for row in found:
        # The values are the processor's: what differs is what is asked for on a GPU alone, the
        # precision of features.
        assert row.against != "tolerance" or row.passes, row
        assert "features" in row.name or row.against != "tolerance" or row.ours < 1e-6, row


@pytest.mark.parametrize("labels", ["cpu", "cuda"])
def test_mixtures_of_every_family_pass_their_test_of_a_gpu(labels: str) -> None:
    assert set(FAMILIES) == set(test_mixtures.FAMILIES)
    with Machine():
        for family in FAMILIES:
            test_mixtures.test_a_gpu_finds_what_the_processor_finds(family, 2, labels)


def test_copies_pass_their_test_of_a_gpu() -> None:
    with Machine() as machine:
        test_transfers.test_copies_to_and_from_a_gpu_change_no_bit()
    assert machine.copies == {"to": 6, "from": 6}


def test_a_head_of_drawn_features_passes_its_test_of_a_gpu() -> None:
    with Machine():
        test_sampling.test_a_gpu_learns_what_the_processor_learns()
