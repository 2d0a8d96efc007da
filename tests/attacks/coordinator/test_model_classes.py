"""In an exact sum, the classes of the received model select the records that a site adds, as the
run's classes do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.common.run import parse_run
from fedsurrogate.strategies.base.training import Training
from tests.attacks.hospitals import CLASSES, NAMES, PLAIN, Hospitals, open_hospitals

DPCVAE = {"method": "dpcvae", "dpcvae.rounds": 2}


@pytest.fixture
def hospitals(tmp_path: Path) -> Hospitals:
    return open_hospitals(tmp_path, NAMES)


def first_round(hospitals: Hospitals, classes: tuple[str, ...]) -> str:
    """The status of one site's release in a sum of updates of a model of these classes, the same
    for all sites.
    """
    training = Training.begin(parse_run(hospitals.settings), classes, "f" * 16, 6)
    model = training.payload()
    dealt = hospitals.dealt(public=model).values()
    return hospitals.deliver("north", dealt, model, round=1, lineage=training.lineage, confirmed=0)


@pytest.mark.parametrize("settings", [{"method": "fedavg"}, {"method": "fedsgd"}, DPCVAE])
@pytest.mark.parametrize(
    "classes", [("malign",), ("malign", "benign"), ("malign", "no such class")]
)
def test_a_model_of_other_classes_does_not_select_records(
    hospitals: Hospitals, settings: dict[str, Any], classes: tuple[str, ...]
) -> None:
    """A run with other classes is refused after an exact sum, because the difference shows records:
    so is such a model.
    """
    hospitals.settings = {
        key: value for key, value in PLAIN.items() if not key.startswith("fedpft.")
    } | settings
    assert first_round(hospitals, tuple(CLASSES.split(","))) == "ok", hospitals.log("north")
    assert first_round(hospitals, classes) == "surrogate"
    assert hospitals.released("north") == 1
