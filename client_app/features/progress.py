"""Progress of long work at a site: a bar on a terminal, otherwise log lines, with the time that is
left.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOG = logging.getLogger("fedsurrogate.site")
LOG_EVERY_SECONDS = 10.0


@contextmanager
def progress(
    name: str, total: int, done: int = 0, what: str = "images"
) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts finished items.

    It shows a progress bar on a terminal, otherwise a log line at intervals.

    Args:
        name: of the work.
        total: number of items.
        done: items that were finished before; they do not count for the rate.
        what: the items' name.
    """
    start = reported = time.perf_counter()
    before = done
    if sys.stderr.isatty():
        from rich.progress import Progress

        from fedsurrogate.common.command_line import stderr_console

        columns = Progress.get_default_columns()
        rated = "{task.fields[rate]:.0f} " + what + "/s"
        with Progress(*columns, rated, console=stderr_console()) as bar:
            task = bar.add_task(name, total=total, completed=done, rate=0.0)

            def draw(count: int) -> None:
                nonlocal done
                done += count
                rate = (done - before) / (time.perf_counter() - start)
                bar.update(task, completed=done, rate=rate)

            yield draw
        return

    def log(count: int) -> None:
        nonlocal done, reported
        done += count
        now = time.perf_counter()
        if now - reported >= LOG_EVERY_SECONDS:
            reported = now
            rate = (done - before) / (now - start)
            left = (total - done) / max(rate, 1e-9)
            shown = (name, done, total, what, rate, what, left)
            LOG.info("%s: %d of %d %s, %.0f %s/s, %.0f s left", *shown)

    yield log
