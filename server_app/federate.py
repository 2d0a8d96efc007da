"""One federation: strategy -> run folder -> report. No maths in here."""

from __future__ import annotations

import logging

from common.config import RunConfig, pick_device
from common.errors import FedSurrogateError
from server_app.report import write_report
from server_app.run_folder import RunFolder
from strategies import Grid, strategy_of

log = logging.getLogger("flwr")


def federate(config: RunConfig, grid: Grid, flower_run_id: int) -> None:
    """Run one federation. A failure leaves a complete run folder, with a report that says why, and is raised again."""
    device = pick_device(config.device)
    folder = RunFolder(config, flower_run_id)
    strategy = strategy_of(config)(config, folder, device)
    log.info("Run folder: %s", folder.path)
    try:
        strategy.run(grid)
    except FedSurrogateError as error:
        folder.event("failed", reason=str(error))
        folder.finish(strategy.outcome, "failed", str(error))
        raise
    except BaseException as error:
        folder.event("failed", reason=type(error).__name__)
        folder.finish(strategy.outcome, "failed", f"stopped by {type(error).__name__}: {error}")
        raise
    else:
        folder.finish(strategy.outcome, "ok")
    finally:
        log.info("Report: %s", write_report(folder.path))
