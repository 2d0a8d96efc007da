"""The coordinator's ServerApp: configuration -> strategy -> run folder. No maths in here."""

from __future__ import annotations

import logging

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from common.config import parse_run_config, pick_device
from common.errors import FedSurrogateError
from server_app.report import write_report
from server_app.run_folder import RunFolder
from strategies import STRATEGIES

log = logging.getLogger("flwr")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run one federation. A wrong setting stops it before anything starts; a failure leaves a complete run folder."""
    config = parse_run_config(context.run_config)
    device = pick_device(config.device)
    folder = RunFolder(config, context.run_id)
    strategy = STRATEGIES[config.method](config, folder, device)
    log.info("Run folder: %s", folder.path)
    try:
        strategy.start(grid)
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
