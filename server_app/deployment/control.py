"""A run on the coordinator's own SuperLink."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from fedsurrogate.common.errors import ConfigError, RunError
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.security.proposals import read_setting
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.control_api.following import (
    END_SECONDS,
    Handle,
    find_handle,
    follow_run,
)
from fedsurrogate.server_app.control_api.runs import UNKNOWN, status_of
from fedsurrogate.server_app.control_api.runs import stop as stop_at_superlink
from fedsurrogate.server_app.deployment.addresses import connect, is_here
from fedsurrogate.server_app.deployment.audit_log import note
from fedsurrogate.server_app.deployment.submit import (
    DONE,
    OnEvent,
    failure,
    reason,
    submit,
    to_the_end,
)
from fedsurrogate.server_app.lifecycle.ends import await_end, complete_interrupted, final_metrics
from fedsurrogate.server_app.lifecycle.resume import Interrupted, can_continue, continuation

STOPPED = "stopped with `coordinator stop`"


def check_connection(address: str, authority: Path | None) -> None:
    """Check an address and its certificate, without connecting.

    Args:
        address: of the Control API.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.

    Raises:
        ConfigError: `address` is no address, or the file `authority` does not exist.
    """
    if not re.fullmatch(rf"({UNIX}/[^\s\"\\]+|[^/\s\"\\]+):\d+", address):
        raise ConfigError(f"--control {address!r}: must be {UNIX}/path:NUMBER, or HOST:PORT")
    if authority is not None and not authority.is_file():
        raise ConfigError(f"--root-certificates {str(authority)!r}: the file does not exist")


def _check_listening(address: str) -> None:
    """Raise RunError if an address of this machine has no listener. A proxy may lie before others."""
    try:
        if is_here(address):
            connect(address, seconds=5)
    except OSError as error:
        what = (
            f"--control {address!r}: no SuperLink listens there ({error.strerror or 'no answer'})"
        )
        raise RunError(f"{what}; start one with `coordinator superlink`, or name another") from None


def run(
    overrides: Mapping[str, Scalar],
    output: Path,
    address: str,
    authority: Path | None,
    on_event: OnEvent,
) -> Path | None:
    """Run a federation with the connected sites to its end.

    Args:
        overrides: settings of the run, flat.
        output: folder in which the coordinator's app makes the run folder.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the coordinator's app writes it on another machine.

    Raises:
        RunError: the run did not finish.
    """
    check_connection(address, authority)
    _check_listening(address)
    papers = None if authority is None else authority.parent
    note(papers, "start", facts_of_run(overrides))
    try:
        run_id = submit(address, authority, overrides)
    except RunError:
        note(papers, "end", {"run": "", "status": "not started"})
        raise
    try:
        folder, status, log = to_the_end(run_id, output, address, authority, on_event)
    except Interrupted as stop:
        if stop.terminal_is_lost:
            # `coordinator attach` continues to watch it.
            raise
        # Otherwise the run would continue at the SuperLink without anyone who watches it.
        with suppress(RunError):
            stop_at_superlink(run_id, address, authority)
        if stop.folder is not None:
            complete_interrupted(stop.folder, f"interrupted by {stop}", END_SECONDS)
        note(papers, "end", {"run": _name(stop.folder), "status": "interrupted"})
        raise
    if status == UNKNOWN and folder is not None and succeeded(folder):
        # The SuperLink has gone meanwhile.
        status = DONE
    note(papers, "end", {"run": _name(folder), "status": status})
    if status != DONE:
        if folder is not None:
            (folder / "flower.log").write_text(log, encoding="utf-8")
            raise ended(folder, status)
        raise RunError(f"the run ended as {status}: {reason(log)}")
    return folder


def facts_of_run(overrides: Mapping[str, Scalar]) -> dict[str, object]:
    """What the audit log says of a run: its settings, and its digest by which sites know it.

    Args:
        overrides: its settings, flat.
    """
    shown = {key: value for key, value in overrides.items() if key != "approval"}
    run = parse_run(overrides)
    proposal = run.settings.approval
    allowed = read_setting(proposal).proposal.id if proposal else ""
    return {"digest": run.full_digest, "proposal": allowed, "settings": shown}


def _name(folder: Path | None) -> str:
    return "" if folder is None else folder.name


def attach(
    run: str, output: Path, address: str, authority: Path | None, on_event: OnEvent
) -> Path | None:
    """Follow a run that was started before to its end.

    Args:
        run: as for `find_handle`.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.
        on_event: takes each event of the run.

    Returns:
        The run folder; None if the coordinator's app writes it on another machine.

    Raises:
        RunError: the run did not finish.
    """
    check_connection(address, authority)
    handle = find_handle(run, output)
    folder = follow_run(handle, output, address, authority, on_event)
    if folder is None and (status := status_of(handle.id, address, authority)) != DONE:
        raise RunError(
            f"run {handle.id} ended as {status}; its folder is on the machine of the coordinator's "
            "app"
        )
    if folder is not None and not succeeded(folder):
        raise ended(folder, "failed")
    return folder


def stop(run: str, output: Path, address: str, authority: Path | None) -> Handle:
    """Stop a run at its SuperLink, and record it in its folder.

    Args:
        run: as for `find_handle`.
        output: folder of all runs.
        address: of the Control API, unix:/path or host:port.
        authority: as for `check_connection`.

    Returns:
        The run.

    Raises:
        RunError: it has ended, or the SuperLink did not stop it.
    """
    check_connection(address, authority)
    handle = find_handle(run, output)
    if handle.folder is not None and (status := final_metrics(handle.folder).get("status")) not in (
        None,
        "running",
    ):
        raise RunError(
            f"{handle.folder} has ended as {status}; name a newer run that has no folder yet by "
            "its number in `coordinator runs`, else there is nothing to stop"
        )
    if not handle.id:
        raise RunError(
            f"{handle.folder} does not name Flower's number of the run; give it, `coordinator "
            "runs` lists it"
        )
    facts = {"run": _name(handle.folder), "flower_run": handle.id}
    note(None if authority is None else authority.parent, "stop", facts)
    if not stop_at_superlink(handle.id, address, authority):
        raise RunError(
            f"the SuperLink at {address} did not stop run {handle.id}; `coordinator runs` shows "
            "its state"
        )
    if handle.folder is not None:
        complete_interrupted(handle.folder, STOPPED, END_SECONDS)
    return handle


def succeeded(folder: Path) -> bool:
    """Whether a run that has ended was successful."""
    return final_metrics(folder).get("status") == "ok"


def ended(folder: Path, status: str) -> RunError:
    """The error of a run without success: how it ended, why, and what to do.

    Args:
        folder: the run folder.
        status: Flower's.

    Returns:
        The error, to be raised.
    """
    # Flower reports the end of an app that it has ended before that app records why.
    await_end(folder, END_SECONDS)
    interrupted = final_metrics(folder).get("status") == "interrupted"
    how = "was interrupted" if interrupted else f"ended as {status}"
    lines = [f"the run {how}: {failure(folder)}", f"run folder: {folder}"]
    if interrupted or can_continue(folder):
        lines.append(continuation(folder))
    return RunError("\n".join(filter(None, lines)))
