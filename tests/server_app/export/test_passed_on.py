"""What is passed on about a deployment: measured results with intervals, the unit of privacy, and
no name or path.
"""

from __future__ import annotations

import base64
import json
import re
import zipfile
from pathlib import Path
from urllib.parse import unquote_to_bytes

import pytest

from fedsurrogate.common.signed_models.signed_model import read_signed_model
from fedsurrogate.server_app.counting import CountingBudget
from fedsurrogate.server_app.deployment.local_engine import simulate_here
from fedsurrogate.server_app.export.measured import evaluated as measured
from fedsurrogate.server_app.export.pseudonyms import write_pseudonymous
from fedsurrogate.server_app.export.source import signed_model_of
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
    card = exported(monkeypatch, run, "card", tmp_path / "README.md").read_text()
    found = json.loads((run / "evaluation.json").read_text())
    for interval in (
        found["accuracy"],
        found["classes"]["1"]["sensitivity"],
        found["classes"]["7"]["specificity"],
    ):
        assert f"{interval['value']:.3f} ({interval['low']:.3f} to {interval['high']:.3f})" in card
    assert (
        "held-out records of 3 sites, from noisy counts: epsilon 8, delta 1e-05 at each site"
        in card
    )
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
    assert "Accuracy: hidden by the noise." in hidden.words


def contents(crate: Path) -> dict[str, bytes]:
    """The files of a crate, and everything that a page in it embeds."""
    with zipfile.ZipFile(crate) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    for name, content in list(found.items()):
        for number, (kind, data) in enumerate(re.findall(rb"data:([^,\"' ]*),([^\"')]*)", content)):
            plain = unquote_to_bytes(data)
            found[f"{name} {number}"] = (
                base64.b64decode(plain) if kind.endswith(b"base64") else plain
            )
    return found


def test_no_file_of_a_crate_has_a_name_of_a_site_or_a_path(
    deployment: tuple[Path, list[NodeConfig], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, _, run = deployment
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    files = contents(exported(monkeypatch, run, "rocrate", tmp_path / "run.zip"))
    assert {"report.html", "metrics.json", "evaluation.json"} <= set(files)
    for name, content in files.items():
        for secret in (*NAMES, "clinic", str(home), str(Path.home()), str(tmp_path), "/tmp/"):
            assert secret.encode() not in content, f"{secret} in {name}"
    metrics = json.loads(files["metrics.json"])
    assert (
        metrics["card"]["used"]
        == list(metrics["privacy"]["per_site"])
        == ["site-1", "site-2", "site-3"]
    )
    assert b"site-2" in files["report.html"]
    # The run folder itself keeps its names.
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


def test_names_and_paths_in_sentences_and_settings_are_hidden_and_nothing_else(
    tmp_path: Path,
) -> None:
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    copy.mkdir()
    config = {
        "data-dir": "scans/north",
        "fedpft.order": "north,north-east",
        "classes": "north,yes",
        "backbone": "timm:a/b",
    }
    (run / "manifest.json").write_text(json.dumps({"config": config, "classes": ["north", "yes"]}))
    card = {
        "used": ["north", "7"],
        "rejected": {"north-east": "north-east: cannot read /data/scans/a.png (3/4 and/or)"},
    }
    (run / "metrics.json").write_text(json.dumps({"status": "ok", "card": card}))
    reason = (
        "node 4711 (north-east.) reported C:\\Scans\\x.dcm, '/my scans/x' and ~/b.csv, see "
        "https://example.org/north-sea/a"
    )
    events = [
        {"event": "replied", "site": "north", "counts": {"north": 3, "yes": 4}},
        {"event": "rejected", "site": "north-east", "before": "node 4711", "reason": reason},
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_pseudonymous(run, copy)
    manifest = json.loads((copy / "manifest.json").read_text())
    assert manifest["config"]["fedpft.order"] == "site-1,site-2"
    assert (manifest["config"]["data-dir"], manifest["config"]["backbone"]) == (
        "(path)",
        "timm:a/b",
    )
    assert (manifest["classes"], manifest["config"]["classes"]) == (["north", "yes"], "north,yes")
    found = json.loads((copy / "metrics.json").read_text())["card"]
    assert found == {
        "used": ["site-1", "7"],
        "rejected": {"site-2": "site-2: cannot read (path) (3/4 and/or)"},
    }
    first, second = map(json.loads, (copy / "events.jsonl").read_text().splitlines())
    assert first == {"event": "replied", "site": "site-1", "counts": {"north": 3, "yes": 4}}
    assert second["before"] == "site-3"
    assert (
        second["reason"] == "site-3 (site-2.) reported (path), '(path)' and (path), see "
        "https://example.org/north-sea/a"
    )


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
    crate = contents(exported(monkeypatch, run, "rocrate", tmp_path / "r.zip"))
    assert f"neighbouring relation: {relation}" in crate["ro-crate-metadata.json"].decode()
    (row,) = json.loads(site("models", "--json", "--node-config", text(nodes[0])).stdout)["models"]
    assert row["privacy"] == f"epsilon 8, delta 1e-05; neighbouring relation: {relation}"
    # A run without a signed file is signed at export, from what its metrics say.
    (run / "model.fedsurrogate").unlink()
    again = signed_model_of(run).manifest.privacy
    assert again == privacy


def test_the_evaluation_of_a_simulated_run_is_on_its_card(tmp_path: Path) -> None:
    from fedsurrogate.server_app.counting import evaluation_settings

    settings = {
        "output-dir": str(tmp_path),
        "device": "cpu",
        "classes": "0,1,2",
        "image-size": 8,
        "seed": 4,
    }
    run = simulate_here(
        3, settings | {"epsilon": 8.0, "delta": 1e-5}, lambda event: None, report=False
    )
    asked, sites = evaluation_settings(run, CountingBudget(8.0, 1e-5))
    folder = simulate_here(
        sites,
        asked | {"output-dir": str(tmp_path), "device": "cpu"},
        lambda event: None,
        report=False,
    )
    (run / "evaluation.json").write_bytes((folder / "evaluation.json").read_bytes())
    found = measured(signed_model_of(run), run)
    assert found is not None
    assert (
        found.accuracy == json.loads((folder / "evaluation.json").read_text())["accuracy"]["value"]
    )


@pytest.mark.parametrize("place", ["data/Jane Doe.png", "/x/Jane Doe.png", "Jane Doe.png"])
def test_a_copy_says_how_many_records_were_left_out_and_names_none(
    tmp_path: Path, place: str
) -> None:
    losses = [
        {"why": f"3 images cannot be read, such as {place}; they are not tested", "count": 3},
        {"why": f"2 files are DICOM, such as '{place}'", "count": 2},
    ]
    report = {
        "source": "imagefolder",
        "used": 5,
        "left_out": losses,
        "odd": ["all records are of one class, 'Doe'"],
        "read": 10,
        "lost": 5,
    }
    run, copy = tmp_path / "run", tmp_path / "copy"
    for folder in (run, copy):
        folder.mkdir()
    (run / "metrics.json").write_text(json.dumps({"status": "ok", "data": [report]}))
    (run / "manifest.json").write_text("{}")
    (run / "events.jsonl").write_text("")
    write_pseudonymous(run, copy)
    written = "".join(file.read_text() for file in copy.iterdir())
    assert "Doe" not in written
    (kept,) = json.loads((copy / "metrics.json").read_text())["data"]
    assert [each["why"] for each in kept["left_out"]] == [
        "3 images cannot be read; they are not tested",
        "2 files are DICOM",
    ]
    assert (kept["read"], kept["used"], kept["lost"]) == (10, 5, 5)
