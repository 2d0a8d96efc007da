"""The mixture of a site's own head with the federated head, and the kNN keys."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.fedavg.update import (
    Scores,
    _share,
    nearest_records,
    own_head,
    personal_accuracy,
)
from fedsurrogate.client_app.methods.job import Job
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header

HEAD = {"head.min-steps": 100, "head.learning-rate": 0.05}
OWN = parse_run({"method": "fedlambda"} | HEAD).settings
FITS = {
    "fedlambda": partial(own_head, head=OWN.head, seed=OWN.seed),
    "knn-per": nearest_records,
}


def site(method: str, flip: bool) -> tuple[Job, Head]:
    """A site and a federated head that is right for it, or (`flip`) wrong."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(300) % 2
    features = torch.randn(300, 4, generator=generator) + 4 * (2 * labels - 1)[:, None] * torch.eye(
        1, 4
    )
    train, test = (
        LabelledFeatures(features[:200], labels[:200]),
        LabelledFeatures(features[200:], labels[200:]),
    )
    found = SiteFeatures(train, test, ("a", "b"), "f", 0.0, simulated=False)
    run = parse_run({"method": method} | HEAD)
    weight = torch.eye(2, 4) * 0
    weight[:, 0] = torch.tensor([1.0, -1.0]) if flip else torch.tensor([-1.0, 1.0])
    return Job(run, NodeConfig(), "s", found), Head(
        Header(method, "r", "coordinator", "f", ("a", "b")), weight, torch.zeros(2)
    )


@pytest.mark.parametrize("method", FITS)
@pytest.mark.parametrize("flip", [True, False])
def test_a_site_is_right_whether_the_federated_head_is_or_not(method: str, flip: bool) -> None:
    right, tested = personal_accuracy(*site(method, flip), FITS[method])
    assert tested == 100
    assert right > 95


def test_too_few_records_to_choose_by_leave_the_federated_head(tmp_path: Path) -> None:
    job, head = site("fedlambda", flip=False)
    one = LabelledFeatures(job.found.train.features[:1], job.found.train.labels[:1])
    right, _ = personal_accuracy(
        replace(job, found=replace(job.found, train=one)), head, FITS["fedlambda"]
    )
    assert right > 95


@settings(max_examples=25, deadline=None)
@given(count=st.integers(2, 30), tested=st.integers(0, 12), seed=st.integers(0, 99))
def test_the_weight_is_chosen_on_held_out_records_and_judged_on_test_records(
    count: int, tested: int, seed: int
) -> None:
    """Record by record, for heads that are right by chance alone."""
    draw = torch.Generator().manual_seed(seed)
    parts = [
        LabelledFeatures(
            torch.randn(n, 3, generator=draw), torch.randint(0, 2, (n,), generator=draw)
        )
        for n in (count, tested)
    ]
    # The site has its classes in another order than the head.
    found = SiteFeatures(parts[0], parts[1], ("b", "a"), "f", 0.0, simulated=False)
    run = parse_run({"method": "fedlambda", "seed": seed, "baseline.validation": 0.3})
    names = ("a", "b")
    head = Head(
        Header("fedlambda", "r", "c", "f", names), torch.randn(2, 3, generator=draw), torch.zeros(2)
    )
    table, seen = torch.randn(2, 3, generator=draw), []

    def fit(x: Tensor, y: Tensor, classes: int) -> Scores:
        seen.append((x, y, classes))
        return lambda asked: (asked @ table.T).softmax(1)

    right, total = personal_accuracy(Job(run, NodeConfig(), "s", found), head, fit)
    assert total == tested
    x, y = parts[0].features, 1 - parts[0].labels
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    held = max(1, round(0.3 * count))
    ((given_x, given_y, classes),) = seen
    assert torch.equal(given_x, x[order[held:]])
    assert torch.equal(given_y, y[order[held:]])
    assert classes == 2

    def both(asked: Tensor) -> tuple[Tensor, Tensor]:
        return (asked @ table.T).softmax(1), (asked @ head.weight.T).softmax(1)

    share = _share(*both(x[order[:held]]), y[order[:held]])
    hits = 0
    for row, label in zip(parts[1].features, parts[1].labels.tolist(), strict=True):
        own, federated = both(row[None])
        mixed = (share * own + (1 - share) * federated)[0]
        hits += int(mixed.argmax()) == 1 - label
    assert right == hits
