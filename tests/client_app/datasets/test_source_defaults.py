"""What a source is if nothing is chosen, and all records of one from which a run takes some classes."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.datasets.dataset import DataSource, load
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run


def test_a_source_refuses_what_is_broken_and_protects_nobody_unless_it_is_chosen() -> None:
    found = DataSource("parquet")
    assert {each.name: getattr(found, each.name) for each in fields(found)} == {
        "kind": "parquet", "folder": "", "names": (), "label_column": "label", "site_column": "",
        "patient_column": "", "test_fraction": 0.2, "classes": (), "frames": "refuse",
        "one_by_one": False, "patients_protected": False, "noisy": False, "target": None,
        "bags": None,
    }  # fmt: skip


@pytest.mark.parametrize("unit", ["record", "patient"])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_site_is_a_source_by_its_own_settings(unit: str, private: bool, parts: int) -> None:
    run = parse_run(
        {"epsilon": 1.0, "delta": 1e-5, "classes": "a,b"} if private else {"classes": "a"}
    )
    node = NodeConfig(
        site="s", data="parquet", data_dir="/d", dataset=("x", "y", "z"), label_column="l",
        patient_column="p", dicom_frames="first", unit=unit, partition_id=1 if parts > 1 else 0,
        num_partitions=parts,
    )  # fmt: skip
    assert DataSource.of_node(node, run) == DataSource(
        kind="parquet",
        folder="/d",
        names=(node.dataset[node.partition_id],) if private else ("x", "y", "z"),
        label_column="l",
        patient_column="p",
        test_fraction=run.settings.test_fraction,
        classes=run.settings.classes,
        frames="first",
        one_by_one=private,
        patients_protected=node.protects == "patient",
        noisy=private,
    )


@pytest.mark.parametrize("classes", [("b",), ("a", "c"), ("a", "b", "c")])
def test_all_records_of_a_source_have_features_and_no_labels(
    tmp_path: Path, classes: tuple[str, ...]
) -> None:
    labels = torch.arange(9) % 3
    content = {"x": torch.arange(18.0).reshape(9, 2) ** 2, "y": labels}
    save_file(content, tmp_path / "own.safetensors", {"classes": "a,b,c", "fingerprint": "f"})
    every = load(DataSource("safetensors", str(tmp_path)), 0)
    found = load(DataSource("safetensors", str(tmp_path), classes=classes), 0)
    whole, rows = found.whole, found.rows
    assert whole is not None
    assert rows is not None
    wanted = [at for at in range(9) if "abc"[int(labels[at])] in classes]
    assert rows.tolist() == wanted
    assert [classes[label] for label in found.labels.tolist()] == [
        "abc"[int(labels[at])] for at in wanted
    ]
    assert whole.labels.tolist() == [-1] * 9
    assert not whole.is_train.any()
    assert (whole.classes, whole.key, whole.fingerprint) == ((), every.key, "f")
    assert (whole.name, whole.origin, whole.whole) == (found.name, None, None)
    assert whole.features is not None
    assert torch.equal(whole.features, content["x"])
