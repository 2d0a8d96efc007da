"""What a model card says about a deployment: measured results with intervals, and the unit of privacy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedsurrogate.common.escapes import percent
from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.server_app.export.graph import signed_model_of
from fedsurrogate.server_app.export.model_card import evaluated as measured
from tests import commands
from tests.client_app.model_use.hospitals import PRIVATE, hospital, rows_of_classes, site, text
from tests.grid import FAST, InProcessGrid, NodeConfig, run_federation
from tests.strategies.counting.hospitals import evaluated, learned

NAMES = ("clinic-0", "clinic-1", "clinic-2")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[NodeConfig], Path]:
    """A folder, three hospitals, and the folder of their run with an evaluation."""
    home = tmp_path_factory.mktemp("deployment")
    nodes, run = learned(home)
    _, result = evaluated(home, nodes, run, epsilon=8.0)
    # As `coordinator evaluate RUN` does.
    (run / "evaluation.json").write_text(json.dumps(result))
    return home, nodes, run


def exported(monkeypatch: pytest.MonkeyPatch, run: Path, kind: str, out: Path) -> Path:
    assert commands.coordinator(monkeypatch, "export", run, "--format", kind, "--out", out) == 0
    return out


def test_the_card_shows_the_noisy_evaluation_with_its_intervals(
    deployment: tuple[Path, list[NodeConfig], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, run = deployment
    card = exported(monkeypatch, run, "card", tmp_path / "README.md").read_text().replace("\\", "")
    found = json.loads((run / "evaluation.json").read_text())
    for interval in (
        found["accuracy"],
        found["classes"]["1"]["sensitivity"],
        found["classes"]["7"]["specificity"],
    ):
        low, value, high = (percent(interval[key]) for key in ("low", "value", "high"))
        assert f"{value} ({low} to {high})" in card
    records = round(found["records"]["value"])
    assert f"of {records} held-out records of its classes at 3 sites." in card
    assert "counts with noise: epsilon 8, delta 1e-05 at each site" in card
    assert (
        f'"value": {round(found["accuracy"]["value"], 4)}, "name": "accuracy (95 % interval' in card
    )
    assert not any(name in card for name in NAMES)


def test_an_evaluation_of_another_model_is_not_on_the_card(
    deployment: tuple[Path, list[NodeConfig], Path], tmp_path: Path
) -> None:
    _, _, run = deployment
    model = read_signed_model(run / "model.fedsurrogate")
    assert measured(model, run) is not None
    content = json.loads((run / "evaluation.json").read_text())
    (tmp_path / "evaluation.json").write_text(json.dumps(content | {"model": "0" * 64}))
    assert measured(model, tmp_path) is None
    (tmp_path / "evaluation.json").write_text(
        json.dumps(content | {"accuracy": {"value": None, "low": None, "high": None}})
    )
    hidden = measured(model, tmp_path)
    assert hidden is not None
    assert hidden.view is not None
    assert "Noise hides the accuracy of the model on" in hidden.view.title


def patients(home: Path, name: str, first: int) -> NodeConfig:
    """A hospital whose table names patients, with two images each."""
    node = hospital(home, name, rows_of_classes()[first : first + 120])
    folder = Path(str(node["data-dir"]))
    files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*.png"))
    lines = [f"{file},{file.split('/')[0]},P{number // 2}" for number, file in enumerate(files)]
    (folder / "labels.csv").write_text("\n".join(["path,label,who", *lines]) + "\n")
    return node | {"patient-column": "who"}


@pytest.mark.parametrize(
    ("protected", "relation"),
    [
        (0, "add or remove one record"),
        (1, "add or remove one record, or one patient at the sites that protect patients"),
        (2, "add or remove one patient"),
    ],
)
def test_the_claim_of_the_signed_model_names_what_the_sites_protect(
    protected: int, relation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        patients(tmp_path, f"clinic-{k}", 120 * k)
        if k < protected
        else hospital(tmp_path, f"clinic-{k}", rows_of_classes()[120 * k : 120 * k + 120])
        for k in range(2)
    ]
    run = run_federation(tmp_path, InProcessGrid(nodes), **(FAST | PRIVATE))
    privacy = read_signed_model(run / "model.fedsurrogate").manifest.privacy
    assert privacy is not None
    assert privacy.relation == relation
    assert (
        f"Neighbouring relation: {relation}."
        in exported(monkeypatch, run, "card", tmp_path / "c.md").read_text()
    )
    (row,) = json.loads(site("models", "list", "--json", "--node-config", text(nodes[0])).stdout)[
        "models"
    ]
    assert row["privacy"] == f"epsilon 8, delta 1e-05; neighbouring relation: {relation}"
    # A run without a signed file is signed at export, from what its metrics say.
    (run / "model.fedsurrogate").unlink()
    again = signed_model_of(run).manifest.privacy
    assert again == privacy
