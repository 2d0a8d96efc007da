"""A site for Prometheus: its budget, its ledger, its data and its disks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fedsurrogate.client_app.processes.app_report import LEDGER, AppReport
from fedsurrogate.common.metrics_page import disk_series, series
from fedsurrogate.common.version import own_version

if TYPE_CHECKING:
    from prometheus_client import Metric

USER = "`site metrics`"


class SiteCollector:
    """The figures of a site, as a `prometheus_client` collector.

    Args:
        report: what gives them at each request; None if the site's app does not answer.
        of_app: whether a running app reports, and not this process.
    """

    def __init__(self, report: Callable[[], AppReport | None], of_app: bool) -> None:
        self._report, self._of_app = report, of_app

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""

        def figure(name: str, help_text: str, *values: float) -> Metric:
            return series(name, help_text, (), [((), value) for value in values])

        found = self._report()
        yield figure("app_up", "1 if the site's app answers.", found is not None)
        if self._of_app:
            help_text = "1 if the app found the data that the policy's smallest-site asks for, and so joins."
            yield figure("data_found", help_text, found is not None and found.found_data)
        if found is None:
            return
        yield series(
            "site_info", "The site, and the version of this page.", ("site", "version"),
            [((found.site, own_version()), 1.0)],
        )  # fmt: skip
        help_text = "1 if the folder of data has anything in it; a run on an empty one gets noise."
        yield figure("data_present", help_text, found.data_present)
        for name, help_text in LEDGER.items():
            yield figure(name, help_text, *([found.ledger[name]] if name in found.ledger else ()))
        yield from disk_series(found.disks)
