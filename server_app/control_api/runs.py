"""The runs that a SuperLink knows: list them, and stop one."""

from __future__ import annotations

from pathlib import Path

from fedsurrogate.common.errors import RunError
from fedsurrogate.common.flower import flower
from fedsurrogate.common.flower.interface import FlowerRun

UNKNOWN = "unknown"


def list_runs(address: str, authority: Path | None) -> list[FlowerRun]:
    """All runs of a SuperLink.

    Args:
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Returns:
        The runs, newest first.

    Raises:
        RunError: the SuperLink does not answer.
    """
    with flower().control(address, authority) as control:
        runs = control.runs()
    return sorted(runs, key=lambda run: run.begun.timestamp() if run.begun else 0.0, reverse=True)


def status_of(run_id: str, address: str, authority: Path | None) -> str:
    """Flower's status of a run.

    Args:
        run_id: Flower's number.
        address: as for `list_runs`.
        authority: as for `list_runs`.

    Returns:
        Such as "running"; "unknown" where the SuperLink does not answer, or does not know the run.
    """
    try:
        runs = list_runs(address, authority)
    except RunError:
        return UNKNOWN
    return next((run.status for run in runs if run.id == run_id), UNKNOWN)


def stop(run_id: str, address: str, authority: Path | None) -> bool:
    """Stop a run.

    Args:
        run_id: Flower's number.
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Returns:
        Whether the SuperLink stopped it.

    Raises:
        RunError: the SuperLink does not answer, or the run has ended.
    """
    with flower().control(address, authority) as control:
        return control.stop(run_id)
