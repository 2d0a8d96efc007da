"""What a running `site app` reports of itself to other programs of its site: version, policy, totals of
its budget, its disks, and whether it has found the site's data.

They run in other containers. The SuperNode and the page of metrics have a network, and no data, ledger
or policy; the app has these, and no network. That the doctor reads a policy does not mean that the app
does: a file that is mounted into a running container stays what it was when an editor replaces it. So
the app answers on a socket next to that of the Runtime API, which only this account may open, whatever
is asked, with a few words and numbers.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, ValidationError

from fedsurrogate.common.errors import LOG
from fedsurrogate.common.flower.environment import UNIX
from fedsurrogate.common.metrics_page import disk
from fedsurrogate.common.version import own_version

from ..diagnostics.connection_checks import Finding
from ..node_config import data_present

if TYPE_CHECKING:
    from ..node_config import NodeConfig

# Ending of the socket, after the Runtime API's name.
SOCKET = ".status"
SECONDS, LONGEST, LOOK_SECONDS = 5.0, 65536, 15.0
RESTART = "start the app again: docker compose up -d --force-recreate app"
# Totals of a ledger, and what they mean.
LEDGER = {
    "ledger_usable": "1 if the ledger agrees with its check log; 0: nothing leaves this site.",
    "budget_epsilon_total": "Epsilon that the policy allows for all releases of these data.",
    "budget_epsilon_spent": "Epsilon spent by all releases of these data so far.",
    "budget_left_ratio": "Share of the budget that is left, from 0 to 1.",
    "budget_runs_left": "Further runs of noisy sums at epsilon-per-run that fit into the budget.",
    "releases": "Releases in the ledger.",
    "releases_without_privacy": "Releases without differential privacy.",
    "last_release_timestamp_seconds": "Unix time of the newest entry of the ledger.",
}


class AppReport(BaseModel):
    """Of a running app.

    Attributes:
        version: of the software that it runs.
        policy: SHA-256 of the policy file as it reads it now; empty without one.
        found_data: whether it found as many records as the policy asks for when it started, so that
            its SuperNode may join.
        site: its name.
        data_present: whether the folder of data has anything in it now; true for public data.
        disks: free and all bytes of the disk of each of its folders.
        ledger: totals of the ledger, see `ledger_totals`; empty until they are computed, and for
            public data.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")
    version: str
    policy: str
    found_data: bool
    site: str
    data_present: bool
    disks: dict[str, tuple[float, float]]
    ledger: dict[str, float]


class Reporter:
    """Makes reports. Nothing is computed when one is asked for: totals of the ledger are computed by one
    thread, one after another, when one of its files, or the policy, has changed.

    Args:
        node: the site's settings.

    Attributes:
        found_data: as in the report.
    """

    def __init__(self, node: NodeConfig) -> None:
        self._node, self.found_data = node, False
        self._totals: dict[str, float] = {}
        self._seen: object = None

    def look(self) -> None:
        """Compute the totals again if a file has changed."""
        if (now := _files_of(self._node)) != self._seen:
            self._totals, self._seen = ledger_totals(self._node), now

    def report(self) -> AppReport:
        """The report now, with the newest totals that there are."""
        from ..governance.policy import digest_of_policy

        node = self._node
        folders = {"state": node.state, "cache": node.cache, "check-log": node.check_log}
        disks = {name: found for name, each in folders.items() if (found := disk(each))}
        return AppReport(
            version=own_version(),
            policy=digest_of_policy(node),
            found_data=self.found_data,
            site=node.site,
            data_present=data_present(node),
            disks=disks,
            ledger=self._totals,
        )


@contextmanager
def watching(node: NodeConfig) -> Iterator[Reporter]:
    """Makes reports of a site, whose totals a thread keeps new meanwhile."""
    reporter, over = Reporter(node), threading.Event()

    def keep_looking() -> None:
        while not over.is_set():
            try:
                reporter.look()
            except Exception as error:  # Such as a disk that fails; the app goes on.
                LOG.warning("the totals for `site metrics` could not be computed: %s", error)
            over.wait(LOOK_SECONDS)

    threading.Thread(target=keep_looking, daemon=True).start()
    try:
        yield reporter
    finally:
        over.set()


@contextmanager
def reporting(runtime: str, node: NodeConfig) -> Iterator[Reporter]:
    """Report on the socket meanwhile, from a thread; what is left of an earlier socket is replaced.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings.
    """
    path = _socket(runtime)
    path.unlink(missing_ok=True)
    with watching(node) as reporter, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bound:
        bound.bind(str(path))
        bound.listen()
        threading.Thread(target=_answer, args=(bound, reporter), daemon=True).start()
        try:
            yield reporter
        finally:
            # The thread that waits there would else take one more question.
            bound.shutdown(socket.SHUT_RDWR)


def _answer(bound: socket.socket, reporter: Reporter) -> None:
    while True:
        try:
            asked, _ = bound.accept()
        except OSError:  # It was closed.
            return
        with asked, suppress(OSError):
            asked.settimeout(SECONDS)
            asked.sendall(reporter.report().model_dump_json().encode())


def ask(runtime: str) -> AppReport | None:
    """The report of the app at this Runtime API; None if none answers there, or with another one."""
    with (
        suppress(OSError, ValidationError),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as to,
    ):
        to.settimeout(SECONDS)
        to.connect(str(_socket(runtime)))
        return AppReport.model_validate_json(to.makefile("rb").read(LONGEST))
    return None


def check_app(runtime: str, node: NodeConfig) -> Finding:
    """Whether the running app has this version and this policy.

    Args:
        runtime: address of the SuperNode's Runtime API.
        node: the site's settings, as this process has them.
    """
    from ..governance.policy import digest_of_policy

    report, version, policy = ask(runtime), own_version(), digest_of_policy(node)
    if report is None:
        after = "after its start this command also checks that it uses this policy"
        return Finding("app", "WARN", "it does not run", after)
    if report.policy != policy:
        used = f"one with sha256 {report.policy[:16]}" if report.policy else "none that it can read"
        named = node.policy or "the default"
        facts = f"the running app uses another policy than {named}: {used}"
        return Finding("app", "FAIL", facts, RESTART)
    if report.version != version:
        facts = f"the running app has version {report.version}, this command {version}"
        return Finding("app", "WARN", facts, RESTART)
    used = f"the policy with sha256 {policy[:16]}" if policy else "the default policy"
    return Finding("app", "PASS", f"it runs version {version} and uses {used}")


def ledger_totals(node: NodeConfig) -> dict[str, float]:
    """Totals of the ledger of a site's own data.

    Args:
        node: the site's settings.

    Returns:
        By the names of `LEDGER`: only the first one, 0, for a ledger that is not usable; without the
        last one before the first release. Nothing for public data.
    """
    from fedsurrogate.common.errors import FedSurrogateError

    from ..governance import budget
    from ..governance import ledger as own_ledger
    from ..governance.budget import non_private_releases
    from ..governance.policy import policy_of

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


def _socket(runtime: str) -> Path:
    return Path(runtime.removeprefix(UNIX) + SOCKET)


def _files_of(node: NodeConfig) -> object:
    """Names, times and sizes of the files from which totals are computed."""
    from ..governance.policy import LIMITS_FILE

    files = [Path(node.policy), Path(node.policy).with_name(LIMITS_FILE)] if node.policy else []
    for folder, pattern in ((node.state / "ledgers", "*"), (node.check_log, "*.witness")):
        files += sorted(folder.glob(pattern))
    found = []
    for file in files:
        with suppress(OSError):
            status = file.stat()
            # Each look locks the ledger, which writes nothing else than this file.
            if file.suffix != ".lock":
                found.append((str(file), status.st_mtime_ns, status.st_size))
    return found
