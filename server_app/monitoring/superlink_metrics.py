"""What a SuperLink knows, for Prometheus: which sites are connected, and which runs wait."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import FedSurrogateError
from fedsurrogate.common.metrics_page import series
from fedsurrogate.common.security.registrations import read_table
from fedsurrogate.server_app.control_api.runs import list_runs
from fedsurrogate.server_app.control_api.sites import KnownSite, list_sites
from fedsurrogate.server_app.monitoring.prometheus import MOST_SITES

if TYPE_CHECKING:
    from prometheus_client import Metric

STATES = ("pending", "starting", "running")
"""Flower's states of a run that has not ended."""
LEFT = "key revoked"
KEPT_SECONDS = 10.0


class LinkCollector:
    """The sites and runs of a SuperLink, as a `prometheus_client` collector.

    A SuperLink that does not answer gives `fedsurrogate_superlink_up 0` and no more. Sites whose key
    was revoked are left out: they are not missed.

    Args:
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        table: file of the registered sites, of `coordinator register`; without it nodes have the
            names of their keys.
    """

    def __init__(self, address: str, authority: Path | None, table: Path | None) -> None:
        self._address, self._authority, self._table = address, authority, table
        self._known: list[Metric] = []
        self._asked = -math.inf
        # The page handles each request in its own thread.
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """All metrics, at most `KEPT_SECONDS` old: one request at a time asks the SuperLink."""
        with self._lock:
            if time.monotonic() - self._asked >= KEPT_SECONDS:
                self._known, self._asked = self._ask(), time.monotonic()
            return self._known

    def _ask(self) -> list[Metric]:
        try:
            table = read_table(self._table) if self._table and self._table.is_file() else {}
            sites = list_sites(self._address, self._authority, table)
            runs = Counter(run.status for run in list_runs(self._address, self._authority))
        except FedSurrogateError:
            return [up_series(0.0)]
        return [up_series(1.0), *site_series(sites), run_series(runs)]


def up_series(value: float) -> Metric:
    """Whether the SuperLink answers, as a metric."""
    return series("superlink_up", "1 if the SuperLink answers.", (), [((), value)])


def site_series(sites: Sequence[KnownSite]) -> list[Metric]:
    """Metrics of the sites that a SuperLink knows, at most `MOST_SITES` of them."""
    here = [site for site in sites if site.health != LEFT][:MOST_SITES]
    connected = [((site.name,), float(site.health == "connected")) for site in here]
    seen = [((site.name,), site.seen.timestamp()) for site in here if site.seen is not None]
    return [
        series("site_connected", "1 if a registered site is connected.", ("site",), connected),
        series(
            "site_seen_timestamp_seconds",
            "Unix time of a site's last heartbeat; no series for one that never connected.",
            ("site",),
            seen,
        ),
    ]


def run_series(runs: Mapping[str, int]) -> Metric:
    """Numbers of runs by Flower's status, as a metric."""
    return series(
        "superlink_runs",
        "Runs that have not ended, by state; pending ones wait for the coordinator's app.",
        ("state",),
        [((state,), float(runs.get(state, 0))) for state in STATES],
    )
