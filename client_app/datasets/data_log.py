"""The data report in a site's own log, once for each state of the data."""

from __future__ import annotations

import hashlib
import json
import logging

from fedsurrogate.common.data_report import DataReport
from fedsurrogate.common.files import replace_file

from ..node_config import NodeConfig

log = logging.getLogger("fedsurrogate.site")


def log_once(report: DataReport, node: NodeConfig) -> None:
    """Write a report to the log, unless it is the one that was written last for this source.

    Every request reads the records, mostly in a process of its own: a file in the site's state
    remembers what was written. It never leaves the site, and no error of it decides anything.

    Args:
        report: of the records.
        node: the site's settings.
    """
    source = hashlib.sha256(repr((node.data_dir, report.source)).encode()).hexdigest()[:16]
    file = node.state / f"data-report-{source}.json"
    text = json.dumps(report.facts(), indent=1)
    try:
        if file.is_file() and file.read_text(encoding="utf-8") == text:
            return
        node.state.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), durable=False)
    except (OSError, ValueError):
        log.debug("'%s' cannot be written", file)
    lost = logging.WARNING if report.left_out or report.odd else logging.INFO
    log.log(lost, "%s", report.lines()[0])
    for each in report.left_out:
        log.log(lost, "left out: %s", each.why)
    for remark in report.odd:
        log.log(lost, "odd: %s", remark)
