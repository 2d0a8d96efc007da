"""The state of runs, from the run folders, and what a SuperLink knows, for Prometheus; read at each
request.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.common.errors import FedSurrogateError, RunError
from fedsurrogate.common.extras import needed_for
from fedsurrogate.common.metrics_page import PREFIX, Collector, series, serve_page
from fedsurrogate.common.security.registrations import read_table

from ..control_api import KnownSite, list_runs, list_sites
from ..runs.reader import LiveRun, find_run, run_folders
from ..runs.state import RunState, SiteState, natural_order
from .watch import elapsed, look, silent_for

if TYPE_CHECKING:
    from prometheus_client import Metric


USER = "`coordinator log --to prometheus`"
RUN = ("run", "method")
STATUSES = ("running", "ok", "failed", "interrupted")
# Only the first sites of a run, by name, have their own series; the counts by fate include all
# sites.
MOST_SITES = 200
OF_A_RUN: dict[str, tuple[str, Callable[[RunState], float | None]]] = {
    "rounds_done": ("Completed rounds, or chain steps.", lambda state: state.done),
    "rounds_planned": ("Planned rounds, or chain steps.", lambda state: state.planned),
    "accuracy": ("Latest accuracy of the model, from 0 to 1.", lambda state: state.accuracy),
    "epsilon_spent": ("Epsilon spent so far: maximum over the sites.", lambda state: state.epsilon),
    "seconds": ("Duration of the run so far.", elapsed),
    "seconds_since_event": ("Seconds since the last event of an active run.", silent_for),
    "start_timestamp_seconds": (
        "Unix time of a run's first event.",
        lambda state: _unix(state.first),
    ),
    "end_timestamp_seconds": (
        "Unix time of the last event of a run that has ended.",
        lambda state: _unix(state.last) if state.ended else None,
    ),
}
OF_A_SITE: dict[str, tuple[str, Callable[[SiteState], float | None]]] = {
    "site_bytes_up": ("Bytes a site has sent so far.", lambda site: site.bytes),
    "site_seconds": ("Working time of a site, over all rounds.", lambda site: site.seconds),
    "site_accuracy": (
        "Accuracy on the site's own test data, from 0 to 1.",
        lambda site: site.accuracy,
    ),
    "site_epsilon_spent": ("Epsilon a site has spent in this run.", lambda site: site.epsilon),
}


class RunCollector:
    """A `prometheus_client` collector.

    The number of labels is limited: `newest` runs, and `MOST_SITES` sites per run.

    Args:
        path: a run folder, or the folder of all runs.
        newest: how many run folders of the folder of all runs, the newest first.
    """

    def __init__(self, path: Path, newest: int) -> None:
        self._path, self._newest = path, newest
        self._runs: dict[Path, LiveRun] = {}
        # The server handles each request in its own thread.
        self._lock = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """All current metrics of all runs."""
        with self._lock:
            return list(_families([(run.folder.name, run.state) for run in self._refreshed()]))

    def _refreshed(self) -> list[LiveRun]:
        alone = find_run(self._path) == self._path
        folders = [self._path] if alone else run_folders(self._path)[: self._newest]
        runs = {folder: self._runs.get(folder) or LiveRun(folder) for folder in folders}
        self._runs = {folder: run for folder, run in runs.items() if _is_there(run)}
        return list(self._runs.values())


def serve(
    path: Path, host: str, port: int, newest: int, exposed: bool, more: Sequence[Collector] = ()
) -> AbstractContextManager[str]:
    """Serve Prometheus from a thread while the context is open.

    Args:
        path: a run folder, or the folder of all runs.
        host: address to listen on.
        port: to listen on.
        newest: as for `RunCollector`.
        exposed: whether other machines may reach the address.
        more: other collectors for the page.

    Returns:
        A context with the URL of the page.

    Raises:
        ConfigError, PackageError: as for `serve_page`, when the context is entered.
        RunError: `path` is a file.
    """
    find_run(path)
    return serve_page((RunCollector(path, newest), *more), host, port, exposed, USER)


def _unix(moment: datetime | None) -> float | None:
    return None if moment is None else moment.timestamp()


def _is_there(run: LiveRun) -> bool:
    """Refresh a run if it is active, and return whether its folder still exists."""
    try:
        if not run.state.ended or not run.folder.is_dir():
            look(run)
    except RunError:
        return False
    return True


def _families(runs: Sequence[tuple[str, RunState]]) -> Iterator[Metric]:
    """All metrics by name, each with the runs that have a value for it."""
    yield series("runs", "Runs on this page.", (), [((), len(runs))])
    yield from _counted(runs)
    for key, (help_text, of_run) in OF_A_RUN.items():
        found = [((name, state.method), of_run(state)) for name, state in runs]
        yield series(f"run_{key}", help_text, RUN, _known(found))
    for key, (help_text, of_site) in OF_A_SITE.items():
        of_sites = [
            ((name, state.method, site), of_site(state.sites[site]))
            for name, state in runs
            for site in sorted(state.sites, key=natural_order)[:MOST_SITES]
        ]
        yield series(key, help_text, (*RUN, "site"), _known(of_sites))


def _known(
    values: Iterable[tuple[Sequence[str], float | None]],
) -> Iterator[tuple[Sequence[str], float]]:
    return ((labels, value) for labels, value in values if value is not None)


def _counted(runs: Sequence[tuple[str, RunState]]) -> Iterator[Metric]:
    """Metrics with a category label: run status, sites by fate, bytes by direction."""
    with needed_for(USER):
        from prometheus_client.core import CounterMetricFamily

    status = [
        ((name, state.method, each), float(state.status == each))
        for name, state in runs
        for each in STATUSES
    ]
    yield series("run_status", "1 for the run's status.", (*RUN, "status"), status)
    sites = [
        ((name, state.method, fate), float(count))
        for name, state in runs
        for fate, count in state.fates.items()
    ]
    yield series("run_sites", "Number of sites by fate.", (*RUN, "fate"), sites)
    help_text = "Bytes up so far; bytes down after the run's end."
    sent = CounterMetricFamily(f"{PREFIX}run_bytes", help_text, labels=(*RUN, "direction"))
    for name, state in runs:
        for direction, total in (("up", state.bytes_up), ("down", state.bytes_down)):
            if total is not None:
                sent.add_metric((name, state.method, direction), total)
    yield sent


# Flower's states of a run that has not ended.
STATES = ("pending", "starting", "running")
LEFT = "key revoked"
KEPT_SECONDS = 10.0


class LinkCollector:
    """The sites and runs of a SuperLink, as a `prometheus_client` collector.

    A SuperLink that does not answer gives `fedsurrogate_superlink_up 0` and no more. Sites whose key
    was revoked are left out: they are not missed.

    Args:
        address: of the Control API, host:port.
        authority: file of the certificate that the SuperLink's is signed with; None without TLS.
        table: file of the registered sites, of `coordinator sites register`; without it nodes have the
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
