"""Exact counts: the smallest cell is held against the records that are counted, not against all."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.counting import counts
from fedsurrogate.client_app.methods.job import Job, SiteLimits
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.counts import unpack_counts
from fedsurrogate.common.errors import DataError, SurrogateError
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier

CLASSES = ("a", "b", "c")
# A score beyond single precision is not finite: such a record cannot be counted.
HUGE = 3e38


def evaluation_of(model: bytes) -> Run:
    return parse_run(
        {
            "counting.kind": "evaluation",
            "counting.digest": hashlib.sha256(model).hexdigest(),
            "classes": ",".join(CLASSES),
        }
    )


@given(st.permutations(CLASSES))
def test_a_model_whose_classes_are_in_another_order_is_refused(order: list[str]) -> None:
    """Its decisions would count for other classes."""
    header = Header("fedavg", "r", "coordinator", "f", tuple(order))
    model = pack_classifier(Head(header, torch.eye(3), torch.zeros(3)))
    own = LabelledFeatures(torch.eye(3), torch.arange(3))
    site = SiteFeatures(own, own, CLASSES, "f", 0.0, simulated=False)
    job = Job(evaluation_of(model), NodeConfig(), "north", site, SiteLimits(), payload=model)
    if tuple(order) == CLASSES:
        shown = unpack_counts(counts(job).payload).tables["decisions"]
        assert torch.equal(shown, torch.eye(3, dtype=torch.int64))
        return
    with pytest.raises(SurrogateError, match="in another order"):
        counts(job)


@settings(max_examples=60, deadline=None)
@given(
    records=st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30),
    least=st.integers(1, 8),
)
def test_a_class_is_shown_if_so_many_of_its_usable_records_are_counted(
    records: list[tuple[int, bool]], least: int
) -> None:
    # The last class is none of the run's.
    labels = torch.tensor([label for label, _ in records], dtype=torch.int64)
    features = torch.eye(4)[labels, :3] + 0.5
    features[torch.tensor([broken for _, broken in records], dtype=torch.bool)] = HUGE
    header = Header("fedavg", "r", "coordinator", "f", CLASSES)
    model = pack_classifier(Head(header, 100 * torch.eye(3), torch.zeros(3)))
    own = LabelledFeatures(features, labels)
    site = SiteFeatures(own, own, (*CLASSES, "d"), "f", 0.0, simulated=False)
    job = Job(
        evaluation_of(model),
        NodeConfig(),
        "north",
        site,
        SiteLimits(smallest_cell=least),
        payload=model,
    )
    usable = [sum(each == (label, False) for each in records) for label in range(3)]
    expected = [count if count >= least else 0 for count in usable]
    try:
        shown = unpack_counts(counts(job).payload).tables["decisions"].sum(1).tolist()
    except DataError:
        shown = [0, 0, 0]
    assert shown == expected
