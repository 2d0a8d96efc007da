"""Training records of a coded target come in single precision from memory, and as they lie from a file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.governance.work_limits import SiteLimits
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.errors import DataError
from fedsurrogate.common.run import parse_run

NUMBER = {"task": "regression", "value-columns": "x", "target-range": "0,10"}
RUN, HIDDEN = parse_run(NUMBER), parse_run(NUMBER | {"secure-aggregation": True})


@pytest.mark.parametrize("on_disk", [False, True])
def test_features_are_single_precision_unless_memory_cannot_hold_them(
    on_disk: bool, tmp_path: Path
) -> None:
    features = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).half()
    values = torch.tensor([[0.0], [5.0], [10.0], [20.0], [-1.0], [7.5]], dtype=torch.float64)
    zeros = torch.zeros(6, dtype=torch.int64)
    folder = tmp_path if on_disk else None
    train = LabelledFeatures(features, zeros, None, None, folder, values)
    job = Job(RUN, NodeConfig(), "s", SiteFeatures(train, train, (), "f", 0.0, False))
    found, code = job.training_data(())
    assert found.dtype == (torch.float16 if on_disk else torch.float32)
    assert torch.equal(found.float(), features.float())
    assert code[:, -1].tolist() == [-1.0, 0.0, 1.0, 1.0, -1.0, 0.5]
    without = Job(RUN, NodeConfig(), "s", SiteFeatures(
        LabelledFeatures(features, zeros), train, (), "f", 0.0, False
    ))  # fmt: skip
    with pytest.raises(DataError, match="no values"):
        without.training_data(())


@given(records=st.integers(1, 9), least=st.integers(1, 9), seed=st.integers(0, 99))
def test_nothing_of_a_site_with_too_few_records_is_in_a_hidden_sum(
    records: int, least: int, seed: int
) -> None:
    """Not one record: what is sent would be that record, where all other sites send zeros too."""
    features = 1 + torch.rand(records, 3, generator=torch.Generator().manual_seed(seed))
    values = torch.arange(records, dtype=torch.float64)[:, None] % 2
    train = LabelledFeatures(
        features, torch.zeros(records, dtype=torch.int64), None, None, None, values
    )
    site = SiteFeatures(train, train, (), "f", 0.0, False)
    limits = SiteLimits(smallest_class=least)
    found, code = Job(HIDDEN, NodeConfig(), "s", site, limits).training_data(())
    assert len(found) == len(code) == (records if records >= least else 0)
    job = Job(RUN, NodeConfig(), "s", site, limits)
    if records < least:
        with pytest.raises(DataError, match="smallest-class"):
            job.training_data(())
    else:
        assert len(job.training_data(())[0]) == records
