"""The queue of a coordinator, for Prometheus: how many runs wait, for what, and whether they will
start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.metrics_page import series
from fedsurrogate.server_app.deployment.run_queue import STATES, is_served, may_start, read

if TYPE_CHECKING:
    from prometheus_client import Metric

UNREADABLE = "unreadable"


class QueueCollector:
    """The runs of a queue, as a `prometheus_client` collector.

    A queue with a file that cannot be read has one run in the state "unreadable" and no other: it
    starts none.

    Args:
        output: folder of all runs.
        rules: folder of the federation's rules; None where it has none.
    """

    def __init__(self, output: Path, rules: Path | None) -> None:
        self._output, self._allowed = output, may_start(output, rules)

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""
        now = datetime.now(UTC)
        try:
            runs = Counter(each.state(self._allowed(each), now) for each in read(self._output))
        except FedSurrogateError:
            runs = Counter([UNREADABLE])
        yield series(
            "queue_runs",
            "Runs of the queue, by what they wait for.",
            ("state",),
            [((state,), float(runs[state])) for state in (*STATES, UNREADABLE)],
        )
        yield series(
            "queue_served",
            "1 if `coordinator queue --serve` starts the runs of the queue.",
            (),
            [((), float(is_served(self._output)))],
        )
