"""A run's scalars by round, for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from fedsurrogate.common.extras.packages import needed_for
from fedsurrogate.server_app.monitoring.following import await_run, follow
from fedsurrogate.server_app.runs.json_values import Json, as_number
from fedsurrogate.server_app.runs.reader import LiveRun
from fedsurrogate.server_app.runs.state import RunState, when

# File names of SummaryWriter.
WRITTEN = "events.out.tfevents.*"
OF_A_ROUND = {"accuracy": "accuracy", "bytes_up": "bytes/up", "epsilon": "epsilon"}


class Scalar(NamedTuple):
    """A value at a step.

    Attributes:
        tag: name of the curve.
        value: a finite number.
        step: a round, or a step of a chain.
        seconds: since 1970; None without a time.
    """

    tag: str
    value: float
    step: int
    seconds: float | None


def scalars_of(event: Json) -> Iterator[Scalar]:
    """Scalars in one event."""
    moment = when(event)
    seconds = moment.timestamp() if moment else None
    step = int(as_number(event.get("round")) or as_number(event.get("hop")) or 1)
    values: dict[str, object] = {}
    match event.get("event"):
        case "round":
            values = {tag: event.get(key) for key, tag in OF_A_ROUND.items()}
        case "replied":
            values = {
                f"seconds/{event.get('site')}": event.get("seconds"),
                "accuracy": event.get("accuracy"),
            }
            values[f"bytes-up/{event.get('site')}"] = event.get("bytes")
    for tag, value in values.items():
        if (number := as_number(value)) is not None:
            yield Scalar(tag, number, step, seconds)


def scalars_at_end(state: RunState) -> Iterator[Scalar]:
    """Scalars that are known only at the end of a run: the result of a run without rounds, and its
    costs.
    """
    seconds = state.last.timestamp() if state.last else None
    values = {"accuracy": state.accuracy, "epsilon": state.epsilon, "bytes/up": state.bytes_up}
    for tag, value in values.items():
        if value is not None:
            yield Scalar(tag, value, max(1, state.done), seconds)


def write_scalars(path: Path, logdir: Path | None = None, timeout: float = 0.0) -> Path:
    """Write a run's scalars until it ends. Replaces earlier scalars of the run there.

    Args:
        path: as for `await_run`.
        logdir: folder of all runs' scalars; None for the run folder.
        timeout: as for `await_run`.

    Returns:
        Their folder: `logdir`/<run name>, else <run folder>/tensorboard.

    Raises:
        PackageError: without the extra `tensorboard`.
        RunError: as for `await_run` and `follow`.
    """
    with needed_for("`coordinator tensorboard`"):
        from torch.utils.tensorboard import SummaryWriter
    run = LiveRun(await_run(path, timeout=timeout).resolve())
    folder = run.folder / "tensorboard" if logdir is None else logdir / run.folder.name
    for earlier in folder.glob(WRITTEN):
        earlier.unlink()
    written: set[str] = set()
    with SummaryWriter(folder) as writer:

        def write(scalars: Iterable[Scalar]) -> None:
            for scalar in scalars:
                writer.add_scalar(scalar.tag, scalar.value, scalar.step, scalar.seconds)
                written.add(scalar.tag)
            writer.flush()

        for events in follow(run, timeout):
            if events:
                write(scalar for event in events for scalar in scalars_of(event))
        write([scalar for scalar in scalars_at_end(run.state) if scalar.tag not in written])
    return folder
