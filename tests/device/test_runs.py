"""Whole runs of every method with a device: sites and coordinator on a pretended GPU find what they
find on a processor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fedsurrogate.common.methods.method import Method
from tests.device.machine import Machine
from tests.grid import InProcessGrid, metrics_of, run_federation, sites
from tests.registry import SPECS, TINY, cases, settings_of

# What `make test` runs: one of each kind of work that a site or the coordinator does on a device.
QUICK = ("fedpft", "fedlap", "dpcvae")


def model_of(tmp_path: Path, device: str, **settings: Any) -> tuple[dict[str, Any], Machine]:
    """Metrics and tensors of a run of two sites, and the machine that it ran on."""
    with Machine() as machine:
        folder = run_federation(
            tmp_path / device, InProcessGrid(sites(2)), partition="iid", device=device, **settings
        )
    metrics = metrics_of(folder)
    assert metrics["status"] == "ok"
    assert metrics["sites"]["used"] == 2
    found = {"accuracy": metrics["accuracy"]["model"]}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found, machine


@pytest.mark.slow
@pytest.mark.parametrize("spec", cases({n: s for n, s in SPECS.items() if s.needs_budget}))
def test_a_private_method_runs_with_a_device(tmp_path: Path, spec: Method) -> None:
    found, machine = model_of(tmp_path, "cuda", **settings_of(spec, TINY))
    assert found["accuracy"] > 0
    assert max(machine.used) < 2**16


@pytest.mark.parametrize(
    "spec",
    [
        *(pytest.param(SPECS[name], id=name) for name in QUICK),
        *(
            pytest.param(each, id=name, marks=pytest.mark.slow)
            for name, each in SPECS.items()
            if not each.needs_budget and name not in QUICK
        ),
    ],
)
def test_a_method_on_a_device_learns_what_it_learns_on_a_processor(
    tmp_path: Path, spec: Method
) -> None:
    machine = compare(tmp_path, settings_of(spec, TINY))
    computes = spec is SPECS[spec.name] and spec.name in QUICK
    assert machine.copies["to"] > 0 or not computes


def compare(tmp_path: Path, settings: dict[str, Any]) -> Machine:
    """The same model from both; without privacy, whose noise is the operating system's."""
    there, machine = model_of(tmp_path, "cuda", **settings)
    here, other = model_of(tmp_path, "cpu", **settings)
    assert other.copies == {"to": 0, "from": 0}
    # Constants may be kept for the next run; everything else on the device is freed.
    assert max(machine.used) < 2**16
    assert there.keys() == here.keys()
    for name, value in here.items():
        torch.testing.assert_close(there[name], value, rtol=1e-5, atol=1e-6)
    return machine


FURTHER: dict[str, dict[str, Any]] = {
    "mixtures": {
        **{"method": "fedpft", "fedpft.covariance": "diag", "fedpft.components": 2},
    },
    "images of a network with all augmentations": {
        **{"method": "fedlap", "fedlap.model": "convnet", "fedlap.width": 4},
        "fedlap.augment": "colour,crop,cutout,flip,scale,rotate",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_settings_that_compute_more_on_a_device_find_the_same(tmp_path: Path, name: str) -> None:
    assert compare(tmp_path, TINY | FURTHER[name]).copies["to"] > 0
