"""What a person sees of long work: a counted bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .command_line import of_a_command, stderr_console

LOG = logging.getLogger("fedsurrogate.site")
EVERY_SECONDS = 10.0


@contextmanager
def counted(
    name: str, total: int, done: int = 0, what: str = "records"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts finished items.

    A terminal shows a bar with the items, their rate and the seconds left. Elsewhere a line every ten
    seconds has the same, in the log and, of a command, on stderr.

    Args:
        name: of the work.
        total: number of items.
        done: items that were finished before; they do not count for the rate.
        what: the items' name.

    Example:
        >>> with counted("drawing", 3, what="pictures") as advance:
        ...     advance(1)
    """
    start = reported = time.perf_counter()
    before = done
    if stderr_console().is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        of, rated = "{task.completed} of {task.total} ", "{task.fields[rate]:.0f} "
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn(f"{of}{what}, {rated}{what}/s,"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
        )
        with Progress(*columns, console=stderr_console(), transient=True) as bar:
            task = bar.add_task(name, total=total, completed=done, rate=0.0)

            def draw(count: int) -> None:
                nonlocal done
                done += count
                rate = (done - before) / max(time.perf_counter() - start, 1e-9)
                bar.update(task, completed=done, rate=rate)

            yield draw
        return

    def log(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.perf_counter()
        if now - reported >= EVERY_SECONDS:
            reported = now
            rate = (done - before) / (now - start)
            left = (total - done) / max(rate, 1e-9)
            line = f"{name}: {done} of {total} {what}, {rate:.0f} {what}/s, {left:.0f} s left"
            LOG.info("%s", line)
            if of_a_command.is_set():
                stderr_console().print(line, soft_wrap=True)

    yield log
