"""Patients as privacy units: read from the data, kept on one side of a split and at one site, and weighing one each."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from client_app.data import Source, load, stratified_split
from client_app.partition import share
from client_app.settings import NodeConfig
from common.config import parse_run_config
from common.errors import ConfigError, DataError

BUDGET = {"epsilon": 1.0, "delta": 1e-5, "classes": "0,1"}


def safetensors(folder: Path, patients: torch.Tensor, name: str = "f") -> Path:
    n = len(patients)
    content = {"x": torch.randn(n, 3), "y": torch.arange(n) % 2, "patient": patients}
    save_file(content, folder / f"{name}.safetensors")
    return folder


def images(folder: Path, patients: list[str]) -> Path:
    lines = ["path,label,who"]
    for number, patient in enumerate(patients):
        Image.new("L", (4, 4), number).save(folder / f"{number}.png")
        lines.append(f"{number}.png,{number % 2},{patient}")
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_patients_are_read_as_they_are_written(tmp_path: Path) -> None:
    source = Source("imagefolder", str(images(tmp_path, ["007", "7", "007", "8"])), patient_column="who")
    assert load(source, 0).patients == ("007", "7", "007", "8")


def test_a_record_of_nobody_is_refused(tmp_path: Path) -> None:
    source = Source("imagefolder", str(images(tmp_path, ["1", "", "3", ""])), patient_column="who")
    with pytest.raises(DataError, match="2 of 4 records name no patient"):
        load(source, 0)


def test_data_without_columns_has_no_patients(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="patient-column = 'who': the digits have no columns"):
        load(Source("digits", patient_column="who"), 0)
    (tmp_path / "0").mkdir()
    with pytest.raises(DataError, match="patient-column = 'who'"):
        load(Source("imagefolder", str(tmp_path), patient_column="who"), 0)
    save_file({"x": torch.zeros(2, 2), "y": torch.zeros(2, dtype=torch.int64)}, tmp_path / "f.safetensors")
    with pytest.raises(DataError, match="lacks the tensors \\['who'\\]"):
        load(Source("safetensors", str(tmp_path), patient_column="who"), 0)


def test_a_drawn_split_keeps_patients_whole_and_is_unchanged_without_them() -> None:
    labels = torch.arange(300) % 3
    patients = [str(number // 4) for number in range(300)]
    is_train = stratified_split(labels, 0.25, 0, patients)
    for patient in set(patients):
        own = is_train[torch.tensor([name == patient for name in patients])]
        assert own.all() or not own.any()
    assert 0.15 < float((~is_train).float().mean()) < 0.35
    alone = [str(number) for number in range(300)]
    assert torch.equal(stratified_split(labels, 0.25, 0, alone), stratified_split(labels, 0.25, 0))


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "classes"])
def test_in_a_simulation_nobody_is_at_two_sites(tmp_path: Path, kind: str) -> None:
    folder = safetensors(tmp_path, torch.arange(400) // 5)
    run = parse_run_config(
        {
            "data": "safetensors",
            "data-dir": str(folder),
            "partition": kind,
            "patient-column": "patient",
            "classes-per-site": 1,
        }
    )
    seen: dict[str, int] = {}
    for site in range(2):
        part = share(run, NodeConfig(partition_id=site, num_partitions=2), in_simulation=True)
        assert part.dataset.patients is not None
        for row in part.train.tolist():
            assert seen.setdefault(part.dataset.patients[row], site) == site
    assert set(seen.values()) == {0, 1}


def test_under_privacy_no_split_is_drawn_from_a_hospitals_data(tmp_path: Path) -> None:
    node = NodeConfig(data="safetensors", data_dir=str(safetensors(tmp_path, torch.arange(40))))
    private, plain = (share(parse_run_config(run), node) for run in (BUDGET, {}))
    assert (len(private.train), len(private.test)) == (40, 0)
    assert (len(plain.train), len(plain.test)) == (32, 8)
    save_file({"x": torch.zeros(6, 3), "y": torch.arange(6) % 2}, tmp_path / "g-train.safetensors")
    save_file({"x": torch.zeros(4, 3), "y": torch.arange(4) % 2}, tmp_path / "g-test.safetensors")
    made_by_files = share(parse_run_config(BUDGET), node.model_copy(update={"dataset": ("g",)}))
    assert (len(made_by_files.train), len(made_by_files.test)) == (6, 4)


def test_under_privacy_a_hospital_is_told_the_classes_and_has_its_folder_for_itself(tmp_path: Path) -> None:
    node = NodeConfig(data="safetensors", data_dir=str(safetensors(tmp_path, torch.arange(40))))
    with pytest.raises(ConfigError, match="classes is empty"):
        share(parse_run_config(BUDGET | {"classes": ""}), node)
    with pytest.raises(ConfigError, match="give each site a folder of its own"):
        share(parse_run_config(BUDGET), node.model_copy(update={"num_partitions": 2}))
