"""Every method learns the bundled digits with no setting but its name, and a budget where it needs
one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.common.methods import METHODS, Method
from fedsurrogate.common.settings.base import Scalar
from tests.grid import metrics_of, run_federation, sites

# A guess is right one time in ten.
FLOOR = 0.6


@pytest.mark.parametrize("spec", METHODS.values(), ids=METHODS)
def test_a_method_learns_with_its_defaults(tmp_path: Path, spec: Method) -> None:
    budget: dict[str, Scalar] = {
        "epsilon": 8.0,
        "delta": 1e-5,
        "classes": ",".join(map(str, range(10))),
    }
    folder = run_federation(
        tmp_path, sites(2), method=spec.name, **(budget if spec.needs_budget else {})
    )
    accuracy = metrics_of(folder)["accuracy"]["model"]
    assert accuracy > FLOOR, f"method {spec.name}: {accuracy:.1%} with its defaults"
