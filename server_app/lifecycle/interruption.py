"""Interrupting a run: Ctrl-C or SIGTERM ends it in order, its folder records this, and a command
continues it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from fedsurrogate.common.command_line import handling
from fedsurrogate.common.run import parse_run
from fedsurrogate.common.settings.flat import Scalar
from fedsurrogate.server_app.lifecycle.resume import command_of, without_sites

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NAMES = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "the loss of its terminal",
}


class Interrupted(KeyboardInterrupt):
    """A signal ended the run.

    Args:
        number: of the signal.

    Attributes:
        number: of the signal.
        folder: the run folder; None until that is known.
    """

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(NAMES[number])
        self.number = number
        self.folder: Path | None = None

    @property
    def exit_code(self) -> int:
        """The exit code by which shells report a signal."""
        return 128 + self.number

    @property
    def terminal_is_lost(self) -> bool:
        """Whether only the terminal is gone; no person has asked to end the run."""
        return self.number == signal.SIGHUP


@contextmanager
def interruptible() -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or loss of the terminal raises Interrupted. Later ones are ignored:
    the run is ending.
    """

    def interrupt(number: int, _: object) -> None:
        for each in SIGNALS:
            # A function, not SIG_IGN: processes started from here must not inherit it.
            signal.signal(each, lambda *_: None)
        raise Interrupted(signal.Signals(number))

    with handling(SIGNALS, interrupt):
        yield


def goodbye(stop: Interrupted, words: Sequence[str], overrides: Mapping[str, Scalar]) -> list[str]:
    """What a person reads after an interruption: where the run is, and the command that continues
    it, or begins it again.

    Args:
        stop: the interruption, with the run folder if there is one.
        words: the command without its settings.
        overrides: the settings of the run, flat.

    Returns:
        Two lines.
    """
    command, resumes = command_of(words, overrides, stop.folder)
    where = f"run folder: {stop.folder}" if stop.folder else "it had no run folder yet"
    how = (
        "continue it:"
        if resumes
        else f"{without_sites(parse_run(overrides).plan.combination.stored, stop.folder)}start it again:"
    )
    return [f"interrupted by {stop}; {where}", f"{how} {command}"]
