"""Runs and sweeps in MLflow, read back with MLflow's own client from a folder; needs the extra
`mlflow`.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import fedsurrogate as fs
from fedsurrogate.common.errors import RunError
from fedsurrogate.common.settings import Settings
from fedsurrogate.common.settings.base import flatten
from fedsurrogate.server_app.monitoring.mlflow_runs import FILES, log_to_mlflow
from tests.commands import coordinator

pytest.importorskip("mlflow", reason="pip install -e '.[mlflow]'")


def client_of(place: tuple[str, str]) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(place[0])


@pytest.fixture
def place(tmp_path: Path) -> tuple[str, str]:
    return (f"file:{tmp_path / 'mlruns'}", "trial")


def all_runs(place: tuple[str, str]) -> list[Any]:
    client = client_of(place)
    experiment = client.get_experiment_by_name(place[1])
    return list(client.search_runs([experiment.experiment_id]))


def test_a_run_has_its_settings_metrics_and_files_but_nothing_that_a_site_sent(
    tmp_path: Path, place: tuple[str, str]
) -> None:
    result = fs.simulate(3, output_dir=tmp_path / "runs", alpha=1.0)
    result.report()
    (run,) = log_to_mlflow(result.folder, *place)
    client = client_of(place)
    data = client.get_run(run).data
    assert data.params["alpha"] == "1.0"
    assert data.params.keys() == flatten(Settings().model_dump(by_alias=True)).keys()
    assert data.metrics["accuracy/model"] == pytest.approx(result.accuracy)
    assert data.metrics["test/accuracy"] == pytest.approx(result.accuracy, abs=1e-6)
    assert data.metrics["bytes/up"] == result.metrics["bytes"]["up"]
    assert client.get_run(run).info.status == "FINISHED"
    logged = {file.path for file in client.list_artifacts(run)}
    assert logged == {name for name in FILES if (result.folder / name).is_file()}
    assert {"metrics.json", "report.html", "model.safetensors"} <= logged
    assert (result.folder / "surrogates").is_dir()
    # Again, as after `refit`: one entry, not two.
    log_to_mlflow(result.folder, *place)
    assert len(all_runs(place)) == 1


def test_a_run_in_rounds_has_a_curve(tmp_path: Path, place: tuple[str, str]) -> None:
    result = fs.simulate(2, method="fedavg", rounds=3, output_dir=tmp_path / "runs")
    (run,) = log_to_mlflow(result.folder, *place)
    curve = client_of(place).get_metric_history(run, "round/accuracy")
    expected = [(each["round"], each["accuracy"]) for each in result.metrics["rounds"]]
    assert [(each.step, each.value) for each in curve] == expected


def test_the_runs_of_a_sweep_are_below_one_and_a_failed_one_says_why(
    tmp_path: Path,
    place: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    table = fs.sweep(
        2,
        grid={"partition": ["iid", "column"]},
        seeds=1,
        progress=False,
        output_dir=tmp_path / "runs",
    )
    assert len(table.failed) == 1
    words = ("--store", place[0], "--experiment", place[1])
    assert coordinator(monkeypatch, "log", "--to", "mlflow", table.file, *words) == 0
    parent, *children = capsys.readouterr().out.split()
    found = {run.info.run_id: run for run in all_runs(place)}
    assert set(found) == {parent, *children}
    assert {found[child].data.tags["mlflow.parentRunId"] for child in children} == {parent}
    assert sorted(found[child].info.status for child in children) == ["FAILED", "FINISHED"]
    (failed,) = (found[child] for child in children if found[child].info.status == "FAILED")
    assert failed.data.params["partition"] == "column"
    assert failed.data.tags["error"] == table.failed[0].error
    assert [file.path for file in client_of(place).list_artifacts(parent)] == [table.file.name]


def test_nothing_is_sent_to_its_maker(tmp_path: Path, place: tuple[str, str]) -> None:
    with pytest.raises(RunError, match="neither a run folder nor the file of a sweep"):
        log_to_mlflow(tmp_path / "nothing.json", *place)
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"


@pytest.mark.parametrize("content", ["{", "{}", "[1]", json.dumps([[]])])
def test_another_file_is_refused(content: str, tmp_path: Path, place: tuple[str, str]) -> None:
    file = tmp_path / "sweep.json"
    file.write_text(content)
    with pytest.raises(RunError, match="file of a sweep"):
        log_to_mlflow(file, *place)
