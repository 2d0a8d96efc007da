"""Where the result of an evaluation may not leave a hospital, the hospital reads no record for it."""

from pathlib import Path
from typing import Any

import pytest

from fedsurrogate.client_app import requests as answers
from fedsurrogate.client_app.features.site_features import load_site
from fedsurrogate.client_app.governance import release
from tests.attacks.privacy.neighbours import Record
from tests.attacks.privacy.visits import METHODS, Hospital, close_logs
from tests.grid import FAST, NodeConfig, metrics_of, run_federation

CLASSES = ",".join("0123456789")


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Evaluations, and what is loaded in them."""
    found: list[str] = []
    within: list[bool] = []
    honest = answers.WORK["evaluation"]

    def loading(*given: Any) -> Any:
        found.extend(["loaded"] * len(within))
        return load_site(*given)

    def evaluation(asked: Any, gate: Any) -> Any:
        found.append("evaluation")
        within.append(True)
        try:
            return honest(asked, gate)
        finally:
            within.pop()

    monkeypatch.setitem(answers.WORK, "evaluation", evaluation)
    monkeypatch.setattr(answers, "load_site", loading)
    monkeypatch.setattr(release, "load_site", loading)
    return found


@pytest.mark.parametrize("method", ["sums spherical", "dpcvae"])
def test_a_hospital_reads_no_record_for_a_private_evaluation(
    method: str, tmp_path: Path, work: list[str]
) -> None:
    try:
        Hospital(tmp_path, "folder", (Record(), Record("b"))).visit(METHODS[method])
    finally:
        close_logs()
    assert set(work) == {"evaluation"}
    assert (method == "dpcvae") == any((tmp_path / "state").glob("generators/*")), (
        "a generator is kept"
    )


def test_a_site_reads_no_record_for_the_evaluation_of_a_secure_aggregation(
    tmp_path: Path, work: list[str]
) -> None:
    nodes: list[NodeConfig] = [
        {
            "site": name,
            "data": "digits",
            "partition-id": index,
            "num-partitions": 3,
            "state-dir": str(tmp_path / name),
        }
        for index, name in enumerate(("north", "south", "west"))
    ]
    settings: dict[str, Any] = {
        "secure-aggregation": True,
        "fedpft.covariance": "gram",
        "classes": CLASSES,
    }
    folder = run_federation(tmp_path, nodes, **FAST, **settings)
    assert metrics_of(folder)["accuracy"] == {"per_site": {}}
    assert work == ["evaluation"] * 3
