"""Patients as privacy units: read from the data, never split between parts or sites, each with
total weight one.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.partition import share
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance.policy import policy_of
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.base import Scalar

BUDGET: dict[str, Scalar] = {"epsilon": 1.0, "delta": 1e-5, "classes": "0,1"}


def safetensors(folder: Path, patients: torch.Tensor, name: str = "f") -> Path:
    n = len(patients)
    content = {"x": torch.randn(n, 3), "y": torch.arange(n) % 2, "patient": patients}
    save_file(content, folder / f"{name}.safetensors")
    return folder


def test_a_hospital_names_its_own_patient_column_and_a_simulation_the_runs(tmp_path: Path) -> None:
    folder = str(safetensors(tmp_path, torch.arange(40)))
    run = parse_run({"data": "safetensors", "data-dir": folder, "patient-column": "patient"})
    hospital = NodeConfig(data="safetensors", data_dir=folder)
    assert share(run, hospital).dataset.patients is None
    assert (
        share(
            parse_run({}), hospital.model_copy(update={"patient_column": "patient"})
        ).dataset.patients
        is not None
    )
    assert (
        share(run, NodeConfig(patient_column="nowhere"), in_simulation=True).dataset.patients
        is not None
    )


def test_a_simulated_site_keeps_its_split_under_privacy_and_needs_no_classes() -> None:
    private, plain = (share(parse_run(run), NodeConfig()) for run in (BUDGET | {"classes": ""}, {}))
    assert torch.equal(private.train, plain.train)
    assert torch.equal(private.test, plain.test)


@pytest.mark.parametrize("method", ["dp-fedavg", "fedlap", "dpcvae"])
def test_the_unit_of_the_node_config_decides_what_a_run_protects(
    tmp_path: Path, method: str
) -> None:
    run = parse_run(BUDGET | {"method": method, "data": "safetensors"})
    folder = str(safetensors(tmp_path, torch.arange(40) // 2))
    node = NodeConfig(
        data="safetensors",
        data_dir=folder,
        patient_column="patient",
        cache_dir=str(tmp_path),
        state_dir=str(tmp_path),
    )
    alone, found = node.model_copy(update={"unit": "record"}), []
    for own, unit in ((node, "patient"), (alone, "record")):
        site = load_site(run, own, policy_of(own).cache_mib)
        job = Job(run, own, "a", site)
        claim, units = job.mechanism(), job.training_units(run.settings.classes)
        assert claim is not None
        assert claim.unit == unit
        assert (units is None) == (unit == "record")
        assert units is None or len(units) == len(job.training_data(run.settings.classes)[1])
        found.append(site.train.features)
    # Still no patient is on both sides of a split.
    assert found[0].equal(found[1])
