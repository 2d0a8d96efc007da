"""Two exact sums over the same sites, of which only one leaves out small classes, show the small
classes of one site.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsurrogate.client_app.features.site_features import LabelledFeatures, SiteFeatures
from fedsurrogate.client_app.methods.counting import summed_counts
from fedsurrogate.client_app.methods.job import Job, SiteLimits
from fedsurrogate.client_app.node_config import NodeConfig
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.model_proto import pack_classifier
from tests.attacks.hospitals import CLASSES, NAMES, PLAIN, POLICY, Hospitals, open_hospitals

SURVEY = PLAIN | {"counting.kind": "survey"}
del SURVEY["fedpft.covariance"]


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    return open_hospitals(tmp_path, NAMES)


def policy(hospitals: Hospitals, smallest_class: int, smallest_cell: int) -> None:
    limits = f"smallest-class = {smallest_class}\nsmallest-cell = {smallest_cell}\n"
    hospitals.policy(POLICY.replace("smallest-class = 1\n", limits))


def released(hospitals: Hospitals, settings: dict[str, Any]) -> str:
    hospitals.settings = settings
    return hospitals.deliver("north", hospitals.dealt().values())


def test_training_and_a_survey_leave_out_the_same_classes(hospitals: Hospitals) -> None:
    """north has 30 records of each class: only in the first sum. So the difference of both is its
    own class sizes.
    """
    policy(hospitals, 1, 33)
    assert released(hospitals, PLAIN) == "ok"
    assert released(hospitals, SURVEY) == "policy", (
        "the difference of both sums is the counts of north"
    )
    assert "smallest-cell" in hospitals.log("north")


def test_a_policy_that_changes_between_two_sums_shows_no_class(hospitals: Hospitals) -> None:
    policy(hospitals, 1, 1)
    assert released(hospitals, PLAIN) == "ok"
    policy(hospitals, 31, 31)
    assert released(hospitals, PLAIN) in ("policy", "data")
    policy(hospitals, 25, 25)
    assert released(hospitals, PLAIN) == "policy"


def test_the_same_limits_allow_a_survey_after_training(hospitals: Hospitals) -> None:
    policy(hospitals, 10, 10)
    assert released(hospitals, PLAIN) == "ok"
    assert released(hospitals, SURVEY) == "ok", hospitals.log("north")[-1500:]


def held_out(weight: torch.Tensor) -> torch.Tensor:
    """The decisions that a site with 12 and 3 held-out records of two classes adds."""
    header = Header("fedavg", "r", "coordinator", "f", ("benign", "malign"))
    model = pack_classifier(Head(header, weight, torch.zeros(2)))
    settings = {
        "counting.kind": "evaluation",
        "counting.digest": hashlib.sha256(model).hexdigest(),
        "secure-aggregation": True,
        "classes": CLASSES,
    }
    labels = torch.tensor([0] * 12 + [1] * 3)
    features = torch.eye(2)[labels]
    features[0] *= 3e38
    records = LabelledFeatures(features, labels)
    found = SiteFeatures(records, records, ("benign", "malign"), "f", 0.0, simulated=False)
    limits = SiteLimits(smallest_cell=12)
    job = Job(parse_run(settings), NodeConfig(), "north", found, limits, payload=model)
    return summed_counts(job).values["decisions"]


def test_an_evaluation_leaves_out_a_class_with_too_few_records() -> None:
    assert held_out(torch.eye(2)).tolist() == [[12, 0], [0, 0]]


def test_the_model_does_not_decide_which_sites_leave_out_a_class() -> None:
    """It made one record's scores infinite, so that a site with just enough left out all 12: the
    sum showed its number.
    """
    assert held_out(100 * torch.eye(2)).tolist() == [[11, 0], [0, 0]]
