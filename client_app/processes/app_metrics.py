"""What a running `site app` tells `site metrics` of itself: totals of its budget, its disks, its data.

The app has data, ledger and policy, and no network; the page of metrics has a network, and nothing of
these. So the app answers on a socket next to that of the Runtime API, with numbers only.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from fedsurrogate.client_app.processes.app_status import received, replying
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.metrics_page import disk

if TYPE_CHECKING:
    from fedsurrogate.client_app.node_config import NodeConfig

METRICS = ".metrics"
"""Ending of the socket, after the Runtime API's name."""
LONGEST = 65536
LOOK_SECONDS = 15.0
LEDGER = {
    "ledger_usable": "1 if the ledger agrees with its witness; 0: nothing leaves this site.",
    "budget_epsilon_total": "Epsilon that the policy allows for all releases of these data.",
    "budget_epsilon_spent": "Epsilon spent by all releases of these data so far.",
    "budget_left_ratio": "Share of the budget that is left, from 0 to 1.",
    "budget_runs_left": "Further runs of noisy sums at epsilon-per-run that fit into the budget.",
    "releases": "Releases in the ledger.",
    "releases_without_privacy": "Releases without differential privacy.",
    "last_release_timestamp_seconds": "Unix time of the newest entry of the ledger.",
}
"""Totals of a ledger, and what they mean."""
log = logging.getLogger("fedsurrogate.site")


@dataclass(frozen=True)
class AppFigures:
    """Numbers of a running app.

    Attributes:
        site: its name.
        data_present: whether the folder of data has anything in it now; true for public data.
        disks: free and all bytes of the disk of each of its folders.
        ledger: totals of the ledger, see `ledger_totals`; empty until they are computed, and for
            public data.
    """

    site: str
    data_present: bool
    disks: Mapping[str, tuple[float, float]]
    ledger: Mapping[str, float] = field(default_factory=dict)


class Watched:
    """The figures of a site. A page that shows them computes nothing: totals of the ledger are
    computed by one thread, one after another, when one of its files, or the policy, has changed.

    Args:
        node: the site's settings.
    """

    def __init__(self, node: NodeConfig) -> None:
        self._node = node
        self._totals: dict[str, float] = {}
        self._seen: object = None

    def look(self) -> None:
        """Compute the totals again if a file has changed."""
        if (now := _files_of(self._node)) != self._seen:
            self._totals, self._seen = ledger_totals(self._node), now

    def figures(self) -> AppFigures:
        """The figures now, with the newest totals that there are."""
        node = self._node
        folders = {"state": node.state, "cache": node.cache, "witness": node.witness}
        disks = {name: found for name, each in folders.items() if (found := disk(each))}
        return AppFigures(node.site, data_present(node), disks, self._totals)


@contextmanager
def watching(node: NodeConfig) -> Iterator[Watched]:
    """A site's figures, whose totals a thread keeps new meanwhile."""
    watched, over = Watched(node), threading.Event()

    def keep_looking() -> None:
        while not over.is_set():
            try:
                watched.look()
            except Exception as error:  # Such as a disk that fails; the app goes on.
                log.warning("the totals for `site metrics` could not be computed: %s", error)
            over.wait(LOOK_SECONDS)

    threading.Thread(target=keep_looking, daemon=True).start()
    try:
        yield watched
    finally:
        over.set()


def data_present(node: NodeConfig) -> bool:
    """Whether the site's folder of data has anything in it. A folder that is not mounted is empty."""
    if not node.data_dir:
        return True
    try:
        with os.scandir(Path(node.data_dir).expanduser()) as found:
            return any(True for _ in found)
    except OSError:
        return False


def ledger_totals(node: NodeConfig) -> dict[str, float]:
    """Totals of the ledger of a site's own data.

    Args:
        node: the site's settings.

    Returns:
        By the names of `LEDGER`: only the first one, 0, for a ledger that is not usable; without the
        last one before the first release. Nothing for public data.
    """
    from fedsurrogate.client_app.governance import budget, own_ledger
    from fedsurrogate.client_app.governance.entries import non_private_releases
    from fedsurrogate.client_app.governance.policy import policy_of
    from fedsurrogate.common.errors import FedSurrogateError

    if (ledger := own_ledger.own_ledger(node)) is None:
        return {}
    try:
        policy, entries = policy_of(node), ledger.entries()
        ledger.check()
        limits, total = own_ledger.budget_of(policy, bool(node.bag_column)), policy.epsilon_total
        spent = budget.spent(entries, limits)
        left = budget.runs_left(entries, own_ledger.one_run(policy), limits)
    except FedSurrogateError:
        return {"ledger_usable": 0.0}
    times = [datetime.fromisoformat(each["time"]).timestamp() for each in entries]
    return {
        "ledger_usable": 1.0,
        "budget_epsilon_total": total,
        "budget_epsilon_spent": spent,
        "budget_left_ratio": min(1.0, max(0.0, 1 - spent / total)),
        "budget_runs_left": float(left),
        "releases": float(sum(each["kind"] == "release" for each in entries)),
        "releases_without_privacy": float(non_private_releases(entries)),
    } | ({"last_release_timestamp_seconds": max(times)} if times else {})


@contextmanager
def reporting(runtime: str, node: NodeConfig) -> Iterator[None]:
    """Answer on the socket meanwhile.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings.
    """
    with watching(node) as watched, replying(_socket(runtime), watched.figures):
        yield


def ask(runtime: str) -> AppFigures | None:
    """The figures of the app at this Runtime API; None if none answers there, or with other numbers."""
    found = received(_socket(runtime), LONGEST)
    if found is None:
        return None
    try:
        disks = {
            str(name): (float(free), float(size))
            for name, (free, size) in found["disks"].items()  # type: ignore[attr-defined]
        }
        ledger = {
            name: float(found["ledger"][name])  # type: ignore[index]
            for name in LEDGER
            if name in found["ledger"]  # type: ignore[operator]
        }
        return AppFigures(str(found["site"]), bool(found["data_present"]), disks, ledger)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return None


def _socket(runtime: str) -> Path:
    return Path(runtime.removeprefix(UNIX) + METRICS)


def _files_of(node: NodeConfig) -> object:
    """Names, times and sizes of the files from which totals are computed."""
    files = [Path(node.policy)] if node.policy else []
    for folder, pattern in ((node.state / "ledgers", "*"), (node.witness, "*.witness")):
        files += sorted(folder.glob(pattern))
    found = []
    for file in files:
        with suppress(OSError):
            status = file.stat()
            # Each look locks the ledger, which writes nothing else than this file.
            if file.suffix != ".lock":
                found.append((str(file), status.st_mtime_ns, status.st_size))
    return found
