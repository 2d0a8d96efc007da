"""Two exact sums over the same sites, of which only one leaves out small classes, show the small classes of one site."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.wire import sum_proto
from tests.attacks.coordinator.test_secure_sums import CLASSES, NAMES, PLAIN, POLICY, Hospitals, open_hospitals

SURVEY = {"counting.kind": "survey", "secure-sum": True, "classes": CLASSES, "dropouts": 0.2, "colluding": 0.0}


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    return open_hospitals(tmp_path, NAMES)


def policy(hospitals: Hospitals, smallest_class: int, smallest_cell: int) -> None:
    limits = f"smallest-class = {smallest_class}\nsmallest-cell = {smallest_cell}\n"
    for name in NAMES:
        (hospitals.folder / name / "policy.toml").write_text(POLICY.replace("smallest-class = 1\n", limits))


def released(hospitals: Hospitals, settings: dict[str, Any]) -> str:
    hospitals.settings = settings
    dealt = hospitals.shares(hospitals.keys())
    return hospitals.status("north", "train", sum_proto.pack_delivery(dealt.values(), "north"))


def test_training_and_a_survey_leave_out_the_same_classes(hospitals: Hospitals) -> None:
    """north has 30 records of each class: only in the first sum. So the difference of both is its own class sizes."""
    policy(hospitals, 1, 33)
    assert released(hospitals, PLAIN) == "ok"
    assert released(hospitals, SURVEY) == "policy", "the difference of both sums is the counts of north"
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
