"""The runs that a SuperLink knows: list them, and stop one."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from server_app.control_api.connection import SECONDS, control_api

FINISHED = "finished"


@dataclass(frozen=True)
class FlowerRun:
    """A run as the SuperLink knows it. status: such as "running" or "finished:completed". begun: when it was submitted."""

    id: str
    status: str
    begun: datetime | None
    ended: datetime | None

    @property
    def is_over(self) -> bool:
        """Whether the SuperLink has nothing more to do for it."""
        return self.status.startswith(FINISHED)


def list_runs(address: str, authority: Path | None) -> list[FlowerRun]:
    """All runs of a SuperLink, newest first. Raises RunError."""
    from flwr.proto.control_pb2 import ListRunsRequest

    with control_api(address, authority) as control:
        found = control.ListRuns(ListRunsRequest(), timeout=SECONDS).run_dict
    runs = [_run(number, each) for number, each in found.items()]
    return sorted(runs, key=lambda run: run.begun.timestamp() if run.begun else 0.0, reverse=True)


def stop(run_id: str, address: str, authority: Path | None) -> bool:
    """Stop a run; return whether the SuperLink did. Raises RunError, also for a run that has ended."""
    from flwr.proto.control_pb2 import StopRunRequest

    with control_api(address, authority) as control:
        return bool(control.StopRun(StopRunRequest(run_id=int(run_id)), timeout=SECONDS).success)


def _run(number: int, run: Any) -> FlowerRun:
    status = ":".join(part for part in (run.status.status, run.status.sub_status) if part)
    return FlowerRun(str(number), status or "unknown", _time(run.pending_at), _time(run.finished_at))


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None
