"""Every row of `make gpu`, and the tests that need a GPU, run on a pretended one: nothing there meets
a device's rules for the first time on a machine that costs money.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import _gpu_extraction, _gpu_limits, _gpu_parity, _gpu_rows, _gpu_speed, gpu
from benchmarks._gpu_rows import TINY, LeftOutError
from fedsurrogate.client_app.datasets.records import Opener
from fedsurrogate.client_app.features.device_processes import Devices, in_parts
from tests.client_app.features import test_transfers
from tests.common.surrogates import test_mixtures
from tests.device.machine import Machine
from tests.strategies.fedpft import test_sampling

FAMILIES = ("full", "diag", "spherical", "lowrank")
# Bytes of the card, which one row fills; and sizes that are smaller than those of a dry run.
SMALL = 2**28
SIZES = replace(TINY, records=120, dimensions=(16,), em_steps=1, images=4)


def small_backbone(name: str) -> nn.Module:
    """A network whose memory is that of its images, as of a large one: not that of its weights."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers).eval().requires_grad_(False)


@pytest.mark.parametrize(
    "name", [case.name for case in gpu.cases_of("parity", "cpu", SIZES, False)]
)
def test_a_row_finds_on_a_device_what_the_processor_finds(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "a batch that does not fit":
        monkeypatch.setattr(_gpu_parity, "backbone", small_backbone)
    cases = {case.name: case for case in gpu.cases_of("parity", "cuda", SIZES, False)}
    with Machine(memory=SMALL):
        rows = list(cases[name].rows())
    assert rows
    for row in rows:
        # The values are the processor's. What differs is what only a GPU is asked for: features in
        # half precision, of which tiny ones lose more.
        assert row.passes or "features of" in row.name, row


@pytest.mark.parametrize("name", [case.name for case in gpu.cases_of("speed", "cpu", SIZES, False)])
def test_a_row_of_speed_runs_on_a_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_gpu_rows, _gpu_speed, _gpu_extraction):
        # Once, and not to be timed.
        monkeypatch.setattr(module, "seconds", lambda work, device, repeats: (work(), 1.0)[1])

    def in_one(opener: Opener, shards: Iterable[range], devices: Devices, batch: int) -> Any:
        # Processes of their own are tested with the sites.
        return in_parts(opener, shards, devices.load(devices.names[0]), batch)

    known = _gpu_limits.sheet("NVIDIA H100 80GB HBM3")
    assert known is not None
    clock = _gpu_rows.Clock("cuda", replace(known, images=1000.0), 1)
    monkeypatch.setattr(_gpu_extraction, "in_processes", in_one)
    monkeypatch.setattr(_gpu_speed.Measured, "clock", lambda measured: clock)
    cases = {case.name: case for case in gpu.cases_of("speed", "cuda", SIZES, False)}
    left_out = ""
    with Machine(memory=SMALL):
        try:
            assert list(cases[name].rows())
        except LeftOutError as reason:
            left_out = str(reason)
    # torchvision's own decoder for a GPU needs a real one.
    reasons = ("there is one", "scikit-learn", "JPEG decoded on the device")
    assert not left_out or any(each in left_out for each in reasons), left_out


def test_mixtures_of_every_family_pass_their_test_of_a_gpu() -> None:
    assert set(FAMILIES) == set(test_mixtures.FAMILIES)
    with Machine():
        for family in FAMILIES:
            test_mixtures.test_a_gpu_finds_what_the_processor_finds(family, 2, "cpu")


def test_copies_pass_their_test_of_a_gpu() -> None:
    with Machine() as machine:
        test_transfers.test_copies_to_and_from_a_gpu_change_no_bit()
    assert machine.copies == {"to": 6, "from": 6}


def test_a_head_of_drawn_features_passes_its_test_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = test_sampling.QUICK.model_copy(update={"epochs": 1, "min_steps": 40})
    monkeypatch.setattr(test_sampling, "QUICK", few)
    with Machine():
        test_sampling.test_a_gpu_learns_what_the_processor_learns()
