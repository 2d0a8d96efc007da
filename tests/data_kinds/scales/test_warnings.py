"""Where a run has no frame for outlier columns, a person reads which column it is, and no other reads it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fedsurrogate.client_app.diagnostics.first_look import check_records
from fedsurrogate.client_app.features import site_features
from fedsurrogate.client_app.features.site_features import load_site, warning_of
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run
from tests.data_kinds.scales.affine import records

WITHOUT: list[dict[str, Any]] = [
    {"method": "fedpft", "epsilon": 1.0, "delta": 1e-5, "classes": "0,1,2"},
    {"method": "dp-fedavg", "epsilon": 1.0, "delta": 1e-5, "classes": "0,1,2"},
    {"fedpft.covariance": "gram", "secure-aggregation": True, "classes": "0,1,2", "sites": 3},
    {"method": "fedpft", "fedpft.topology": "chain"},
    {"method": "fedlap"},
    {"method": "dpcvae"},
]
WITH: list[dict[str, Any]] = [{"method": "fedpft"}, {"method": "fedavg"}]


def written(folder: Path, features: torch.Tensor) -> dict[str, Any]:
    """Settings of a run whose sites share these records."""
    labels = records()[1]
    for part in ("train", "test"):
        content = {"x": features.contiguous(), "y": labels}
        save_file(content, folder / f"own-{part}.safetensors", {"classes": "0,1,2"})
    return {"data": "safetensors", "data-dir": str(folder), "dataset": "own"}


def odd() -> torch.Tensor:
    """Clean features, of which column 2 is 10^4 away."""
    return records()[0] + torch.tensor([0.0, 0, 1e4, 0, 0, 0])


@pytest.mark.parametrize("own", WITHOUT, ids=lambda own: "-".join(map(str, own.values())))
def test_a_simulation_without_frames_names_the_column(own: dict[str, Any], tmp_path: Path) -> None:
    run = parse_run(written(tmp_path, odd()) | own)
    assert not run.frames
    (warning,) = (line for line in check_records(run, 3) if "column 2 of the features" in line)
    assert warning.startswith("site 0 and 2 more sites: ")


@pytest.mark.parametrize("own", WITH, ids=lambda own: str(own["method"]))
def test_a_simulation_with_frames_or_clean_columns_says_nothing(
    own: dict[str, Any], tmp_path: Path
) -> None:
    warnings = [*check_records(parse_run(written(tmp_path, odd()) | own), 3)]
    warnings += check_records(parse_run(written(tmp_path, records()[0]) | WITHOUT[0]), 3)
    assert not any("column" in line for line in warnings)


def test_a_site_of_its_own_says_it_once_in_its_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, odd())
    site_features._warn_once.cache_clear()
    node = NodeConfig(data="safetensors", data_dir=str(tmp_path), dataset=("own",))
    run = parse_run(WITHOUT[0])
    with caplog.at_level(logging.WARNING, "fedsurrogate.site"):
        for _ in range(2):
            load_site(run, node, 1.0)
    assert [line for line in caplog.messages if "column 2 of the features" in line] == [
        warning_of(load_site(run, node, 1.0).train.features)
    ]
