"""The progress of a run in words, such as "round 3 of 30 done, 12 s left; 1.2 MB a round"."""

from __future__ import annotations

from datetime import datetime

from fedsurrogate.common.number_format import human_bytes, human_seconds
from fedsurrogate.server_app.runs.json_values import Json
from fedsurrogate.server_app.runs.state import RunState, event_line

# Characters of a reason that is not repeated.
LONG = 40


def progress_line(state: RunState, now: datetime | None = None) -> str:
    """The completed steps, an estimate of the time left, and the bytes that all sites together send
    in a step.

    The estimate takes the mean time of the steps so far.

    Args:
        state: of the run.
        now: the present time; with it, the time since the last step is subtracted.

    Returns:
        One line.

    Example:
        >>> progress_line(RunState(done=3, planned=30))
        'round 3 of 30 done'
    """
    line = f"{state.step} {min(state.done, state.planned)} of {state.planned} done"
    if (left := state.seconds_left(now)) is not None:
        line += f", {f'{left:.0f} s' if left < 59.5 else human_seconds(left)} left"
    if (each := state.bytes_per_step) is not None:
        line += f"; {human_bytes(each)} a {state.step}"
    return line


class Progress:
    """Turns the events of one run into lines, the ends of rounds with the progress of the run. A
    reason that several sites have stands in the line of the first one.
    """

    def __init__(self) -> None:
        self.state = RunState()
        self._first: dict[str, str] = {}

    def line(self, event: Json) -> str:
        """The next event as one line."""
        done = self.state.done
        self.state.take(event)
        line = event_line(event | {"reason": self._once(event)} if "reason" in event else event)
        return (
            f"{line}; {self.status}" if self.state.done > done and self.state.planned > 1 else line
        )

    def _once(self, event: Json) -> str:
        """The reason of an event, where the site that had a long reason first stands for it."""
        reason = str(event["reason"])
        short = reason
        for known, site in self._first.items():
            short = short.replace(known, f"as site {site}")
        if "site" in event and len(reason) > LONG:
            self._first.setdefault(reason, str(event["site"]))
        return short

    @property
    def status(self) -> str:
        """The run in a phrase, for a line that is replaced: its progress, or its last event."""
        if self.state.planned > 1 and self.state.done:
            return progress_line(self.state)
        return f"{self.state.newest or 'starting'} ..."
