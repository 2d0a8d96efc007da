"""The map of the hospitals is of runs without privacy alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsurrogate.common.settings.base import Scalar
from fedsurrogate.server_app.report.site_distances import site_map_of
from fedsurrogate.server_app.runs.reader import read_run
from tests.grid import FAST, run_federation, sites

PRIVATE: dict[str, Scalar] = {
    "epsilon": 4.0,
    "delta": 1e-5,
    "classes": ",".join(map(str, range(10))),
}


@pytest.mark.parametrize(
    "privacy",
    [{}, PRIVATE, PRIVATE | {"fedpft.privacy": "theorem-4.1", "fedpft.covariance": "diag"}],
    ids=["none", "sums", "theorem"],
)
def test_a_run_with_noise_has_no_map(privacy: dict[str, Scalar], tmp_path: Path) -> None:
    folder = run_federation(tmp_path, sites(3), report=False, **FAST | privacy)
    assert (site_map_of(read_run(folder), folder) is None) == bool(privacy)
