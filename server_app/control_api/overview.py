"""Runs in a table: those with a folder, and those that only the SuperLink knows."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower.interface import FlowerRun
from fedsurrogate.server_app.control_api.following import flower_id
from fedsurrogate.server_app.control_api.runs import list_runs
from fedsurrogate.server_app.runs.json_values import as_table
from fedsurrogate.server_app.runs.reader import LiveRun, run_folders


@dataclass(frozen=True)
class Row:
    """A run, as a row of a table.

    Attributes:
        name: of its folder, "" without one.
        id: Flower's number.
        method: name of the method, "" without a folder.
        state: status of the run.
        progress: completed and planned steps, "" without a folder.
        sites: their numbers by fate, "" without a folder.
        age: seconds since it began.
    """

    name: str
    id: str
    method: str
    state: str
    progress: str
    sites: str
    age: float | None

    def facts(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def overview(
    output: Path, address: str, authority: Path | None, newest: int
) -> tuple[list[Row], str]:
    """The newest runs.

    Args:
        output: folder of all runs.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        newest: the most rows.

    Returns:
        The runs, newest first; and why the SuperLink's runs are missing, "" if they are not.
    """
    problem, flowers = "", list[FlowerRun]()
    try:
        flowers = list_runs(address, authority)
    except RunError as error:
        problem = str(error)
    by_id = {run.id: run for run in flowers}
    rows = []
    for folder in run_folders(output)[:newest]:
        live = LiveRun(folder)
        live.refresh()
        rows.append(_row(live, by_id.pop(flower_id(folder), None)))
    rows += [Row("", run.id, "", run.status, "", "", _age(run.begun)) for run in by_id.values()]
    return sorted(rows, key=lambda row: row.age if row.age is not None else 0.0)[:newest], problem


def _row(live: LiveRun, flower: FlowerRun | None) -> Row:
    state = live.state
    began = state.first or _started(live) or (flower.begun if flower else None)
    status = state.status
    if status == "running" and flower is not None and flower.is_over:
        status = f"running, but {flower.status} at the SuperLink"
    number = flower.id if flower else flower_id(live.folder)
    progress = f"{min(state.done, state.planned)} of {state.planned}"
    sites = ", ".join(f"{count} {fate}" for fate, count in state.fates.items() if count)
    return Row(live.folder.name, number, state.method, status, progress, sites, _age(began))


def _started(live: LiveRun) -> datetime | None:
    try:
        return datetime.fromisoformat(str(as_table(live.manifest).get("started")))
    except ValueError:
        return None


def _age(began: datetime | None) -> float | None:
    if began is None:
        return None
    began = began if began.tzinfo else began.replace(tzinfo=UTC)
    return max(0.0, (datetime.now(UTC) - began).total_seconds())
