"""The halves of an audit are of units: a patient with records in both would be member and not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.audit import release_audit
from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.job import Job, MethodOutput
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.run import parse_run

RUN = parse_run({"backbone": "none", "fedpft.covariance": "spherical", "fedpft.components": 1})
# Each patient's number of records, in an order of its own.
patients = st.lists(st.integers(1, 4), min_size=5, max_size=9).flatmap(
    lambda sizes: st.permutations([f"p{i}" for i, size in enumerate(sizes) for _ in range(size)])
)


# Not shrunk: an audit takes a second.
@settings(max_examples=3, deadline=None, phases=[Phase.generate])
@given(units=patients, most=st.sampled_from([8, 12, 4000]), seed=st.integers(0, 99))
def test_no_release_of_an_audit_has_a_part_of_a_patient(
    units: list[str], most: int, seed: int
) -> None:
    drawn = torch.Generator().manual_seed(seed)
    train = LabelledFeatures(
        torch.randn(len(units), 3, generator=drawn),
        torch.arange(len(units)) % 2,
        tuple(units),
        torch.arange(len(units)),
    )
    site = SiteFeatures(train, train, ("a", "b"), "f", 0.0, simulated=False)
    used: list[tuple[str, ...]] = []
    honest = release_audit.site_function

    def watched(combination: Any) -> Any:
        def make(job: Job) -> MethodOutput:
            used.append(job.found.train.units or ())
            return honest(combination)(job)

        return make

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(release_audit, "load_site", lambda *_: site)
        patch.setattr(release_audit, "site_function", watched)
        patch.setattr(release_audit, "MOST_RECORDS", most)
        places = SimpleNamespace(dataset=SimpleNamespace(where=str))
        patch.setattr(release_audit, "share", lambda *_: places)
        found = release_audit.audit_release(RUN, NodeConfig(), seconds=0.0, seed=seed)
    assert (found.records, found.of) == (min(most, len(units)), len(units))
    attacked = sorted((*used[0], *used[1]))
    assert len(attacked) == min(most, len(units))
    for one, other in zip(used[::2], used[1::2], strict=True):
        assert not set(one) & set(other)
        assert sorted((*one, *other)) == attacked
