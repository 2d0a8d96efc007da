"""Where the result of an evaluation may not leave a site, the site does not compute it."""

from pathlib import Path
from typing import Any

import pytest

from client_app import requests as answers
from client_app.methods.evaluation import evaluate
from tests.attacks.privacy.neighbours import Record
from tests.attacks.privacy.visits import GENERATED, METHODS, Hospital, close_logs
from tests.grid import FAST, metrics_of, run_federation

CLASSES = ",".join("0123456789")
DIGITS: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5, "classes": CLASSES}


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of test records in all evaluations."""
    found: list[int] = []

    def counting(task: Any, *rest: Any) -> Any:
        found.append(len(task.found.test.labels))
        return evaluate(task, *rest)

    monkeypatch.setattr(answers, "evaluate", counting)
    return found


@pytest.mark.parametrize("method", ["sums spherical", "dpcvae"])
def test_a_hospital_evaluates_no_record_in_a_private_run(method: str, tmp_path: Path, tested: list[int]) -> None:
    try:
        Hospital(tmp_path, "folder", tuple(Record(grey=grey) for grey in range(20))).visit(METHODS[method])
    finally:
        close_logs()
    assert set(tested) == {0}
    assert (method == "dpcvae") == any((tmp_path / "state").glob("generators/*")), "a generator is kept"


@pytest.mark.parametrize(
    ("settings", "models"),
    [
        (DIGITS, 1),
        ({"method": "dpcvae", **GENERATED, **DIGITS}, 1),
        ({"secure-sum": True, "fedpft.covariance": "gram", "classes": CLASSES}, 0),
    ],
    ids=["sums", "generator", "secure sum"],
)
def test_a_rehearsal_with_digits_does_as_a_hospital_does(
    settings: dict[str, Any], models: int, tmp_path: Path, tested: list[int]
) -> None:
    nodes = [
        {"site": name, "data": "digits", "partition-id": index, "num-partitions": 3, "state-dir": str(tmp_path / name)}
        for index, name in enumerate(("north", "south", "west"))
    ]
    folder = run_federation(tmp_path, nodes, **FAST, **settings)
    metrics = metrics_of(folder)
    assert metrics["sites"]["used"] == 3
    assert metrics["accuracy"] == {"per_site": {}}
    assert tested == [0] * (3 * models)
    assert not [line for line in (folder / "events.jsonl").read_text().splitlines() if "evaluation-failed" in line]
