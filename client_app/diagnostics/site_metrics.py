"""A site for Prometheus: its budget, its ledger, its data and its disks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fedsurrogate.client_app.processes.app_metrics import LEDGER, AppFigures
from fedsurrogate.common.metrics_page import disk_series, series
from fedsurrogate.common.version import own_version

if TYPE_CHECKING:
    from prometheus_client import Metric

USER = "`site metrics`"


class SiteCollector:
    """The figures of a site, as a `prometheus_client` collector.

    Args:
        figures: what gives them at each request; None if the site's app does not answer.
        joins: whether the app has found the site's data, so that the site joins; None where no app
            runs.
    """

    def __init__(
        self, figures: Callable[[], AppFigures | None], joins: Callable[[], bool] | None
    ) -> None:
        self._figures, self._joins = figures, joins

    def collect(self) -> Iterable[Metric]:
        """All current metrics."""
        found = self._figures()
        yield series("app_up", "1 if the site's app answers.", (), [((), float(found is not None))])
        if self._joins is not None:
            yield series(
                "data_found",
                "1 if the app found the data that the policy's smallest-site asks for, and so joins.",
                (),
                [((), float(self._joins()))],
            )
        if found is None:
            return
        yield series(
            "site_info", "The site, and the version of this page.", ("site", "version"),
            [((found.site, own_version()), 1.0)],
        )  # fmt: skip
        yield series(
            "data_present",
            "1 if the folder of data has anything in it; a run on an empty one gets noise.",
            (),
            [((), float(found.data_present))],
        )
        for name, help_text in LEDGER.items():
            values = [((), found.ledger[name])] if name in found.ledger else []
            yield series(name, help_text, (), values)
        yield from disk_series(found.disks)
