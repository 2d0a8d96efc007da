"""The coordinator chooses which sites are in a sum. It leaves out honest ones, so colluding sites
are a larger share.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.common.secure_aggregation.rules import SumRules
from tests.attacks.hospitals import POLICY, open_hospitals

SIX = ("a", "b", "c", "d", "e", "victim")
THIRD = 1 / 3


@pytest.mark.parametrize(
    ("smallest", "summed", "answer"), [(3, 3, "ok"), (5, 5, "ok"), (6, 5, "policy"), (6, 6, "ok")]
)
def test_two_colluding_sites_of_six_choose_their_company(
    tmp_path: Path, smallest: int, summed: int, answer: str
) -> None:
    """With three sites, two of which collude, the sum shows the victim's part. Five give less noise
    than claimed.
    """
    hospitals = open_hospitals(tmp_path, SIX)
    limits = POLICY.replace("smallest-colluding = 0.0", f"smallest-sum = {smallest}")
    hospitals.policy(limits, "victim")
    hospitals.settings |= {"colluding": THIRD, "dropouts": 0.0}
    members = hospitals.keys((*SIX[: summed - 1], "victim"))
    assert hospitals.offer("victim", members.values()) == answer


@pytest.mark.parametrize("colluding", [1, 2, 3, 5, 10])
def test_a_smallest_sum_of_three_times_as_many_keeps_every_choice_safe(colluding: int) -> None:
    """With a third that may collude. A smallest sum that is only larger by their number does not:
    less noise counts.
    """

    def covered(smallest: int) -> bool:
        return all(
            SumRules.of(n, THIRD, 0.1).colluding >= colluding
            for n in range(smallest, smallest + 100)
        )

    assert covered(3 * colluding)
    assert covered(3 + colluding) == (colluding < 2)
