"""Training records of a coded target come in single precision from memory, and as they lie from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.task import Task
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run

RUN = parse_run({"target": "number", "value-columns": "x", "target-range": "0,10"})


@pytest.mark.parametrize("on_disk", [False, True])
def test_features_are_single_precision_unless_memory_cannot_hold_them(
    on_disk: bool, tmp_path: Path
) -> None:
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).half()
    values = torch.tensor([[0.0], [5.0], [10.0], [20.0], [-1.0], [7.5]], dtype=torch.float64)
    zeros = torch.zeros(6, dtype=torch.int64)
    folder = tmp_path if on_disk else None
    train = LabelledFeatures(features, zeros, None, None, folder, values)
    task = Task(RUN, NodeConfig(), "s", SiteFeatures(train, train, (), "f", 0.0, False))
    found, code = task.training_data(())
    assert found.dtype == (torch.float16 if on_disk else torch.float32)
    assert torch.equal(found.float(), features.float())
    assert code[:, -1].tolist() == [-1.0, 0.0, 1.0, 1.0, -1.0, 0.5]
    without = Task(RUN, NodeConfig(), "s", SiteFeatures(
        LabelledFeatures(features, zeros), train, (), "f", 0.0, False
    ))  # fmt: skip
    with pytest.raises(DataError, match="no values"):
        without.training_data(())
