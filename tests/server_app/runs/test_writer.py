import json
import resource
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.files import read_json
from fedsurrogate.common.models.classifiers import Head
from fedsurrogate.common.run import Run, parse_run
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.surrogates.surrogates import Header
from fedsurrogate.common.wire.records import unpack_surrogate
from fedsurrogate.server_app.runs.metrics import End, make_metrics, make_projection
from fedsurrogate.server_app.runs.reader import read_payloads
from fedsurrogate.server_app.runs.writer import RunWriter
from fedsurrogate.strategies.base.outcome import Outcome, Site
from tests.grid import InProcessGrid, run_federation, sites

HEADER = Header("fedpft", "r", "coordinator", "f" * 64, ("cat", "dog"))
HEAD = Head(HEADER, torch.arange(6.0).reshape(2, 3), torch.tensor([0.5, -0.5]))


def run_folder(tmp_path: Path, **settings: object) -> RunWriter:
    return RunWriter(Run.resolve(Settings(output_dir=str(tmp_path / "runs"), **settings)), 42)  # type: ignore[arg-type]


def test_a_run_just_started_can_be_read(tmp_path: Path) -> None:
    folder = run_folder(tmp_path).path
    assert read_json(folder, "metrics.json")["status"] == "running"
    assert read_json(folder, "manifest.json")["flower_run_id"] == "42"
    assert list((folder / "surrogates").iterdir()) == []


def test_runs_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({run_folder(tmp_path).path for _ in range(10)}) == 10


def test_the_manifest_is_enough_to_repeat_the_run(tmp_path: Path) -> None:
    settings = {"classes": ("3", "1"), "alpha": 0.3, "seed": 9, "dataset": ("a", "b")}
    folder = run_folder(tmp_path, **settings)
    manifest = read_json(folder.path, "manifest.json")
    assert parse_run(manifest["config"]) == folder.config
    assert manifest["run"] == folder.config.digest
    assert set(manifest) >= {"config", "versions", "seed", "run", "git_commit", "started"}
    assert {"flwr", "torch", "numpy"} <= set(manifest["versions"])


def test_events_are_one_line_each_whatever_is_in_them(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    folder.event("rejected", site="a", reason="two\nlines \u2028 and \ud800", nothing=None)
    folder.event("done")
    text = (folder.path / "events.jsonl").read_text()
    first, second = (json.loads(line) for line in text.splitlines())
    assert first["reason"] == "two\nlines \u2028 and \ud800"
    assert "nothing" not in first
    assert second["event"] == "done"
    assert first["time"] <= second["time"]


def test_metrics_count_every_site_once(tmp_path: Path) -> None:
    sites = {
        1: Site("a", "used", "", 100, 10, 8, 6),
        2: Site("b", "rejected", "nan", 30, 10),
        3: Site("node 3", bytes_down=10),
    }
    folder = run_folder(tmp_path)
    folder.finish(Outcome(sites, seconds={"fit": 1.23456}), "failed", "quorum missed")
    metrics = read_json(folder.path, "metrics.json")
    assert metrics["sites"] == {"invited": 3, "used": 1, "rejected": 1, "dropped": 1}
    assert metrics["accuracy"] == {"per_site": {"a": 0.75}}
    assert metrics["bytes"]["up_per_site"] == {"a": 100, "b": 30, "node 3": 0}
    assert (metrics["bytes"]["up"], metrics["bytes"]["down"]) == (130, 30)
    assert (metrics["status"], metrics["failure"], metrics["rounds"]) == (
        "failed",
        "quorum missed",
        [],
    )
    assert metrics["seconds"]["fit"] == 1.235
    assert not (folder.path / "model.safetensors").exists()


def test_a_learned_head_is_kept_with_its_picture(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    points = {
        "synthetic": {"x": [0.0], "y": [1.0], "label": [0]},
        "real": {"x": [], "y": [], "label": []},
    }
    folder.finish(Outcome(model=HEAD, accuracy={"model": 0.5}, points=points), "ok")
    assert read_json(folder.path, "manifest.json")["classes"] == ["cat", "dog"]
    assert read_json(folder.path, "projection.json")["synthetic"] == {
        "x": [0.0],
        "y": [1.0],
        "label": [0],
    }
    assert read_json(folder.path, "metrics.json")["rounds"][0]["accuracy"] == 0.5
    assert not list(folder.path.glob(".*"))


def test_what_was_refused_is_not_kept(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    folder.surrogate("a", b"1")
    folder.discard("a")
    folder.discard("never-there")
    assert list((folder.path / "surrogates").iterdir()) == []


def test_a_folder_that_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(
        RunError, match=r"not a run folder: manifest.json cannot be read \(FileNotFoundError\)"
    ):
        read_json(tmp_path, "manifest.json")
    for content in ("{", "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), ""):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(RunError, match="is not a run folder"):
            read_json(tmp_path, "manifest.json")
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(RunError, match="is not a JSON object"):
        read_json(tmp_path, "manifest.json")
    with pytest.raises(RunError, match="has no surrogates"):
        read_payloads(tmp_path)


def test_an_event_that_the_disk_takes_only_a_part_of_is_not_there_at_all(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    folder.event("configured", method="fedpft")
    events = folder.path / "events.jsonl"
    before = events.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="only a part"):
            folder.event("invited", sites=3)
        with pytest.raises(OSError, match="too large"):
            folder.keep("checkpoint", bytes(2 * len(before)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert events.read_bytes() == before
    assert not [file for file in folder.path.iterdir() if file.name.startswith(".checkpoint")]


@pytest.mark.parametrize(
    ("stop", "status", "reason"),
    [
        (KeyboardInterrupt(), "interrupted", "interrupted by Ctrl-C"),
        (SystemExit(0), "failed", "stopped by SystemExit"),
        (MemoryError("out of it"), "failed", "stopped by MemoryError"),
    ],
)
def test_a_run_that_is_stopped_leaves_a_complete_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: BaseException, status: str, reason: str
) -> None:
    def fail(*_: object) -> None:
        raise stop

    monkeypatch.setattr("fedsurrogate.strategies.fedpft.strategy.learn", fail)
    with pytest.raises(type(stop)):
        run_federation(tmp_path, InProcessGrid(sites(2)), report=True)
    (folder,) = (tmp_path / "runs").iterdir()
    metrics = read_json(folder, "metrics.json")
    assert metrics["status"] == status
    assert reason in metrics["failure"]
    assert metrics["sites"] == {"invited": 2, "used": 2, "rejected": 0, "dropped": 0}
    assert {unpack_surrogate(each).header.site for each in read_payloads(folder)} == {"0", "1"}
    assert reason in (folder / "report.html").read_text()
    assert json.loads((folder / "events.jsonl").read_text().splitlines()[-1])["event"] == status


def test_the_same_outcome_gives_the_same_metrics_and_is_left_as_it_was() -> None:
    outcome = Outcome(
        {1: Site("a", "used", "", 100, 10, 8, 6)},
        model=HEAD,
        accuracy={"model": 0.5},
        hops=[{"site": "a"}],
    )
    before = replace(outcome)
    first, again = (make_metrics(parse_run({}), outcome, End("ok", "", 2.0)) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert outcome == before
    assert first["rounds"] == [{"round": 1, "accuracy": 0.5, "bytes_up": 100, "seconds": 2.0}]
    assert first["hops"] == [{"site": "a"}]
    assert not {"failure", "stopped", "parameters", "downstream"} & set(first)


@pytest.mark.parametrize(("stopped", "epsilon"), [("", 8.0), ("the budget is spent", 3.5)])
def test_a_run_that_stopped_early_reports_the_epsilon_it_spent(
    stopped: str, epsilon: float
) -> None:
    config = parse_run({"method": "fedlap", "epsilon": 8.0, "delta": 1e-5, "classes": "cat,dog"})
    claim = config.mechanism
    assert claim is not None
    sites = {1: Site("a", "used", "", claim=replace(claim, epsilon=8.0))}
    outcome = Outcome(sites, rounds=[{"round": 1, "epsilon": 3.5}], stopped=stopped)
    assert make_metrics(config, outcome, End("ok"))["privacy"]["epsilon"] == epsilon


def test_a_picture_needs_a_model_and_points() -> None:
    points = {"synthetic": {"x": [0.0], "y": [1.0], "label": [0]}}
    assert make_projection(Outcome(model=HEAD)) == make_projection(Outcome(points=points)) == {}
    assert set(make_projection(Outcome(model=HEAD, points=points))) == {"classes", "synthetic"}


def test_a_manifest_names_backbone_and_classes_once_there_is_a_model(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    early = json.loads((folder.path / "manifest.json").read_text())
    folder.finish(Outcome(model=HEAD), "ok")
    late = json.loads((folder.path / "manifest.json").read_text())
    assert late == early | {"fingerprint": "f" * 64, "classes": ["cat", "dog"]}
    assert datetime.fromisoformat(early["started"]).tzinfo is not None
