"""Runs and sweeps in MLflow: settings, metrics, and the files of a run folder that are no hospital's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.files import read_json
from fedsurrogate.common.settings.base import flatten

from ..runs.reader import read_run
from ..runs.state import METRICS, Json, as_list, as_number, as_table

# What a run folder gives: surrogates and sums that sites sent stay where they are.
FILES = ("metrics.json", "manifest.json", "report.html", "model.safetensors", "model.fedsurrogate")
NAME, PARENT = "fedsurrogate.run", "mlflow.parentRunId"
STATUS = {"ok": "FINISHED", "interrupted": "KILLED", "running": "RUNNING"}
LONGEST_PARAMETER, MOST_PARAMETERS = 500, 100
# It reports its use to its maker unless this is set before it is imported.
QUIET = "MLFLOW_DISABLE_TELEMETRY"
# A folder is what works without a server; MLflow would rather have a database.
FOLDERS = "MLFLOW_ALLOW_FILE_STORE"


def log_to_mlflow(path: Path, store: str, experiment: str) -> list[str]:
    """Log a run, or all runs of a sweep below one of their own. Earlier entries of the same runs in
    the experiment are replaced.

    Args:
        path: a run folder, or the file of a sweep.
        store: its address: `file:FOLDER`, `sqlite:///FILE`, or that of a tracking server.
        experiment: name of the experiment, which is made if it does not exist.

    Returns:
        The ids of the runs in MLflow; that of a sweep first.

    Raises:
        PackageError: without the extra `mlflow`.
        RunError: for another folder or file, or a store that refuses.
    """
    os.environ.setdefault(QUIET, "true")
    os.environ.setdefault(FOLDERS, "true")
    with needed_for("`coordinator log --to mlflow`"):
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient
    try:
        client = MlflowClient(store)
        found = client.get_experiment_by_name(experiment)
        made = None if found is None else found.experiment_id
        made = made or client.create_experiment(experiment)
        if path.is_dir():
            return [_log_run(client, made, path, {})]
        return _log_sweep(client, made, path)
    except (MlflowException, OSError) as error:
        raise RunError(f"MLflow at {store!r} refused: {str(error)[:300]}") from None


def _log_sweep(client: Any, experiment: str, file: Path) -> list[str]:
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ValueError("it holds no rows")
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(
            f"{file} is neither a run folder nor the file of a sweep ({error})"
        ) from None
    parent = _new_run(client, experiment, file.stem, {})
    client.log_artifact(parent, str(file))
    logged = [parent]
    for row in rows:
        folder = Path(str(row.get("folder") or ""))
        if row.get("error") or not (folder / METRICS).is_file():
            name = ", ".join(f"{key}={value}" for key, value in _varied(row).items())
            run = _new_run(client, experiment, f"{file.stem}: {name}", {PARENT: parent})
            _log_parameters(client, run, _varied(row))
            client.set_tag(run, "error", str(row.get("error") or "its folder is no longer there"))
            client.set_terminated(run, "FAILED")
            logged.append(run)
        else:
            logged.append(_log_run(client, experiment, folder, {PARENT: parent}))
    client.set_terminated(parent)
    return logged


def _log_run(client: Any, experiment: str, folder: Path, tags: Mapping[str, str]) -> str:
    run, name = read_run(folder), folder.resolve().name
    metrics = read_json(folder, METRICS)
    facts = {"status": str(metrics.get("status")), "method": str(metrics.get("method"))}
    if commit := run.manifest.get("git_commit"):
        facts["mlflow.source.git.commit"] = str(commit)
    id_: str = _new_run(client, experiment, name, {**facts, **tags})
    config = flatten(run.config)
    _log_parameters(client, id_, config)
    for key, value in _results(metrics).items():
        client.log_metric(id_, key, value)
    for key, value, step in _by_round(metrics):
        client.log_metric(id_, key, value, step=step)
    for file in (folder / each for each in FILES):
        if file.is_file():
            client.log_artifact(id_, str(file))
    if run.failure:
        client.set_tag(id_, "failure", run.failure)
    client.set_terminated(id_, STATUS.get(facts["status"], "FAILED"))
    return id_


def _new_run(client: Any, experiment: str, name: str, tags: Mapping[str, str]) -> str:
    """A new entry in place of an earlier one of the same name."""
    quoted = name.replace("'", "")
    for earlier in client.search_runs([experiment], f"tags.`{NAME}` = '{quoted}'"):
        client.delete_run(earlier.info.run_id)
    made = client.create_run(experiment, tags={**tags, NAME: quoted}, run_name=name)
    found: str = made.info.run_id
    return found


def _log_parameters(client: Any, run: str, values: Mapping[str, Any]) -> None:
    with needed_for("`coordinator log --to mlflow`"):
        from mlflow.entities import Param

    rows = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in values.items()]
    for start in range(0, len(rows), MOST_PARAMETERS):
        client.log_batch(run, params=rows[start : start + MOST_PARAMETERS])


def _results(metrics: Json) -> dict[str, float]:
    """The numbers at the end of a run, by the name that MLflow shows."""

    def table(*keys: str) -> Json:
        found = metrics
        for key in keys:
            found = as_table(found.get(key))
        return found

    sites, sent = table("accuracy", "per_site"), table("bytes")
    numbers: dict[str, object] = {
        f"accuracy/{key}": each for key, each in table("accuracy").items()
    }
    numbers |= {f"accuracy/site-{_plain(site)}": value for site, value in sites.items()}
    numbers |= {f"bytes/{key}": sent.get(key) for key in ("up", "down")}
    numbers |= {f"seconds/{key}": value for key, value in table("seconds").items()}
    averages = table("quality", "averages")
    numbers |= {f"test/{key}": as_table(each).get("value") for key, each in averages.items()}
    for output, own in table("metric_values", "all").items():
        numbers |= {f"test/{_plain(output)}/{key}": each for key, each in as_table(own).items()}
    numbers["epsilon"] = table("privacy").get("epsilon")
    found = {key: as_number(value) for key, value in numbers.items()}
    return {key: number for key, number in found.items() if number is not None}


def _by_round(metrics: Json) -> Iterator[tuple[str, float, int]]:
    """Accuracy, bytes and epsilon of each round of a run that has several."""
    rounds = as_list(metrics.get("rounds"))
    for place, each in enumerate(map(as_table, rounds if len(rounds) > 1 else [])):
        step = int(as_number(each.get("round")) or place + 1)
        for key in ("accuracy", "bytes_up", "epsilon"):
            if (number := as_number(each.get(key))) is not None:
                yield f"round/{key}", number, step


def _varied(row: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a sweep varied, which stand before the results."""
    keys = list(row)
    return {key: row[key] for key in keys[: keys.index("accuracy") if "accuracy" in row else 0]}


def _plain(name: str) -> str:
    """A name with the characters that MLflow allows in the name of a metric."""
    return "".join(each if each.isalnum() or each in " _-." else "_" for each in name)[:100]
