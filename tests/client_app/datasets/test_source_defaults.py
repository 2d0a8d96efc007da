"""What a source is if nothing is chosen, and all records of one from which a run takes some classes."""

from __future__ import annotations

import pytest

from fedsurrogate.client_app.datasets.dataset import DataSource
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run


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
